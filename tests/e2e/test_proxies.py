# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers behind proxies of others, and clients of others behind our router.

`vllm-router` is the program from PyPI. vLLM's toy proxy
(`tests/v1/kv_connector/nixl_integration/toy_proxy_server.py` there) is not on PyPI: `ToyProxy`
re-enacts it, that is, sends the requests that it sends. The clients are the `openai` package and
`vllm bench serve`. The control is the decode node, asked directly with a salt: it computes all.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="kvhaven[router] is not installed")
pytest.importorskip("openai", reason="it is installed with vLLM")

import openai

from examples.demo.processes import free_port, kvhaven, server
from tests.e2e.engines import (
    CHUNK,
    PATIENT,
    SMALL_SERVER,
    ForkedServer,
    NodeService,
    forked_server,
    peered_services,
)
from tests.e2e.test_peers import PATIENT_PEERS

pytestmark = pytest.mark.vllm

TEMPLATE = """\
{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
BENCH_REQUESTS = int(os.environ.get("KVHAVEN_EVENTS", "20"))
ROUNDS = 3
PD_WAIT_S = 60
"""Far longer than a request takes: a request that waited in vain is seen on any machine."""
BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`. `vllm` itself asks for the version of a package that CPU builds lack."""

Ask = Callable[[str, str, bool], "Answer"]

_numbers = itertools.count(3, 2)


@dataclass(frozen=True)
class Answer:
    """The text of an answer, and the number of tokens of its prompt, all and cached ones."""

    text: str
    prompt: int
    cached: int


@dataclass(frozen=True)
class Fleet:
    """A prefill node and a decode node: their URLs, and the latter's peer address."""

    prefill: str
    decode: str
    peer: str
    folder: Path

    def control(self, path: str, text: str, *, stream: bool = False) -> Answer:
        """Return the answer that the decode node computes without any cached KV."""
        body = _body(path, text, stream=stream) | {"cache_salt": str(uuid.uuid4())}
        return _read(_post(self.decode + path, body))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start all servers and services."""
    folder = tmp_path_factory.mktemp("proxies")
    ports = [free_port(), free_port()]
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    options = SMALL_SERVER | {
        "chat_template": str(template),
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "enable_prompt_tokens_details": True,
    }
    short_dir = Path(tempfile.mkdtemp(prefix="kvh-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, short_dir, ignore_errors=True)
        services = stack.enter_context(peered_services(short_dir, folder, ports, **PATIENT_PEERS))
        servers = [
            stack.enter_context(_vllm(model, folder / f"{number}.log", options, service, number))
            for number, service in enumerate(services)
        ]
        for one in servers:
            one.wait()
        for service in services:
            service.await_ranks()
        prefill, decode = (one.url for one in servers)
        yield Fleet(prefill, decode, f"127.0.0.1:{ports[1]}", folder)


@pytest.fixture(scope="module")
def vllm_router(fleet: Fleet) -> Iterator[str]:
    """Start vllm-router in front of the nodes; yield its URL."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("vllm-router", path=path)
    if program is None:
        pytest.skip("vllm-router is not installed; `make setup` or `pip install vllm-router`")
    port = free_port()
    options = [f"--port={port}", "--host=127.0.0.1", f"--prometheus-port={free_port()}"]
    command = [program, "--vllm-pd-disaggregation", "--prefill", fleet.prefill]
    command += ["--decode", fleet.decode, *options]
    with server(command, port, fleet.folder / "vllm-router.log") as started:
        started.wait()
        yield started.url


@pytest.fixture(scope="module")
def route(fleet: Fleet) -> Iterator[str]:
    """Start `kvhaven route` in front of the nodes; yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "kvhaven.cli", "route", "--prefill", fleet.prefill]
    command += ["--decode", f"{fleet.decode}={fleet.peer}", "--listen", f"127.0.0.1:{port}"]
    with server(command, port, fleet.folder / "route.log") as started:
        started.wait()
        yield started.url


# --- proxies of others ----------------------------------------------------------------------


class ToyProxy:
    """Re-enactment of vLLM's toy proxy: the same two requests with the same parameters."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.handover: dict[str, Any] = {}

    def ask(self, path: str, text: str, stream: bool) -> Answer:
        """Answer a request."""
        body = _body(path, text, stream=stream)
        name = str(uuid.uuid4())
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        first = {**body, "kv_transfer_params": params, "stream": False, "max_tokens": 1}
        first.pop("stream_options", None)
        answered = json.loads(_post(f"{self._fleet.prefill}{path}", first, name))
        self.handover = answered["kv_transfer_params"]
        return _read(_post(f"{self._fleet.decode}{path}", _second(body, self.handover), name))


def _second(body: dict[str, Any], handover: dict[str, Any]) -> dict[str, Any]:
    return {**body, "kv_transfer_params": handover} if handover else body


CASES = [
    pytest.param(path, stream, id=f"{path.split('/')[2]}{'-stream' if stream else ''}")
    for path in ("/v1/completions", "/v1/chat/completions")
    for stream in (False, True)
]


@pytest.mark.parametrize(("path", "stream"), CASES)
def test_vllm_router_moves_kv_and_answers_like_vllm(
    fleet: Fleet, vllm_router: str, path: str, stream: bool
) -> None:
    def ask(path: str, text: str, stream: bool) -> Answer:
        return _read(_post(f"{vllm_router}{path}", _body(path, text, stream=stream)))

    _assert_kv_moves(fleet, ask, path, stream)


@pytest.mark.parametrize(("path", "stream"), CASES)
def test_requests_of_vllms_toy_proxy_move_kv_and_are_answered_like_vllm(
    fleet: Fleet, path: str, stream: bool
) -> None:
    _assert_kv_moves(fleet, ToyProxy(fleet).ask, path, stream)


def _assert_kv_moves(fleet: Fleet, ask: Ask, path: str, stream: bool) -> None:
    text = _tale()
    found_before = _metric(fleet.decode, "external_prefix_cache_hits_total")
    answer = ask(path, text, stream)
    found = _metric(fleet.decode, "external_prefix_cache_hits_total") - found_before
    assert answer == fleet.control(path, text, stream=stream)
    assert answer.text
    # All tokens but the last, which the engine computes in any case: it needs its output.
    assert found >= answer.prompt - 1 > 400
    # The usage says what the prefill node had cached, not what the decode node read from it.
    assert answer.cached == 0


@pytest.mark.parametrize("tokens", [20, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_the_toy_proxys_short_prompts_are_not_delayed(fleet: Fleet, tokens: int) -> None:
    text = _tale()[:tokens]
    before = _metric(fleet.decode, "external_prefix_cache_hits_total")
    began = time.monotonic()
    answer = ToyProxy(fleet).ask("/v1/completions", text, stream=False)
    assert time.monotonic() - began < PD_WAIT_S
    assert _metric(fleet.decode, "external_prefix_cache_hits_total") - before >= tokens - 1
    assert answer.prompt == tokens
    assert answer == fleet.control("/v1/completions", text)


def test_usage_reports_the_tokens_that_the_prefill_node_had_cached(fleet: Fleet) -> None:
    toy, text = ToyProxy(fleet), _tale()
    first, again = (toy.ask("/v1/completions", text, stream=False) for _ in range(2))
    assert first.text == again.text
    assert first.cached == 0
    assert again.cached == toy.handover["remote_prefill_cached_tokens"] > 400


# --- clients of others ----------------------------------------------------------------------


def test_the_openai_package_gets_the_answers_of_one_server(fleet: Fleet, route: str) -> None:
    texts = [_tale() for _ in range(4)]
    before = _metric(fleet.decode, "external_prefix_cache_hits_total")
    with _client(route) as client:
        found = _answers(client, texts)
    hits = _metric(fleet.decode, "external_prefix_cache_hits_total") - before
    with _client(fleet.decode) as client:
        assert found == _answers(client, texts, cache_salt="control")
    assert hits >= len(texts) * 400


def _answers(client: Any, texts: list[str], **more: str) -> list[Any]:
    """Return what does not differ between two equal answers, of each of the ways to ask."""
    common = {"model": "tiny", "max_tokens": 16, "temperature": 0, "extra_body": more}
    usage = {"include_usage": True}
    chats = [[{"role": "user", "content": text}] for text in texts]
    whole = client.completions.create(prompt=texts[0], logprobs=1, **common)
    pieces = [*client.completions.create(prompt=texts[1], stream=True, **common)]
    said = client.chat.completions.create(messages=chats[2], **common)
    streamed = client.chat.completions.create(
        messages=chats[3], stream=True, stream_options=usage, **common
    )
    *deltas, last = streamed
    return [
        *(whole.choices[0].text, whole.choices[0].finish_reason, whole.choices[0].logprobs.tokens),
        "".join(piece.choices[0].text for piece in pieces),
        *(said.choices[0].message.model_dump(), said.usage.prompt_tokens),
        "".join(event.choices[0].delta.content or "" for event in deltas),
        *(last.usage.total_tokens, [one.id for one in client.models.list()]),
    ]


@pytest.mark.parametrize("choice", ["auto", "required", "weather"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_openai_package_gets_tool_calls(
    fleet: Fleet, route: str, choice: str, stream: bool
) -> None:
    named = {"type": "function", "function": {"name": choice}}
    tokenized = json.loads(_post(f"{route}/tokenize", {"model": "tiny", "prompt": " \t\r\n"}))
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": _tale()}],
        "tools": TOOLS,
        "tool_choice": named if choice == "weather" else choice,
        "max_tokens": 100,
        "temperature": 0,
        # JSON permits any number of blanks, and this model would not come to an end.
        "logit_bias": {str(token): -100 for token in tokenized["tokens"]},
    }
    found = []
    for url, more in ((route, {}), (fleet.decode, {"cache_salt": "control"})):
        with _client(url) as client:
            answer = client.chat.completions.create(stream=stream, extra_body=more, **options)
            choices = [one for event in (answer if stream else [answer]) for one in event.choices]
        said = [one.delta if stream else one.message for one in choices]
        calls = [call.function for part in said for call in part.tool_calls or ()]
        text = "".join(part.content or "" for part in said)
        name = "".join(call.name or "" for call in calls)
        found.append((text, name, "".join(call.arguments or "" for call in calls)))
    assert found[0] == found[1]
    if choice == "auto":  # the model is too small to call of its own accord
        assert found[0][0]
    else:
        assert found[0][1] == "weather"
        assert json.loads(found[0][2])["city"] in {"Paris", "Rome"}


def test_a_stream_that_the_openai_package_leaves_ends_in_vllm(fleet: Fleet, route: str) -> None:
    most = 900
    for _ in range(5):  # on a busy machine all tokens may be there before the client has left
        before = _metric(fleet.decode, "generation_tokens_total")
        with _client(route) as client:
            stream = client.completions.create(
                model="tiny",
                prompt=_tale()[:100],
                max_tokens=most,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(3):
                assert next(stream).choices
            stream.close()
        for url in (fleet.prefill, fleet.decode):
            _until(functools.partial(_is_idle, url))
        generated = _metric(fleet.decode, "generation_tokens_total")
        if generated - before < most:
            break
    assert 3 <= generated - before < most
    time.sleep(0.5)  # for 50 tokens or more, if it went on
    assert _metric(fleet.decode, "generation_tokens_total") == generated


def _is_idle(url: str) -> bool:
    return _metric(url, "num_requests_running") == 0


def test_vllms_own_benchmark_has_no_failed_request(
    fleet: Fleet, model: Path, route: str, request: pytest.FixtureRequest
) -> None:
    urls = {"kvhaven route": route}
    if "KVHAVEN_EVENTS" in os.environ:  # the long form: the ratio as well
        urls["decode node"] = fleet.decode
        urls["vllm-router"] = request.getfixturevalue("vllm_router")
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for _ in range(ROUNDS if len(urls) > 1 else 1):
        for name, url in urls.items():
            rates[name].append(_bench(url, model, fleet.folder))
    print("\nrequests/s:", rates)  # noqa: T201 - pytest shows it with -s


def _bench(url: str, model: Path, folder: Path) -> float:
    """Run `vllm bench serve`; return the requests per second."""
    result = folder / f"{uuid.uuid4()}.json"
    options = {
        "backend": "openai",
        "base-url": url,
        "model": "tiny",
        "tokenizer": str(model),
        "dataset-name": "random",
        "random-input-len": "480",
        "random-output-len": "16",
        "num-prompts": str(BENCH_REQUESTS),
        "max-concurrency": "16",
        "seed": str(next(_numbers)),
        "result-filename": str(result),
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-c", BENCH, *arguments, "--ignore-eos", "--save-result"]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"}
    ran = subprocess.run(
        [*command, "--disable-tqdm"], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(result.read_text())
    tokens = BENCH_REQUESTS * 16
    assert (found["completed"], found["total_output_tokens"]) == (BENCH_REQUESTS, tokens)
    return float(found["request_throughput"])


# --- helpers --------------------------------------------------------------------------------


def _vllm(
    model: Path, log: Path, options: dict[str, Any], service: NodeService, number: int
) -> contextlib.AbstractContextManager[ForkedServer]:
    settings = {"chunk_size": CHUNK, "service_address": str(service.socket), **PATIENT}
    settings["pd_wait_ms"] = PD_WAIT_S * 1000
    config = {"kv_transfer_config": kvhaven(**settings)}
    cores = sorted(os.sched_getaffinity(0))
    own = str(cores[number % len(cores)])  # both nodes compute at the same time
    return forked_server(model, log, options | config, own)


def _tale() -> str:
    """Return about 500 bytes, each a token, that no other test has."""
    number = next(_numbers)
    return f"Tale {number}. " + " ".join(f"{word * number % 997}" for word in range(130))


def _body(path: str, text: str, *, stream: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "temperature": 0}
    if path == "/v1/completions":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _post(url: str, body: dict[str, Any], name: str = "") -> bytes:
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
        return content


def _read(content: bytes) -> Answer:
    """Read an answer, streamed or not."""
    if content.startswith(b"data: "):
        lines = [line for line in content.decode().split("\n\n") if line.strip()]
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        events = [json.loads(content)]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [one.get("text") or _said(one) for one in choices]
    usage = events[-1]["usage"]
    return Answer(
        "".join(texts), usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    )


def _said(choice: dict[str, Any]) -> str:
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")


def _metric(url: str, pattern: str) -> float:
    """Return the sum of a server's metrics whose name and labels begin so (`vllm:` left out)."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    matching = [line for line in lines if re.match(f"vllm:{pattern}", line)]
    assert matching, pattern
    return sum(float(line.rpartition(" ")[2]) for line in matching)


def _client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)


def _until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)
