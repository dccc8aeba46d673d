# SPDX-License-Identifier: Apache-2.0
"""Blocks of a session's next turn that may have KV of dropped tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvhaven.engine.parts import KvPart
from kvhaven.engine.session_turns import SessionTurns

BLOCKS = [[1, 2, 3, 4], [11, 12, 13, 14]]
"""Of full attention, and of a recurrent state, four tokens each."""
FULL = KvPart("kv", (0,), 4)
STATE = KvPart("state", (1,), 4, is_state=True)


def turn(number: int, tokens: int) -> Any:
    return SimpleNamespace(request_id="s", resumable=True, turn=number, num_tokens=tokens)


@pytest.mark.parametrize(
    ("counts_dropped", "planned", "doubtful"),
    [
        (False, True, [3, 4, 12, 13, 14]),  # the state at the last computed token
        (True, True, [2, 3, 4, 11, 12, 13, 14]),
        (True, False, [1, 2, 3, 4, 11, 12, 13, 14]),  # nothing is known of its last step
    ],
)
def test_doubt_begins_where_the_last_step_of_the_turn_began(
    counts_dropped: bool, planned: bool, doubtful: list[int]
) -> None:
    turns = SessionTurns((FULL, STATE), (4, 4), counts_dropped=counts_dropped)
    assert turns.doubtful(turn(1, 4), BLOCKS, 0) is None
    if planned:
        turns.planned(turn(1, 4))
    assert turns.doubtful(turn(2, 12), BLOCKS, 8) == doubtful
    assert turns.doubtful(turn(2, 12), BLOCKS, 8) is None, "the same turn, after a preemption"
    turns.finished("s")
    assert turns.doubtful(turn(3, 12), BLOCKS, 8) is None
