# SPDX-License-Identifier: Apache-2.0
"""Nodes behind the router: their health, their load, their speed, and the prefixes they hold."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from kvhaven.config.urls import split_url
from kvhaven.errors import ConfigError
from kvhaven.peers.addresses import PORT, parse_address

_MOST_PREFIXES: Final = 200_000
"""Digests of prefixes remembered per node: 100 MB of text."""
_WEIGHT: Final = 0.2
"""Weight of the newest measurement in a learned speed."""
_LEAST_MEASURED: Final = 512
"""Tokens of the shortest prefill whose speed is learned: below, other costs prevail."""


@dataclass(frozen=True)
class HealthPolicy:
    """When a node is out of use: after `failures` failed checks, or one refused connection.

    A check every `interval_s` seconds ends after `timeout_s`. A node that is out is checked again
    after `pause_s` seconds.
    """

    interval_s: float = 1.0
    timeout_s: float = 1.0
    failures: int = 3
    pause_s: float = 2.0


DEFAULT_HEALTH: Final = HealthPolicy()


class Node:
    """One vLLM server. `peer` is the address of its service's peer plane, for chains."""

    def __init__(self, url: str, peer: str = "") -> None:
        self.url = url.rstrip("/")
        self.peer = peer
        self.up = True
        self.error = ""
        self.went_down = asyncio.Event()
        """Set while the node is out of use, so that requests do not wait for its answer."""
        self.running = 0
        """Requests that are being answered."""
        self.queued_tokens = 0.0
        """Estimated tokens of prompts without a first byte."""
        self.tokens_per_s: float | None = None
        """Learned speed of prefills; None before the first."""
        self.failures = 0
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()

    def held(self, digests: Sequence[bytes]) -> int:
        """Return how many of a prompt's prefixes, shortest first, this node has served."""
        for at, digest in enumerate(digests):
            if digest not in self._prefixes:
                return at
        return len(digests)

    def served(self, digests: Sequence[bytes]) -> None:
        """Note that a prompt's KV is on this node now."""
        for digest in reversed(digests):  # the shortest is forgotten last
            self._prefixes[digest] = None
            self._prefixes.move_to_end(digest)
        while len(self._prefixes) > _MOST_PREFIXES:
            self._prefixes.popitem(last=False)

    def forget(self) -> None:
        """Forget all prefixes: the node's engine was restarted."""
        self._prefixes.clear()

    @contextmanager
    def prefilling(self, tokens: float) -> Iterator["Prefilling"]:
        """Count a prompt of `tokens` uncached tokens as queued until its first byte."""
        mine = Prefilling(self, tokens)
        try:
            yield mine
        finally:
            mine.ended()

    def seconds(self, tokens: float) -> float | None:
        """Return the estimated time until a prompt of uncached tokens is computed, if known."""
        if self.tokens_per_s is None:
            return None
        return (self.queued_tokens + tokens) / self.tokens_per_s

    def alive(self) -> None:
        """Note a successful check."""
        self.failures, self.error = 0, ""
        if not self.up:
            self.up = True
            self.went_down.clear()

    def failed(self, error: str, policy: HealthPolicy, *, refused: bool = False) -> bool:
        """Note a failed check, or a refused connection; return whether the node went down."""
        self.failures += 1
        self.error = error
        if self.up and (refused or self.failures >= policy.failures):
            self.up = False
            self.forget()
            self.went_down.set()
            return True
        return False


class Prefilling:
    """A prompt that waits for its first byte at a node."""

    def __init__(self, node: Node, tokens: float) -> None:
        self._node = node
        self._tokens = tokens
        self._ahead = node.queued_tokens
        self._begin = time.perf_counter()
        self._queued = True
        self.seconds = 0.0
        """Time to the first byte."""
        node.queued_tokens += tokens

    def answered(self, *, learn: bool = True) -> None:
        """Note the first byte, and learn the node's speed from it."""
        self.ended()
        node, seconds = self._node, time.perf_counter() - self._begin
        self.seconds = seconds
        if learn and self._tokens >= _LEAST_MEASURED and seconds > 0:
            speed = (self._ahead + self._tokens) / seconds
            known = node.tokens_per_s
            node.tokens_per_s = speed if known is None else known + _WEIGHT * (speed - known)

    def ended(self) -> None:
        """Count the prompt as queued no longer. A second call changes nothing."""
        if self._queued:
            self._queued = False
            self._node.queued_tokens = max(0.0, self._node.queued_tokens - self._tokens)


def parse_node(text: str, option: str) -> Node:
    """Return the node of `URL` or `URL=HOST:PORT`, the second being its peer plane.

    Without it, the URL's host and port 7420 are assumed. Raises `ConfigError`.
    """
    url, _, peer = text.partition("=")
    try:
        parts = split_url(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
        raise ConfigError(
            f"{option}: invalid URL (got {text!r}); expected http://host:port, or "
            "http://host:port=peerhost:7420 with the address of the node's peer_listen"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Node(url, str(parse_address(peer or f"{host}:{PORT}", option)))
