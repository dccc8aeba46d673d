# SPDX-License-Identifier: Apache-2.0
"""For tests of the router: scripted OpenAI servers in the place of vLLM, and a real router."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvhaven.router.app import MOST_BODY, Router
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import HealthPolicy, parse_node

QUICK = HealthPolicy(interval_s=0.05, timeout_s=0.5, failures=2, pause_s=0.05)


@dataclass
class Seen:
    """A request that a server got."""

    path: str
    headers: dict[str, str]
    body: Any
    raw: bytes


@dataclass
class FakeVllm:
    """A server that records its requests and answers as it is told; it stands for vLLM.

    It answers `tokens` words, as a stream if asked to, or `answer`. `status`, `silent` and `drops`
    say how it fails, and `breaks_after` after how many events it breaks off.
    """

    name: str
    tokens: int = 3
    status: int = 200
    healthy: bool = True
    silent: bool = False
    drops: bool = False
    answer: bytes = b""
    breaks_after: int | None = None
    hangs_after: int | None = None
    may_break: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Seen] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    checks: int = 0
    holds_s: float = 0.0
    """How long a check holds the event loop, which is also the router's."""
    url: str = ""

    def bodies(self) -> list[Any]:
        """Return the bodies of all requests."""
        return [one.body for one in self.seen]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        if request.path == "/health":
            self.checks += 1
            time.sleep(self.holds_s)  # noqa: ASYNC251
            if self.silent:
                await asyncio.sleep(3600)
            return web.Response(status=200 if self.healthy else 503)
        self.running += 1
        try:
            return await self._handle(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body: Any = await request.json() if raw else {}
        self.seen.append(
            Seen(
                request.path,
                {name.lower(): value for name, value in request.headers.items()},
                body,
                raw,
            )
        )
        if self.silent:
            await asyncio.sleep(3600)
        if self.drops and request.transport is not None:
            request.transport.close()
        if self.status != 200:
            error = {"error": {"message": f"{self.name} says {self.status}"}}
            return web.json_response(error, status=self.status)
        if self.answer:
            return web.Response(body=self.answer, content_type="application/json")
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.name}]})
        params = body.get("kv_transfer_params") or {}
        handover = None
        if params.get("do_remote_decode"):
            handover = {"do_remote_prefill": True, "from": self.name, "remote_host": None}
        if body.get("stream"):
            return await self._stream(request)
        words = " ".join(f"{self.name}{n}" for n in range(self.tokens))
        prompt = len(raw) // 4
        return web.json_response(
            {
                "choices": [{"text": words, "message": {"role": "assistant", "content": words}}],
                "usage": {"prompt_tokens": prompt},
                "kv_transfer_params": handover,
            }
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(self.tokens):
            if number == self.breaks_after:
                await self.may_break.wait()
                assert request.transport is not None
                request.transport.close()
                return answer
            if number == self.hangs_after:
                await asyncio.sleep(3600)
            event = f'data: {{"choices": [{{"text": "{self.name}{number}"}}]}}\n\n'
            await answer.write(event.encode())
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer


@contextlib.asynccontextmanager
async def serving(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """Serve an application on loopback; yield its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    try:
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake(name: str, **how: Any) -> AsyncIterator[FakeVllm]:
    """Serve a scripted server."""
    server = FakeVllm(name, **how)
    app = web.Application(client_max_size=MOST_BODY)
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with serving(app) as url:
        server.url = url
        yield server


@dataclass
class Running:
    """A running router, and a client of it."""

    url: str
    chooser: Chooser
    client: aiohttp.ClientSession

    async def ask(self, body: Any, path: str = "/v1/completions", **more: Any) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        async with self.client.post(self.url + path, json=body, **more) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        async with self.client.get(self.url + path) as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def routing(
    prefill: Sequence[FakeVllm],
    decode: Sequence[FakeVllm],
    *,
    least_tokens: int = 0,
    health: HealthPolicy = QUICK,
    prefill_s: float = 60.0,
) -> AsyncIterator[Running]:
    """Serve a router in front of scripted servers."""
    chooser = Chooser(
        [parse_node(one.url, "--prefill") for one in prefill],
        [parse_node(f"{one.url}={one.name}.example:7420", "--decode") for one in decode],
        least_tokens,
    )
    app = Router(chooser, health, prefill_s).app()
    async with serving(app) as url, aiohttp.ClientSession() as client:
        yield Running(url, chooser, client)


async def until(what: Any, seconds: float = 120.0) -> None:
    """Wait until `what()` is true."""
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110 - the tests look at objects that signal nothing
            await asyncio.sleep(0.005)
