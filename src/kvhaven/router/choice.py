# SPDX-License-Identifier: Apache-2.0
"""Choice of nodes: the least estimated time to the first token."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvhaven.router.nodes import Node

_RUNNING_S: Final = 0.002
"""Estimated delay by each request that a node is answering; it decides between equal nodes."""
_WEIGHT: Final = 0.05
_FIRST_GUESS: Final = 0.25
"""Tokens per byte of text before any answer told the number of its prompt's tokens."""


@dataclass(frozen=True)
class Plan:
    """Nodes for a request. Without `prefill`, the decode node computes the prompt itself.

    `prefill_tokens` and `decode_tokens` are the estimated uncached tokens at each.
    """

    decode: Node
    prefill: Node | None
    prefill_tokens: float
    decode_tokens: float


class Chooser:
    """Chooser of nodes by load, learned speed, and the prefixes that each node has served.

    Fewer than `least_tokens` uncached tokens are computed by the decode node itself.
    """

    def __init__(self, prefill: Sequence[Node], decode: Sequence[Node], least_tokens: int) -> None:
        self.prefill = tuple(prefill)
        self.decode = tuple(decode)
        self._least_tokens = least_tokens
        self._tokens_per_byte = _FIRST_GUESS

    @property
    def roles(self) -> Mapping[str, tuple[Node, ...]]:
        """All nodes by their role."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes."""
        return (*self.prefill, *self.decode)

    def learn_length(self, text_bytes: int, tokens: int) -> None:
        """Learn from an answer how many tokens a prompt's text has."""
        if text_bytes and tokens:
            self._tokens_per_byte += _WEIGHT * (tokens / text_bytes - self._tokens_per_byte)

    def plan(
        self,
        digests: Sequence[bytes],
        text_bytes: int,
        *,
        divisible: bool = True,
        without: Collection[Node] = (),
    ) -> Plan | None:
        """Return the nodes for a prompt; None if no decode node is left."""
        plans = [
            self._plan(node, digests, text_bytes, divisible=divisible, without=without)
            for node in self.decode
            if node.up and node not in without
        ]
        return min(plans, key=lambda timed: timed[0])[1] if plans else None

    def _plan(
        self,
        decode: Node,
        digests: Sequence[bytes],
        text_bytes: int,
        *,
        divisible: bool,
        without: Collection[Node],
    ) -> tuple[float, Plan]:
        """Return the estimated seconds of the best plan with a decode node, and that plan."""
        own = self._uncached(decode, digests, text_bytes)
        load = decode.running * _RUNNING_S
        alone = decode.seconds(own)
        plain = Plan(decode, None, 0.0, own)
        best = (load + (alone or 0.0), plain)
        if not divisible or own < self._least_tokens or own <= 0:
            return best
        candidates = []
        for node in self.prefill:
            if node.up and node not in without:
                tokens = self._uncached(node, digests, text_bytes)
                seconds = node.seconds(tokens) or 0.0
                order = (seconds + node.running * _RUNNING_S, tokens)
                candidates.append((order, Plan(decode, node, tokens, own)))
        if not candidates:
            return best
        (seconds, _), apart = min(candidates, key=lambda timed: timed[0])
        # Until the decode node's own speed is known, prompts go to the nodes that are for them.
        if alone is None or seconds < alone:
            return load + seconds, apart
        return best

    def _uncached(self, node: Node, digests: Sequence[bytes], text_bytes: int) -> float:
        missing = 1 - node.held(digests) / len(digests) if digests else 0.0
        return text_bytes * self._tokens_per_byte * missing
