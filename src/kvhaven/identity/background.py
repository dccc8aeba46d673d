# SPDX-License-Identifier: Apache-2.0
"""Identification of the model's files by content, while the engine starts or already serves."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.identity.content import DigestMemory, FileChangedError, ReadingStoppedError
from kvhaven.identity.files import AT_ONCE_BYTES, EngineFiles, UnidentifiedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_ONCE_S = 10.0
"""Maximum wait of a start for files below `AT_ONCE_BYTES`, as storage may hang."""

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each retry after a storage error."""

Content = Mapping[str, str]
"""The namespace's fields for the content of files."""
Attach = Callable[[Content, float], None]
"""Attaches one side of the connector; the number is the maximum wait for the service in seconds."""


def digest_memory(runtime_path: Path) -> DigestMemory:
    """Return the memory of file digests in the cache directory, shared by this user's processes."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # noqa: PTH117 - may be empty, by the specification
        cache = os.path.expanduser("~/.cache")  # noqa: PTH111 - keeps "~" without a home
    return DigestMemory.open(Path(cache) / "kvhaven" / "files", runtime_path / "files")


def look_at_files(look: Callable[[], EngineFiles], stop: threading.Event) -> EngineFiles | None:
    """Return the result of `look`; None, with a log line, if it fails.

    It fails if storage returns errors or if there are too many files. Other exceptions propagate.
    """
    try:
        return _patiently(look, stop)
    except OSError as error:
        logger.warning("nothing is cached: the model's files cannot be listed: %s", error)
    except UnidentifiedError as error:
        logger.warning("nothing is cached: %s", error)
    return None


def attach_when_known(
    files: EngineFiles, stop: threading.Event, attach: Attach, wait_s: float
) -> None:
    """Call `attach` with the identity of the files' content, once it is known.

    If the files are small or their digests are remembered, `attach` is called before this returns,
    waits up to `wait_s` for the service, and its exceptions propagate. Otherwise a thread reads
    the files until `stop` is set, then attaches, and the engine serves without a cache meanwhile.
    If the content cannot be identified, the engine serves without a cache until it is restarted,
    and the log has the reason.
    """
    if files.changed:
        logger.warning(
            "nothing is cached: %s after the engine began to load, so the loaded content is not "
            "known. Restart the engine, or set `model_fingerprint`",
            files.changed,
        )
        return
    unknown = files.unknown_bytes
    if unknown > AT_ONCE_BYTES:
        logger.warning(
            "nothing is cached yet: %.1f GB of the model's files are read in the background, to "
            "identify the loaded content",
            unknown / 1e9,
        )
    began = time.monotonic()
    content: Future[dict[str, str]] = Future()

    def read() -> None:
        try:
            content.set_result(_patiently(lambda: files.read(stop), stop))
        except Exception as error:  # noqa: BLE001 - any error must reach the waiter
            content.set_exception(error)

    threading.Thread(target=read, name="kvhaven-identity", daemon=True).start()
    if unknown <= AT_ONCE_BYTES:
        try:
            error = content.exception(_AT_ONCE_S)
        except TimeoutError:
            logger.warning("nothing is cached yet: reading the model's files takes long")
        else:
            if error is None:
                attach(content.result(), wait_s)
                return
    content.add_done_callback(lambda done: _attach_late(done, attach, began))


def _patiently(work: Callable[[], T], stop: threading.Event) -> T:
    """Return the result of `work`; retry a few times after storage errors."""
    for pause_s in _PAUSES_S:
        try:
            return work()
        except OSError as error:
            logger.warning("the model's files cannot be read, retrying: %s", error)
            if stop.wait(pause_s):
                raise
    return work()


def _attach_late(content: "Future[dict[str, str]]", attach: Attach, began: float) -> None:
    """Attach without waiting; the link retries and logs why it cannot connect."""
    try:
        attach(content.result(), 0.0)
    except ReadingStoppedError:
        return
    except ServiceUnavailableError:
        pass
    except (FileChangedError, OSError) as error:
        logger.warning("nothing is cached: the model's files cannot be identified: %s", error)
        return
    except KVHavenError as error:
        logger.error("nothing is cached: %s", error)  # noqa: TRY400 - a refusal, not a bug
        return
    logger.warning(
        "the model's files are identified after %.1f s; caching begins", time.monotonic() - began
    )
