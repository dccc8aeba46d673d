# SPDX-License-Identifier: Apache-2.0
"""Entry point of the fleet demo (`make demo-fleet`); see `fleet.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.fleet.fleet import main

if __name__ == "__main__":
    sys.exit(main())
