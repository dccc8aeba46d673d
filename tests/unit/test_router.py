# SPDX-License-Identifier: Apache-2.0
"""The router, over real sockets: two legs, choice, fallbacks, cancellation, streams."""

import asyncio
import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from tests.commands import kvhaven

pytest.importorskip("aiohttp", reason="kvhaven[router] is not installed")
pytest.importorskip("uvloop", reason="kvhaven[router] is not installed")

import aiohttp
from yarl import URL

from kvhaven import http_server
from kvhaven.errors import ConfigError
from kvhaven.peers.addresses import Address
from kvhaven.router import main, nodes
from kvhaven.router.body import RequestBody
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import HealthPolicy, parse_node
from tests.router_kit import QUICK, FakeVllm, Running, fake, routing, until

pytestmark = pytest.mark.asyncio

ASK = {"model": "m", "prompt": "word " * 400, "max_tokens": 7}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "word " * 400}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 9,
    "min_tokens": 5,
    "temperature": 1.0,
    "unknown": [1, 2.50, "\u00e9"],
}


@contextlib.asynccontextmanager
async def fleet(prefills: int = 1, decodes: int = 1, **options: Any) -> AsyncIterator[Any]:
    """Yield prefill servers, decode servers, and a router."""
    async with contextlib.AsyncExitStack() as stack:
        p = [await stack.enter_async_context(fake(f"p{n}")) for n in range(prefills)]
        d = [await stack.enter_async_context(fake(f"d{n}")) for n in range(decodes)]
        yield p, d, await stack.enter_async_context(routing(p, d, **options))


async def test_a_prompt_goes_to_prefill_for_one_token_and_then_to_decode() -> None:
    async with fleet() as ((p,), (d,), router):
        status, text = await router.ask(ASK)
        assert (status, "d00 d01 d02" in text) == (200, True)
        (first,), (second,) = p.bodies(), d.bodies()
        assert first["max_tokens"] == 1
        assert first["stream"] is False
        params = first["kv_transfer_params"]
        assert (params["do_remote_decode"], params["kvhaven.to"]) == (True, "d0.example:7420")
        assert second["kv_transfer_params"] == {"do_remote_prefill": True, "from": "p0"}
        del second["kv_transfer_params"]
        assert second == ASK


async def test_a_chat_is_streamed_and_its_other_fields_stay_as_they_were() -> None:
    async with fleet() as ((p,), (d,), router):
        status, text = await router.ask(CHAT, "/v1/chat/completions")
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("data: {") == 3
        (first,) = p.bodies()
        assert (first["max_tokens"], first["max_completion_tokens"]) == (1, 1)
        assert not first.keys() & {"stream_options", "min_tokens"}
        assert first["messages"] == CHAT["messages"]
        raw = d.seen[0].raw
        assert b"1.0" in raw  # as the client wrote it
        assert json.loads(raw)["unknown"] == CHAT["unknown"]
        assert json.loads(raw)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
async def test_every_path_limits_its_prefill_by_its_own_field(path: str, limit: str) -> None:
    body = RequestBody(path, json.dumps({"input": "x", "prompt": "x", "n": 3}).encode())
    prefill = json.loads(body.for_prefill("d:7420"))
    assert (prefill[limit], prefill["n"]) == (1, 1)
    assert prefill["kv_transfer_params"]["kvhaven.to"] == "d:7420"


async def test_a_clients_own_parameters_stay_but_cannot_name_a_node() -> None:
    own = {"kvhaven.skip_save": True, "kvhaven.to": "evil:1"}
    async with fleet() as ((p,), (d,), router):
        await router.ask(ASK | {"kv_transfer_params": own})
        params = p.bodies()[0]["kv_transfer_params"]
        assert params["kvhaven.skip_save"] is True
        assert params["kvhaven.to"] == "d0.example:7420"
        assert d.bodies()[0]["kv_transfer_params"]["kvhaven.skip_save"] is True


async def test_headers_go_through_and_those_of_the_connection_do_not() -> None:
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "7", "Connection": "X-Mine"}
    async with fleet() as ((p,), (d,), router):
        await router.ask(ASK, headers=headers | {"X-Mine": "1"})
        for server in (p, d):
            seen = server.seen[0].headers
            assert (seen["authorization"], seen["x-request-id"]) == ("Bearer secret", "7")
            assert "x-mine" not in seen


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_prefill_that_refuses_is_replaced_once_and_then_done_without(status: int) -> None:
    async with fleet(prefills=3) as (ps, (d,), router):
        for p in ps:
            p.status = status
        assert (await router.ask(ASK))[0] == 200
        assert sum(len(p.seen) for p in ps) == (1 if status < 500 else 2)
        assert "kv_transfer_params" not in d.bodies()[0]


@pytest.mark.parametrize(
    "answer",
    [b"nonsense", b'{"usage": 5}', b'{"x": "\xff"}', b'{"x": ' + 200_000 * b"["],
    ids=["nonsense", "usage", "encoding", "deep"],
)
async def test_a_malformed_answer_of_a_prefill_node_is_done_without(answer: bytes) -> None:
    async with fleet() as ((p,), _, router):
        p.answer = answer
        assert (await router.ask(ASK))[0] == 200


async def test_a_prefill_that_does_not_tell_its_usage_counts() -> None:
    async with fleet() as ((p,), (d,), router):
        p.answer = b'{"usage": null, "kv_transfer_params": {"do_remote_prefill": true}}'
        assert (await router.ask(ASK))[0] == 200
        assert d.bodies()[0]["kv_transfer_params"]["do_remote_prefill"]


async def test_a_clients_error_comes_from_the_decode_node() -> None:
    async with fleet(decodes=2) as ((p,), ds, router):
        for server in (p, *ds):
            server.status = 422
        status, text = await router.ask(ASK)
        assert status == 422
        assert "says 422" in text
        assert sum(len(d.seen) for d in ds) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_another_decode_node_takes_over_before_the_first_byte(streams: bool) -> None:
    async with fleet(prefills=0, decodes=2) as (_, (a, b), router):
        a.status = b.status = 500
        assert (await router.ask(ASK))[0] == 500  # the last one's own error
        a.status = 200
        for _ in range(4):
            status, text = await router.ask(ASK | {"stream": streams})
            assert (status, "d0" in text) == (200, True)


async def test_an_answer_that_breaks_off_ends_with_an_error_event() -> None:
    async with fleet(decodes=2) as (_, ds, router):
        for d in ds:
            d.breaks_after = 2
        body = ASK | {"stream": True}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            await answer.content.readany()
            for d in ds:
                d.may_break.set()
            text = await answer.text()
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        assert "error" in json.loads(events[-1].removeprefix("data: "))
        assert "[DONE]" not in text
        assert sum(len(d.seen) for d in ds) == 1


async def test_a_silent_prefill_node_goes_down_and_the_request_goes_on() -> None:
    async with fleet() as ((p,), (d,), router):
        p.silent = True
        status, _ = await router.ask(ASK)
        assert status == 200
        assert "kv_transfer_params" not in d.bodies()[0]
        health = json.loads((await router.get("/health"))[1])
        assert health["prefill"][0]["up"] is False
        p.silent = False
        await until(lambda: router.chooser.prefill[0].up)
        assert (await router.ask(ASK | {"prompt": "another " * 400}))[0] == 200
        assert "kv_transfer_params" in d.bodies()[1]


async def test_a_prefill_that_takes_too_long_is_given_up() -> None:
    never = HealthPolicy(interval_s=3600, timeout_s=3600)
    async with fleet(health=never, prefill_s=0.2) as ((p,), (d,), router):
        p.silent = True
        assert (await router.ask(ASK))[0] == 200
        await until(lambda: p.cancelled >= 1)
        assert len(d.seen) == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_a_decode_node_that_falls_silent_is_not_waited_for(after: int) -> None:
    async with fleet(prefills=0, decodes=2) as (_, (a, b), router):
        b.tokens = 4
        a.hangs_after, a.tokens = after, 4
        router.chooser.decode[1].running = 5  # so that the first is chosen
        asked = asyncio.create_task(router.ask(ASK | {"stream": True}))
        await until(lambda: a.seen)
        a.silent = True
        status, text = await asked
        assert status == 200
        assert ("error" in text) == (after > 0)
        assert ("[DONE]" in text) == (after == 0)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_goes_away_ends_its_requests(leg: str) -> None:
    never = HealthPolicy(interval_s=3600, timeout_s=3600)
    async with fleet(health=never) as ((p,), (d,), router):
        hung = p if leg == "prefill" else d
        hung.silent = True
        asked = asyncio.create_task(router.ask(ASK))
        await until(lambda: hung.running)
        asked.cancel()
        await until(lambda: hung.cancelled and not hung.running)
        await until(lambda: not any(node.running for node in router.chooser.nodes))
        assert all(node.queued_tokens == 0 for node in router.chooser.nodes)
        metrics = (await router.get("/metrics"))[1]
        assert 'kvhaven_route_total{what="requests",outcome="left"} 1' in metrics.splitlines()


async def test_without_a_decode_node_there_is_a_clear_error() -> None:
    async with fleet() as (_, (d,), router):
        d.healthy = False
        await until(lambda: not router.chooser.decode[0].up)
        status, text = await router.ask(ASK)
        assert (status, json.loads(text)["error"]["message"]) == (503, "no decode node is up")
        assert (await router.get("/health"))[0] == 503
        assert (await router.get("/v1/models"))[0] == 503
        d.healthy = True
        await until(lambda: router.chooser.decode[0].up)
        assert (await router.ask(ASK))[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b'{"prompt": "x", "echo": "\xff"}',
        b'{"echo": 1e999999}',
        b'{"prompt": ' + b"[" * 100_000,
        b"\xff",
    ],
)
async def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    async with fleet() as (_, (d,), router):
        async with router.client.post(router.url + "/v1/completions", data=raw) as answer:
            assert answer.status == 400
            assert "not a JSON object" in (await answer.json())["error"]["message"]
        assert d.seen == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3] * 900},
        {"prompt": ["one", "two"]},
        {"messages": "nonsense"},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"prompt": None, "n": "x", "kv_transfer_params": 7, "model": [1]},
    ],
)
async def test_odd_bodies_reach_the_decode_node(body: dict[str, Any]) -> None:
    async with fleet() as (_, (d,), router):
        assert (await router.ask(body))[0] == 200
        got = d.bodies()[0]
        assert {**got, "kv_transfer_params": None} == {**body, "kv_transfer_params": None}


@pytest.mark.parametrize("field", ["echo", "prompt_logprobs"])
async def test_answers_about_the_prompt_are_of_one_node(field: str) -> None:
    async with fleet() as ((p,), (d,), router):
        assert (await router.ask(ASK | {field: 1}))[0] == 200
        assert (len(p.seen), len(d.seen)) == (0, 1)


async def test_short_prompts_are_not_prefilled_apart() -> None:
    async with fleet(least_tokens=100) as ((p,), _, router):
        await router.ask({"prompt": "short"})
        assert p.seen == []
        await router.ask(ASK)
        assert len(p.seen) == 1


async def test_a_large_body_goes_through() -> None:
    async with fleet() as (_, (d,), router):
        raw = io.BytesIO(json.dumps({"prompt": "x" * (20 << 20)}).encode())
        async with router.client.post(f"{router.url}/v1/completions", data=raw) as answer:
            assert answer.status == 200
        assert len(d.bodies()[0]["prompt"]) == 20 << 20


async def test_conversations_return_to_the_nodes_that_know_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = HealthPolicy(interval_s=3600, timeout_s=3600)

    def answered(prompt: nodes.Prefilling, **_: object) -> None:
        """On a busy machine a node may seem so slow that another is the better choice."""
        prompt.ended()
        prompt._node.tokens_per_s = 10_000.0

    monkeypatch.setattr(nodes.Prefilling, "answered", answered)
    async with fleet(prefills=3, decodes=1, health=never) as (ps, _, router):
        for turn in range(1, 4):
            for talk in range(12):
                messages = [{"role": "system", "content": f"{talk} " * 9999}]
                messages += [{"role": "user", "content": str(n)} for n in range(turn)]
                await router.ask({"messages": messages}, "/v1/chat/completions")
        served: dict[str, set[str]] = {}
        for p in ps:
            for body in p.bodies():
                served.setdefault(body["messages"][0]["content"], set()).add(p.name)
        assert all(len(names) == 1 for names in served.values())
        assert all(p.seen for p in ps)


async def test_requests_at_once_are_spread() -> None:
    async with fleet(prefills=0, decodes=4) as (_, ds, router):
        asked = [router.ask({"prompt": f"{n} " * 500}) for n in range(40)]
        await asyncio.gather(*asked)
        assert max(len(d.seen) for d in ds) <= 20
        assert min(len(d.seen) for d in ds) >= 1


async def test_metrics_say_what_happened() -> None:
    async with fleet() as ((p,), _, router):
        await router.ask(ASK)
        p.status = 500
        await router.ask(ASK | {"prompt": "another " * 400})
        text = (await router.get("/metrics"))[1]
        for line in (
            'kvhaven_route_total{what="prefill",outcome="done"} 1',
            'kvhaven_route_total{what="prefill",outcome="failed"} 1',
            'kvhaven_route_total{what="requests",outcome="answered"} 2',
            'kvhaven_route_first_byte_seconds_bucket{le="+Inf"} 2',
            f'kvhaven_route_node_up{{role="prefill",node="{p.url}"}} 1',
        ):
            assert line in text.splitlines()


async def test_the_openai_client_works() -> None:
    openai = pytest.importorskip("openai")
    async with fleet() as (_, (d,), router):
        client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="key", max_retries=0)
        done = await client.completions.create(model="m", prompt="word " * 200)
        assert done.choices[0].text == "d00 d01 d02"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        messages: Any = [{"role": "user", "content": "word " * 200}]
        chat = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert chat.choices[0].message.content == "d00 d01 d02"
        assert d.bodies()[-1]["tools"] == tools
        stream = await client.completions.create(model="m", prompt="word " * 300, stream=True)
        assert [event.choices[0].text async for event in stream] == ["d00", "d01", "d02"]
        assert [model.id async for model in client.models.list()] == ["d0"]
        d.hangs_after, d.tokens = 2, 5
        aborted = await client.completions.create(model="m", prompt="word " * 400, stream=True)
        await anext(aiter(aborted))
        await aborted.close()
        await until(lambda: d.cancelled == 1)
        await client.close()


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:80", "ftp://h", "http://", "http://h:x", "http://h=a/b"),
        *("http://[::1", "http://h:99999"),
    ],
)
async def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--decode: invalid"):
        parse_node(url, "--decode")


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("http://d:8000", "d:7420"),
        ("https://[::1]:8000/x/", "[::1]:7420"),
        ("http://d:8000=k:1", "k:1"),
    ],
)
async def test_a_nodes_peer_plane_is_on_its_host_unless_it_is_given(text: str, peer: str) -> None:
    assert parse_node(text, "--decode").peer == peer


async def test_the_command_serves_and_stops() -> None:
    async with fake("d0") as d:
        port = free_port()
        command = [sys.executable, "-m", "kvhaven.cli", "route", "--decode", d.url]
        process = await asyncio.to_thread(
            subprocess.Popen, [*command, "--listen", f"127.0.0.1:{port}"]
        )
        try:
            router = Running(f"http://127.0.0.1:{port}", None, None)  # type: ignore[arg-type]
            await until(lambda: _listens(port))
            async with aiohttp.ClientSession() as router.client:
                assert (await router.ask(ASK))[0] == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 30) == 0
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def command(*options: str, files: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `kvhaven route` with a limit of open files; yield it and its port, before it listens."""
    port = free_port()
    route = [sys.executable, "-m", "kvhaven.cli", "route", "--listen", f"127.0.0.1:{port}"]
    limited = ["sh", "-c", f'ulimit {files} && exec "$@"', "sh", *route, *options]
    process = await asyncio.to_thread(subprocess.Popen, limited, stderr=subprocess.PIPE)
    try:
        yield process, port
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
        await asyncio.to_thread(process.wait)


async def test_the_command_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    async with command("--decode", "http://127.0.0.1:1", files="-Sn 64") as (process, port):
        await until(lambda: _listens(port))
        limits = await asyncio.to_thread(Path(f"/proc/{process.pid}/limits").read_text)
        (line,) = [one for one in limits.splitlines() if one.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard


async def test_a_lack_of_descriptors_is_no_failure_of_nodes() -> None:
    """Their answers that are under way would be broken off."""
    async with fake("d0") as d:
        nodes = [f"--decode={d.url}/{number}" for number in range(80)]
        options = ["--health-interval", "0.05", "--health-failures", "1"]
        async with command(*options, *nodes, files="-n 48") as (process, _):
            assert process.stderr is not None
            said = b""
            while b"Too many open files" not in said:
                said = await asyncio.to_thread(process.stderr.readline)
                assert said, "it has ended"
                assert b"out of use" not in said


async def test_as_many_clients_as_are_let_in_have_descriptors_for_their_requests() -> None:
    """A connection to a prefill node stays open for a while after its answer."""
    files = 256
    clients = (files - main._RESERVED) // main._EACH
    async with (
        fake("p0") as p,
        fake("d0", hangs_after=1) as d,
        contextlib.AsyncExitStack() as open_,
    ):
        nodes = ["--prefill", p.url, "--decode", d.url]
        _, port = await open_.enter_async_context(command(*nodes, files=f"-n {files}"))
        await until(lambda: _listens(port))
        connector = aiohttp.TCPConnector(limit=0)
        client = await open_.enter_async_context(aiohttp.ClientSession(connector=connector))

        async def ask() -> int:
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = await open_.enter_async_context(client.post(url, json=ASK | {"stream": True}))
            await answer.content.readany()
            return answer.status

        statuses = await asyncio.gather(*(ask() for _ in range(clients)))
    assert statuses == [200] * clients


@contextlib.asynccontextmanager
async def whole(d: FakeVllm) -> AsyncIterator[Running]:
    """Yield the router as its command runs it, with the limits of its connections."""
    port = free_port()
    chooser = Chooser([], [parse_node(d.url, "--decode")], 0)
    serving = asyncio.create_task(
        main._run(Address("127.0.0.1", port), chooser, QUICK, 60.0, most=4)
    )
    try:
        await until(lambda: _listens(port))
        async with aiohttp.ClientSession() as client:
            yield Running(f"http://127.0.0.1:{port}", chooser, client)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def test_clients_that_send_no_request_are_disconnected_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.5)
    async with fake("d0") as d, whole(d) as router:
        port = URL(router.url).port
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in slow:
            writer.write(b"GET /health HTTP/1.1\r\n")
        for reader, writer in slow:
            async with asyncio.timeout(60):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert (await router.ask(ASK))[0] == 200


async def test_an_answer_may_take_longer_than_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has sent its request is not disconnected with a client that sends none."""
    monkeypatch.setattr(http_server, "HEADER_S", 0.5)
    async with (
        fake("d0", breaks_after=1) as d,
        whole(d) as router,
        router.client.post(f"{router.url}/v1/completions", json=ASK | {"stream": True}) as answer,
    ):
        assert await answer.content.readany()
        idle, writer = await asyncio.open_connection("127.0.0.1", URL(router.url).port)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                assert await idle.read() == b""
        writer.close()
        d.may_break.set()  # so the router tells that the node broke off
        assert b"broke off" in await answer.content.read()


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = await asyncio.to_thread(
            kvhaven,
            *("route", "--decode", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{port}"),
            status=2,
        )
    assert "--listen: cannot listen at" in said


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def test_errors_and_whole_answers_teach_no_speed() -> None:
    async with fleet(prefills=0) as (_, (d,), router):
        d.status = 400
        await router.ask(ASK | {"stream": True, "prompt": "word " * 2000})
        d.status = 200
        await router.ask(ASK | {"prompt": "other " * 2000})
        assert router.chooser.decode[0].tokens_per_s is None
        await router.ask(ASK | {"stream": True, "prompt": "third " * 2000})
        assert router.chooser.decode[0].tokens_per_s is not None


async def test_a_node_that_refuses_connections_is_out_of_use_immediately() -> None:
    never = HealthPolicy(interval_s=3600, timeout_s=3600, failures=3, pause_s=3600)
    async with contextlib.AsyncExitStack() as stack:
        d = await stack.enter_async_context(fake("d0"))
        async with fake("gone") as gone:
            pass
        router = await stack.enter_async_context(routing([], [d, gone], health=never))
        assert (await router.ask(ASK))[0] == 200
        await until(lambda: not router.chooser.decode[1].up)
        assert router.chooser.decode[0].up


async def test_a_node_with_a_name_that_no_host_can_have_is_out_of_use() -> None:
    async with fake("d0") as d, contextlib.AsyncExitStack() as stack:
        odd = FakeVllm("odd", url="http://a..b:80")
        router = await stack.enter_async_context(routing([], [odd, d]))
        await until(lambda: not router.chooser.decode[0].up)
        assert [(await router.ask(ASK))[0] for _ in range(4)] == [200] * 4


async def test_checks_go_on_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet() as (_, (d,), router):
        node = router.chooser.decode[0]

        def fail(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(aiohttp.ClientSession, "get", fail)
            await until(lambda: node.error)
        assert (node.up, node.error) == (True, "can't start new thread")
        await until(lambda: not node.error)
        d.healthy = False
        await until(lambda: not node.up)


async def test_a_check_whose_answer_the_router_reads_late_is_no_failure() -> None:
    """A large body holds its loop; answers that are under way would be broken off."""
    async with fleet() as (_, (d,), router):
        d.holds_s, checks = 2 * QUICK.timeout_s, d.checks
        await until(lambda: d.checks > checks + QUICK.failures + 1)
        assert router.chooser.decode[0].up
        d.holds_s = 0
        await until(lambda: not router.chooser.decode[0].error)


async def test_a_request_that_may_have_had_an_effect_is_sent_once() -> None:
    async with fleet(prefills=0) as (_, (d,), router):
        d.drops = True
        for _ in range(4):
            assert (await router.ask({}, "/v1/load_lora_adapter"))[0] == 502
        assert len(d.seen) == 4
        assert router.chooser.decode[0].up


async def test_an_image_is_no_text_but_part_of_the_prompt() -> None:
    def body(image: str) -> RequestBody:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        messages = [{"role": "user", "content": "word " * 100}, {"role": "user", "content": [url]}]
        return RequestBody("/v1/chat/completions", json.dumps({"messages": messages}).encode())

    one, other = body("a" * 300_000), body("b" * 300_000)
    assert one.text_bytes < 5000
    assert one.digests()[0] == other.digests()[0]
    assert one.digests()[-1] != other.digests()[-1]
