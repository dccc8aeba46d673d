# SPDX-License-Identifier: Apache-2.0
"""Zygote: a process that has imported vLLM and forks engines, which start in 4 s instead of 13.

Importing torch and vLLM is most of the start of an engine. Each pytest worker keeps one zygote. It
imports and does nothing else, so a fork of it is like a new process. The processes that vLLM starts
for itself (engine core, workers) are forked from that.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

_LONGEST = 1 << 20
IMPORTED = [
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]


class Forked:
    """An engine's process, with the part of `subprocess.Popen` that is used. The zygote's child."""

    def __init__(self, pid: int, pidfd: int, stdin: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self._pidfd = pidfd

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the process has ended. Raises `subprocess.TimeoutExpired`."""
        wait_ms = None if timeout is None else timeout * 1000
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(wait_ms):
            raise subprocess.TimeoutExpired("a forked engine", timeout or 0)

    def __del__(self) -> None:
        os.close(self._pidfd)


class Zygote:
    """The zygote's handle in a pytest worker. The zygote ends with the worker."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()  # tests start engines side by side
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno()), *IMPORTED],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def fork(
        self,
        program: Path,
        argument: str,
        environment: Mapping[str, str],
        *,
        answers: int,
        output: int,
    ) -> Forked:
        """Run a Python program in a fork, with `output` as its standard output and error.

        Its arguments are the number of the descriptor `answers` there, and `argument`.
        """
        read, write = os.pipe()
        order = {"program": str(program), "argument": argument, "environment": dict(environment)}
        with self._lock:
            try:
                socket.send_fds(self._ours, [json.dumps(order).encode()], [read, answers, output])
            finally:
                os.close(read)
            answer, (pidfd,), _, _ = socket.recv_fds(self._ours, 64, 1)
        return Forked(int(answer), pidfd, os.fdopen(write, "w"))

    def close(self) -> None:
        """End the process; its forks go on."""
        self._ours.close()
        self._process.wait()


def _serve(orders: socket.socket, imported: Sequence[str]) -> None:
    """Fork for every order until the other end is closed."""
    for name in imported:
        importlib.import_module(name)
    # vLLM names its processes. This finds where names go, as long as the environment is there.
    importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    # vLLM collects garbage three times at a start and three times at an end, here without a look
    # through all modules.
    gc.freeze()
    gc.unfreeze = lambda: None
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that has ended is not waited for
    while True:
        text, fds, _, _ = socket.recv_fds(orders, _LONGEST, 3)
        if not text:
            return
        pid = os.fork()
        if not pid:
            orders.close()
            _become(json.loads(text), *fds)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(orders, [str(pid).encode()], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def _become(order: dict[str, Any], stdin: int, answers: int, output: int) -> NoReturn:
    """Run an order's program in this process, and end it as a program of its own would end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for fd, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    os.environ.clear()
    os.environ.update(order["environment"])
    if threads := order["environment"].get("OMP_NUM_THREADS"):
        torch = importlib.import_module("torch")  # read the variable when it was imported
        torch.set_num_threads(int(threads))
    program = order["program"]
    sys.argv = [program, str(answers), order["argument"]]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
