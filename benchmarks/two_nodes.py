# SPDX-License-Identifier: Apache-2.0
"""`ttft.<tier>`: speedup of a node by KV that another node computed, in real vLLM.

Two engines each have their own node service and arena. Node A computes three prompts of 8,200
tokens on the same document, and stores them in a shared directory, S3 and Redis together. Node B's
service is restarted before each prompt, with one of these tiers, so its arena is empty and has no
lookup results: it looks up, reads, verifies and loads.

- `ttft.cold`: seconds to the first token at node B without a tier, alternating with the others.
- `ttft.fs`, `ttft.s3`, `ttft.redis`: from a tier that only A wrote to. Limit: 1/5 of cold.
- `ttft.disk`: from B's own disk, where an earlier service of B stored the prompts; the same limit.

All outputs are compared with those of A, and the cache must cover all full chunks.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.rates import empty_folder
from benchmarks.results import BENCH, Result, at_most, plain
from benchmarks.servers import s3_bucket
from benchmarks.turns import ask, warm_up
from examples.demo.demo import CHUNK, PATIENT, QUESTIONS
from examples.demo.model import make_model
from examples.demo.processes import (
    Engine,
    NodeService,
    ProcessError,
    engine,
    kvhaven,
    node_service,
)
from examples.demo.text import make_document, make_questions
from tests import servers

_DOCUMENT_TOKENS = 8100
_PASSES = 3
_TIMES = 5
_ATTACH_S = 30.0
_SETTLE_S = 1.0
"""Longer than service and engine need to populate their mappings of a new arena."""

_Settings = Mapping[str, object]


def measure(say: Callable[[str], None]) -> list[Result]:
    """Compute on one node, then send the prompts to the other."""
    with contextlib.ExitStack() as stack:
        runtime = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhaven-bench-")))
        folder = stack.enter_context(empty_folder("two-nodes"))
        shared = dict(_shared_tiers(stack, folder, say))
        nodes = [_Node(runtime / f"{name}.sock", BENCH / f"two-nodes-{name}") for name in "ab"]
        say("starting two vLLM engines")
        model = make_model(BENCH / "model")
        engines = [stack.enter_context(node.engine(model)) for node in nodes]
        warm_up(*engines)
        return _Measurement(nodes, engines, shared, folder / "disk", say).run()


def _shared_tiers(
    stack: contextlib.ExitStack, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, _Settings]]:
    """Yield the settings of each shared tier whose server is available."""
    (folder / "shared").mkdir()
    yield "fs", {"remote_url": f"file://{folder}/shared"}
    try:
        bucket = stack.enter_context(s3_bucket())
        yield "s3", {"remote_url": f"s3://{bucket.name}", "s3_endpoint_url": bucket.url}
    except servers.MissingServerError as missing:
        say(f"skipped: {missing}")
    try:
        yield "redis", {"remote_url": stack.enter_context(servers.redis())}
    except servers.MissingServerError as missing:
        say(f"skipped: {missing}")


class _Node:
    """A node: the socket of its service and engine, and their logs."""

    def __init__(self, socket: Path, log: Path) -> None:
        self._socket = socket
        self._log = log

    def engine(self, model: Path) -> contextlib.AbstractContextManager[Engine]:
        """Start the node's engine, which attaches to each service that starts."""
        config = kvhaven(service_address=str(self._socket), **PATIENT)
        return engine(model, self._log.with_suffix(".engine.log"), kv_transfer_config=config)

    @contextlib.contextmanager
    def service(self, attached: Engine, settings: _Settings) -> Iterator[NodeService]:
        """Run a service with an empty arena, to which the engine is attached."""
        log = self._log.with_suffix(".service.log")
        common = {"max_local_cpu_size": "512MiB", "runtime_dir": self._socket.parent}
        with node_service(self._socket, log, **common, **settings) as service:
            attached.resume()
            end = time.monotonic() + _ATTACH_S
            while len(service.status()["members"]) < 2:
                if time.monotonic() > end:
                    raise ProcessError(f"no engine attached within {_ATTACH_S:.0f} s")
                time.sleep(0.05)
            time.sleep(_SETTLE_S)
            attached.pause()
            yield service


class _Measurement:
    """The passes over all prompts. `_outputs` are those of node A."""

    def __init__(
        self,
        nodes: list[_Node],
        engines: list[Engine],
        shared: Mapping[str, _Settings],
        disk: Path,
        say: Callable[[str], None],
    ) -> None:
        self._a, self._b = zip(nodes, engines, strict=True)
        self._shared = shared
        self._disk: _Settings = {"local_disk": disk}
        self._say = say
        document = make_document(_DOCUMENT_TOKENS)
        self._prompts = [question.prompt for question in make_questions(document, QUESTIONS)]
        self._outputs: list[list[int]] = []

    def run(self) -> list[Result]:
        """Return all results."""
        self._fill()
        tiers: dict[str, _Settings] = {"cold": {}, "disk": self._disk, **self._shared}
        times: dict[str, list[float]] = {name: [] for name in tiers}
        for _ in range(_PASSES):
            for number in range(len(self._prompts)):
                for name, settings in tiers.items():
                    times[name].append(self._ask_b(number, settings))
        medians = {name: statistics.median(of_tier) for name, of_tier in times.items()}
        results = []
        for name, of_tier in times.items():
            value, count = medians[name], len(of_tier)
            self._say(
                f"{name}: {value:.3f} s ({min(of_tier):.3f} to {max(of_tier):.3f}), "
                f"{medians['cold'] / value:.1f} times as fast as cold, "
                f"{value / medians['disk']:.2f} times the time of disk"
            )
            if name == "cold":
                results.append(plain("ttft.cold", value, "s", count))
            else:
                limit, what = medians["cold"] / _TIMES, f"ttft.cold / {_TIMES}"
                results.append(at_most(f"ttft.{name}", value, "s", limit, count, what))
        return results

    def _fill(self) -> None:
        """Compute the prompts; store them from A in all shared tiers, and from B on its disk."""
        every: dict[str, object] = {}
        for settings in self._shared.values():
            urls = f"{every.get('remote_url', '')} {settings['remote_url']}".strip()
            every |= {**settings, "remote_url": urls}
        for (node, attached), settings in ((self._a, every), (self._b, self._disk)):
            outputs = []
            with node.service(attached, settings) as service:
                for prompt in self._prompts:
                    service.clear("memory")
                    outputs.append(ask(attached, prompt).tokens)
                service.flush()
                stored = {name: tier["writes"] for name, tier in service.status()["tiers"].items()}
            self._say(f"computed and stored: {stored}")
            if self._outputs not in ([], outputs):
                raise ProcessError("the two engines compute different outputs")
            self._outputs = outputs

    def _ask_b(self, number: int, settings: _Settings) -> float:
        """Return the seconds to the first token at node B, with a new service."""
        node, attached = self._b
        prompt = self._prompts[number]
        with node.service(attached, settings) as service:
            answer = ask(attached, prompt)
            tiers = service.status()["tiers"]
        if answer.tokens != self._outputs[number]:
            raise ProcessError(f"with {settings} the output differs from node A's")
        computed = answer.sources["computed"]
        wanted = CHUNK if settings else answer.prompt_tokens
        if computed > wanted or (not settings and computed != wanted):
            raise ProcessError(f"with {settings}, {computed} tokens were computed; {tiers}")
        return answer.ttft
