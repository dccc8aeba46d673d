# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers behind the router: prefill on one, decode on the other."""

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("aiohttp", reason="kvhaven[router] is not installed")

import aiohttp

from examples.demo.processes import free_port, kvhaven
from kvhaven.router.app import Router
from kvhaven.router.body import RequestBody
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import parse_node
from tests.e2e.engines import (
    CHUNK,
    PATIENT,
    SMALL_SERVER,
    ForkedServer,
    NodeService,
    forked_server,
    peered_services,
)
from tests.e2e.test_peers import PATIENT_PEERS, wait_for_peer
from tests.e2e.test_two_nodes import wait_until_attached
from tests.router_kit import serving, until
from tests.servers import Bucket

pytestmark = pytest.mark.vllm

PROMPTS = [
    f"Tale {number}. " + " ".join(f"{word * number % 997}" for word in range(130))
    for number in (3, 5, 7, 11)
]
"""About 500 tokens each: a byte is a token."""
STORED = [f"Stored {number}. {prompt}" for number, prompt in enumerate(PROMPTS[:3])]
ATTACHED = "attached to the node service"


class Nodes(NamedTuple):
    """Servers of a prefill and a decode node, and where their services listen."""

    prefill: ForkedServer
    decode: ForkedServer
    sockets: Sequence[Path]
    folder: Path


@pytest.fixture(scope="module")
def nodes(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Start the servers, which attach to services as these come and go."""
    folder = tmp_path_factory.mktemp("router")
    with tempfile.TemporaryDirectory(prefix="kvh-") as short, contextlib.ExitStack() as stack:
        sockets = [Path(short) / str(number) for number in range(2)]
        servers = []
        for number, socket in enumerate(sockets):
            settings: dict[str, Any] = {"chunk_size": CHUNK, "service_address": str(socket)}
            options = SMALL_SERVER | {"kv_transfer_config": kvhaven(**settings, **PATIENT)}
            log = folder / f"vllm-{number}.log"
            servers.append(stack.enter_context(forked_server(model, log, options)))
        for server in servers:
            server.wait()
        yield Nodes(servers[0], servers[1], sockets, folder)


def connected() -> aiohttp.ClientSession:
    """Return a client with a connection for each request: vLLM closes those that were idle."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))


async def complete(session: aiohttp.ClientSession, url: str, prompt: str, **more: Any) -> str:
    """Return the text of an answer, streamed or not."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        content = await answer.text()
        assert answer.status == 200, content
    if not more.get("stream"):
        return str(json.loads(content)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@contextlib.contextmanager
def service_at(nodes: Nodes, number: int, **settings: object) -> Iterator[NodeService]:
    """Run a service of a node without peers, to which its server is attached."""
    log = nodes.folder / f"vllm-{number}.log"
    before = log.read_text().count(ATTACHED)
    service = NodeService(
        nodes.sockets[number],
        nodes.folder / f"service-{number}.log",
        max_local_cpu_size="64MiB",
        **settings,
    )
    try:
        service.start()
        service.await_ranks()
        service.await_tiers()
        wait_until_attached(log, before // 2 + 1)
        yield service
    finally:
        service.stop(signal.SIGKILL)


async def test_kv_moves_through_storage_also_when_the_prefill_node_is_gone(
    nodes: Nodes, s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No node is another's peer: the prefill node writes behind, the decode node reads."""
    bucket = Bucket(s3_server)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "shared").mkdir()
    stores = {"fs": f"file://{tmp_path}/shared", "s3": f"s3://{bucket.name}/kv"}
    common: dict[str, Any] = {"s3_endpoint_url": bucket.url, "pd_stall_ms": 20_000}
    chooser = Chooser(
        [parse_node(nodes.prefill.url, "--prefill")], [parse_node(nodes.decode.url, "--decode")], 0
    )
    found = []
    with contextlib.ExitStack() as stack:
        writing = stack.enter_context(
            service_at(nodes, 0, remote_url=" ".join(stores.values()), **common)
        )
        async with serving(Router(chooser).app()) as url, connected() as session:
            for (tier, store), prompt in zip(stores.items(), STORED, strict=False):
                with service_at(nodes, 1, remote_url=store, remote_write="off", **common) as d:
                    # A chain is awaited if its beginning is stored when the decode node is asked.
                    await prefilled(session, nodes.prefill.url, prompt[: CHUNK + 1])
                    writing.flush()
                    found.append(await complete(session, url, prompt, stream=tier == "s3"))
                    assert d.settled().tiers[tier].reads == len(prompt) // CHUNK
            with service_at(nodes, 1, remote_url=stores["s3"], remote_write="off", **common) as d:
                params = await prefilled(session, nodes.prefill.url, STORED[2])
                writing.flush()
                writing.stop(signal.SIGKILL)  # with it, all that is in its memory
                found.append(
                    await complete(session, nodes.decode.url, STORED[2], kv_transfer_params=params)
                )
                assert d.settled().tiers["s3"].reads == len(STORED[2]) // CHUNK
            alone = [
                await complete(session, nodes.decode.url, one, cache_salt="x") for one in STORED
            ]
    assert found == alone
    assert len(set(alone)) > 1


async def prefilled(session: aiohttp.ClientSession, url: str, prompt: str) -> Any:
    """Have a node prefill a prompt, as the router does; return what it answers for the other."""
    fields = {"model": "tiny", "prompt": prompt, "temperature": 0}
    body = RequestBody("/v1/completions", json.dumps(fields).encode())
    headers = {"Content-Type": "application/json"}
    raw = body.for_prefill("127.0.0.1:7420")
    async with session.post(f"{url}/v1/completions", data=raw, headers=headers) as answer:
        return (await answer.json())["kv_transfer_params"]


async def test_answers_are_those_of_one_server_also_when_the_prefill_node_is_killed(
    nodes: Nodes,
) -> None:
    """The last test of these servers: one of them is killed."""
    prefill, decode, ports = nodes.prefill, nodes.decode, [free_port(), free_port()]
    chooser = Chooser(
        [parse_node(prefill.url, "--prefill")],
        [parse_node(f"{decode.url}=127.0.0.1:{ports[1]}", "--decode")],
        CHUNK,
    )
    logs = [nodes.folder / f"vllm-{number}.log" for number in range(2)]
    before = [log.read_text().count(ATTACHED) for log in logs]
    peered = peered_services(nodes.sockets[0].parent, nodes.folder, ports, **PATIENT_PEERS)
    async with contextlib.AsyncExitStack() as stack:
        other, service = stack.enter_context(peered)
        for node in (other, service):
            await asyncio.to_thread(wait_for_peer, node)
        for log, times in zip(logs, before, strict=True):
            await asyncio.to_thread(wait_until_attached, log, times // 2 + 1)
        url = await stack.enter_async_context(serving(Router(chooser).app()))
        session = await stack.enter_async_context(connected())
        found = [await complete(session, url, PROMPTS[0])]
        found.append(await complete(session, url, PROMPTS[1], stream=True))
        status = service.status()
        full = sum(len(prompt) // CHUNK for prompt in PROMPTS[:2])
        # Announced, or asked for by a decode request that overtook the announcement.
        assert status.chains.expected >= 2
        assert status.catalog.hit_chunks + status.catalog.awaited_chunks >= full
        asking = asyncio.create_task(complete(session, url, PROMPTS[2]))
        await until(lambda: chooser.prefill[0].running)
        prefill.kill()
        found.append(await asking)
        found.append(await complete(session, url, PROMPTS[3], stream=True))
        # Another salt: nothing of the answers above is reused.
        alone = [await complete(session, decode.url, one, cache_salt="x") for one in PROMPTS]
    assert found == alone
    assert len(set(alone)) > 1
