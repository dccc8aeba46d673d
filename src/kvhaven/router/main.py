# SPDX-License-Identifier: Apache-2.0
"""Life cycle of the router's process."""

import asyncio
import functools
import signal
from typing import Final

import uvloop

from kvhaven.descriptors import allow_descriptors
from kvhaven.errors import ConfigError
from kvhaven.http_server import Guard, ProtocolFactory, serving
from kvhaven.peers.addresses import Address
from kvhaven.router.app import Router
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import HealthPolicy

_IDLE_S: Final = 75.0
"""Longest pause between two requests of a client, longer than that of common load balancers."""
_BACKLOG: Final = 1024
_RESERVED: Final = 64
"""Descriptors for everything but clients."""
_EACH: Final = 3
"""Descriptors of a client: its own, one to a node, and one that is idle, to the node before."""
_SHUTDOWN_S: Final = 30.0


def serve(address: Address, chooser: Chooser, health: HealthPolicy, prefill_s: float) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the address cannot be used."""
    most = max(1, (allow_descriptors() - _RESERVED) // _EACH)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(address, chooser, health, prefill_s, most))


async def _run(
    address: Address, chooser: Chooser, health: HealthPolicy, prefill_s: float, most: int
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    guard = Guard(most, _IDLE_S)
    app = Router(chooser, health, prefill_s, guard).app()
    listen = functools.partial(_listen, address)
    async with serving(app, guard, listen, idle_s=_IDLE_S, shutdown_s=_SHUTDOWN_S):
        await stop.wait()


async def _listen(address: Address, protocol: ProtocolFactory) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(
            protocol, address.host, address.port, backlog=_BACKLOG
        )
    except OSError as error:
        raise ConfigError(
            f"--listen: cannot listen at {address} ({error.strerror or error}); expected an "
            "address of this machine and a free port"
        ) from error
