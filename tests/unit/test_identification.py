# SPDX-License-Identifier: Apache-2.0
"""An engine attaches when its model's files are known: at its start, or while it serves."""

import errno
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvhaven.client.unix import lock_file
from kvhaven.config import Settings
from kvhaven.errors import IncompleteEngineError, KVHavenError, ServiceUnavailableError
from kvhaven.identity import background
from kvhaven.identity.background import (
    attach_when_known,
    digest_memory,
    look_at_files,
)
from kvhaven.identity.content import DigestMemory
from kvhaven.identity.files import AT_ONCE_BYTES, EngineFiles, Source
from kvhaven.integrations.vllm import start
from kvhaven.integrations.vllm.namespace import Description

NEVER_NS = 2**63 - 1


class Side:
    """What attaches: keeps what it was told, and raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told: queue.Queue[tuple[Mapping[str, str], float, str]] = queue.Queue()
        self.error = error

    def attach(self, content: Mapping[str, str], wait_s: float) -> None:
        self.told.put((content, wait_s, threading.current_thread().name))
        if self.error is not None:
            raise self.error


@pytest.fixture
def memory(tmp_path: Path) -> DigestMemory:
    return DigestMemory.open(tmp_path / "cache")


def files(tmp_path: Path, memory: DigestMemory, size: int, since_ns: int = NEVER_NS) -> EngineFiles:
    """A model whose weights have that many bytes, of which the disk needs few."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(size)
    return EngineFiles([Source("weights", folder)], memory, since_ns)


def test_files_that_are_read_quickly_are_known_at_the_start(
    tmp_path: Path, memory: DigestMemory
) -> None:
    side, few = Side(), files(tmp_path, memory, AT_ONCE_BYTES)
    attach_when_known(few, threading.Event(), side.attach, 7.0)
    content, wait_s, thread = side.told.get_nowait()
    assert content == few.read(threading.Event())
    assert wait_s == 7.0
    assert thread == threading.current_thread().name


@pytest.mark.parametrize("error", [KVHavenError("refused"), ServiceUnavailableError("away")])
def test_a_start_that_is_refused_then_is_refused(
    tmp_path: Path, memory: DigestMemory, error: Exception
) -> None:
    with pytest.raises(type(error), match=str(error)):
        attach_when_known(files(tmp_path, memory, 1), threading.Event(), Side(error).attach, 7.0)


@pytest.fixture
def held(tmp_path: Path, memory: DigestMemory) -> "Held":
    return Held(tmp_path / "cache", files(tmp_path, memory, AT_ONCE_BYTES + 1))


class Held:
    """Files of which another process seems to be reading: it holds their lock until `let_go`."""

    def __init__(self, cache: Path, many: EngineFiles) -> None:
        self.files = many
        self._lock = lock_file(str(cache / f"{many._name}.lock"))
        assert self._lock.__enter__()

    def let_go(self) -> None:
        self._lock.__exit__(None, None, None)


def test_an_engine_with_large_files_starts_and_attaches_when_they_are_read(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(ServiceUnavailableError("the link goes on trying"))
    attach_when_known(held.files, threading.Event(), side.attach, 7.0)
    assert side.told.empty()
    held.let_go()
    content, wait_s, thread = side.told.get(timeout=60)
    assert content == held.files.read(threading.Event())
    assert wait_s == 0.0
    assert thread != threading.current_thread().name
    wait_until_logged(caplog, "caching begins")
    assert "nothing is cached yet: 0.3 GB of the model's files are read" in caplog.text


def test_a_refusal_while_the_engine_serves_is_said_and_ends_nothing(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    attach_when_known(held.files, threading.Event(), Side(KVHavenError("unlike")).attach, 7.0)
    held.let_go()
    wait_until_logged(caplog, "nothing is cached: unlike")
    assert "caching begins" not in caplog.text


def test_an_engine_that_ends_before_does_not_attach(held: Held) -> None:
    side, stop = Side(), threading.Event()
    before = threading.active_count()
    attach_when_known(held.files, stop, side.attach, 7.0)
    stop.set()
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        stop.wait(0.01)
    assert threading.active_count() == before
    held.let_go()
    assert side.told.empty()


def test_files_that_changed_after_loading_began_are_never_identified(
    tmp_path: Path, memory: DigestMemory, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    changed = files(tmp_path, memory, 1, since_ns=0)
    attach_when_known(changed, threading.Event(), side.attach, 7.0)
    assert side.told.empty()
    assert "nothing is cached: " in caplog.text
    assert "model.safetensors changed after the engine began to load" in caplog.text


def test_files_that_change_while_they_wait_to_be_read_are_not_identified(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side()
    attach_when_known(held.files, threading.Event(), side.attach, 7.0)
    with (tmp_path / "model" / "model.safetensors").open("r+b") as weights:
        weights.write(b"x")
    held.let_go()
    wait_until_logged(caplog, "nothing is cached: the model's files cannot be identified")
    assert side.told.empty()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_PAUSES_S", (0.001,) * 3)


@pytest.fixture
def stale_reads(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Errors that the next reads of files end with, as those of a file server that restarts."""
    errors: list[OSError] = []
    preadv = os.preadv

    def read(*arguments: Any) -> int:
        if errors:
            raise errors.pop()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", read)
    return errors


@pytest.mark.usefixtures("no_pauses")
def test_reads_that_fail_for_a_moment_are_tried_again(
    tmp_path: Path, memory: DigestMemory, stale_reads: list[OSError]
) -> None:
    side, few = Side(), files(tmp_path, memory, 1000)
    stale_reads += [OSError(errno.ESTALE, "Stale file handle")] * 3
    attach_when_known(few, threading.Event(), side.attach, 7.0)
    content, wait_s, _ = side.told.get_nowait()
    assert content == few.read(threading.Event())
    assert wait_s == 7.0


@pytest.mark.usefixtures("no_pauses")
def test_reads_that_go_on_failing_leave_the_engine_without_a_cache(
    tmp_path: Path,
    memory: DigestMemory,
    stale_reads: list[OSError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    side, few = Side(), files(tmp_path, memory, 1000)
    stale_reads += [OSError(errno.EIO, "Input/output error")] * 4
    attach_when_known(few, threading.Event(), side.attach, 7.0)
    assert side.told.empty()
    assert "nothing is cached: the model's files cannot be identified" in caplog.text


@pytest.mark.usefixtures("no_pauses")
def test_folders_that_cannot_be_listed_for_a_moment_are_looked_at_again(
    tmp_path: Path,
    memory: DigestMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors: list[OSError] = []
    listdir = os.listdir

    def listed(path: Any) -> list[str]:
        if errors:
            raise errors.pop()
        return listdir(path)

    known = files(tmp_path, memory, 1000).read(threading.Event())
    monkeypatch.setattr(os, "listdir", listed)
    look = functools.partial(files, tmp_path, memory, 1000)
    errors += [OSError(errno.EIO, "Input/output error")] * 3
    found = look_at_files(look, threading.Event())
    assert found is not None
    assert found.read(threading.Event()) == known
    errors += [OSError(errno.EIO, "Input/output error")] * 4
    assert look_at_files(look, threading.Event()) is None
    assert "nothing is cached: the model's files cannot be listed" in caplog.text


def test_an_engine_that_ends_does_not_try_again(
    tmp_path: Path, memory: DigestMemory, stale_reads: list[OSError]
) -> None:
    side, few, stop = Side(), files(tmp_path, memory, 1000), threading.Event()
    stop.set()
    stale_reads += [OSError(errno.EIO, "Input/output error")]
    attach_when_known(few, stop, side.attach, 7.0)
    assert side.told.empty()


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (IncompleteEngineError("not all 2 ranks"), logging.ERROR),
        (ServiceUnavailableError("nobody there"), logging.WARNING),
    ],
)
def test_a_start_goes_on_where_no_setting_is_wrong(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(error)
    named = Settings(model_fingerprint="mine")
    start._attach(named, object(), Description({}, {}), threading.Event(), side.attach)
    assert side.told.get_nowait()[0] == {"weights": "mine"}
    said = [record for record in caplog.records if "serving without a cache" in record.message]
    assert [(record.levelno, str(error) in record.message) for record in said] == [(level, True)]


def test_digests_are_kept_in_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    digest_memory(tmp_path / "run")
    assert (tmp_path / "xdg" / "kvhaven" / "files").is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    digest_memory(tmp_path / "run")
    assert (tmp_path / "home" / ".cache" / "kvhaven" / "files").is_dir()
    monkeypatch.setenv("HOME", "/proc")
    assert not (tmp_path / "run").exists()
    digest_memory(tmp_path / "run")
    assert (tmp_path / "run" / "files").is_dir()


def wait_until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until a thread has logged something."""
    caplog.set_level(logging.INFO)
    end = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)
