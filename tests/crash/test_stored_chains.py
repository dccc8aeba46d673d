# SPDX-License-Identifier: Apache-2.0
"""Prefill on one node and decode on another without peers: through a shared directory."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvhaven.protocol import UNKNOWN_NODE
from kvhaven.types import ChunkKey
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, flush, settled, status_of
from tests.crash.test_chains import Asking
from tests.crash.test_two_nodes import node_of

pytestmark = pytest.mark.crash

KEYS = prompt("p", 12)


class Decoding(Asking):
    """The lookup of a request that another node has prefilled."""

    def __init__(self, engine: Engine, keys: Sequence[ChunkKey] = KEYS) -> None:
        super().__init__(engine, keys)
        self.asked = time.monotonic()

    def run(self) -> None:
        self.engine.scheduler.client.pull_chain(UNKNOWN_NODE, self.keys)
        super().run()


@contextlib.contextmanager
def nodes(short_dir: Path, stall_s: int) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """A prefill node and a decode node that share a directory."""
    (short_dir / "shared").mkdir()
    with (
        node_of(short_dir, "p") as p,
        node_of(
            short_dir,
            "d",
            remote_write="off",
            pd_stall_ms=stall_s * 1000,
        ) as d,
    ):
        yield p, d


def test_chunks_that_are_still_being_written_are_waited_for(short_dir: Path) -> None:
    with nodes(short_dir, 60) as (p, d):
        with Engine(p.address) as prefill, Engine(d.address) as decode:
            assert prefill.save(KEYS[:8]) == 8
            flush(p.address)
            asking = Decoding(decode)
            asking.start()
            assert asking.pending.wait(120)
            assert prefill.save(KEYS[8:], KEYS[7]) == 4
            assert asking.result() == len(KEYS)
        settled(d.address)


@pytest.mark.parametrize("end", ["kill", "abort"])
def test_what_is_not_written_is_not_waited_for_for_long(short_dir: Path, end: str) -> None:
    with nodes(short_dir, 1) as (p, d), Engine(d.address) as decode:
        with Engine(p.address) as prefill:
            assert prefill.save(KEYS[:8]) == 8
            flush(p.address)
        if end == "kill":
            p.kill()
        asking = Decoding(decode)
        asking.start()
        assert asking.result() == 8
        assert asking.answered - asking.asked >= 1.0
        # All is there now, or was given up: another request waits for nothing.
        again = Decoding(decode, KEYS[:8])
        again.start()
        assert again.result() == 8
        settled(d.address, members=None)


def test_a_prompt_of_which_nothing_is_stored_is_not_waited_for(short_dir: Path) -> None:
    with nodes(short_dir, 60) as (_, d), Engine(d.address) as decode:
        asking = Decoding(decode)
        asking.start()
        assert asking.result() == 0
        assert status_of(d.address).chains.open == 0
