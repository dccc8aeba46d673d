# SPDX-License-Identifier: Apache-2.0
"""Saves of recurrent states: only those that the engine keeps, complete, computed in this step."""

import pytest

from kvhaven.config import Settings
from kvhaven.engine.jobs import SaveJob
from kvhaven.engine.parts import FULL, KvPart, state_part
from kvhaven.engine.request_state import PartLoad, PendingLoad, RequestState
from kvhaven.engine.requests import EVERYTHING, KeptState, KnownExtras, Request
from kvhaven.engine.save_planner import SavePlanner
from kvhaven.keys import Extras

BLOCK = 8
CHUNK = 16
PROMPT = 70
PARTS = (KvPart(FULL, (0,), BLOCK), state_part((1, 2), BLOCK))


class Planned:
    """A planner, and a request of 70 prompt tokens and more output."""

    def __init__(self, *, decode: bool = False, output: int = 40) -> None:
        settings = Settings(chunk_size=CHUNK, save_decode_cache=decode)
        self.saves = SavePlanner(settings, [BLOCK] * 3, 1, parts=PARTS)
        request = Request("r", list(range(PROMPT + output)), PROMPT)
        self.state = RequestState(request, bytes(32), CHUNK, [bytes([1]) * 32])
        self.state.wanted = EVERYTHING
        self.state.key(KnownExtras(Extras()))
        blocks = list(range(1, 20))
        self.state.replace_blocks([blocks, [b + 20 for b in blocks], [b + 40 for b in blocks]])

    def states(self, begin: int, end: int, *kept: tuple[int, int, int]) -> list[SaveJob]:
        """Plan a step of tokens `begin` to `end`; return the jobs of states."""
        self.state.step_begin = begin
        jobs = self.saves.plan(self.state, end, [KeptState(*one) for one in kept])
        return [job for job in jobs if job.part == 1]


def test_a_state_is_saved_from_the_blocks_that_the_engine_names() -> None:
    planned = Planned()
    (job,) = planned.states(0, 64, (1, 7, 64), (2, 9, 64))
    assert job.blocks == (((7,),), ((9,),)), "not those at its position in the request"
    assert job.keys == (planned.state.chains[1].keys[3],)
    assert job.parent is None, "no state needs an earlier one"


def test_a_step_without_kept_states_saves_none() -> None:
    assert Planned().states(0, 64) == []


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        ([(1, 7, 64)], "the second group lacks it"),
        ([(1, 7, 64), (2, 9, 48)], "the groups have states of different tokens"),
        ([(1, 7, 56), (2, 9, 56)], "no chunk ends there"),
        ([(1, 0, 64), (2, 9, 64)], "the null block has no state"),
        ([(1, 7, 32), (2, 9, 32)], "it was loaded, or computed in an earlier step"),
        ([(1, 7, 80), (2, 9, 80)], "this step does not compute it"),
    ],
)
def test_other_states_are_not_saved(kept: list[tuple[int, int, int]], why: str) -> None:
    assert Planned().states(32, 70, *kept) == [], why


def test_states_in_the_output_are_saved_with_generated_tokens_only() -> None:
    kept = [(1, 7, 80), (2, 9, 80)]
    assert Planned().states(79, 80, *kept) == []
    (job,) = Planned(decode=True).states(79, 80, *kept)
    assert job.blocks == (((7,),), ((9,),))
    assert Planned(decode=True, output=9).states(79, 80, *kept) == [], "a token is not known yet"


def test_a_state_is_saved_though_the_full_part_has_planned_its_chunk() -> None:
    planned = Planned()
    planned.states(0, 70)
    assert len(planned.states(48, 70, (1, 7, 64), (2, 9, 64))) == 1


def test_a_state_that_is_being_saved_is_not_saved_again() -> None:
    planned = Planned()
    kept = [(1, 7, 64), (2, 9, 64)]
    assert planned.states(0, 64, *kept)
    assert planned.states(0, 64, *kept) == []


def test_a_state_needs_a_load_of_one_chunk_only() -> None:
    _, part = PARTS
    assert part.chunks(4, 0, CHUNK) == range(3, 4)
    assert part.chunks(4, 56, CHUNK) == range(3, 4), "also if most of the chunk is computed"
    assert part.stored_blocks(CHUNK) == 1
    assert part.first_token(64) // BLOCK == 7, "the block that ends there"


def test_a_load_puts_the_state_into_the_block_that_ends_with_the_hit() -> None:
    from kvhaven.client.scheduler import LeasedChunks
    from kvhaven.devices.base import SKIP
    from kvhaven.engine.load_planner import LoadPlanner

    planned = Planned()
    table = [0] * 7 + [33]
    planned.state.replace_blocks([list(range(1, 9)), table, [*table[:-1], 34]])
    lease = LeasedChunks(5, "service", ((0, 0),) * 4, bytes(4), (0,))
    one = LeasedChunks(6, "service", ((0, 4096),), bytes(1), (0,))
    offer = PendingLoad(lease, 0, 0, 64, CHUNK, others=(PartLoad(1, 3, one),))
    planner = LoadPlanner(PARTS, [BLOCK] * 3, asynchronous=True)
    full, state = planner.plan(planned.state, offer, 64)
    assert state.blocks == (((33,),), ((34,),))
    assert state.asynchronous
    assert SKIP not in state.blocks[0][0]
    assert len(full.blocks[0]) == 4
