# SPDX-License-Identifier: Apache-2.0
"""A tiny inference server: what vLLM does with prompts, KVHaven and the router, without a model.

Run as a program, with its port and the service's socket. A prompt is a name. Its chunks, and the
tokens of its answer, follow from it. A step computes some chunks or one token of each request, in
the engine's thread, which verifies every byte that it loads: `WRONG` is then the token.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from kvhaven.client.scheduler import LeasedChunks, Outcome
from kvhaven.types import ChunkKey
from tests.crash.engine import Rank, Scheduler, WrongBytesError, prompt

CHUNKS = 12
_CHUNKS_A_STEP = 3
_STEP_S = 0.004
_ids = itertools.count(1)


def tokens(name: str, count: int) -> list[str]:
    """Return the right answer to a prompt."""
    return [hashlib.sha256(f"{name} {at}".encode()).hexdigest()[:8] for at in range(count)]


class Request:
    """A request in the engine's thread; `say` passes a token on, and None at the end."""

    def __init__(self, body: Any, say: Callable[[str | None], object]) -> None:
        self.id = f"request-{next(_ids)}"
        self.keys: Sequence[ChunkKey] = prompt(body["prompt"], CHUNKS)
        self.to = (body.get("kv_transfer_params") or {}).get("kvhaven.to", "")
        self.left = tokens(body["prompt"], body["max_tokens"])
        self.say = say
        self.aborted = False
        self.lease_id: int | None = None
        self.computed = -1
        """Chunks that are there; -1 while a lookup is pending."""


class TinyEngine:
    """The thread that steps over all requests."""

    def __init__(self, service: str) -> None:
        self.requests: list[Request] = []
        self._new: list[Request] = []
        self._rank = Rank(service).start()
        self._scheduler = Scheduler(service, lookup_s=0.5, promote_s=2.0).start()
        self._saves = itertools.count(1)
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, request: Request) -> None:
        self._new.append(request)

    def _run(self) -> None:
        while True:
            time.sleep(_STEP_S)
            while self._new:
                self._begin(self._new.pop(0))
            for request in tuple(self.requests):
                self._step(request)
            self._rank.client.keep_arenas(self._scheduler.client.services_in_use)

    def _begin(self, request: Request) -> None:
        client = self._scheduler.client
        if request.to:
            client.offer_chain(request.id, request.to, request.keys)
        request.lease_id = client.ask(request.keys)
        if request.lease_id is None:
            request.computed = 0
        self.requests.append(request)

    def _step(self, request: Request) -> None:
        if request.aborted or not request.left:
            self._end(request)
        elif request.computed < 0:
            self._look_up(request)
        elif request.computed < CHUNKS:
            at = request.computed
            parent = request.keys[at - 1] if at else None
            part = request.keys[at : at + _CHUNKS_A_STEP]
            self._rank.save(part, parent, wait_s=0.1, save=next(self._saves))
            request.computed += len(part)
        else:
            request.say(request.left.pop(0))

    def _look_up(self, request: Request) -> None:
        client, lease_id = self._scheduler.client, request.lease_id
        assert lease_id is not None
        answer = client.look_up(lease_id)
        if answer is Outcome.PENDING:
            return
        request.computed, request.lease_id = 0, None
        if isinstance(answer, LeasedChunks):
            client.dispatched(lease_id)
            try:
                request.computed = self._rank.load(answer, request.keys)
            except WrongBytesError:
                request.left = ["WRONG"]

    def _end(self, request: Request) -> None:
        client = self._scheduler.client
        if request.lease_id is not None:
            client.release([request.lease_id])
        if request.to:
            client.end_chain(request.id)
        self.requests.remove(request)
        request.say(None)


class Server:
    """Its HTTP side."""

    def __init__(self, engine: TinyEngine) -> None:
        self._engine = engine

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        said: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def say(token: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the program ends
                loop.call_soon_threadsafe(said.put_nowait, token)

        request = Request(body, say)
        self._engine.add(request)
        try:
            if body.get("stream"):
                return await self._stream(http, said)
            words = []
            while (token := await said.get()) is not None:
                words.append(token)
            params = {"do_remote_prefill": True, "kvhaven.id": request.id}
            return web.json_response(
                {
                    "choices": [{"text": " ".join(words)}],
                    "usage": {"prompt_tokens": 1000},
                    "kv_transfer_params": params,
                }
            )
        finally:
            request.aborted = True

    async def _stream(
        self, http: web.Request, said: "asyncio.Queue[str | None]"
    ) -> web.StreamResponse:
        first = await said.get()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        token = first
        while token is not None:
            await answer.write(f"data: {token}\n\n".encode())
            token = await said.get()
        await answer.write(b"data: [DONE]\n\n")
        return answer


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int)
    options.add_argument("--service")
    given = options.parse_args()
    server = Server(TinyEngine(given.service))
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_post("/v1/completions", server.complete)
    web.run_app(app, host="127.0.0.1", port=given.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
