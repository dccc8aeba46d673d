# SPDX-License-Identifier: Apache-2.0
"""The embedded service: exactly one, as long as it is needed, and nothing is left of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.client.embedded import EmbeddedService, embedded_address
from kvhaven.client.unix import lock_file
from kvhaven.config import Settings
from kvhaven.errors import ServiceUnavailableError
from tests.crash.engine import Engine, Rank, Scheduler, prompt
from tests.crash.node import MIB, audit_disk, eventually, settled, status_of
from tests.crash.workload import Work, WorkingEngine, seed_of_this_run

pytestmark = pytest.mark.crash

KEYS = prompt("p", 6)


def settings_in(path: Path, **more: Any) -> Settings:
    defaults: dict[str, Any] = {
        "runtime_dir": str(path / "run"),
        "max_local_cpu_size": 4 * MIB,
        "embedded_linger_s": 0.1,
        "log_level": "WARNING",
    }
    return Settings(**defaults | more)


def services(address: str) -> list[int]:
    """Return the processes that listen at an address."""
    found = []
    for line in Path("/proc/net/unix").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and words[7] == address and words[3] == "00010000":
            found.append(int(words[6]))
    return found


def left_behind(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "run").glob("*"))


@contextlib.contextmanager
def engine_on(settings: Settings, name: str = "e", world_size: int = 1) -> Iterator[Engine]:
    address = embedded_address(settings, name)
    ensure = EmbeddedService(settings, address).ensure
    engine = Engine.__new__(Engine)
    engine.ranks = [
        Rank(address, n, world_size, engine=name, ensure_service=ensure) for n in range(world_size)
    ]
    engine.scheduler = Scheduler(address, world_size, engine=name, ensure_service=ensure)
    with engine:
        yield engine


def test_it_starts_with_the_engine_and_ends_with_it(short_dir: Path) -> None:
    settings = settings_in(short_dir)
    address = embedded_address(settings, "e")
    with engine_on(settings, world_size=2) as engine:
        pid = status_of(address).pid
        assert pid != os.getpid()
        engine.save(KEYS)
        assert eventually(lambda: engine.load(KEYS)) == 6
        assert left_behind(short_dir) == [Path(address).name, f"{Path(address).name}.lock"]
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert left_behind(short_dir) == []


def test_data_parallel_replicas_share_one(short_dir: Path) -> None:
    settings = settings_in(short_dir)
    assert embedded_address(settings, "e_dp0") == embedded_address(settings, "e_dp11")
    assert embedded_address(settings, "e") != embedded_address(settings, "f")


def test_many_processes_race_and_one_service_comes_of_it(short_dir: Path) -> None:
    settings = settings_in(short_dir)
    address = embedded_address(settings, "race")
    work = Work(address, "race", 6, 1, prompts=3, length=4, embedded=settings)
    engine = WorkingEngine(work)
    try:
        engine.wait_ready()
        assert len(services(address)) == 1
        # They all came to one and the same: all are members of one session there.
        status = status_of(address)
        assert len(status.members) == 7
        assert len({member.session for member in status.members}) == 1
        engine.stop()
    finally:
        engine.kill()
    eventually(lambda: not Path(f"/proc/{status.pid}").exists())
    assert left_behind(short_dir) == []


def test_a_race_in_one_process_starts_one_too(short_dir: Path) -> None:
    settings = settings_in(short_dir, embedded_linger_s=0.0)
    address = embedded_address(settings, "e")
    failures: list[Exception] = []

    def ensure() -> None:
        try:
            EmbeddedService(settings, address).ensure()
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=ensure) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(services(address)) == 1
    os.kill(status_of(address).pid, signal.SIGTERM)
    eventually(lambda: not left_behind(short_dir))


def test_a_killed_service_is_started_again_by_the_link(short_dir: Path) -> None:
    settings = settings_in(short_dir, local_disk=str(short_dir / "disk"))
    address = embedded_address(settings, "e")
    with engine_on(settings) as engine:
        engine.save(KEYS)
        eventually(lambda: status_of(address).catalog.tiers["disk"].written == 6)  # type: ignore[index]
        pid = status_of(address).pid
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: engine.load(KEYS) == 6)  # from disk
        assert status_of(address).pid != pid
        assert len(services(address)) == 1
        settled(address, members=2)
    eventually(lambda: not left_behind(short_dir))


def test_killing_everything_leaves_nothing_after_the_next_start(short_dir: Path) -> None:
    settings = settings_in(short_dir, local_disk=str(short_dir / "disk"))
    seed = seed_of_this_run()
    for turn in range(3):
        address = embedded_address(settings, f"e{turn}")
        work = Work(address, f"e{turn}", 2, seed, embedded=settings)
        engine = WorkingEngine(work).wait_ready()
        pid = status_of(address).pid
        os.kill(pid, signal.SIGKILL)
        engine.kill()
        # Of this one at most: each start sweeps before itself. A start that an earlier engine had
        # begun when it was killed takes its time to end.
        own = {Path(address).stem}
        eventually(lambda own=own: {name.split(".")[0] for name in left_behind(short_dir)} <= own)  # type: ignore[misc]
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
    assert audit_disk(short_dir / "disk").clean
    with engine_on(settings, "last"):
        pass
    eventually(lambda: not left_behind(short_dir))


def test_a_start_that_was_killed_is_no_obstacle(short_dir: Path) -> None:
    settings = settings_in(short_dir)
    address = embedded_address(settings, "e")
    Path(address).parent.mkdir(mode=0o700)
    for suffix in ("", ".lock", ".start"):
        Path(address + suffix).touch()
    with engine_on(settings) as engine:
        assert engine.save(KEYS) == 6
    eventually(lambda: not left_behind(short_dir))


def test_who_waits_for_another_starter_waits_for_bounded_time(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.client.embedded._START_S", 0.3)
    settings = settings_in(short_dir)
    address = embedded_address(settings, "e")
    Path(address).parent.mkdir(mode=0o700)
    with lock_file(f"{address}.start") as held:
        assert held
        with pytest.raises(ServiceUnavailableError, match=r"starting the node service for 0\.3 s"):
            EmbeddedService(settings, address).ensure()


def test_a_service_whose_queue_is_full_counts_as_there(short_dir: Path) -> None:
    import socket

    address = str(short_dir / "busy.sock")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.bind(address)
        listener.listen(0)
        first = stack.enter_context(socket.socket(socket.AF_UNIX))
        first.connect(address)
        EmbeddedService(settings_in(short_dir), address).ensure()
        assert services(address)


def test_stopping_stores_what_is_not_stored_yet(short_dir: Path) -> None:
    settings = settings_in(short_dir, local_disk=str(short_dir / "disk"), stop_deadline_s=10)
    keys = prompt("many", 60)
    with engine_on(settings) as engine:
        engine.save(keys)
        os.kill(status_of(embedded_address(settings, "e")).pid, signal.SIGTERM)
        # The link starts another one, which waits until the first has let the disk go.
        assert eventually(lambda: engine.load(keys) == 60)
    eventually(lambda: not left_behind(short_dir))


def test_two_embedded_services_on_one_disk(short_dir: Path) -> None:
    settings = settings_in(short_dir, local_disk=str(short_dir / "disk"))
    with engine_on(settings, "a") as first:
        first.save(KEYS)
        with engine_on(settings, "b") as second:
            owner = status_of(embedded_address(settings, "a"))
            other = status_of(embedded_address(settings, "b"))
            assert owner.tiers["disk"].online
            assert not other.tiers["disk"].online
            assert other.tiers["disk"].holder.startswith(f"pid {owner.pid} on ")
            assert second.save(KEYS) == 6
            assert eventually(lambda: second.load(KEYS)) == 6
        assert eventually(lambda: first.load(KEYS)) == 6
    eventually(lambda: not left_behind(short_dir))


STARTER = """
import sys, msgspec
from kvhaven.client.embedded import EmbeddedService
from kvhaven.config import Settings
settings = msgspec.json.decode(sys.argv[1], type=Settings)
EmbeddedService(settings, sys.argv[2]).ensure()
"""


def test_whoever_started_it_is_not_waited_for_at_its_output(short_dir: Path) -> None:
    """`vllm serve | tee log`: the pipe ends with the engine, not with the service."""
    import msgspec

    settings = settings_in(short_dir, log_level="ERROR")
    address = embedded_address(settings, "e")
    subprocess.run(
        [sys.executable, "-c", STARTER, msgspec.json.encode(settings).decode(), address],
        stdout=subprocess.PIPE,
        check=True,
        timeout=30,
    )
    os.kill(status_of(address).pid, signal.SIGTERM)
    eventually(lambda: not left_behind(short_dir))
