# SPDX-License-Identifier: Apache-2.0
"""Metrics of the router, in Prometheus's text format."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvhaven.router.nodes import Node

_BOUNDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of times to the first byte, in seconds."""
_WAIT: Final = "kvhaven_route_first_byte_seconds"


class Metrics:
    """Counters by outcome, and times to the first byte."""

    def __init__(self) -> None:
        self._outcomes = Counter[tuple[str, str]]()
        self._waits = [0] * (len(_BOUNDS) + 1)
        self._waited_s = 0.0

    def count(self, what: str, outcome: str) -> None:
        """Count the outcome of a request, or of one of its legs."""
        self._outcomes[what, outcome] += 1

    def waited(self, seconds: float) -> None:
        """Count an answer whose first byte came after this time."""
        at = next((at for at, bound in enumerate(_BOUNDS) if seconds <= bound), len(_BOUNDS))
        self._waits[at] += 1
        self._waited_s += seconds

    def text(self, nodes: Mapping[str, Sequence[Node]]) -> str:
        """Return all metrics; `nodes` are the nodes by role."""
        return "\n".join(self._lines(nodes)) + "\n"

    def _lines(self, nodes: Mapping[str, Sequence[Node]]) -> Iterator[str]:
        yield "# HELP kvhaven_route_total Requests, and their legs, by outcome."
        yield "# TYPE kvhaven_route_total counter"
        for (what, outcome), count in sorted(self._outcomes.items()):
            yield f'kvhaven_route_total{{what="{what}",outcome="{outcome}"}} {count}'
        yield from _gauge(nodes, "up", "Whether the node is in use.")
        yield from _gauge(nodes, "running", "Requests that are being answered.")
        yield from _gauge(nodes, "queued_tokens", "Estimated tokens of prompts that wait.")
        yield f"# HELP {_WAIT} Time to the first byte of the answer of a decode node."
        yield f"# TYPE {_WAIT} histogram"
        total = 0
        for bound, count in zip((*_BOUNDS, math.inf), self._waits, strict=True):
            total += count
            shown = "+Inf" if bound == math.inf else f"{bound:g}"
            yield f'{_WAIT}_bucket{{le="{shown}"}} {total}'
        yield f"{_WAIT}_sum {self._waited_s:g}"
        yield f"{_WAIT}_count {total}"


def _gauge(nodes: Mapping[str, Sequence[Node]], name: str, text: str) -> Iterator[str]:
    yield f"# HELP kvhaven_route_node_{name} {text}"
    yield f"# TYPE kvhaven_route_node_{name} gauge"
    for role, members in nodes.items():
        for node in members:
            labels = f'role="{role}",node="{node.url}"'
            yield f"kvhaven_route_node_{name}{{{labels}}} {float(getattr(node, name)):g}"
