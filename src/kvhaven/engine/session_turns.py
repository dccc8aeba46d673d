# SPDX-License-Identifier: Apache-2.0
"""Turns of streaming sessions: where a turn may go on from KV of dropped tokens."""

from collections.abc import Hashable, Sequence

from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import NO_TURN, NULL_BLOCK
from kvhaven.engine.requests import EngineRequest


class SessionTurns:
    """The sessions of an engine whose KV has these `parts`, and its groups these `block_sizes`.

    A turn ends with tokens that vLLM computed and drops, in two ways:

    - With asynchronous scheduling, vLLM (0.32) has begun to compute one more token. A recurrent
      state is advanced in place, so the next turn goes on from a state of other tokens.
    - Without it, drafts that were accepted behind the token that ends the turn count as computed
      (`counts_dropped`), so the first tokens of the next turn are not computed. In 0.29 that is so
      with asynchronous scheduling, too, and also without drafts.

    All KV that is computed from such blocks is wrong, too.
    """

    def __init__(
        self, parts: Sequence[KvPart], block_sizes: Sequence[int], *, counts_dropped: bool
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._is_state = {group: part.is_state for part in parts for group in part.groups}
        self._keeps_states = any(self._is_state.values())
        self._counts_dropped = counts_dropped
        self._turns: dict[str, Hashable] = {}
        """The turn in which each session was last admitted."""
        self._known: dict[str, int] = {}
        """The tokens that each session had when its last step was planned."""

    def planned(self, request: EngineRequest | None) -> None:
        """Note that a step of a request is planned."""
        if request is not None and request.request_id in self._turns:
            self._known[request.request_id] = request.num_tokens

    def doubtful(
        self, request: EngineRequest | None, blocks: Sequence[Sequence[int]], computed: int
    ) -> Sequence[int] | None:
        """Return the blocks of a session's new turn that may have KV of dropped tokens.

        `blocks` are those of each KV group, `computed` the tokens whose KV they are said to have.
        None: no such doubt, for other models, new requests, and those computed from the start.
        """
        watched = self._keeps_states or self._counts_dropped
        if not watched or request is None or not request.resumable:
            return None
        before = self._turns.get(request.request_id, NO_TURN)
        self._turns[request.request_id] = request.turn
        if before in {NO_TURN, request.turn} or not computed:
            return None
        first = computed
        if self._counts_dropped:
            first = min(computed, self._known.get(request.request_id, 0))
        if first == computed and not self._keeps_states:
            return None
        return [
            block
            for group, ids in enumerate(blocks)
            for block in ids[max(0, first - self._is_state[group]) // self._block_sizes[group] :]
            if block != NULL_BLOCK
        ]

    def finished(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._turns.pop(request_id, None)
        self._known.pop(request_id, None)
