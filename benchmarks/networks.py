# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a link of limited speed between them, for this process's threads."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from examples.fleet.namespaces import (
    Namespace,
    NoNetworkError,
    connect,
    new_namespace,
    require_root,
    run,
)

_BURST = "256kb"
"""Bytes that `tbf` sends without a pause: more than one packet as large as TCP makes them."""
_QUEUE = "4mb"

NoLinkError = NoNetworkError


@dataclass(frozen=True)
class Link:
    """A link between two namespaces."""

    near: Namespace
    far: Namespace

    def limit(self, rate: str) -> None:
        """Limit both directions to a rate, such as `200mbit`; empty: no limit."""
        kind = f"tbf rate {rate} burst {_BURST} limit {_QUEUE}" if rate else "noqueue"
        for end in (self.near, self.far):
            with end.inside():
                run(f"tc qdisc replace dev bench root {kind}")


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Make two namespaces and a link between them. Raises `NoLinkError`."""
    require_root("tc")
    with new_namespace("10.77.0.1") as near, new_namespace("10.77.0.2") as far:
        with near.inside():
            connect("bench", far, "bench")
        for end in (near, far):
            with end.inside():
                run(f"ip address add {end.address}/24 dev bench")
                run("ip link set bench up")
        yield Link(near, far)
