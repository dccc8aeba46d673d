# SPDX-License-Identifier: Apache-2.0
"""What was cached outlives engines and services; their absence is only a miss."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.e2e.conftest import Control
from tests.e2e.engines import Engine, NodeService, assert_nothing_held, assert_same, engine, prompts
from tests.e2e.test_engine import full_chunks

pytestmark = pytest.mark.vllm


def test_a_new_engine_and_a_killed_service_find_everything(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked = prompts(5, 6)
    expected = control(asked, max_tokens=4)
    service = NodeService(
        short_dir / "s",
        tmp_path / "service.log",
        max_local_cpu_size="128MiB",
        local_disk=tmp_path / "disk",
    )
    service.start()
    settings = {"service_address": str(service.socket)}
    try:
        with engine(model, tmp_path / "a.log", settings) as started:
            service.await_ranks()
            assert_same(started.generate(asked, max_tokens=4), expected)
            service.flush()
            started.kill()
        wait_for_members(service, 0)
        service.stop(signal.SIGKILL)
        service.start()
        with engine(model, tmp_path / "b.log", settings, in_process=True) as started:
            service.await_ranks()
            found = started.generate(asked, max_tokens=4)
            assert_same(found, expected)
            for prompt, one in zip(asked, found, strict=True):
                assert one["cached"] >= full_chunks(prompt)
            # Damaged files are misses, and are not offered again.
            for at, file in enumerate(sorted((tmp_path / "disk").rglob("*.kv"))):
                damage(file, at % 4)
            service.stop(signal.SIGKILL)
            service.start()
            started.ask("reset")
            found = started.generate(asked, max_tokens=4)
            assert_same(found, expected)
            assert max(one["cached"] for one in found) < 700
            service.flush()
            started.ask("reset")
            assert_same(started.generate(asked, max_tokens=4), expected)
            assert started.ask("metrics").get("vllm:kvhaven_failed_loads", 0) == 0
    finally:
        service.stop()


def test_serving_goes_on_while_the_service_is_away_or_stuck_and_recovers(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked = prompts(6, 8)
    expected = control(asked, max_tokens=4)
    service = NodeService(short_dir / "s", tmp_path / "service.log", max_local_cpu_size="128MiB")
    deadlines = {"lookup_deadline_ms": 100, "save_deadline_ms": 50}  # a stuck service is met here
    settings = {"service_address": str(service.socket)} | deadlines
    log = tmp_path / "log"
    with engine(model, log, settings, in_process=True) as started:  # no service at start
        try:
            assert_same(started.generate(asked, max_tokens=4), expected)
            service.start()
            wait_for_members(service, 2)
            started.ask("reset")
            assert_same(started.generate(asked, max_tokens=4), expected)
            started.ask("reset")
            assert hits_again(started, asked[0])
            assert service.process is not None
            service.process.send_signal(signal.SIGSTOP)
            started.ask("reset")
            assert_same(started.generate(asked, max_tokens=4), expected)
            service.process.send_signal(signal.SIGCONT)
            assert_nothing_held(service.settled())
            # Killed and started again at random moments while requests run.
            stop = threading.Event()
            killer = threading.Thread(target=keep_killing, args=(service, stop))
            killer.start()
            try:
                for _ in range(12):
                    started.ask("reset")
                    assert_same(started.generate(asked, max_tokens=4), expected)
            finally:
                stop.set()
                killer.join()
            wait_for_members(service, 2)
            assert hits_again(started, asked[0])
            started.ask("reset")
            assert_same(started.generate(asked, max_tokens=4), expected)
            assert_nothing_held(service.settled())
        finally:
            service.stop(signal.SIGKILL)


def hits_again(started: Engine, prompt: list[int]) -> bool:
    """Ask until the prompt comes from the cache; on a busy machine an answer may be late."""
    for _ in range(20):
        started.ask("reset")
        if started.generate([prompt])[0]["cached"] >= full_chunks(prompt):
            return True
        threading.Event().wait(0.2)
    return False


def damage(file: Path, kind: int) -> None:
    """Flip a bit, truncate, empty, or overwrite the header."""
    size = file.stat().st_size
    with file.open("r+b") as content:
        if kind == 0:
            content.seek(size // 2)
            byte = content.read(1)[0]
            content.seek(size // 2)
            content.write(bytes([byte ^ 1]))
        elif kind == 3:
            content.write(os.urandom(4096))
        else:
            content.truncate(size // 2 if kind == 1 else 0)


def keep_killing(service: NodeService, stop: threading.Event) -> None:
    """Kill and restart the service until told to stop; leave it running."""
    while not stop.wait(0.4):
        service.stop(signal.SIGKILL)
        service.start()


def wait_for_members(service: NodeService, count: int) -> None:
    """Wait until exactly that many processes are attached."""
    for _ in range(400):
        if len(service.status().members) == count:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{service.status().members} are attached, {count} should be")
