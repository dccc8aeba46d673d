# SPDX-License-Identifier: Apache-2.0
"""Finding out what the model's files contain, while the engine starts or already serves."""

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
"""How long a start waits for files that are few: storage may hang."""

_PAUSES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Before each further try where storage is in trouble."""

Content = Mapping[str, str]
"""The namespace's fields for the content of files."""
Attach = Callable[[Content, float], None]
"""Attaches one side of the connector, and waits so many seconds for the service."""


def digest_memory(runtime_path: Path) -> DigestMemory:
    """Return the digests of files that this user's processes share, in the cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # noqa: PTH117 - may be empty; the specification has it so
        cache = os.path.expanduser("~/.cache")  # noqa: PTH111 - "~" stays where no home is known
    return DigestMemory.open(Path(cache) / "kvhaven" / "files", runtime_path / "files")


def look_at_files(look: Callable[[], EngineFiles], stop: threading.Event) -> EngineFiles | None:
    """Return what `look` returns; None where it cannot know, and the log says why.

    That is if storage does not let it look, or there are too many files. Raises what else it
    raises.
    """
    try:
        return _patiently(look, stop)
    except OSError as error:
        logger.warning("nothing is cached: the model's files cannot be looked at: %s", error)
    except UnidentifiedError as error:
        logger.warning("nothing is cached: %s", error)
    return None


def attach_when_known(
    files: EngineFiles, stop: threading.Event, attach: Attach, wait_s: float
) -> None:
    """Call `attach` with what the files contain: now if that is known soon, else when it is.

    Small or remembered files are known soon: then `attach` is called before this returns, told to
    wait `wait_s` for the service, and what it raises is raised. Else a thread does so, until
    `stop` is set, and the engine serves without a cache meanwhile. Where the content cannot be
    known, the engine serves without a cache for good, and the log says why.
    """
    if files.changed:
        logger.warning(
            "nothing is cached: %s after the engine began to load, so it is not known what was "
            "loaded. Start the engine again, or set `model_fingerprint`",
            files.changed,
        )
        return
    unknown = files.unknown_bytes
    if unknown > AT_ONCE_BYTES:
        logger.warning(
            "nothing is cached yet: %.1f GB of the model's files are read in the background, to "
            "know what was loaded",
            unknown / 1e9,
        )
    began = time.monotonic()
    content: Future[dict[str, str]] = Future()

    def read() -> None:
        try:
            content.set_result(_patiently(lambda: files.read(stop), stop))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach who waits
            content.set_exception(error)

    threading.Thread(target=read, name="kvhaven-identity", daemon=True).start()
    if unknown <= AT_ONCE_BYTES:
        try:
            error = content.exception(_AT_ONCE_S)
        except TimeoutError:
            logger.warning("nothing is cached yet: the model's files take long to read")
        else:
            if error is None:
                attach(content.result(), wait_s)
                return
    content.add_done_callback(lambda done: _attach_late(done, attach, began))


def _patiently(work: Callable[[], T], stop: threading.Event) -> T:
    """Return what `work` returns; where storage is in trouble, try again a few times."""
    for pause_s in _PAUSES_S:
        try:
            return work()
        except OSError as error:
            logger.warning("the model's files cannot be read for now: %s", error)
            if stop.wait(pause_s):
                raise
    return work()


def _attach_late(content: "Future[dict[str, str]]", attach: Attach, began: float) -> None:
    """Attach without waiting: the link goes on trying, and says what keeps it."""
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
        logger.error("nothing is cached: %s", error)  # noqa: TRY400 - it is a refusal, no mistake
        return
    logger.warning(
        "the model's files are identified after %.1f s; caching begins", time.monotonic() - began
    )
