# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers behind the router: prefill on one, decode on the other."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="kvhaven[router] is not installed")

import aiohttp

from examples.demo.processes import Server, kvhaven, vllm_server
from kvhaven.router.app import Router
from kvhaven.router.choice import Chooser
from kvhaven.router.nodes import parse_node
from tests.e2e.engines import CHUNK, PATIENT, SMALL_SERVER, NodeService, peered_services
from tests.e2e.test_peers import PATIENT_PEERS
from tests.router_kit import serving, until
from tests.servers import free_port

pytestmark = pytest.mark.vllm

PROMPTS = [
    f"Tale {number}. " + " ".join(f"{word * number % 997}" for word in range(130))
    for number in (3, 5, 7, 11)
]
"""About 500 tokens each: a byte is a token."""


@pytest.fixture
def nodes(
    model: Path, tmp_path: Path, short_dir: Path
) -> Iterator[tuple[list[Server], list[NodeService], int]]:
    """Return servers and services of a prefill and a decode node, and the latter's peer port."""
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        services = stack.enter_context(peered_services(short_dir, tmp_path, ports, **PATIENT_PEERS))
        servers = []
        for number, service in enumerate(services):
            settings: dict[str, Any] = {"chunk_size": CHUNK, "service_address": str(service.socket)}
            options = SMALL_SERVER | {"kv_transfer_config": kvhaven(**settings, **PATIENT)}
            log = tmp_path / f"vllm-{number}.log"
            servers.append(stack.enter_context(vllm_server(model, free_port(), log, options)))
        for server, service in zip(servers, services, strict=True):
            server.wait()
            service.await_ranks()
        yield servers, services, ports[1]


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


async def test_answers_are_those_of_one_server_also_when_the_prefill_node_is_killed(
    nodes: tuple[list[Server], list[NodeService], int],
) -> None:
    (prefill, decode), (_, service), port = nodes
    chooser = Chooser(
        [parse_node(prefill.url, "--prefill")],
        [parse_node(f"{decode.url}=127.0.0.1:{port}", "--decode")],
        CHUNK,
    )
    async with serving(Router(chooser).app()) as url, aiohttp.ClientSession() as session:
        found = [await complete(session, url, PROMPTS[0])]
        found.append(await complete(session, url, PROMPTS[1], stream=True))
        status = service.status()
        full = sum(len(prompt) // CHUNK for prompt in PROMPTS[:2])
        assert status.chains.expected == 2
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
