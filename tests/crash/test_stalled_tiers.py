# SPDX-License-Identifier: Apache-2.0
"""Stores that take what they are asked and never answer: a real service over real servers.

S3 is stopped (its kernel still accepts connections), and so is the server of a FUSE mount, where
every system call then hangs. Nobody waits for long; status shows it; all comes back by itself.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.client.control import connect
from kvhaven.tiers.base import Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from tests import servers
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, NodeThread, eventually, flush, seconds, status_of
from tests.servers import Stoppable

pytestmark = pytest.mark.crash

KEYS = prompt("p", 8)
LOOKUP_S = 0.5
LOOKUPS = 20

Open = Callable[[], Tier]


@contextlib.contextmanager
def s3(folder: Path) -> Iterator[tuple[Open, Stoppable]]:
    """A bucket whose requests may take a second."""
    pytest.importorskip("obstore", reason="pip install 'kvhaven[s3]'")
    with servers.moto_process() as (url, server):
        bucket = servers.Bucket(url)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in bucket.environment.items():
                patch.setenv(name, value)
            yield lambda: bucket.tier(deadline_s=1, absent_s=0, present_s=0, retry_s=0.1), server


@contextlib.contextmanager
def directory(folder: Path) -> Iterator[tuple[Open, Stoppable]]:
    """A mount where a call may hang for a second."""
    (folder / "store").mkdir()
    mount = folder / "mount"
    with servers.fuse_mount(folder / "store", mount) as server:
        yield (
            lambda: filesystem_tier(
                mount, executor=TierExecutor(4, per_core=4), deadline_s=1, stall_s=1, retry_s=0.1
            ),
            server,
        )


@pytest.mark.parametrize("store", [s3, directory], ids=["s3", "directory"])
def test_a_stalled_store_costs_one_deadline_and_comes_back(
    short_dir: Path,
    store: Callable[[Path], contextlib.AbstractContextManager[tuple[Open, Stoppable]]],
) -> None:
    settings = {"promote_deadline_ms": 1000 * LOOKUP_S, "remote_lookup_ttl_s": 0.1}
    with store(short_dir) as (open_tier, server):
        node = NodeThread(short_dir / "s.sock", **settings)
        node.make_tiers = lambda settings: {TierName("remote"): open_tier()}
        with node, Engine(node.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
            flush(node.address)
            forget_memory(node)
            eventually(lambda: engine.load(KEYS) == len(KEYS), 30)
            for again in range(2):
                forget_memory(node)
                with server.stopped():
                    spent = seconds(
                        lambda: [engine.load(prompt(f"{again}/{n}", 4)) for n in range(LOOKUPS)]  # noqa: B023
                    )
                    assert spent < LOOKUPS / 2 * LOOKUP_S
                    assert engine.save(prompt(f"q{again}", 3)) == 3
                    eventually(lambda: is_off(node, engine), 30)
                    assert "remote" in node.status().tiers
                eventually(lambda: node.status().tiers["remote"].online, 30)
                eventually(lambda: engine.load(KEYS) == len(KEYS), 30)
            node.check()


def test_a_disk_that_hangs_at_the_start_keeps_a_service_from_nothing(short_dir: Path) -> None:
    """It serves without, ends when it is told to, and takes the disk when that answers."""
    (short_dir / "store").mkdir()
    settings = {"local_disk": short_dir / "mount" / "disk", "stop_deadline_s": "1"}
    node = NodeProcess(short_dir / "s.sock", short_dir / "log", **settings)
    with servers.fuse_mount(short_dir / "store", short_dir / "mount") as server:
        with server.stopped(), node:
            assert "the attempt continues" in status_of(node.address).tiers["disk"].last_error
            with Engine(node.address) as engine:
                assert engine.save(KEYS) == len(KEYS)
            node.stop()
        with contextlib.ExitStack() as stack:
            with server.stopped():
                stack.enter_context(node)
            eventually(lambda: status_of(node.address).tiers["disk"].online)


def is_off(node: NodeThread, engine: Engine) -> bool:
    """Ask for something new, and return whether status shows the tier off, and why."""
    engine.load(prompt(time.monotonic_ns(), 1))
    health = node.status().tiers["remote"]
    return not health.online and bool(health.last_error)


def forget_memory(node: NodeThread) -> None:
    with connect(node.address) as control:
        control.clear(tier="memory")
