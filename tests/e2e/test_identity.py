# SPDX-License-Identifier: Apache-2.0
"""What an engine's weights are is found out while it serves, once, and remembered."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvhaven.client.unix import lock_file
from kvhaven.identity.content import DigestMemory
from kvhaven.identity.files import AT_ONCE_BYTES, EngineFiles, Source
from tests.e2e.conftest import Control
from tests.e2e.engines import Engine, NodeService, assert_same, engine, prompts
from tests.e2e.test_engine import full_chunks

pytestmark = pytest.mark.vllm

NEVER_NS = 2**63 - 1


@pytest.fixture
def large_model(model: Path, tmp_path: Path) -> Path:
    """The tiny model, with a file beside it that is too large to be read while an engine starts."""
    folder = tmp_path / "large"
    shutil.copytree(model, folder)
    with (folder / "part_of_it.dat").open("wb") as file:
        file.truncate(AT_ONCE_BYTES + 1)
    return folder


@contextmanager
def being_read(model: Path, cache: Path) -> Iterator[None]:
    """Hold the lock of a process that reads the model's files."""
    memory = DigestMemory.open(cache / "kvhaven" / "files")
    name = EngineFiles([Source("weights", model)], memory, NEVER_NS)._name
    with lock_file(str(cache / "kvhaven" / "files" / f"{name}.lock")) as held:
        assert held
        yield


def test_an_engine_serves_before_it_is_known_what_its_weights_are(
    large_model: Path,
    control: Control,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    short_dir: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = prompts(51, 6, least=200)[::2]  # no two begin alike
    expected = control(asked, max_tokens=4)
    service = NodeService(short_dir / "s", tmp_path / "service.log", max_local_cpu_size="64MiB")
    service.start()
    settings = {"service_address": str(service.socket)}
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    try:
        with ExitStack() as reading:
            reading.enter_context(being_read(large_model, tmp_path / "cache"))
            with engine(large_model, first, settings, in_process=True) as started:
                found = started.generate(asked, max_tokens=4)
                assert_same(found, expected)
                assert [one["cached"] for one in found] == [0] * len(asked)
                assert service.status().members == []
                assert "nothing is cached yet: 0.3 GB of the model's files" in first.read_text()
                reading.close()
                wait_for_hits(started, asked)
                started.ask("reset")
                assert_same(started.generate(asked, max_tokens=4), expected)
                assert "the model's files are identified after" in first.read_text()
        with engine(large_model, second, settings, in_process=True) as again:
            found = again.generate(asked, max_tokens=4)
            assert_same(found, expected)
            for prompt, one in zip(asked, found, strict=True):
                assert one["cached"] >= full_chunks(prompt)
            assert "nothing is cached" not in second.read_text()
        (namespace,) = service.status().namespaces
        paged = {"format", "engine", "layout", "cache.block_size", "parallel.tensor_parallel_size"}
        assert paged | {"weights", "weights.other", "model.dtype"} <= namespace.fields.keys()
    finally:
        service.stop(signal.SIGKILL)


def wait_for_hits(started: Engine, asked: list[list[int]]) -> None:
    """Ask until all full chunks of all prompts come from the cache."""
    end = time.monotonic() + 60
    while True:
        started.ask("reset")
        found = started.generate(asked, max_tokens=4)
        if all(one["cached"] >= full_chunks(p) for p, one in zip(asked, found, strict=True)):
            return
        assert time.monotonic() < end, started.log.read_text()[-4000:]
