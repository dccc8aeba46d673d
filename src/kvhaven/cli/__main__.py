# SPDX-License-Identifier: Apache-2.0
"""Entry point of `python -m kvhaven.cli`, for environments without the `kvhaven` script."""

from kvhaven.cli import run

if __name__ == "__main__":
    run()
