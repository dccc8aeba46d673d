# SPDX-License-Identifier: Apache-2.0
"""CPU time and delay of events through the router, against vllm-router (Rust) from PyPI.

One process serves 500 streams of 20 events a second each, another reads them; the routers run one
after the other between the two, in alternation. vllm-router is installed into an environment of its
own below build/.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.results import BUILD, ROOT, Result, at_most
from examples.demo.processes import ProcessError

_STREAMS = 500
_RATE = 20
_SECONDS = 6
_ROUNDS = 3
_WANTED = 1.6
_GAP_MS = 10.0
_START_S = 60.0
_OTHER = "vllm-router==0.1.17"
_ENVIRONMENT = BUILD / "vllm-router-venv"


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure `route.cpu` and `route.gap`: medians of rounds that alternate."""
    _install()
    node = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.route"], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    try:
        assert node.stdout is not None
        url = node.stdout.readline().strip()
        found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
        for _ in range(_ROUNDS):
            for name, start in (("ours", _ours), ("theirs", _theirs)):
                with start(url) as (process, address):
                    cpu, gap = uvloop.run(_load(process.pid, address))
                found[name].append((cpu, gap))
                say(f"{name}: {cpu:.1f} us of CPU an event, p99 between events {gap:.1f} ms")
    finally:
        node.kill()
    cpu, gap = [statistics.median(values) for values in zip(*found["ours"], strict=True)]
    cpu_limit, gap_limit = [
        statistics.median(values) for values in zip(*found["theirs"], strict=True)
    ]
    what = f"{_OTHER}, same run"
    return [
        at_most("route.cpu", cpu, "us", cpu_limit * _WANTED, _ROUNDS, f"{_WANTED} times {what}"),
        at_most("route.gap", gap, "ms", gap_limit + _GAP_MS, _ROUNDS, f"{what}, and 10 ms"),
    ]


def _install() -> None:
    if not (_ENVIRONMENT / "bin" / "vllm-router").exists():
        venv.create(_ENVIRONMENT, with_pip=True)
        pip = [str(_ENVIRONMENT / "bin" / "pip"), "install", "--quiet"]
        if subprocess.run([*pip, _OTHER], check=False).returncode:
            raise ProcessError(f"pip cannot install {_OTHER}")


@contextlib.contextmanager
def _ours(node: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    listen = "127.0.0.1:18080"
    line = [sys.executable, "-m", "kvhaven.cli", "route", "--decode", node, "--listen", listen]
    with _started(line, f"http://{listen}") as process:
        yield process, f"http://{listen}"


@contextlib.contextmanager
def _theirs(node: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    program = str(_ENVIRONMENT / "bin" / "vllm-router")
    line = [program, "--worker-urls", node, "--host", "127.0.0.1", "--port", "18081"]
    line += ["--prometheus-port", "18082", "--log-level", "warning"]
    with _started(line, "http://127.0.0.1:18081") as process:
        yield process, "http://127.0.0.1:18081"


@contextlib.contextmanager
def _started(line: list[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    log = BUILD / "bench" / "route.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, subprocess.Popen(line, stdout=output, stderr=output) as process:
        try:
            asyncio.run(_answers(url, process))
            yield process
        finally:
            process.kill()


async def _answers(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(f"{url}/v1/completions", json=_body(0)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise ProcessError(f"{process.args!r} does not answer")


def _body(events: int) -> dict[str, object]:
    return {"model": "m", "prompt": "x", "stream": True, "max_tokens": events}


async def _load(pid: int, url: str) -> tuple[float, float]:
    """Return microseconds of CPU for an event, and the p99 of milliseconds between two."""
    gaps: list[float] = []
    counted = 0
    connector = aiohttp.TCPConnector(limit=0)

    async def read(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal counted
        await asyncio.sleep(number / _STREAMS)
        before = 0.0
        body = _body(_RATE * _SECONDS)
        async with session.post(f"{url}/v1/completions", json=body) as response:
            while piece := await response.content.readany():
                now = time.perf_counter()
                counted += piece.count(b"data: ")
                if before:
                    gaps.append(now - before)
                before = now

    async with aiohttp.ClientSession(connector=connector) as session:
        began = _cpu_s(pid)
        await asyncio.gather(*(read(session, number) for number in range(_STREAMS)))
        used = _cpu_s(pid) - began
    if counted < _STREAMS * _RATE * _SECONDS:
        raise ProcessError(f"{url}: {counted} events came")
    return used / counted * 1e6, statistics.quantiles(gaps, n=100)[98] * 1e3


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123 - it is no path of ours
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _serve() -> None:
    """Serve streams of events until killed."""
    event = b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":'
    event += b'[{"index":0,"text":" word","finish_reason":null}]}\n\n'

    async def complete(request: web.Request) -> web.StreamResponse:
        count = (await request.json())["max_tokens"]
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        due = asyncio.get_running_loop().time()
        for _ in range(count):
            await reply.write(event)
            due += 1 / _RATE
            await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0))
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def healthy(request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/{path:.*}", healthy)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve())
