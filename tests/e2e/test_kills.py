# SPDX-License-Identifier: Apache-2.0
"""Kills at random moments, with real vLLM: what follows is right, and nothing leaks.

The short form kills a few times; `KVHAVEN_EVENTS=50 pytest -o timeout=0 tests/e2e/test_kills.py`
is the long one. `KVHAVEN_SEED` repeats the random choices.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from kvhaven.client.control import connect
from tests.crash.node import audit_disk
from tests.crash.workload import events_of_this_run, seed_of_this_run
from tests.e2e.conftest import Control
from tests.e2e.engines import Engine, NodeService, assert_nothing_held, assert_same, engine, prompts

pytestmark = pytest.mark.vllm

VICTIMS = ("service", "service", "worker", "engine core")
LONGEST_S = 1.5
"""Serving all prompts takes about so long."""


@pytest.mark.timeout(900)
def test_kills_at_random_moments(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    dice = random.Random(seed_of_this_run())
    asked = prompts(21, 12)
    expected = control(asked, max_tokens=4)
    disk = tmp_path / "disk"
    service = NodeService(
        short_dir / "s", tmp_path / "service.log", max_local_cpu_size="64MiB", local_disk=disk
    )
    service.start()
    settings = {"service_address": str(service.socket)}
    left, counts = events_of_this_run(3), Counter[str]()
    with contextlib.ExitStack() as stack:
        stack.callback(service.stop, signal.SIGKILL)
        while left:
            log = tmp_path / f"engine-{counts.total()}.log"
            with engine(model, log, settings) as started:
                assert_same(started.generate(asked, max_tokens=4), expected)
                while left:
                    victim = dice.choice(VICTIMS)
                    left -= 1
                    counts[victim] += 1
                    forget(started, service, dice)
                    started.send("generate", prompts=asked, max_tokens=4)
                    time.sleep(dice.uniform(0, LONGEST_S))
                    if victim != "service":
                        os.kill(process_of(started, victim), signal.SIGKILL)
                        time.sleep(dice.uniform(0, 0.5))  # what is left of vLLM notices, or not
                        started.kill()
                        break
                    service.stop(signal.SIGKILL)
                    service.start()
                    assert_same(started.answer(), expected)
                    started.ask("reset")
                    assert_same(started.generate(asked, max_tokens=4), expected)
                    assert_nothing_held(service.settled())
                    assert started.ask("metrics").get("vllm:kvhaven_failed_loads", 0) == 0
            assert_nothing_held(service.settled())
        service.stop(signal.SIGKILL)
        assert audit_disk(disk).problems == ()
    print(dict(counts))  # noqa: T201 - pytest shows it with -s


def forget(started: Engine, service: NodeService, dice: random.Random) -> None:
    """Let the next answers come from anywhere: memory, disk, or computation that is saved."""
    started.ask("reset")
    tier = dice.choice(("", "memory", None))
    if tier is not None:
        with connect(str(service.socket)) as node:
            node.clear(tier=tier)


def process_of(started: Engine, victim: str) -> int:
    """Return the id of the engine's process of that kind (vLLM names them)."""
    name = {"worker": "VLLM::Worker", "engine core": "VLLM::EngineCore"}[victim]
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            of_this_engine = os.getpgid(int(folder.name)) == started.process.pid
            if of_this_engine and (folder / "cmdline").read_bytes().startswith(name.encode()):
                return int(folder.name)
    raise AssertionError(f"{name} does not run; the log ends:\n{started.log.read_text()[-2000:]}")
