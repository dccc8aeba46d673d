# SPDX-License-Identifier: Apache-2.0
"""Cost of the HTTP API, for the service and in memory.

`api.snapshot` is the CPU time of one snapshot on the service's loop, with 100,000 chunks and 10,000
tenants; `api.snapshot.empty` with none. `api.page` is that of a page of 100 tenants, and
`api.page.piece` its longest piece. `api.acquire_p99` is the 99th percentile of acquires of 512
chunks while the API answers 100 requests a second (every fifth for metrics) and 10 streams, and
runs a plugin that computes, prints and asks for each request, relative to the same service without
the API: the median of rounds that alternate. The engine has 100 requests a second, each of 131,072
tokens (with 600, all of which the plugin asks for, the ratio was 1.2 to 1.4). The clients of the
API run on the same cores; `api.acquire_p99.other` is the ratio with the same load on the API of
another, idle service, which takes nothing but CPU time from this one (its plugin is told of no
requests). `api.streams` is how much the API's memory grows by 500 clients that open a stream and
never read.

`metrics.cost` is the CPU time of the service's loop for an acquire of 512 resident chunks and its
release that counts in the metrics, relative to one that does not; `metrics.cost.miss` the same for
512 chunks that are nowhere. Messages are handed to the handler, without the socket, so the ratio is
above that of a whole request. The two alternate; the ratio is
from the median of the differences in each pair. Counting includes the sample for the reuse curve,
whose figures (`curve.*`) are explained in `benchmarks/curves.py`.
"""

import asyncio
import contextlib
import gc
import hashlib
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import curves
from benchmarks.acquires import acquire_all, await_resident, engine, save_chunks
from benchmarks.results import BENCH, Result, at_most, plain
from benchmarks.stalls import AddressSpace
from examples.demo.processes import ProcessError, Server, node_service, server
from kvhaven.catalog.actions import LeaseId, MemberId
from kvhaven.catalog.sessions import RankDescription
from kvhaven.config import Settings
from kvhaven.keys import namespace_digest, tenant_id
from kvhaven.peers.listener import ListenerStatus
from kvhaven.protocol import Acquire, List, Snapshot, encode
from kvhaven.service.arena import SEGMENT
from kvhaven.service.main import tame_collector
from kvhaven.service.server import Service
from kvhaven.service.snapshot import Observation
from kvhaven.service.status import ChainStatus
from kvhaven.tiers.base import Namespace
from kvhaven.types import Checksum, ChunkKey, Shard, ShardId, ShardTable

_TENANTS = 10_000
_CHUNKS_OF_EACH = 10
_CHUNKS = 512
_CHUNK_BYTES = 64 << 10
_REPETITIONS = 1000
_ROUNDS = 5
_REQUESTS = 1500
_PAUSE_S = 0.009
"""After each request of the engine: 100 prompts of 131,072 tokens a second."""
_RATE = 100
_STREAMS = 10
_UNREAD = 500
_UNREAD_S = 20.0
_PORT = 18888
_MIB = 1 << 20


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure the snapshot, the acquires of an engine, and the memory of unread streams."""
    return [*curves.measure(say), *asyncio.run(_measure_snapshots(say)), *_measure_processes(say)]


# --- on the service's loop ------------------------------------------------------------------


async def _measure_snapshots(say: Callable[[str], None]) -> list[Result]:
    settings = Settings(max_local_cpu_size=AddressSpace.size)
    service = Service(settings, AddressSpace(), {})  # type: ignore[arg-type]
    observation = Observation(
        service.id,
        service.settings,
        service.catalog,
        service.arena,
        service.verifier,
        service.sessions,
        service.tiers,
        service.accounts,
        service.runner,
        service.pins,
        service.jobs,
        lambda: False,
        lambda: 0,
    )
    try:
        empty = _snapshot_times(observation)
        _fill(service)
        full = _snapshot_times(observation)
        totals = service.catalog.totals()
        say(f"{totals.resident_chunks} chunks: {_spread(full)}; none: {_spread(empty)}")
        pages, pieces = _page_times(observation)
        costs = _measure_cost(service, say)
        say(f"{len(pages)} pages of 100 tenants: {_spread(pages)}")
    finally:
        service.verifier.close()
    return [
        at_most("api.snapshot", statistics.median(full), "ms", 0.2, len(full), "set by the design"),
        plain("api.snapshot.empty", statistics.median(empty), "ms", len(empty)),
        plain("api.page", statistics.median(pages), "ms", len(pages)),
        at_most("api.page.piece", max(pieces), "ms", 1.0, len(pieces), "a piece of a job"),
        *costs,
    ]


def _fill(service: Service) -> None:
    """Save chunks of many tenants in the service's catalog, as one rank."""
    fields = {"model": "benchmark"}
    shard = Shard(ShardId(0, (0, 1), (0, 1)), _CHUNK_BYTES)
    namespace = Namespace(namespace_digest(fields), fields, ShardTable((shard,)))
    catalog, member = service.catalog, MemberId("m")
    description = RankDescription(1, namespace.digest, fields, (shard,))
    catalog.attach_rank("s", member, 0, description)
    catalog.ready(member, SEGMENT, AddressSpace.usable)
    for number in range(_TENANTS):
        tenant = tenant_id(f"tenant {number}")
        keys = [
            ChunkKey(hashlib.sha256(f"{number}/{at}".encode()).digest())
            for at in range(_CHUNKS_OF_EACH)
        ]
        for grant in catalog.reserve(member, namespace.digest, None, keys, number, tenant):
            assert grant is not None
            catalog.commit(member, grant.key, grant.extent.generation, [Checksum(bytes(16))])
        catalog.take_actions()


def _measure_cost(service: Service, say: Callable[[str], None]) -> list[Result]:
    """Measure acquires that count and that do not, of chunks that are resident and of others."""
    fields = {"model": "counted", "chunk_size": "256"}
    shard = Shard(ShardId(0, (0, 1), (0, 1)), _CHUNK_BYTES)
    digest = namespace_digest(fields)
    catalog, rank = service.catalog, MemberId("counted-r")
    session = catalog.attach_rank("counted", rank, 0, RankDescription(1, digest, fields, (shard,)))
    member = service.sessions.attached(session, rank)
    catalog.ready(rank, SEGMENT, AddressSpace.usable)
    catalog.attach_scheduler("counted", MemberId("counted-s"), 1)
    scheduler = service.sessions.attached(session, MemberId("counted-s"))
    keys = [ChunkKey(hashlib.sha256(f"counted {at}".encode()).digest()) for at in range(_CHUNKS)]
    for first in range(0, _CHUNKS, 32):
        parent = keys[first - 1] if first else None
        part = keys[first : first + 32]
        for grant in catalog.reserve(member.id, digest, parent, part, first):
            assert grant is not None
            catalog.commit(member.id, grant.key, grant.extent.generation, [Checksum(bytes(16))])
    absent = [ChunkKey(hashlib.sha256(key).digest()) for key in keys]
    results = []
    tame_collector()  # as in a service
    for name, wanted in (("metrics.cost", keys), ("metrics.cost.miss", absent)):
        times: dict[int, list[float]] = {0: [], 1: []}
        blob = b"".join(wanted)
        for number in range(2 * _REPETITIONS):
            counts = (number + number // 2) % 2  # each comes first in half of the pairs
            tokens = counts * 256 * _CHUNKS
            lease = LeaseId(number + 1)
            service.loads.reuse.since(0, asyncio.get_running_loop().time())  # it is wanted
            began = time.thread_time_ns()
            service.loads.acquire(scheduler, Acquire(lease, blob, 1000, prompt_tokens=tokens))
            catalog.release(session.id, lease)
            times[counts].append((time.thread_time_ns() - began) / 1e3)
            while catalog.busy:
                catalog.work()
            catalog.take_actions()
        without = statistics.median(times[0])
        more = statistics.median(b - a for a, b in zip(times[0], times[1], strict=True))
        say(f"{name}: {without:.1f} us without counting, {more:.1f} us more with it")
        ratio = 1 + more / without
        if wanted is keys:
            results.append(at_most(name, ratio, "x", 1.03, _REPETITIONS, "set by the design"))
        else:
            results.append(plain(name, ratio, "x", _REPETITIONS))
    gc.enable()
    return results


def _snapshot_times(observation: Observation) -> list[float]:
    times = []
    for number in range(_REPETITIONS):
        began = time.thread_time_ns()
        encode(Snapshot(number, observation.snapshot(ChainStatus(), ListenerStatus())))
        times.append((time.thread_time_ns() - began) / 1e6)
    return times


def _page_times(observation: Observation) -> tuple[list[float], list[float]]:
    """Return the times of all pages of tenants, and of their pieces, in milliseconds."""
    pages, pieces = [], []
    after = ""
    while True:
        collecting = observation.rows(List(1, "tenants", after))
        spent = 0.0
        while True:
            began = time.thread_time_ns()
            try:
                next(collecting)
            except StopIteration as end:
                after = end.value.next
                break
            finally:
                pieces.append((time.thread_time_ns() - began) / 1e6)
                spent += pieces[-1]
        pages.append(spent)
        if not after:
            return pages, pieces


# --- with real processes --------------------------------------------------------------------


def _measure_processes(say: Callable[[str], None]) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime:
        # Each in a directory of its own: an API also shows the neighbours of its service.
        address, idle = Path(runtime) / "service.sock", Path(runtime) / "idle" / "service.sock"
        log, idle_log = BENCH / "operate-service.log", BENCH / "operate-idle.log"
        with (
            node_service(address, log, max_local_cpu_size="256MiB", runtime_dir=runtime),
            node_service(idle, idle_log, max_local_cpu_size="16MiB", runtime_dir=runtime),
            engine(str(address), "measured") as (rank, scheduler),
        ):
            keys = save_chunks(rank, "measured", 512)
            await_resident(scheduler, keys)
            acquire_all(scheduler, keys)
            ratios, others = [], []
            sides: list[Path | None] = [None, address, idle]
            for _ in range(_ROUNDS):
                sides = [*sides[1:], sides[0]]
                p99 = {}
                for side in sides:
                    with contextlib.ExitStack() as stack:
                        if side is not None:
                            stack.enter_context(_load(stack.enter_context(_api(side))))
                        times = acquire_all(
                            scheduler, keys, _REQUESTS, as_requests=True, pause_s=_PAUSE_S
                        )
                    p99[side] = statistics.quantiles(times, n=100)[98]
                ratios.append(p99[address] / p99[None])
                others.append(p99[idle] / p99[None])
                say(
                    f"p99 without the API {p99[None]:.2f} ms, with it {p99[address]:.2f} ms, with "
                    f"that of another service {p99[idle]:.2f} ms"
                )
            grown = _measure_streams(address, say)
    return [
        at_most(
            "api.acquire_p99", statistics.median(ratios), "x", 1.1, _ROUNDS, "set by the design"
        ),
        plain("api.acquire_p99.other", statistics.median(others), "x", _ROUNDS),
        at_most("api.streams", grown, "MiB", 64.0, _UNREAD, "set by the design"),
    ]


@contextlib.contextmanager
def _api(address: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvhaven.cli", "api", "--socket", str(address)]
    command += ["--listen", f"127.0.0.1:{_PORT}", "--file", str(_settings(address))]
    with server(command, _PORT, BENCH / f"operate-api-{address.stem}.log") as api:
        api.wait()
        yield api


def _settings(address: Path) -> Path:
    """Return a file with the settings of the API: a plugin that is busy."""
    file = address.with_name("api.yaml")
    file.write_text("plugins: benchmarks.busy_plugin:Busy\n")
    return file


@contextlib.contextmanager
def _load(api: Server) -> Iterator[None]:
    """Send requests and read streams, in a process of low priority."""
    command = [sys.executable, "-m", "benchmarks.operate", api.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ProcessError("the clients of the API did not start")
        try:
            yield
            if process.poll() is not None:
                raise ProcessError("the clients of the API ended early")
        finally:
            process.kill()


def _play_clients(url: str) -> None:
    """Send `_RATE` requests a second on one connection, and read streams, until killed."""
    import http.client  # noqa: PLC0415  only this process needs it
    from urllib.parse import urlsplit  # noqa: PLC0415

    os.nice(19)
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None

    def read() -> None:
        with socket.create_connection((where.hostname or "", where.port or 0)) as stream:
            stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while stream.recv(1 << 16):
                pass

    for _ in range(_STREAMS):
        threading.Thread(target=read, daemon=True).start()
    client = http.client.HTTPConnection(where.hostname, where.port)
    due = time.monotonic()
    for number in range(sys.maxsize):
        client.request("GET", "/metrics" if number % 5 == 0 else "/stats")
        answer = client.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        if number == 0:
            print("begun", flush=True)
        due += 1 / _RATE
        time.sleep(max(0.0, due - time.monotonic()))


def _measure_streams(address: Path, say: Callable[[str], None]) -> float:
    """Return by how many MiB the memory of the API grows at most."""
    where = ("127.0.0.1", _PORT)
    with _api(address), contextlib.ExitStack() as stack:
        pid = _listening(address)
        before = _resident_bytes(pid)
        most, slowest = 0.0, 0.0
        for _ in range(_UNREAD):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(where)
            with contextlib.suppress(OSError):
                client.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + _UNREAD_S
        while time.monotonic() < end:
            began = time.monotonic()
            with contextlib.suppress(OSError), socket.create_connection(where, 5) as probe:
                probe.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if probe.recv(1 << 12):
                    slowest = max(slowest, time.monotonic() - began)
            most = max(most, (_resident_bytes(pid) - before) / _MIB)
            time.sleep(0.2)
    say(f"{_UNREAD} unread streams: {most:.1f} MiB more, /livez within {slowest * 1e3:.0f} ms")
    return most


def _listening(address: Path) -> int:
    """Return the process that serves the API of the service at `address`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"api" in words and os.fsencode(address) in words:
                return int(folder.name)
    raise ProcessError("the API's process was not found")


def _resident_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _spread(times: list[float]) -> str:
    ordered = sorted(times)
    at = math.ceil(0.99 * len(ordered)) - 1
    return f"median {statistics.median(times):.3f} ms, p99 {ordered[at]:.3f} ms"


if __name__ == "__main__":
    _play_clients(sys.argv[1])
