# SPDX-License-Identifier: Apache-2.0
"""Life cycle of the router's process, and the limits of its clients' connections."""

import asyncio
import logging
import signal
from typing import Final

import uvloop
from aiohttp import web

from kvhaven.descriptors import allow_descriptors
from kvhaven.errors import ConfigError
from kvhaven.gateway.guard import Guard
from kvhaven.peers.addresses import Address
from kvhaven.router.app import Router
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import HealthPolicy

_IDLE_S: Final = 75.0
"""Longest pause between two requests of a client, longer than that of common load balancers."""
_BACKLOG: Final = 1024
_RESERVED: Final = 64
"""Descriptors for everything but clients, each of which needs two: its own, and one to a node."""
_SHUTDOWN_S: Final = 30.0

logger = logging.getLogger(__name__)

_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # aiohttp would log a traceback for each malformed request


def serve(address: Address, chooser: Chooser, health: HealthPolicy, prefill_s: float) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the address cannot be used."""
    most = max(1, (allow_descriptors() - _RESERVED) // 2)
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
    runner = web.AppRunner(
        Router(chooser, health, prefill_s, guard).app(),
        access_log=None,
        logger=_malformed,
        handler_cancellation=True,  # a client that goes away ends its requests
        keepalive_timeout=_IDLE_S,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        server = await _listen(runner, guard, address)
        try:
            await stop.wait()
        finally:
            server.close()
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, guard: Guard, address: Address) -> asyncio.Server:
    inner = runner.server
    assert inner is not None, "the runner was set up"

    def protocol() -> asyncio.Protocol:
        return guard.protocol(inner())

    try:
        return await asyncio.get_running_loop().create_server(
            protocol, address.host, address.port, backlog=_BACKLOG
        )
    except OSError as error:
        raise ConfigError(
            f"--listen: cannot listen at {address} ({error.strerror or error}); expected an "
            "address of this machine and a free port"
        ) from error
