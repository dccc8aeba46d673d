# SPDX-License-Identifier: Apache-2.0
"""`python -m kvhaven.cli`: the command line where no script is installed."""

from kvhaven.cli import main

if __name__ == "__main__":
    main()
