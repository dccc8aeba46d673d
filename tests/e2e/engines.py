# SPDX-License-Identifier: Apache-2.0
"""Real engines and node services for the end-to-end tests."""

import contextlib
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from examples.demo.processes import (
    clean_environment,
    free_port,
    server_arguments,
    server_environment,
)
from kvhaven.client.control import connect
from kvhaven.errors import KVHavenError
from kvhaven.service.status import ServiceStatus
from tests.crash.node import eventually
from tests.e2e.zygote import Forked, Zygote

CHUNK = 64
"""Small chunks and blocks of 32 tokens, so that short prompts have many."""


PATIENT = {"lookup_deadline_ms": 10_000, "save_deadline_ms": 10_000, "promote_deadline_ms": 20_000}
"""For tests that expect hits: on a busy machine the default deadlines may make a miss of one."""

SMALL_SERVER: dict[str, Any] = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
}
"""Options of `vllm serve` with which prompts take several steps."""


@dataclass
class Engine:
    """A running engine; `ask` sends a command of `engine_process.Commands`."""

    process: Forked
    answers: Any
    log: Path

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command, whose answer is to be taken by `answer`."""
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the next answer."""
        line = self.answers.readline()
        if not line:
            raise AssertionError(f"the engine died; its log ends:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def generate(self, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[dict[str, Any]]:
        """Generate for prompts of token ids."""
        result: list[dict[str, Any]] = self.ask("generate", prompts=prompts, **arguments)
        return result

    def kill(self) -> None:
        """Kill -9 the engine and all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


_UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""Also with `enforce_eager`, vLLM compiles some functions at the first request, for seconds."""


def _environment() -> dict[str, str]:
    """Return the environment of all engines."""
    return os.environ | {
        **_UNCOMPILED,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
    }


_starting = threading.Lock()


@functools.cache
def _make_zygote() -> Zygote:
    return Zygote(_environment())


def _zygote() -> Zygote:
    """Return this pytest worker's zygote."""
    with _starting:
        return _make_zygote()


@contextlib.contextmanager
def engine(
    model: Path,
    log: Path,
    settings: dict[str, Any] | None,
    *,
    in_process: bool = False,
    program: str = "engine_process.py",
    threads: int | None = 1,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[Engine]:
    """Start an engine; `settings` are KVHaven's (None: off), `arguments` vLLM's.

    A setting that is None keeps KVHaven's own default.

    With `in_process` vLLM's engine core and worker are one process, as on CUDA with one rank.
    `program` is a file beside this one that answers commands. `threads` is how many compute
    (None: one for each core): with more, engines on the same cores wait for each other's threads.
    `environment` has further variables.
    """
    options: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": 32,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 512,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
    }
    if settings is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "KVHavenConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "chunk_size": CHUNK,
                "verify_memory": "always",
                "load_or_recompute": "always",
            }
            | PATIENT
            | settings,
        }
        extra = options["kv_transfer_config"]["kv_connector_extra_config"]
        for name in [name for name, value in extra.items() if value is None]:
            del extra[name]
    options |= arguments
    variables = _environment() | {
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(log.parent / "cache")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
    }
    if options.get("tensor_parallel_size", 1) > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    elif threads is not None:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    variables |= environment or {}
    read, write = os.pipe()
    with log.open("w") as output:
        process = _zygote().fork(
            Path(__file__).with_name(program),
            json.dumps(options),
            variables,
            answers=write,
            output=output.fileno(),
        )
    os.close(write)
    with os.fdopen(read) as answers:
        started = Engine(process, answers, log)
        try:
            assert started.answer()["ready"]
            yield started
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=120)
            started.kill()


class ForkedServer:
    """vLLM's HTTP server at `url`."""

    def __init__(self, process: Forked, url: str, log: Path) -> None:
        self.url = url
        self._process = process
        self._log = log

    def wait(self) -> None:
        """Wait until it is healthy."""
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.1)
                raise AssertionError(self._log.read_text()[-4000:])

    def kill(self) -> None:
        """Kill -9 it with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def forked_server(
    model: Path, log: Path, options: Mapping[str, object], cores: str = ""
) -> Iterator[ForkedServer]:
    """Start what `vllm_server` starts, sooner: in a fork of a process that imported vLLM."""
    port = free_port()
    read, write = os.pipe()
    with log.open("w") as output:
        process = _zygote().fork(
            Path(__file__).with_name("server_process.py"),
            json.dumps(server_arguments(model, port, options)),
            clean_environment() | server_environment(options, cores) | _UNCOMPILED,
            answers=write,
            output=output.fileno(),
        )
    os.close(write)
    os.close(read)
    server = ForkedServer(process, f"http://127.0.0.1:{port}", log)
    try:
        yield server
    finally:
        server.kill()
        process.stdin.close()


@contextlib.contextmanager
def peered_services(
    short_dir: Path, logs: Path, ports: Sequence[int], **settings: object
) -> Iterator[list["NodeService"]]:
    """Run a node service at each of these ports, each of which reads the others' memory."""
    services = [
        NodeService(
            short_dir / str(number),
            logs / f"service-{number}.log",
            max_local_cpu_size="64MiB",
            peer_listen=f"127.0.0.1:{port}",
            peers=" ".join(f"127.0.0.1:{port}" for port in ports),  # the same on all nodes
            **settings,
        )
        for number, port in enumerate(ports)
    ]
    try:
        for service in services:
            service.start()
        yield services
    finally:
        for service in services:
            service.stop(signal.SIGKILL)


class NodeService:
    """`kvhaven serve` in a process, without its HTTP API and patient, unless settings differ."""

    def __init__(self, socket: Path, log: Path, **settings: object) -> None:
        self.socket = socket
        self._log = log
        own = {"api_listen": "off", "promote_deadline_ms": PATIENT["promote_deadline_ms"]}
        self._environment = os.environ | {
            f"KVHAVEN_{name.upper()}": str(value) for name, value in (own | settings).items()
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self._log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvhaven.cli", "serve", "--socket", str(self.socket)],
                stdout=output,
                stderr=output,
                env=self._environment,
            )
        end = time.monotonic() + 30
        while True:
            try:
                self.status()
            except KVHavenError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise AssertionError(self._log.read_text()) from None
                time.sleep(0.05)
            else:
                return

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal it and wait for its end."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=120)
            self.process = None

    def status(self) -> ServiceStatus:
        """Return its status."""
        with connect(str(self.socket)) as control:
            return msgspec.json.decode(control.status(), type=ServiceStatus)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        with connect(str(self.socket)) as control:
            assert control.flush(60) == 0

    def await_ranks(self, count: int = 1) -> None:
        """Wait until so many ranks can copy to and from the whole arena: then all is saved."""
        while True:
            status = self.status()
            ready = [member.ready_bytes for member in status.members if "rank" in member.role]
            whole = status.arena_allocated_bytes == status.arena_planned_bytes
            if whole and len(ready) == count and min(ready) >= status.arena_allocated_bytes:
                return
            time.sleep(0.05)

    def await_tiers(self) -> None:
        """Wait until its tiers are online: before that, what they hold is not found."""
        while not all(tier.online for tier in self.status().tiers.values()):
            time.sleep(0.05)

    def settled(self, timeout_s: float = 15) -> ServiceStatus:
        """Wait until nothing is held any more; return the status then (or at the timeout)."""
        end = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if not held_bytes(status) or time.monotonic() > end:
                return status
            time.sleep(0.05)


def stored_chunks(runtime_dir: Path) -> int:
    """Return how many chunks an embedded service has on disk, when everything is written."""
    with connect(_embedded(runtime_dir)) as control:
        assert control.flush(60) == 0
    return _on_disk(runtime_dir)


def await_stored(runtime_dir: Path, chunks: int) -> None:
    """Wait until an embedded service that has just started knows so many chunks on disk."""

    def known() -> bool:
        # The service of the engine before may still be ending.
        return len([*runtime_dir.glob("engine-*.sock")]) == 1 and _on_disk(runtime_dir) == chunks

    eventually(known, 60)


def _on_disk(runtime_dir: Path) -> int:
    with connect(_embedded(runtime_dir)) as control:
        status = msgspec.json.decode(control.status(), type=ServiceStatus)
    return sum(one.chunks.get("disk", 0) for one in status.namespaces)


def _embedded(runtime_dir: Path) -> str:
    (address,) = runtime_dir.glob("engine-*.sock")
    return str(address)


def generate(
    at: Engine, prompt: list[int], parameters: dict[str, Any], max_tokens: int
) -> list[dict[str, Any]]:
    """Generate for a prompt, with parameters for KV transfers."""
    extra = {"extra_args": {"kv_transfer_params": parameters}}
    return at.generate([prompt], max_tokens=max_tokens, sampling=extra)


def held_bytes(status: ServiceStatus) -> dict[str, int]:
    """Return what is leased, reserved, promoting, or waiting to be proven free."""
    catalog = status.catalog
    held = {
        "leases": catalog.leases,
        "leased": catalog.leased_bytes,
        "reserved": catalog.reserved_bytes,
        "promoting": catalog.promoting_bytes,
        "retired": catalog.retired_bytes,
        "quarantined": catalog.quarantined_bytes,
    }
    return {name: amount for name, amount in held.items() if amount}


def assert_nothing_held(status: ServiceStatus) -> None:
    """Assert that nothing leaked: what is used is what is resident."""
    assert held_bytes(status) == {}
    resident = sum(namespace.bytes["memory"] for namespace in status.namespaces)
    assert status.arena_used_bytes == resident


def prompts(seed: int, count: int, *, least: int = 100, most: int = 700) -> list[list[int]]:
    """Return prompts of random tokens; every other one begins like the one before it."""
    chance = random.Random(seed)
    result: list[list[int]] = []
    for index in range(count):
        shared = result[-1][: chance.randrange(len(result[-1]))] if index % 2 else []
        length = max(chance.randrange(least, most), len(shared) + 1)
        result.append(shared + [chance.randrange(250) for _ in range(length - len(shared))])
    return result


def difference(one: float, other: float) -> float:
    """Return how far two log-probabilities are apart: infinitely if one is not a number.

    A difference that is not a number is overlooked: it is not larger than any other.
    """
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def assert_same(found: Sequence[dict[str, Any]], control: Sequence[dict[str, Any]]) -> None:
    """Assert that outputs equal the control's: the tokens, and the first log-probability.

    In float32 right KV differs by rounding alone (below 1e-3), wrong KV by far more.
    """
    assert len(found) == len(control)
    for one, other in zip(found, control, strict=True):
        assert one["tokens"] == other["tokens"]
        assert difference(one["logprob"], other["logprob"]) < 1e-3
