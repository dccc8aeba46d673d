# SPDX-License-Identifier: Apache-2.0
"""Entry point of the demo (`make demo`); see `demo.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo.demo import main

if __name__ == "__main__":
    sys.exit(main())
