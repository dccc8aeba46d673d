# SPDX-License-Identifier: Apache-2.0
"""The end of a process that has threads which Python does not know."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_WITH_THREADS: Final = "obstore"
"""The library of the S3 tier. Its threads may ask for the interpreter while Python takes it down,
which aborts the process after all of its work is done: with the commands of `kvhaven tier`, one run
of 400 (compare PyO3's pull request 4874)."""
_NOT_WRITTEN: Final = 120
"""The exit status of Python if it cannot write all output."""


@contextmanager
def ended_at_once() -> Iterator[None]:
    """End this process after the body, with its exit status, if it has such threads.

    Python is then not taken down: only logs and output are flushed.
    """
    status: object = None
    try:
        yield
    except SystemExit as end:
        status = end.code
        if _WITH_THREADS not in sys.modules or not isinstance(status, int | None):
            raise
    if _WITH_THREADS in sys.modules:
        logging.shutdown()
        for stream in (sys.stderr, sys.stdout):
            if stream is None:  # its descriptor was closed when Python started
                continue
            try:
                stream.flush()
            except (OSError, ValueError) as error:  # such as a full disk
                if sys.stderr is not None:
                    with suppress(OSError, ValueError):
                        sys.stderr.write(f"the output is not complete: {error}\n")
                        sys.stderr.flush()
                status = status or _NOT_WRITTEN
        os._exit(status if isinstance(status, int) else 0)
