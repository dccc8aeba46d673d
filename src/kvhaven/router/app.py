# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the router: two legs for each prompt, fallbacks, health, metrics."""

import asyncio
import functools
import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
    web,
)
from multidict import CIMultiDict
from yarl import URL

from kvhaven.descriptors import is_shortage
from kvhaven.http_server import Guard
from kvhaven.router.body import TWO_STEP, RequestBody
from kvhaven.router.choice import Chooser, Plan
from kvhaven.router.metrics import Metrics
from kvhaven.router.nodes import DEFAULT_HEALTH, HealthPolicy, Node, Prefilling

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

MOST_BODY: Final = 256 << 20
"""Longest body of a request in bytes; images come as text."""
_HOP_BY_HOP: Final = (
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "expect"),
)
"""Headers that concern one connection only (RFC 9110, 7.6.1), and those that aiohttp sets."""
_BODY_S: Final = 300.0
"""Longest time for the body of a request."""
_LARGE: Final = 1 << 20
_NOTHING: Final[Mapping[str, str]] = {}
_OK: Final = 200
_MOST_PREFILLS: Final = 2
"""Prefill nodes that are asked for one prompt."""
_LATE: Final = 1.5
"""A check that took so many times its limit was one whose answer this router may not have read."""
_FAILURES: Final = (ClientError, OSError, UnicodeError)
"""Errors of connections; the last one is of a name that no host can have."""
_FAILED: Final = 500
"""Status from which an answer is the node's failure, not the client's."""


class NodeFailedError(Exception):
    """A node did not answer: it refused, broke off, went down, or was too late."""


class Router:
    """Router of OpenAI-compatible requests to prefill and decode nodes. It keeps no KV.

    A prompt goes to a prefill node first, for one token, and then to the decode node, which reads
    the KV meanwhile (`kvhaven.to`). If the prefill fails or takes longer than `prefill_s`, another
    prefill node is asked once, then the decode node computes the prompt itself. If a decode node
    fails before its first byte, another is asked. A client that goes away ends its requests. The
    `guard` of the server's connections is told of requests.
    """

    def __init__(
        self,
        chooser: Chooser,
        health: HealthPolicy = DEFAULT_HEALTH,
        prefill_s: float = 120.0,
        guard: Guard | None = None,
    ) -> None:
        self._chooser = chooser
        self._health = health
        self._prefill_s = prefill_s
        self._guard = Guard() if guard is None else guard
        self._metrics = Metrics()
        self._answers: dict[Node, set[ClientResponse]] = {}
        self._session: ClientSession

    def app(self) -> web.Application:
        """Return the application; it connects to nodes while it runs."""
        app = web.Application(client_max_size=MOST_BODY, middlewares=[self._guarded])
        app.router.add_get("/health", self._on_health)
        app.router.add_get("/metrics", self._on_metrics)
        for path in TWO_STEP:
            app.router.add_post(path, self._on_prompt)
        app.router.add_route("*", "/{path:.*}", self._on_other)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        connector = TCPConnector(limit=0, keepalive_timeout=2)
        no_limit = ClientTimeout(total=None, sock_connect=5)
        async with ClientSession(
            connector=connector,
            timeout=no_limit,
            auto_decompress=False,
            cookie_jar=DummyCookieJar(),  # cookies are the clients' own
        ) as session:
            self._session = session
            checks = [asyncio.create_task(self._look_after(node)) for node in self._chooser.nodes]
            yield
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._guard.began(transport)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self._metrics.count("requests", "left")  # the client went away
            raise
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            raise
        finally:
            self._guard.ended(transport)

    # --- health -----------------------------------------------------------------------------

    async def _look_after(self, node: Node) -> None:
        """Check a node forever."""
        policy, loop = self._health, asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                async with asyncio.timeout(policy.timeout_s):
                    async with self._session.get(f"{node.url}/health") as answer:
                        error = "" if answer.status < _FAILED else f"health {answer.status}"
                refused = False
            except Exception as problem:  # noqa: BLE001  checks must go on
                error = str(problem) or "no answer to a health check in time"
                refused = _is_refusal(problem)
                took_s = loop.time() - began_s
                late = isinstance(problem, TimeoutError) and took_s > _LATE * policy.timeout_s
                if late or not _is_of_node(problem):  # its answers may be under way all the same
                    if error != node.error:
                        logger.warning("node %s: could not be checked: %r", node.url, problem)
                    node.error = error
                    await asyncio.sleep(policy.pause_s)
                    continue
            if error:
                self._note_failure(node, error, refused=refused)
            else:
                if not node.up:
                    logger.info("node %s: up again", node.url)
                node.alive()
            await asyncio.sleep(policy.interval_s if node.up else policy.pause_s)

    def _note_failure(self, node: Node, error: str, *, refused: bool = False) -> None:
        if node.failed(error, self._health, refused=refused):
            logger.warning("node %s: out of use: %s", node.url, error)
            for answer in tuple(self._answers.get(node, ())):
                answer.close()  # ends the wait for its next byte

    async def _on_health(self, _: web.Request) -> web.Response:
        usable = any(node.up for node in self._chooser.decode)
        nodes = {
            role: [_described(node) for node in members]
            for role, members in self._chooser.roles.items()
        }
        body = {"status": "ok" if usable else "no decode node is up", **nodes}
        return web.json_response(body, status=200 if usable else 503)

    async def _on_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._metrics.text(self._chooser.roles))

    # --- requests ---------------------------------------------------------------------------

    async def _on_other(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on to a decode node."""
        raw = await _read(request)
        failed: list[Node] = []
        while True:
            plan = self._chooser.plan((), 0, without=failed)
            if plan is None:
                return _problem(503, "no decode node is up")
            try:
                async with self._answer(plan.decode, request, raw) as answer:
                    return await self._pass_on(plan.decode, answer, request)
            except NodeFailedError as error:
                failed.append(plan.decode)
                if request.method not in {"GET", "HEAD"}:  # others may have had an effect
                    return _problem(502, str(error))

    async def _on_prompt(self, request: web.Request) -> web.StreamResponse:
        raw = await _read(request)
        try:
            body = RequestBody(request.path, raw)
        except ValueError as error:
            return _problem(400, str(error))
        digests, text_bytes = body.digests(), body.text_bytes
        choose = functools.partial(
            self._chooser.plan, digests, text_bytes, divisible=body.divisible
        )
        plan = choose()
        if plan is None:
            self._metrics.count("requests", "refused")
            return _problem(503, "no decode node is up")
        params: dict[str, Any] = {}
        if plan.prefill is not None:
            params = await self._prefill(plan, body, digests, request)
        decoded = body.for_decode(params)
        failed: list[Node] = []
        while True:
            try:
                tokens = 0.0 if params else plan.decode_tokens
                with plan.decode.prefilling(tokens) as waiting:
                    last = choose(without=(*failed, plan.decode)) is None
                    passed = await self._decode(plan.decode, request, decoded, waiting, last=last)
            except NodeFailedError as error:
                logger.warning("decode: %s", error)
                self._metrics.count("decode", "failed")
                failed.append(plan.decode)
                again = choose(without=failed)
                if again is None:
                    self._metrics.count("requests", "failed")
                    return _problem(502, str(error))
                plan = again
            else:
                if passed.status == _OK:
                    plan.decode.served(digests)
                    self._metrics.waited(waiting.seconds)
                return passed

    async def _decode(
        self, node: Node, request: web.Request, raw: bytes, waiting: Prefilling, *, last: bool
    ) -> web.StreamResponse:
        """Pass a decode node's answer on; a failure's only from the `last` node.

        Raises `NodeFailedError`.
        """
        async with self._answer(node, request, raw) as answer:
            if answer.status >= _FAILED and not last:
                raise NodeFailedError(f"{node.url}: status {answer.status}")
            return await self._pass_on(node, answer, request, waiting)

    async def _prefill(
        self, plan: Plan, body: RequestBody, digests: Sequence[bytes], request: web.Request
    ) -> dict[str, Any]:
        """Have a prefill node compute the prompt; return its parameters, or none if it fails."""
        node: Node | None = plan.prefill
        failed: list[Node] = []
        while node is not None and len(failed) < _MOST_PREFILLS:
            try:
                with node.prefilling(plan.prefill_tokens) as waiting:
                    async with asyncio.timeout(self._prefill_s):
                        params = await self._leg_one(node, plan.decode, body, request)
                    waiting.answered()
            except (NodeFailedError, TimeoutError) as error:
                reason = str(error) or f"no answer within {self._prefill_s:g} s"
                logger.warning("prefill: %s: %s", node.url, reason)
                self._metrics.count("prefill", "failed")
                failed.append(node)
                again = self._chooser.plan(digests, body.text_bytes, without=failed)
                node = again.prefill if again is not None else None
                continue
            node.served(digests)
            self._metrics.count("prefill", "done")
            return params
        return {}

    async def _leg_one(
        self, node: Node, decode: Node, body: RequestBody, request: web.Request
    ) -> dict[str, Any]:
        """Return the parameters that a prefill answers. Raises `NodeFailedError`."""
        raw = body.for_prefill(decode.peer)
        async with self._answer(node, request, raw, {"Accept-Encoding": "identity"}) as answer:
            whole = await answer.read()
        if answer.status >= _FAILED:
            raise NodeFailedError(f"status {answer.status}")
        if answer.status != _OK:
            return {}  # the decode node says what is wrong with the request
        try:
            answered = msgspec.json.decode(whole, type=_PrefillAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NodeFailedError(f"malformed answer: {error}") from error
        usage = answered.usage or _Usage()
        self._chooser.learn_length(body.text_bytes, usage.prompt_tokens or usage.input_tokens)
        return answered.kv_transfer_params or {}

    @asynccontextmanager
    async def _answer(
        self, node: Node, request: web.Request, raw: bytes, more: Mapping[str, str] = _NOTHING
    ) -> AsyncIterator[ClientResponse]:
        """Send a request to a node, with `more` headers, and yield its answer.

        Raises `NodeFailedError` if the node fails, also while its answer is read.
        """
        headers = _to_pass(request.headers)
        headers.popall("Content-Encoding", None)  # aiohttp has decompressed the body
        before = headers.get("X-Forwarded-For")
        headers["X-Forwarded-For"] = ", ".join(filter(None, (before, request.remote)))
        headers.update(more)
        url = URL(node.url + request.rel_url.raw_path_qs, encoded=True)
        node.running += 1
        answers = self._answers.setdefault(node, set())
        try:
            again = request.method in {"GET", "HEAD"} or request.path in TWO_STEP
            sending = self._send(request.method, url, raw, headers, again=again)
            answer = await _unless_down(node, sending)
            answers.add(answer)
            try:
                yield answer
            finally:
                answers.discard(answer)
                answer.close()
        except _FAILURES as error:
            if _is_refusal(error):  # else health checks decide: this request may be the cause
                self._note_failure(node, str(error), refused=True)
            raise NodeFailedError(f"{node.url}: {str(error) or type(error).__name__}") from error
        finally:
            node.running -= 1

    async def _send(
        self, method: str, url: URL, raw: bytes, headers: Mapping[str, str], *, again: bool
    ) -> ClientResponse:
        """Send a request; `again`: once more if the node closed the connection without an answer.

        A node closes idle connections at any time, also when a request is on its way.
        """

        async def send() -> ClientResponse:
            data = raw if len(raw) < _LARGE else io.BytesIO(raw)  # sent piece by piece
            return await self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            )

        try:
            return await send()
        except (ServerDisconnectedError, ConnectionResetError):
            if not again:
                raise
            return await send()

    async def _pass_on(
        self,
        node: Node,
        answer: ClientResponse,
        request: web.Request,
        waiting: Prefilling | None = None,
    ) -> web.StreamResponse:
        """Pass an answer on, byte for byte.

        Raises an error of the node before its first byte only.
        """
        piece = await answer.content.readany()
        if waiting is not None:
            # Without a stream, the first byte comes with the last token.
            streams = answer.content_type == "text/event-stream"
            waiting.answered(learn=answer.status == _OK and streams)
        passed = web.StreamResponse(status=answer.status, headers=_to_pass(answer.headers))
        passed.content_length = answer.content_length
        try:
            await passed.prepare(request)
            while piece:
                await passed.write(piece)
                try:
                    piece = await answer.content.readany()
                except (ClientError, OSError) as error:
                    await self._break_off(passed, answer, request, f"{node.url} broke off: {error}")
                    return passed
            await passed.write_eof()
        except ConnectionError:
            self._metrics.count("requests", "left")  # the client went away
        else:
            self._metrics.count("requests", "answered")
        return passed

    async def _break_off(
        self, passed: web.StreamResponse, answer: ClientResponse, request: web.Request, why: str
    ) -> None:
        """End an answer whose node failed after the first byte, so that the client notices."""
        logger.warning("decode: %s", why)
        if answer.content_type == "text/event-stream":
            error = {"error": {"message": why, "type": "upstream_error", "code": 502}}
            await passed.write(b"\n\ndata: " + msgspec.json.encode(error) + b"\n\n")
            await passed.write_eof()
        elif request.transport is not None:
            request.transport.abort()
        self._metrics.count("requests", "broken")


class _Usage(msgspec.Struct):
    """Length of a prompt: `input_tokens` in the answers of two of the paths."""

    prompt_tokens: int = 0
    input_tokens: int = 0


class _PrefillAnswer(msgspec.Struct):
    """The part of a prefill's answer that the router reads."""

    kv_transfer_params: dict[str, Any] | None = None
    usage: _Usage | None = None


async def _unless_down(node: Node, awaited: Awaitable[T]) -> T:
    """Wait for a node's answer, but not after it went down. Raises `NodeFailedError` then."""
    task = asyncio.ensure_future(awaited)
    down = asyncio.ensure_future(node.went_down.wait())
    try:
        await asyncio.wait([task, down], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise NodeFailedError(f"{node.url}: out of use: {node.error}")
    finally:
        down.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # is of no interest any more


async def _read(request: web.Request) -> bytes:
    """Return the body of a request. Raises `HTTPRequestTimeout` if it does not come."""
    try:
        async with asyncio.timeout(_BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _is_of_node(error: Exception) -> bool:
    """Return whether an error is the node's, or its name's, and not this machine's or a bug."""
    cause = getattr(error, "os_error", error)
    return isinstance(error, _FAILURES) and not (isinstance(cause, OSError) and is_shortage(cause))


def _is_refusal(error: BaseException) -> bool:
    """Return whether a node refused a connection: no process listens there."""
    return isinstance(getattr(error, "os_error", error), ConnectionRefusedError)


def _to_pass(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that concern the other side as well."""
    passed: CIMultiDict[str] = CIMultiDict(headers.items())
    named = passed.get("Connection", "").lower()
    for name in {*_HOP_BY_HOP, *(one.strip() for one in named.split(",") if one.strip())}:
        passed.popall(name, None)
    return passed


def _described(node: Node) -> dict[str, Any]:
    """Return a node's state, for people."""
    return {
        "url": node.url,
        "up": node.up,
        "error": node.error,
        "running": node.running,
        "tokens_per_s": node.tokens_per_s,
    }


def _problem(status: int, message: str) -> web.Response:
    """Return an error in OpenAI's form."""
    error = {"message": message, "type": "router_error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
