# SPDX-License-Identifier: Apache-2.0
"""Fleet demo: one node computes prompts, an unlike one answers them, behind one address.

Two nodes, each with `kvhaven serve` and `vllm serve`: a prefill node with blocks of 32 tokens on
one rank, and a decode node with blocks of 128 tokens, on two ranks if the machine has four cores:
with fewer, ranks that wait for each other leave no core to anything else. `kvhaven route` is in
front of them. As root, each node has a network namespace of its own, and so have the router and
this process; else all are on loopback. Prompts of 9,000 tokens are asked in five rows:

| row | what happens |
| --- | --- |
| control | vLLM without KVHaven |
| cold | the decode node alone; all caches are empty |
| apart | through the router: the prefill node computes, the decode node reads and answers |
| peer | the decode node alone; the prompt's KV is in the prefill node's memory |
| killed | through the router; the prefill node is killed while it computes |

Answers are streamed. The exit status is 1 if an answer differs from the control's, or if KV did not
come from where the row says.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from examples.demo.model import make_model
from examples.demo.processes import (
    NodeService,
    ProcessError,
    Server,
    engine,
    free_port,
    kvhaven,
    node_service,
    server,
    vllm_server,
)
from examples.demo.text import Question, make_document, make_questions
from examples.fleet.namespaces import Namespace, NoNetworkError, star

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "fleet"
CHUNK: Final = 256
DOCUMENT_TOKENS: Final = 8900
QUESTIONS: Final = 3
OUTPUT_TOKENS: Final = 24
KILL_AFTER_S: Final = 0.5
ENOUGH_CORES: Final = 4
COMMON: Final = {
    "dtype": "float32",  # the portable format cannot read bfloat16 of CPUs with AMX
    "enforce_eager": True,
    "max_model_len": 16384,
    "max_num_batched_tokens": 1024,
    "served_model_name": "demo",
}
TITLES: Final = {
    "control": "vLLM without KVHaven",
    "cold": "the decode node alone, all caches empty",
    "apart": "router: prefill and decode apart",
    "peer": "the decode node, KV in the prefill node's memory",
    "killed": "router: the prefill node is killed meanwhile",
}


@dataclass(frozen=True)
class Answer:
    """An answer: seconds to the first token, its text, and the chunks that were found for it."""

    ttft: float
    text: str
    chunks: int = 0


class Places:
    """Where the nodes and the router run: their hosts, and how processes get there."""

    def __init__(self, namespaces: Sequence[Namespace] = (), reason: str = "") -> None:
        self._namespaces = dict(zip(("prefill", "decode", "router"), namespaces, strict=False))
        self.described = f"All are on loopback: {reason}."
        if namespaces:
            where = ", ".join(f"{name} {one.address}" for name, one in self._namespaces.items())
            self.described = f"Each has a network namespace of its own: {where}."

    def host(self, name: str) -> str:
        """Return the address of a node, or the router."""
        return self._namespaces[name].address if self._namespaces else "127.0.0.1"

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Let processes that are started meanwhile be there."""
        return self._namespaces[name].inside() if self._namespaces else contextlib.nullcontext()


@dataclass
class Fleet:
    """Both nodes and the router."""

    services: dict[str, NodeService]
    prefill: Server
    decode: Server
    router: Server
    console: Console
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    def empty(self, *nodes: str) -> None:
        """Empty the memory of these nodes, and the prefix caches of both engines."""
        for name in nodes:
            self.services[name].clear()
        for one in (self.prefill, self.decode):
            with contextlib.suppress(OSError):  # the prefill engine may be dead
                post(f"{one.url}/reset_prefix_cache")

    def ask(self, row: str, url: str, question: Question) -> None:
        """Ask one question in a row."""
        before = self._hits()
        ttft, text = stream(url, question.prompt, OUTPUT_TOKENS)
        self.answers.setdefault(row, []).append(Answer(ttft, text, self._hits() - before))
        self.console.print(
            f"  first token after [bold]{ttft:.3f} s[/]: “{question.phrase}” → “{text.strip()}”"
        )

    def _hits(self) -> int:
        catalog = self.services["decode"].status()["catalog"]
        return int(catalog["hit_chunks"]) + int(catalog["awaited_chunks"])


def main() -> int:
    """Run the demo; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    console = Console(highlight=False)
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    # A document for each question, so that no prompt profits from another.
    documents = [make_document(DOCUMENT_TOKENS, seed) for seed in range(1, QUESTIONS + 1)]
    questions = [make_questions(document, 1)[0] for document in documents]
    model = make_model(BUILD / "demo" / "model")
    with contextlib.ExitStack() as stack:
        places = make_places(stack)
        console.print(
            f"{QUESTIONS} documents of {DOCUMENT_TOKENS} tokens, a question about each.\n"
            "Prefill node: blocks of 32 tokens, 1 rank. Decode node: blocks of 128 tokens, "
            f"{decode_ranks()} rank(s).\n{places.described} Logs: build/fleet/",
            soft_wrap=True,
        )
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhaven-fleet-"))
        try:
            answers = run(console, model, Path(runtime), questions, places)
        except ProcessError as error:
            console.print("[bold red]The demo failed:[/]", end=" ")
            console.print(error, markup=False, soft_wrap=True)
            return 1
    print_table(console, answers)
    (BUILD / "demo-fleet.json").write_text(json.dumps(summary(answers), indent=2) + "\n")
    problems = wrong(answers)
    for problem in problems:
        console.print(f"[bold red]Wrong:[/] {problem}", soft_wrap=True)
    return 1 if problems else 0


def make_places(stack: contextlib.ExitStack) -> Places:
    """Make a network namespace for each node and one for the router, where that is possible.

    This process sends its requests from the router's namespace.
    """
    try:
        places = Places(stack.enter_context(star("10.79.0", 2)))
        stack.enter_context(places.inside("router"))
    except NoNetworkError as reason:
        return Places(reason=str(reason))
    return places


def run(
    console: Console, model: Path, runtime: Path, questions: list[Question], places: Places
) -> dict[str, list[Answer]]:
    """Ask all questions in all rows."""
    control = []
    console.print("[bold]control[/]: KVHaven off")
    options = {name: value for name, value in COMMON.items() if name != "served_model_name"}
    with engine(model, LOGS / "control.log", **options) as plain:
        for question in questions:
            answer = plain.ask(question.prompt, OUTPUT_TOKENS)
            control.append(Answer(answer.ttft, answer.text))
    with contextlib.ExitStack() as stack:
        fleet = start(stack, console, model, runtime, places)
        warm_up(fleet)
        console.print("[bold]cold[/]: the decode node alone")
        for question in questions:
            fleet.empty("prefill", "decode")
            fleet.ask("cold", fleet.decode.url, question)
        console.print("[bold]apart[/]: through the router")
        for question in questions:
            fleet.empty("prefill", "decode")
            fleet.ask("apart", fleet.router.url, question)
        console.print("[bold]peer[/]: the KV is in the prefill node's memory")
        for question in questions:
            fleet.empty("prefill", "decode")
            stream(fleet.prefill.url, question.prompt, 1)
            fleet.empty("decode")
            fleet.ask("peer", fleet.decode.url, question)
        console.print(f"[bold]killed[/]: kill -9 of the prefill node after {KILL_AFTER_S} s")
        fleet.empty("prefill", "decode")
        timer = threading.Timer(KILL_AFTER_S, lambda: kill_node(fleet))
        timer.start()
        for question in questions:
            fleet.ask("killed", fleet.router.url, question)
        timer.join()
    return {"control": control, **fleet.answers}


def start(
    stack: contextlib.ExitStack, console: Console, model: Path, runtime: Path, places: Places
) -> Fleet:
    """Start both nodes and the router."""
    console.print("starting two node services, two vLLM servers, and the router")
    token = runtime / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    shapes: dict[str, dict[str, object]] = {
        "prefill": {"block_size": 32},
        "decode": {"block_size": 128, "tensor_parallel_size": decode_ranks()},
    }
    addresses = {}
    for name in shapes:
        with places.inside(name):
            addresses[name] = f"{places.host(name)}:{free_port(places.host(name))}"
    services = {}
    for name, address in addresses.items():
        service = node_service(
            runtime / f"{name}.sock",
            LOGS / f"{name}-service.log",
            max_local_cpu_size="2GiB",
            peer_listen=address,
            peers=" ".join(addresses.values()),  # the same list for all nodes
            peer_token_file=token,
            remote_lookup_ttl_s=0.1,
            runtime_dir=runtime,
        )
        with places.inside(name):
            services[name] = stack.enter_context(service)
    servers = {}
    for name, shape in shapes.items():
        settings = {
            "service_address": str(services[name].socket),
            "chunk_size": CHUNK,
            "format": "portable",
            "lookup_deadline_ms": 1000,
            "promote_deadline_ms": 10_000,
        }
        options = COMMON | shape | {"kv_transfer_config": kvhaven(**settings)}
        log, host = LOGS / f"{name}-vllm.log", places.host(name)
        with places.inside(name):
            started = vllm_server(model, free_port(host), log, options, host=host)
            servers[name] = stack.enter_context(started)
    for one in servers.values():
        one.wait()
    host = places.host("router")
    port = free_port(host)
    command = [sys.executable, "-m", "kvhaven.cli", "route", "--listen", f"{host}:{port}"]
    command += ["--prefill", servers["prefill"].url]
    command += ["--decode", f"{servers['decode'].url}={addresses['decode']}"]
    router = stack.enter_context(server(command, port, LOGS / "router.log", host=host))
    router.wait()
    return Fleet(services, servers["prefill"], servers["decode"], router, console)


def decode_ranks() -> int:
    """Return the number of the decode engine's ranks."""
    return 2 if len(os.sched_getaffinity(0)) >= ENOUGH_CORES else 1


def warm_up(fleet: Fleet) -> None:
    """Let each engine serve a prompt: its first one is slow. Wait until the nodes are connected."""
    for number, one in enumerate((fleet.prefill, fleet.decode, fleet.router)):
        stream(one.url, f"This is asked before the first question. {number} " * 20, 2)
    for service in fleet.services.values():
        while not service.status()["tiers"]["peer"]["online"]:
            time.sleep(0.05)


def kill_node(fleet: Fleet) -> None:
    """Kill the prefill node: engine and service."""
    fleet.prefill.kill()
    fleet.services["prefill"].kill()


def stream(url: str, prompt: str, max_tokens: int, **more: object) -> tuple[float, str]:
    """Return the seconds to the first token of a streamed answer, and its text.

    `more` are further fields of the request.
    """
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    address = urlsplit(url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    with contextlib.closing(connection):
        begin = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise ProcessError(f"{url} answers {answer.status}: {answer.read()[:500]!r}")
        ttft, text = 0.0, ""
        for line in answer:
            event = line.decode().removeprefix("data: ").strip()
            if not event or event == "[DONE]":
                continue
            decoded: dict[str, Any] = json.loads(event)
            if "error" in decoded:
                raise ProcessError(f"{url} broke off: {decoded['error']}")
            ttft = ttft or time.perf_counter() - begin
            text += decoded["choices"][0]["text"]
    return ttft, text


def post(url: str) -> None:
    """Send an empty POST."""
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()


def wrong(answers: dict[str, list[Answer]]) -> list[str]:
    """Return a sentence for everything that is not as promised."""
    problems = []
    full = DOCUMENT_TOKENS // CHUNK
    for row, given in answers.items():
        for number, (answer, control) in enumerate(zip(given, answers["control"], strict=True)):
            if answer.text != control.text:
                problems.append(f"{row}, question {number}: {answer.text!r}, not {control.text!r}")
            if row in {"apart", "peer"} and answer.chunks < full:
                problems.append(f"{row}, question {number}: only {answer.chunks} chunks were hits")
    return problems


def summary(answers: dict[str, list[Answer]]) -> dict[str, dict[str, object]]:
    """Return the median time to first token of each row."""
    cold = statistics.median(answer.ttft for answer in answers["cold"])
    rows: dict[str, dict[str, object]] = {}
    for row, given in answers.items():
        ttft = statistics.median(answer.ttft for answer in given)
        slowest = max(answer.ttft for answer in given)
        texts = [answer.text for answer in given]
        identical = texts == [answer.text for answer in answers["control"]]
        rows[row] = {
            "ttft_s": round(ttft, 3),
            "slowest_s": round(slowest, 3),
            "sooner_than_cold": round(cold / ttft, 2),
            "identical": identical,
        }
    return rows


def print_table(console: Console, answers: dict[str, list[Answer]]) -> None:
    """Print the table."""
    table = Table("row", "what happens", "first token", "slowest", "sooner", "outputs")
    for row, found in summary(answers).items():
        outputs = "identical" if found["identical"] else "[bold red]differ[/]"
        times = (f"{found['ttft_s']} s", f"{found['slowest_s']} s")
        table.add_row(row, TITLES[row], *times, f"{found['sooner_than_cold']}x", outputs)
    console.print(table)
