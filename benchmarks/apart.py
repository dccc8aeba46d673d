# SPDX-License-Identifier: Apache-2.0
"""Two nodes with real vLLM and the router: prefill and decode apart, and KV from the other node.

The nodes' services are in two network namespaces. All KV between them goes over a link, which `tbf`
limits (root only; else loopback, and what needs a limit is skipped). Prompts have 8,200 tokens, one
document each. Values are medians of seconds to the first token; outputs must be equal.

- `ttft.cold`, `ttft.memory`: the decode node alone, without KV and with it in its own memory.
- `pd.ttft`: through the router, over an unlimited link. Limit: 1.10 of the prefill node's own time
  for the same prompt.
- `peer.ttft`: the decode node alone, with KV in the prefill node's memory, over 10 Gbit. Limit: 1/8
  of cold. `peer.ttft.fs`: the same; its limit is the time with KV in a directory of the prefill
  node, which the decode node has mounted over the same link (SFTP without encryption; skipped
  without sshfs). `peer.ttft.cache`: its limit is the time with KV in a directory of its own, in the
  page cache, for which nothing is sent. These alternate, with services that have just started.
- `pd.hidden`: part of the transfer at 200 Mbit that the time to the first token does not show. The
  benchmark sends both requests itself, as the router would: `1 - (second - memory) / (peer -
  memory)`, where `second` is the time from the prefill node's answer to the first token, so that
  the duration of the prefill, which varies, is not in it.
- `pd.tail`: tokens that the decode node computes of a prompt that the prefill node has computed,
  for prompts of every length modulo the chunk size. Limit: 1.
- `pd.dead`: how much longer a prompt takes through the router than at the decode node alone, if the
  prefill node, engine and service, is killed in the middle of it: the median of several kills.
  `pd.dead.most`: the longest of them. `pd.dead.after`: the next prompts. Limit: 3 s.
"""

import contextlib
import itertools
import json
import random
import statistics
import string
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from benchmarks.mounts import NoMountError, mounted
from benchmarks.networks import Link, NoLinkError, link
from benchmarks.rates import empty_folder
from benchmarks.results import BENCH, Result, at_least, at_most, plain
from examples.demo.demo import CHUNK
from examples.demo.model import make_model
from examples.demo.processes import (
    NodeService,
    ProcessError,
    Server,
    free_port,
    kvhaven,
    node_service,
    server,
    vllm_server,
)
from examples.demo.text import make_document, make_questions
from examples.fleet.fleet import post, stream
from kvhaven.router.body import RequestBody

_DOCUMENT_TOKENS: Final = 8100
_PROMPTS: Final = 5
_OUTPUT_TOKENS: Final = 8
_PORT: Final = 7420
_FAST: Final = "10gbit"
_SLOW: Final = "200mbit"
_KILL_AT: Final = 0.3
"""Part of the usual duration of a prefill."""
_RESTARTS: Final = 3
_KILLS: Final = 5
_PATIENCE_S: Final = 60.0
_SETTLED_S: Final = 0.2
"""Time without a new save after which a node is taken to be empty."""
_OPTIONS: Final = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 16384,
    "max_num_batched_tokens": 1024,
    "served_model_name": "demo",
}
_PATIENT: Final = {"lookup_deadline_ms": 1000, "promote_deadline_ms": 60_000}


def measure(say: Callable[[str], None]) -> list[Result]:
    """Start both nodes, ask, and kill one of them."""
    with contextlib.ExitStack() as stack:
        try:
            ends: Link | None = stack.enter_context(link())
        except NoLinkError as reason:
            ends = None
            say(f"skipped: pd.hidden: {reason}; the nodes are connected by loopback")
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhaven-bench-")))
        folder = stack.enter_context(empty_folder("apart"))
        nodes = _Nodes(stack, runtime, ends)
        say("starting two vLLM servers, their services and the router")
        nodes.start()
        return _Measurement(nodes, ends, folder, say).run()


class _Nodes:
    """A prefill node and a decode node, and the router."""

    def __init__(self, stack: contextlib.ExitStack, runtime: Path, ends: Link | None) -> None:
        self._stack = stack
        self._runtime = runtime
        self._ends = ends
        hosts = ("127.0.0.1", "127.0.0.1")
        ports = (free_port(), free_port())
        if ends is not None:
            hosts, ports = (ends.near.address, ends.far.address), (_PORT, _PORT)
        self.addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        token = runtime / "token"
        token.write_text("a token of both nodes, for this benchmark")
        token.chmod(0o600)
        self.services: list[NodeService] = []
        self.engines: list[Server] = []
        self.router = ""
        self._ports = (free_port(), free_port())

    def start(self) -> None:
        """Start everything, and serve a first prompt each."""
        self.services = [self._service(number, **self._shared(number)) for number in (0, 1)]
        self.engines = [self._engine(number) for number in (0, 1)]
        for one in self.engines:
            one.wait()
        port = free_port()
        line = [sys.executable, "-m", "kvhaven.cli", "route", "--listen", f"127.0.0.1:{port}"]
        line += ["--prefill", self.engines[0].url]
        line += ["--decode", f"{self.engines[1].url}={self.addresses[1]}"]
        router = self._stack.enter_context(server(line, port, BENCH / "apart-router.log"))
        router.wait()
        self.router = router.url
        for number, url in enumerate([*(one.url for one in self.engines), router.url]):
            stream(url, f"This is asked before the first question. {number} " * 20, 2)
        _until(self._connected, "the nodes are not connected")

    def empty(self, *numbers: int) -> None:
        """Empty the memory of these nodes, and the prefix caches of both engines."""
        for number in numbers:
            _until(self._emptied(number), "a node is not empty")
        for one in self.engines:
            with contextlib.suppress(OSError):  # it may have been killed
                post(f"{one.url}/reset_prefix_cache")

    def _emptied(self, number: int) -> Callable[[], bool]:
        """Return a check that empties a node: saves may still end after their request's answer."""
        service = self.services[number]

        def check() -> bool:
            if not service.status()["catalog"]["reserved_bytes"]:
                service.clear()
                time.sleep(_SETTLED_S)
            catalog = service.status()["catalog"]
            return not (catalog["reserved_bytes"] or catalog["resident_chunks"])

        return check

    def kill_prefill(self) -> None:
        """Kill engine and service of the prefill node."""
        self.engines[0].kill()
        self.services[0].kill()

    def restart_prefill(self) -> None:
        """Start engine and service of the prefill node again, until the router uses them."""
        self.services[0] = self._service(0, **self._shared(0))
        self.engines[0] = self._engine(0)
        self.engines[0].wait()
        _until(self._connected, "the nodes are not connected")
        _until(self._routed, "the router does not use the prefill node")

    def restart_decode(self, **settings: object) -> None:
        """Start another service at the decode node; with `settings`, it has no other node."""
        self.services[1].stop()
        self.services[1] = self._service(1, **(settings or self._shared(1)))
        _until(lambda: len(self.services[1].status()["members"]) > 1, "no engine attached")
        if not settings:
            _until(self._connected, "the nodes are not connected")

    def hits(self) -> int:
        """Return the chunks that the decode node's engine was given."""
        catalog = self.services[1].status()["catalog"]
        return int(catalog["hit_chunks"]) + int(catalog["awaited_chunks"])

    def _connected(self) -> bool:
        return all(one.status()["tiers"]["peer"]["online"] for one in self.services)

    def _routed(self) -> bool:
        with urllib.request.urlopen(f"{self.router}/health", timeout=60) as answer:
            return all(node["up"] for node in json.load(answer)["prefill"])

    def _shared(self, number: int) -> dict[str, object]:
        return {
            "peer_listen": self.addresses[number],
            "peers": " ".join(self.addresses),
            "peer_token_file": self._runtime / "token",
        }

    def _service(self, number: int, **settings: object) -> NodeService:
        where: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._ends is not None:
            where = (self._ends.near, self._ends.far)[number].inside()
        log = BENCH / f"apart-service-{number}.log"
        common = {"max_local_cpu_size": "1GiB", "runtime_dir": self._runtime}
        started = node_service(self._socket(number), log, **common, **settings)
        with where:
            return self._stack.enter_context(started)

    def _socket(self, number: int) -> Path:
        return self._runtime / f"{number}.sock"

    def _engine(self, number: int) -> Server:
        # The link may be slower than the prefill, and it is the transfer that is measured.
        more = _PATIENT | {"load_or_recompute": "always"}
        config = kvhaven(service_address=str(self._socket(number)), chunk_size=CHUNK, **more)
        options = _OPTIONS | {"kv_transfer_config": config}
        log = BENCH / f"apart-vllm-{number}.log"
        started = vllm_server(make_model(BENCH / "model"), self._ports[number], log, options)
        return self._stack.enter_context(started)


class _Measurement:
    """The passes over all prompts."""

    def __init__(
        self, nodes: _Nodes, ends: Link | None, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._nodes, self._ends, self._folder, self._say = nodes, ends, folder, say
        self._texts: dict[str, str] = {}
        self._times: dict[str, list[float]] = {}
        self._computed = 0.0
        """Tokens that the decode node computed of a short prompt, on average."""

    def run(self) -> list[Result]:
        """Return all results."""
        prompts = _prompts()
        for engine in self._nodes.engines:  # the first long prompt takes longer
            stream(engine.url, next(prompts), 1)
        for _ in range(_PROMPTS):
            self._pass(next(prompts))
            if self._ends is not None:
                self._slow_pass(self._ends, next(prompts))
        self._tails()
        with self._mounted() as mount:
            self._directory(list(islice(prompts, _RESTARTS)), mount)
        for number in range(_KILLS):
            if number:
                self._nodes.restart_prefill()
                stream(self._nodes.engines[0].url, next(prompts), 1)
            self._kill(next(prompts), next(prompts))
        return self._results()

    def _pass(self, prompt: str) -> None:
        """Ask a prompt in each way."""
        nodes = self._nodes
        if self._ends is not None:
            self._ends.limit(_FAST)
        nodes.empty(0, 1)
        self._ask("prefill", prompt, nodes.engines[0].url)
        nodes.empty()
        self._ask("peer", prompt, cached=True)
        nodes.empty()
        self._ask("memory", prompt, cached=True)
        if self._ends is not None:
            self._ends.limit("")
        nodes.empty(0, 1)
        self._ask("pd", prompt, nodes.router, cached=True)
        nodes.empty(0, 1)
        self._ask("cold", prompt)

    def _slow_pass(self, ends: Link, prompt: str) -> None:
        """Ask a prompt over the slow link."""
        ends.limit(_SLOW)
        self._nodes.empty(0, 1)
        self._ask_apart(prompt)
        self._nodes.empty(1)
        self._ask("slow.peer", prompt, cached=True)
        self._nodes.empty()
        self._ask("slow.memory", prompt, cached=True)
        ends.limit("")

    def _ask_apart(self, prompt: str) -> None:
        """Have the prefill node compute a prompt, then the decode node answer it."""
        fields = {"model": "demo", "prompt": prompt, "temperature": 0}
        body = RequestBody("/v1/completions", json.dumps(fields).encode())
        prefill = body.for_prefill(self._nodes.addresses[1])
        request = urllib.request.Request(
            f"{self._nodes.engines[0].url}/v1/completions",
            prefill,
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as answer:
            params = json.load(answer)["kv_transfer_params"]
        self._note("slow.first", time.perf_counter() - began)
        self._ask("slow.second", prompt, cached=True, kv_transfer_params=params)

    def _tails(self) -> None:
        """Ask short prompts of all lengths modulo the chunk size through the router."""
        self._nodes.empty(0, 1)
        chance = random.Random(1)
        before = _tokens_of(self._nodes.engines[1])
        for length in range(CHUNK + 1, 2 * CHUNK + 1):
            stream(self._nodes.router, "".join(chance.choices(string.ascii_letters, k=length)), 1)
        prompts, hits = (
            now - then for now, then in zip(_tokens_of(self._nodes.engines[1]), before, strict=True)
        )
        self._computed = (prompts - hits) / CHUNK
        self._say(f"tails: {prompts:.0f} tokens, {hits:.0f} were hits")

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[Path | None]:
        """Yield where the decode node has the directory mounted over the link, if it can."""
        with contextlib.ExitStack() as stack:
            mount: Path | None = None
            (self._folder / "kv").mkdir()
            if self._ends is not None:
                try:
                    at = self._folder / "mount"
                    mount = stack.enter_context(mounted(self._folder / "kv", at, self._ends))
                except NoMountError as reason:
                    self._say(f"skipped: peer.ttft.fs: {reason}")
            yield mount

    def _directory(self, prompts: Sequence[str], mount: Path | None) -> None:
        """Ask prompts from a directory, and from the other node, by services that just started."""
        nodes, folder = self._nodes, self._folder / "kv"
        if self._ends is not None:
            self._ends.limit(_FAST)
        for prompt in prompts:
            nodes.restart_decode(remote_url=f"file://{folder}")
            nodes.empty()
            self._ask("cold", prompt)
            nodes.services[1].flush()
            self._ask_twice("cache", prompt)
            if mount is not None:
                nodes.restart_decode(remote_url=f"file://{mount}")
                self._ask_twice("fs", prompt)
            nodes.restart_decode()
            stream(nodes.engines[0].url, prompt, 1)
            self._ask_twice("started.peer", prompt)

    def _ask_twice(self, row: str, prompt: str) -> None:
        """Ask a prompt that is not in the decode node's memory."""
        for _ in range(2):
            self._nodes.services[1].clear("memory")
            self._nodes.empty()
            self._ask(row, prompt, cached=True)

    def _kill(self, prompt: str, later: str) -> None:
        """Kill the prefill node in the middle of a prefill, and ask on after that."""
        self._nodes.empty(0, 1)
        usual_s = statistics.median(self._times["prefill"])
        timer = threading.Timer(_KILL_AT * usual_s, self._nodes.kill_prefill)
        timer.start()
        for row, asked in (("dead", prompt), ("dead.after", later)):
            self._ask(row, asked, self._nodes.router)
            self._nodes.empty(1)
            self._ask(f"{row}.control", asked)
            self._nodes.empty(1)
        timer.join()

    def _ask(
        self, row: str, prompt: str, url: str = "", *, cached: bool = False, **more: object
    ) -> None:
        """Ask a prompt, of the decode node unless at `url`; `cached`: its full chunks are hits."""
        before = self._nodes.hits()
        ttft, text = stream(url or self._nodes.engines[1].url, prompt, _OUTPUT_TOKENS, **more)
        hits = self._nodes.hits() - before
        if text != self._texts.setdefault(prompt, text):
            raise ProcessError(f"{row}: the output differs: {text!r}")
        if cached != (hits >= _DOCUMENT_TOKENS // CHUNK):
            raise ProcessError(f"{row}: {hits} chunks were hits")
        self._note(row, ttft)

    def _note(self, row: str, seconds: float) -> None:
        self._times.setdefault(row, []).append(seconds)
        self._say(f"{row}: {seconds:.3f} s")

    def _results(self) -> list[Result]:
        median = {row: statistics.median(times) for row, times in self._times.items()}
        cold, started = median["cold"], median["started.peer"]
        delays, later = (
            [
                dead - control
                for dead, control in zip(
                    self._times[row], self._times[f"{row}.control"], strict=True
                )
            ]
            for row in ("dead", "dead.after")
        )
        own, least = "1.10 times the prefill node's own time", "1/8 of the decode node's cold time"
        alone = "3 s more than the decode node alone"
        results = [
            plain("ttft.cold", cold, "s", len(self._times["cold"])),
            plain("ttft.memory", median["memory"], "s", _PROMPTS),
            at_most("pd.ttft", median["pd"], "s", 1.1 * median["prefill"], _PROMPTS, own),
            at_most("peer.ttft", median["peer"], "s", cold / 8, _PROMPTS, least),
            at_most("peer.ttft.cache", started, "s", median["cache"], 2 * _RESTARTS, "page cache"),
            at_most("pd.dead", statistics.median(delays), "s", 3.0, _KILLS, alone),
            at_most("pd.dead.most", max(delays), "s", 3.0, _KILLS, alone),
            at_most("pd.dead.after", statistics.median(later), "s", 3.0, _KILLS, alone),
        ]
        results.append(
            at_most("pd.tail", self._computed, "tokens", 1, CHUNK, "1 token for every length")
        )
        if "fs" in median:
            limit = "a directory over the same link"
            results.append(
                at_most("peer.ttft.fs", started, "s", median["fs"], 2 * _RESTARTS, limit)
            )
        if self._ends is not None:
            names = ("slow.second", "slow.peer", "slow.memory")
            rows = zip(*(self._times[name] for name in names), strict=True)
            hidden = [1 - (second - memory) / (peer - memory) for second, peer, memory in rows]
            transfer = median["slow.peer"] - median["slow.memory"]
            results += [
                at_least("pd.hidden", hidden, "of transfer", [1.0], 0.8, "the whole transfer"),
                plain("pd.hidden.transfer", transfer, "s", _PROMPTS),
                plain("pd.hidden.prefill", median["slow.first"], "s", _PROMPTS),
            ]
        return results


def _prompts() -> Iterator[str]:
    """Yield prompts that have nothing in common.

    The router remembers which node has answered a prompt, and hears nothing of emptied memories.
    """
    for seed in itertools.count(1):
        yield make_questions(make_document(_DOCUMENT_TOKENS, seed), 1)[0].prompt


def _tokens_of(engine: Server) -> tuple[float, float]:
    """Return the tokens of all prompts, and how many of them were hits, by vLLM's counters."""
    names = ("vllm:prompt_tokens_total{", "vllm:external_prefix_cache_hits_total{")
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    prompts, hits = (
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        for name in names
    )
    return prompts, hits


def _until(met: Callable[[], object], problem: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not met():
        if time.monotonic() > end:
            raise ProcessError(f"{problem} within {_PATIENCE_S:.0f} s")
        time.sleep(0.05)
