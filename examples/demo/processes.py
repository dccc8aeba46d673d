# SPDX-License-Identifier: Apache-2.0
"""Child processes of the demo: vLLM engines and node services.

Each leads a process group, which `kill` ends as a whole. The kernel kills it if this process dies
(`PR_SET_PDEATHSIG`), so no process is left behind.
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from kvhaven.client.control import connect
from kvhaven.errors import KVHavenError

_ROOT = Path(__file__).resolve().parents[2]
_START_S = 180.0
_SERVICE_START_S = 30.0
_STOP_S = 20.0
_LOG_LINES = 25
_PR_SET_PDEATHSIG = 1
_PORTS = range(15_000, 32_000)
_libc = ctypes.CDLL(None)


class ProcessError(Exception):
    """A child process ended or did not answer; the message has the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What an engine answered; see `engine.py`."""

    ttft: float
    total: float
    tokens: list[int]
    text: str
    prompt_tokens: int
    sources: dict[str, int]


class Engine:
    """A vLLM engine in a child process. Use `engine`, which ends it.

    The constructor returns immediately; the first `ask` or `ready` waits until the engine serves.
    """

    def __init__(self, model: Path, log: Path, options: Mapping[str, object]) -> None:
        self._log = log
        self._is_ready = False
        environment = clean_environment() | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": engine_cores(),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # The first is for connectors of the benchmarks.
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])
            ),
        }
        script = Path(__file__).with_name("engine.py")
        read, write = os.pipe()
        try:
            self._process = _start(
                [sys.executable, str(script), str(write), str(model), json.dumps(options)],
                log,
                environment,
                stdin=subprocess.PIPE,
                pass_fds=(write,),
            )
        finally:
            os.close(write)
        self._answers: IO[str] = os.fdopen(read)

    def ready(self) -> None:
        """Wait until it serves. Raises `ProcessError`."""
        if not self._is_ready:
            self._receive()
            self._is_ready = True

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Serve one request alone. Raises `ProcessError`."""
        self.ready()
        assert self._process.stdin is not None
        line = json.dumps({"prompt": prompt, "max_tokens": max_tokens})
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ProcessError(f"vLLM ended\n{_tail(self._log)}") from None
        return Answer(**self._receive())

    def pause(self) -> None:
        """Stop its processes (SIGSTOP), so that its polling uses no CPU, until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue its processes after `pause`, if they still run."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to exit, and wait."""
        self.resume()
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        _await_end(self._process)
        self.kill()

    def kill(self) -> None:
        """Kill it with all its processes (kill -9)."""
        _kill_group(self._process)
        self._answers.close()

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise ProcessError(f"vLLM ended\n{_tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def engine(model: Path, log: Path, **options: object) -> Iterator[Engine]:
    """Start an engine; `options` are arguments of vLLM's `LLM`. It is killed on exit."""
    started = Engine(model, log, options)
    try:
        yield started
        started.stop()
    finally:
        started.kill()


def kvhaven(**settings: object) -> dict[str, object]:
    """Return the `kv_transfer_config` that makes vLLM use KVHaven with these settings."""
    return {
        "kv_connector": "KVHavenConnector",
        "kv_connector_module_path": "kvhaven.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


class NodeService:
    """`kvhaven serve` in a child process. Use `node_service`, which ends it."""

    def __init__(self, socket: Path, log: Path, settings: Mapping[str, object]) -> None:
        self.socket = socket
        self._log = log
        environment = clean_environment() | {
            f"KVHAVEN_{name.upper()}": str(value)
            for name, value in ({"api_listen": "off"} | dict(settings)).items()
        }
        command = [sys.executable, "-m", "kvhaven.cli", "serve", "--socket", str(socket)]
        self._process = _start(command, log, environment)

    def wait(self) -> None:
        """Wait until it answers. Raises `ProcessError`."""
        end = time.monotonic() + _SERVICE_START_S
        while True:
            try:
                self.status()
            except KVHavenError as error:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise ProcessError(
                        f"the node service does not answer: {error}\n{_tail(self._log)}"
                    ) from error
                time.sleep(0.02)
            else:
                return

    def status(self) -> dict[str, Any]:
        """Return its status (the JSON of `service.status.ServiceStatus`)."""
        with connect(str(self.socket)) as control:
            status: dict[str, Any] = json.loads(control.status())
            return status

    def flush(self) -> None:
        """Wait until all it holds is stored in its tiers. Raises `ProcessError`."""
        with connect(str(self.socket)) as control:
            if left := control.flush(30):
                raise ProcessError(f"{left} writes to disk are undone\n{_tail(self._log)}")

    def clear(self, tier: str = "") -> None:
        """Drop all chunks from one tier (`memory`, `disk`), or from everywhere."""
        with connect(str(self.socket)) as control:
            control.clear(tier=tier)

    def pause(self) -> None:
        """Stop it (SIGSTOP) until `resume`: it neither answers nor ends."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue it after `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ask it to exit, and wait."""
        self._process.terminate()
        _await_end(self._process)
        self.kill()

    def kill(self) -> None:
        """Kill it (kill -9)."""
        _kill_group(self._process)


@contextlib.contextmanager
def node_service(socket: Path, log: Path, **settings: object) -> Iterator[NodeService]:
    """Start a node service with these settings and wait for it. It is killed on exit."""
    started = NodeService(socket, log, settings)
    try:
        started.wait()
        yield started
        started.stop()
    finally:
        started.kill()


class Server:
    """A process that serves HTTP at `url`. Use `server`, which ends it."""

    def __init__(
        self, command: list[str], address: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.url = f"http://{address}"
        self._log = log
        self._process = _start(command, log, clean_environment() | dict(environment))

    def wait(self) -> None:
        """Wait until `/health` is fine. Raises `ProcessError`."""
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            if self._process.poll() is not None or time.monotonic() > end:
                raise ProcessError(f"{self.url} does not answer\n{_tail(self._log)}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill it with all its processes (kill -9)."""
        _kill_group(self._process)


@contextlib.contextmanager
def server(
    command: list[str],
    port: int,
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    host: str = "127.0.0.1",
) -> Iterator[Server]:
    """Start a server that listens at a port of `host`; it is killed on exit."""
    started = Server(command, f"{host}:{port}", log, environment)
    try:
        yield started
    finally:
        started.kill()


def vllm_server(
    model: Path,
    port: int,
    log: Path,
    options: Mapping[str, object],
    cores: str = "",
    host: str = "127.0.0.1",
) -> contextlib.AbstractContextManager[Server]:
    """Start vLLM's HTTP server; `options` are its arguments. It is killed on exit.

    It computes on these `cores` (`engine_cores()`, unless given): of engines that compute at the
    same time on the same cores, each waits for threads of the other.
    """
    # Not `vllm serve`, which asks for the version of a package that CPU builds name otherwise.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command = [*program, *server_arguments(model, port, options, host)]
    return server(command, port, log, server_environment(options, cores, host), host)


def server_arguments(
    model: Path, port: int, options: Mapping[str, object], host: str = "127.0.0.1"
) -> list[str]:
    """Return the command line of vLLM's HTTP server, without the program."""
    arguments = [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in options.items()
        if value is not True
    ]
    flags = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
    return [f"--model={model}", f"--port={port}", f"--host={host}", *arguments, *flags]


def server_environment(
    options: Mapping[str, object], cores: str = "", host: str = "127.0.0.1"
) -> dict[str, str]:
    """Return the variables of vLLM's HTTP server, see `vllm_server`."""
    ranks = options.get("tensor_parallel_size", 1)
    cores = cores or engine_cores()
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": host,
        "VLLM_CPU_OMP_THREADS_BIND": cores if ranks == 1 else cores.replace(",", "|"),
    }


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of an address of this machine that is free now.

    It is below those that Linux gives to clients (32768 and up), which could take it before a
    server listens there.
    """
    while True:
        port = secrets.choice(_PORTS)
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port


def engine_cores() -> str:
    """Return the cores that every engine computes on: all, less one where there are three.

    Left alone, vLLM's CPU backend gives an engine with a KV connector another number of cores
    than one without (of two cores two instead of one, of eight six instead of seven), and no
    comparison would be fair.
    """
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(str(core) for core in cores[: max(2, len(cores) - 1)])


def clean_environment() -> dict[str, str]:
    """Return our environment without settings of KVHaven, which could change what is measured."""
    settings = ("KVHAVEN_", "LMCACHE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(settings)}


def _start(
    command: list[str], log: Path, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own; what it writes goes to `log`."""
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_die_with_us,  # noqa: PLW1509 - nothing else runs in this process
            **options,
        )


def _die_with_us() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end for a while, without reaping it: its id stays its group's."""
    end = time.monotonic() + _STOP_S
    while process.returncode is None and time.monotonic() < end:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.02)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those it started, once. It leads its group: its id is the group's."""
    if process.returncode is not None:
        return  # killed before; the id may be another's by now
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"{log} ends:", *(f"  {line}" for line in lines)])
