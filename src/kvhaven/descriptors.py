# SPDX-License-Identifier: Apache-2.0
"""File descriptors of a process: their limit, and errors that say that a process has none left."""

import contextlib
import errno
import resource
from typing import Final

_NO_LIMIT: Final = 1 << 30
_SHORTAGE: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)


def allow_descriptors() -> int:
    """Raise the limit of open files from the soft to the hard limit; return the limit.

    The usual soft limit of 1024 exists for programs that use `select`, which supports no more.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some containers forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        limit = most
    return _NO_LIMIT if limit == resource.RLIM_INFINITY else limit


def is_shortage(error: OSError) -> bool:
    """Return whether a connection failed because this process or machine lacks resources.

    These are descriptors, ports and memory. The other side has not failed then.
    """
    return error.errno in _SHORTAGE
