# SPDX-License-Identifier: Apache-2.0
"""Two nodes behind a link that is slow, loses packets, stalls or is cut.

No load returns a wrong byte (the engine compares every byte) or hangs, and the peers find each
other again. `KVHAVEN_EVENTS` is the number of times that each kind of trouble comes.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvhaven.types import ChunkKey
from tests.crash.engine import Engine, prompt
from tests.crash.network import Link, link
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.test_chains import Asking, Fleet, await_no_chains
from tests.crash.test_peers import TOKEN, connected, node_of
from tests.crash.workload import events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

PORT = 7420
CHUNKS = 12
DEADLINE_MS = 300
STALL_S = 5.0
HOLD = "hold"
_HOWS: list[str | tuple[bool, bool]] = [HOLD, (True, True), (True, False), (False, True)]
_names = itertools.count()


class Nodes(NamedTuple):
    """Two nodes, each in a namespace of its own, and the link between these."""

    link: Link
    a: NodeProcess
    b: NodeProcess

    def fleet(self) -> Fleet:
        """Return them as a prefill and a decode node."""
        return Fleet(self.a, self.b, f"{self.link.ends[1].address}:{PORT}")


@contextlib.contextmanager
def nodes_behind_a_link(short_dir: Path, **settings: object) -> Iterator[Nodes]:
    token = short_dir / "token"
    token.write_bytes(TOKEN)
    with contextlib.ExitStack() as stack:
        between = stack.enter_context(link(seed_of_this_run()))
        nodes = []
        for name, here, there in zip("ab", between.ends, reversed(between.ends), strict=True):
            options: dict[str, object] = {
                "peer_listen": f"{here.address}:{PORT}",
                "peers": f"{there.address}:{PORT}",
                "peer_token_file": token,
                "peer_deadline_ms": DEADLINE_MS,
            }
            node = node_of(short_dir, name, PORT, **(options | settings))
            with here.inside():
                nodes.append(stack.enter_context(node))
        for node in nodes:
            connected(node)
        yield Nodes(between, *nodes)


def new_prompt() -> list[ChunkKey]:
    return prompt(f"network {next(_names)}", CHUNKS)


def quiet(nodes: Nodes) -> None:
    """Wait until nothing is held on either node."""
    for node in (nodes.a, nodes.b):
        await_no_chains(node)
        settled(node.address)


def loads(engine: Engine, keys: Sequence[ChunkKey]) -> None:
    """Wait until an engine can load all of a prompt."""
    eventually(lambda: engine.load(keys) == len(keys), 90)


def test_a_slow_or_lossy_link_brings_all_chunks(short_dir: Path) -> None:
    # Lost packets cost retransmissions, of up to 0.2 s each, and more if they are lost again.
    with (
        nodes_behind_a_link(short_dir, peer_deadline_ms=3000) as nodes,
        Engine(nodes.a.address) as a,
        Engine(nodes.b.address) as b,
    ):
        between = nodes.link
        for between.delay_s, between.loss in ((0.01, 0.0), (0.0, 0.01), (0.01, 0.01)):
            rounds, lost = events_of_this_run(2), between.lost
            while rounds > 0 or (between.loss and between.lost == lost):
                rounds -= 1
                keys = new_prompt()
                assert a.save(keys) == CHUNKS
                loads(b, keys)
        assert status_of(nodes.b.address).tiers["peer"].rejected == 0
        quiet(nodes)


def test_a_link_that_stalls_or_is_cut_ends_every_wait(short_dir: Path) -> None:
    """A lookup, reads and an expected chain are under way when nothing comes through any more."""
    with (
        nodes_behind_a_link(short_dir) as nodes,
        Engine(nodes.a.address) as a,
        Engine(nodes.b.address) as b,
    ):
        rounds = events_of_this_run(0)
        for how in _HOWS * rounds or _HOWS[:3]:
            chain, known = new_prompt(), new_prompt()
            assert a.save(known) == CHUNKS
            fleet = nodes.fleet()
            name = fleet.offer(a, chain)
            waiting, reading = Asking(b, chain), Asking(b, known)
            waiting.start()
            assert waiting.pending.wait(60)
            assert a.save(chain[:5]) == 5
            reading.start()
            with stalled(nodes.link, how):
                began = time.monotonic()
                assert 0 <= waiting.result() <= 5
                assert 0 <= reading.result() <= CHUNKS
                waits = [asked.answered - began for asked in (waiting, reading)]
                assert a.save(new_prompt()) == CHUNKS  # each node goes on by itself
                assert b.save(new_prompt()) == CHUNKS
                eventually(lambda: not status_of(nodes.b.address).tiers["peer"].online, 60)
            shown = ", ".join(f"{wait * 1000 / DEADLINE_MS:.1f}" for wait in waits)
            print(f"{how}: waits of {shown} deadlines")  # noqa: T201 - with `-s`
            connected(nodes.a)
            connected(nodes.b)
            a.scheduler.client.end_chain(name)
            loads(b, known)
            after = new_prompt()
            fleet.offer(a, after)
            assert a.save(after) == CHUNKS
            loads(b, after)
        quiet(nodes)


@contextlib.contextmanager
def stalled(between: Link, how: str | tuple[bool, bool]) -> Iterator[None]:
    """Hold packets for at least 5 s, or lose them; then let them through again."""
    began = time.monotonic()
    if isinstance(how, tuple):
        between.cut = how
    else:
        between.held = True
    try:
        yield
        if how == HOLD:
            time.sleep(max(0.0, STALL_S - (time.monotonic() - began)))
    finally:
        between.cut, between.held = (False, False), False
