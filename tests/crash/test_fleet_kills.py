# SPDX-License-Identifier: Apache-2.0
"""A fleet with streams under way, of which any process is killed or stopped at any moment.

Real services and a real router; the engines are `http_engine.py`, which verify every byte. Each
answer is right, or an error before its first byte. One that has begun breaks off only with the
process that sends it, and the client notices. Its short form leaves the engines
alone; `KVHAVEN_EVENTS` is the number of kills, and of stops, of each process.
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="kvhaven[router] is not installed")

import aiohttp

from examples.demo.processes import free_port
from tests.crash.http_engine import tokens
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.test_chains import await_no_chains
from tests.crash.test_peers import connected, pair_at
from tests.crash.workload import events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

TOKENS = 40
STREAMS = 8
_ROOT = str(Path(__file__).parents[2])


class Program:
    """A process of the fleet that answers at `url`."""

    def __init__(self, log: Path, port: int, *command: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [sys.executable, "-m", *command]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        paths = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        with self._log.open("a") as output:
            self.process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": paths},
            )
        eventually(self._answers, 60)

    def kill(self) -> None:
        """Kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as not_ready:
            not_ready.close()  # Python 3.14 warns of one that is open
            return False
        except OSError:
            return False


class Fleet:
    """All processes: services `p` and `d`, their engines, and the router."""

    def __init__(self, p: NodeProcess, d: NodeProcess, d_port: int, folder: Path) -> None:
        self.nodes = (p, d)
        engines = []
        for name, node in (("p", p), ("d", d)):
            port = free_port()
            engine = "tests.crash.http_engine", "--port", str(port), "--service", node.address
            engines.append(Program(folder / f"engine-{name}.log", port, *engine))
        port = free_port()
        nodes = "--prefill", engines[0].url, "--decode", f"{engines[1].url}=127.0.0.1:{d_port}"
        quick = "--health-interval", "0.2", "--health-timeout", "3", "--health-failures", "2"
        where = "--listen", f"127.0.0.1:{port}"
        self.router = Program(
            folder / "router.log", port, "kvhaven.cli", "route", *nodes, *quick, *where
        )
        self.processes: dict[str, NodeProcess | Program] = {
            "p service": p,
            "d service": d,
            "p engine": engines[0],
            "d engine": engines[1],
            "router": self.router,
        }
        self.programs = (*engines, self.router)


@contextlib.contextmanager
def fleet(short_dir: Path) -> Iterator[Fleet]:
    ports = free_port(), free_port()
    with pair_at(short_dir, *ports, promote_deadline_ms=2000) as (p, d):
        made = Fleet(p, d, ports[1], short_dir)
        try:
            for program in made.programs:
                program.start()
            yield made
        finally:
            for program in made.programs:
                with contextlib.suppress(AttributeError):  # it was not started
                    program.kill()


class Client:
    """Streams of answers; `longest_s` is the longest time to a first token."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self.longest_s = 0.0

    async def ask(self, name: str) -> str:
        """Return how an answer ended: `right`, `wrong`, `refused` or `broken`."""
        body = {"prompt": name, "max_tokens": TOKENS, "stream": True}
        right, got, ended = tokens(name, TOKENS), list[str](), False
        began = time.monotonic()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(self._url, json=body) as answer,
            ):
                if answer.status != 200:
                    return "refused"
                async for line in answer.content:
                    word = line.decode().removeprefix("data: ").strip()
                    if not got:
                        self.longest_s = max(self.longest_s, time.monotonic() - began)
                    ended = word == "[DONE]"
                    if ended or word.startswith("{"):  # an error's event
                        break
                    got += [word] if word else []
        except (aiohttp.ClientError, OSError):
            ended = False
        if ended:
            return "right" if got == right else "wrong"
        if got != right[: len(got)]:
            return "wrong"
        return "broken" if got else "refused"


ALLOWED = {
    ("kill", "router"): {"right", "refused", "broken"},
    ("kill", "d engine"): {"right", "refused", "broken"},
    ("stop", "d engine"): {"right", "refused", "broken"},
}
"""How answers may end; all others are right."""


async def disturb(
    fleet: Fleet, how: str, what: str, dice: random.Random, name: str
) -> Counter[str]:
    """Kill or stop a process while answers are under way, and let it return."""
    client, process = Client(fleet.router.url), fleet.processes[what]
    asked = []
    after = dice.randrange(1, STREAMS)
    for number in range(STREAMS):
        asked.append(asyncio.create_task(client.ask(f"{name} {number // 2}")))
        await asyncio.sleep(dice.random() * 0.05)
        if number == after:
            process.process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    await asyncio.sleep(dice.random() * 0.5)
    if how == "kill":
        await asyncio.to_thread(process.process.wait)
        await asyncio.to_thread(process.start)
    else:
        await asyncio.sleep(dice.random() * 1.5)
        process.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(120):
        ends = Counter(await asyncio.gather(*asked))
    ends["longest ms"] = int(client.longest_s * 1000)
    return ends


async def all_right(fleet: Fleet, name: str) -> None:
    """Wait until the peers are connected, and an answer is right."""
    client = Client(fleet.router.url)
    for node in fleet.nodes:
        await asyncio.to_thread(connected, node)
    async with asyncio.timeout(60):
        for number in itertools.count():
            end = await client.ask(f"{name} after {number}")
            assert end in {"right", "refused"}
            if end == "right":
                return
            await asyncio.sleep(0.1)


async def test_every_answer_is_right_or_a_clean_error(short_dir: Path) -> None:
    dice, rounds = random.Random(seed_of_this_run()), events_of_this_run(0)
    with fleet(short_dir) as running:
        await all_right(running, "first")
        eventually(lambda: status_of(running.nodes[1].address).chains.expected > 0)
        processes = [*running.processes] if rounds else ["p service", "d service", "router"]
        turns = [*itertools.product(("kill", "stop"), processes)] * max(1, rounds)
        for turn, (how, what) in enumerate(turns):
            ends = await disturb(running, how, what, dice, f"turn {turn}")
            longest = ends.pop("longest ms")
            print(f"{how} {what}: {dict(ends)}, first token within {longest} ms")  # noqa: T201
            assert set(ends) <= ALLOWED.get((how, what), {"right"}), (what, ends)
            await all_right(running, f"turn {turn}")
        for node in running.nodes:
            await_no_chains(node)
            settled(node.address)
            connected(node)
