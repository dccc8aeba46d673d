# SPDX-License-Identifier: Apache-2.0
"""Life cycle of the API's process."""

import asyncio
import functools
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kvhaven.client.unix import listens, prepare_directory
from kvhaven.errors import ConfigError
from kvhaven.gateway.access import Access
from kvhaven.gateway.observer import Observer
from kvhaven.gateway.plugins import PluginSettings
from kvhaven.gateway.server import Server
from kvhaven.http_server import HEADER_S, MOST_CONNECTIONS, Guard, ProtocolFactory
from kvhaven.http_server import serving as serving_app

HEARTBEAT_S: Final = 1.0
_SHUTDOWN_S: Final = 1.0
_NO_PLUGINS: Final = PluginSettings()

logger = logging.getLogger(__name__)


def serve(
    address: str, access: Access, plugins: PluginSettings = _NO_PLUGINS, *, child: bool = False
) -> None:
    """Serve the API of the service at `address` until SIGTERM or SIGINT.

    `child`: write a byte to standard output every second, and end when its reader, the service,
    is gone. Raises `KVHavenError` if the API cannot listen.
    """
    asyncio.run(_run(address, access, plugins, child=child))


async def _run(address: str, access: Access, plugins: PluginSettings, *, child: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(Observer(address, sample=True), access, plugins) as url:
        logger.info("api: listening at %s, service at %s", url, address)
        beating = loop.create_task(_beat(stop)) if child else None
        await stop.wait()
        if beating is not None:
            beating.cancel()


@asynccontextmanager
async def serving(
    observer: Observer, access: Access, plugins: PluginSettings = _NO_PLUGINS
) -> AsyncIterator[str]:
    """Serve the API within a context; yield its URL. Raises `KVHavenError` if it cannot listen."""
    guard = Guard(tls=access.tls())
    app = Server(observer, access, guard, plugins).app()
    listen = functools.partial(_listen, access)
    async with serving_app(app, guard, listen, idle_s=HEADER_S, shutdown_s=_SHUTDOWN_S) as server:
        try:
            yield _url(server, access)
        finally:
            if access.path:
                Path(access.path).unlink(missing_ok=True)  # noqa: ASYNC240  it is one system call


async def _listen(access: Access, protocol: ProtocolFactory) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    try:
        if access.address is None:
            prepare_directory(access.path)
            if listens(access.path):
                raise ConfigError(f"api_listen: another process listens at {access}")
            mask = os.umask(0o177)
            try:
                return await loop.create_unix_server(protocol, access.path)
            finally:
                os.umask(mask)
        return await loop.create_server(
            protocol,
            access.address.host,
            access.address.port,
            backlog=MOST_CONNECTIONS,
        )
    except OSError as error:
        raise ConfigError(
            f"api_listen: cannot listen at {access} ({error.strerror or error}); expected an "
            "address of this machine and a free port"
        ) from error


def _url(server: asyncio.Server, access: Access) -> str:
    if access.address is None:
        return str(access)
    host, port = server.sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if access.certificate else ''}://{shown}:{port}"


async def _beat(stop: asyncio.Event) -> None:
    """Write a byte every second, for the service; set `stop` when it is gone."""
    os.set_blocking(1, False)
    while True:
        try:
            os.write(1, b".")
        except BlockingIOError:
            pass  # the service is stopped
        except OSError:
            stop.set()
            return
        await asyncio.sleep(HEARTBEAT_S)
