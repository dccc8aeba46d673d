# SPDX-License-Identifier: Apache-2.0
"""HTTP server that tokenizes texts, as the server of an engine does, and may hang."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from aiohttp import web


class Tokenizer:
    """Server in a thread: known texts have the `tokens` given, others one for each byte."""

    def __init__(self, tokens: Mapping[str, Sequence[int]] | None = None) -> None:
        self.tokens = dict(tokens or {})
        self.texts: list[str] = []
        """Texts that it was asked about."""
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def hang(self) -> None:
        """Answer no text until `go_on`."""
        self._loop.call_soon_threadsafe(self._answers.clear)

    def go_on(self) -> None:
        """Answer all texts."""
        self._loop.call_soon_threadsafe(self._answers.set)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._answers = asyncio.Event()
        self._answers.set()
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._ready.set()
            await self._stop.wait()
        finally:
            self._answers.set()
            await runner.cleanup()

    async def _tokenize(self, request: web.Request) -> web.Response:
        text: str = (await request.json())["prompt"]
        self.texts.append(text)
        await self._answers.wait()
        tokens = self.tokens.get(text) or list(text.encode())
        return web.json_response({"tokens": list(tokens), "count": len(tokens)})
