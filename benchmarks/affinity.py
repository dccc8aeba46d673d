# SPDX-License-Identifier: Apache-2.0
"""`route.affinity`: cached tokens that the router's choices find, against perfect knowledge.

A simulation in virtual time. The router's own code reads the requests and chooses the nodes
(`RequestBody`, `Chooser`, `Node`). The engines are simulated: each computes one prompt after the
other at a fixed speed, and keeps the chunks of prompts and answers in a memory that evicts the
least recently used ones, of which the router hears nothing. Requests are turns of conversations
that begin with one of a few system prompts, and questions about documents; the same requests at the
same times for three policies:

- the router;
- the same choice with knowledge: it sees what is in each node's memory now;
- round robin.

The value is the part of all prompts' tokens that is cached at the chosen nodes. The limit is that
of the node with the most of them, at the same moment in the same fleet. `route.affinity` has four
nodes that do both; `route.affinity.apart` has three prefill nodes and two decode nodes, and counts
at the nodes that compute. `.informed` and `.round_robin` are the other policies in fleets of their
own, with the router's limit. An informed choice is no upper bound: it takes what is good for one
request, and may spread a chain over more nodes, which evict more.
"""

import contextlib
import heapq
import itertools
import json
import random
import statistics
import string
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from benchmarks.results import Result, at_least
from kvhaven.router.body import RequestBody
from kvhaven.router.choice import Chooser, Plan
from kvhaven.router.nodes import Node

_WANTED: Final = 0.9
_PATH: Final = "/v1/chat/completions"
_BYTES_A_TOKEN: Final = 4
_CHUNK: Final = 256
_SPEED: Final = 8000.0
"""Tokens that a node computes in a second."""
_DECODE_S: Final = 4.0
_CHUNKS: Final = 600
"""Chunks that a node's memory holds."""
_SECONDS: Final = 900.0
_CONVERSATIONS_PER_S: Final = 0.8
_QUESTIONS_PER_S: Final = 1.0
_SEEDS: Final = 3
_ROUTER: Final = "router"
_INFORMED: Final = "informed"
_ROUND_ROBIN: Final = "round robin"
_BEST: Final = "the node with the most cached tokens, at each moment of the router's fleet"

_Message = dict[str, str]


@dataclass(frozen=True)
class _Prompt:
    """A request: its time, its messages and the answer that it gets."""

    at: float
    messages: list[_Message]
    answer: str


@dataclass(eq=False)
class _Memory:
    """The chunks in a node's memory, least recently used first."""

    chunks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    evicted: int = 0
    free_at: float = 0.0
    """When the engine has computed all prompts that wait."""

    def cached(self, keys: Sequence[bytes]) -> int:
        """Return how many chunks of a chain are here, from its first."""
        return sum(1 for _ in itertools.takewhile(self.chunks.__contains__, keys))

    def keep(self, keys: Sequence[bytes]) -> None:
        """Store a chain, whose first chunk is evicted last."""
        for key in reversed(keys):
            self.chunks[key] = None
            self.chunks.move_to_end(key)
        while len(self.chunks) > _CHUNKS:
            self.chunks.popitem(last=False)
            self.evicted += 1


class _Seen(Node):
    """A node whose memory the router sees."""

    def __init__(self, url: str, memory: _Memory) -> None:
        super().__init__(url)
        self._memory = memory
        self.asked: Sequence[bytes] = ()
        """The chunks of the prompt that is being placed."""

    def held(self, digests: Sequence[bytes]) -> int:
        """Return the digests of the part that is cached."""
        if not self.asked:
            return 0
        return len(digests) * self._memory.cached(self.asked) // len(self.asked)


def measure(
    say: Callable[[str], None], seconds: float = _SECONDS, seeds: int = _SEEDS
) -> list[Result]:
    """Simulate both kinds of fleet for some seconds of requests, with several seeds."""
    results = []
    for name, prefill, decode in (("", 0, 4), (".apart", 3, 2)):
        found: dict[str, list[float]] = {}
        limits: list[float] = []
        for seed in range(seeds):
            prompts = _prompts(random.Random(seed), seconds)
            for policy in (_ROUTER, _INFORMED, _ROUND_ROBIN):
                fleet = _Fleet(prefill, decode, policy)
                fleet.run(prompts)
                part, best = fleet.hits / fleet.tokens, fleet.best / fleet.tokens
                found.setdefault(policy, []).append(part)
                if policy == _ROUTER:
                    limits.append(best)
                say(
                    f"{prefill} + {decode} nodes, {policy}: {part:.3f} of "
                    f"{fleet.tokens / 1e6:.1f} million tokens cached (best nodes: {best:.3f}), "
                    f"{fleet.evicted} chunks evicted, queued for "
                    f"{fleet.queued_s / len(prompts):.2f} s"
                )
        row, limit = f"route.affinity{name}", statistics.median(limits)
        results.append(at_least(row, found[_ROUTER], "of tokens", limits, _WANTED, _BEST))
        for suffix, policy in ((".informed", _INFORMED), (".round_robin", _ROUND_ROBIN)):
            value = statistics.median(found[policy])
            results.append(Result(row + suffix, value, "of tokens", limit, seeds, _BEST))
    return results


class _Fleet:
    """A fleet under one policy.

    `tokens` are those of all prompts, `hits` those that were cached at the nodes that computed, and
    `best` those at the nodes with the most of them.
    """

    def __init__(self, prefill: int, decode: int, policy: str) -> None:
        self._policy = policy
        self._memories: dict[Node, _Memory] = {}
        self._chooser = Chooser(
            [self._node(f"http://prefill-{number}") for number in range(prefill)],
            [self._node(f"http://decode-{number}") for number in range(decode)],
            0,
        )
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.tokens = self.hits = self.best = 0
        self.queued_s = 0.0

    @property
    def evicted(self) -> int:
        """Number of chunks that all nodes evicted."""
        return sum(memory.evicted for memory in self._memories.values())

    def run(self, prompts: Sequence[_Prompt]) -> None:
        """Serve all requests."""
        for prompt in prompts:
            while self._events and self._events[0][0] <= prompt.at:
                heapq.heappop(self._events)[2]()
            self._serve(prompt)

    def _node(self, url: str) -> Node:
        memory = _Memory()
        node = _Seen(url, memory) if self._policy == _INFORMED else Node(url)
        node.tokens_per_s = _SPEED
        self._memories[node] = memory
        return node

    def _serve(self, prompt: _Prompt) -> None:
        body = RequestBody(_PATH, json.dumps({"messages": prompt.messages}).encode())
        digests = body.digests()
        text = _text(prompt.messages)
        keys, tokens = _keys(text), len(text) // _BYTES_A_TOKEN
        plan = self._plan(keys, digests, body.text_bytes)
        node, expected = plan.decode, plan.decode_tokens
        if plan.prefill is not None:
            node, expected = plan.prefill, plan.prefill_tokens
        memory = self._memories[node]
        cached = memory.cached(keys) * _CHUNK
        self.tokens += tokens
        self.hits += cached
        alike = self._chooser.prefill if plan.prefill is not None else self._chooser.decode
        self.best += max(self._memories[each].cached(keys) for each in alike) * _CHUNK
        self.queued_s += max(0.0, memory.free_at - prompt.at)
        memory.free_at = max(memory.free_at, prompt.at) + (tokens - cached) / _SPEED
        waiting = contextlib.ExitStack()
        waiting.enter_context(node.prefilling(expected))
        node.running += 1

        def computed() -> None:
            waiting.close()
            node.running -= 1
            plan.decode.running += 1
            for each in {node, plan.decode}:
                self._memories[each].keep(keys)
            node.served(digests)

        def answered() -> None:
            plan.decode.running -= 1
            plan.decode.served(digests)
            answer = {"role": "assistant", "content": prompt.answer}
            self._memories[plan.decode].keep(_keys(_text([*prompt.messages, answer])))

        self._at(memory.free_at, computed)
        self._at(memory.free_at + _DECODE_S, answered)

    def _plan(self, keys: Sequence[bytes], digests: Sequence[bytes], text_bytes: int) -> Plan:
        if self._policy == _ROUND_ROBIN:
            turn = next(self._turns)
            of_role = [
                members[turn % len(members)] if members else None
                for members in self._chooser.roles.values()
            ]
            prefill, decode = of_role
            assert decode is not None
            return Plan(decode, prefill, 0.0, 0.0)
        for node in self._chooser.nodes:
            if isinstance(node, _Seen):
                node.asked = keys
        plan = self._chooser.plan(digests, text_bytes)
        assert plan is not None, "all nodes are up"
        return plan

    def _at(self, time: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))


def _prompts(chance: random.Random, seconds: float) -> list[_Prompt]:
    """Return the requests of conversations and about documents, by time."""
    systems = [_words(chance, chance.randint(2_000, 16_000)) for _ in range(12)]
    documents = [_words(chance, chance.randint(8_000, 60_000)) for _ in range(60)]
    prompts: list[_Prompt] = []
    for begin in _times(chance, _CONVERSATIONS_PER_S, seconds):
        at, messages = begin, [{"role": "system", "content": chance.choice(systems)}]
        for _ in range(chance.randint(1, 12)):
            question = _words(chance, chance.randint(100, 3_000))
            messages = [*messages, {"role": "user", "content": question}]
            answer = _words(chance, chance.randint(200, 3_000))
            prompts.append(_Prompt(at, messages, answer))
            messages = [*messages, {"role": "assistant", "content": answer}]
            at += _DECODE_S + chance.expovariate(1 / 20)
    for at in _times(chance, _QUESTIONS_PER_S, seconds):
        rank = min(int(chance.paretovariate(0.6)), len(documents))  # some are asked about often
        question = documents[rank - 1] + _words(chance, 200)
        prompts.append(_Prompt(at, [{"role": "user", "content": question}], _words(chance, 500)))
    return sorted(prompts, key=lambda prompt: prompt.at)


def _times(chance: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Yield the times of random events."""
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)


def _words(chance: random.Random, length: int) -> str:
    return "".join(chance.choices(string.ascii_lowercase + " ", k=length))


def _text(messages: Sequence[_Message]) -> bytes:
    """Return the text that a chat template would make."""
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages).encode()


def _keys(text: bytes) -> list[bytes]:
    """Return the chain of a text's full chunks."""
    keys, key, size = [], b"", _CHUNK * _BYTES_A_TOKEN
    for start in range(0, len(text) - size + 1, size):
        key = blake2b(key + text[start : start + size], digest_size=16).digest()
        keys.append(key)
    return keys
