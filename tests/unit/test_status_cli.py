# SPDX-License-Identifier: Apache-2.0
"""`kvhaven status`, `clear` and `serve`, as a person sees them."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvhaven.errors import KVHavenError
from kvhaven.service.status import decode_status
from tests.commands import kvhaven
from tests.crash.engine import MODEL, Engine, Rank, prompt
from tests.crash.node import NodeProcess, NodeThread, eventually, flush

KEYS = prompt("p", 5)


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock", local_disk=str(short_dir / "disk")) as node:
        yield node


def test_status_as_a_table_names_what_there_is(node: NodeThread) -> None:
    with Engine(node.address, 2) as engine:
        engine.save(KEYS)
        assert eventually(lambda: engine.load(KEYS)) == 5
        flush(node.address)
        lease = engine.scheduler.acquire(KEYS)
        assert lease is not None
        table = kvhaven("status", "--socket", node.address)
        engine.scheduler.client.release([lease.lease_id])
    for word in ("memory", "disk", MODEL, "5 chunks", "rank 1", "scheduler", "1 leases"):
        assert word in table, table
    assert "lost" not in table


def test_a_status_of_another_version_is_named_as_such(node: NodeThread) -> None:
    status = node.status()
    assert decode_status(msgspec.json.encode(status)) == status
    with pytest.raises(KVHavenError, match="the service has another version than this command"):
        decode_status(msgspec.json.encode({"version": status.version}))


def test_status_and_clear_know_shared_tiers(short_dir: Path) -> None:
    shared = short_dir / "shared"
    shared.mkdir()
    url = f"file://{shared}"
    with (
        NodeThread(short_dir / "s.sock", remote_url=url) as node,
        Engine(node.address) as engine,
    ):
        engine.save(KEYS)
        flush(node.address)
        engine.load(prompt("other", 3))
        (row,) = [
            line
            for line in kvhaven("status", "--socket", node.address).splitlines()
            if " fs " in line
        ]
        assert "shared" in row
        assert "online" in row
        assert kvhaven("clear", "--all", "--socket", node.address).startswith("cleared 5 chunks")
        assert len(list(shared.rglob("*.kv"))) == len(KEYS)
        answer = kvhaven("clear", "--tier", "fs", "--socket", node.address)
        assert answer.startswith("cleared 5 chunks")
        assert list(shared.rglob("*.kv")) == []


def test_status_as_json_has_every_figure(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        engine.save(KEYS)
        engine.load(KEYS)
        shown = json.loads(kvhaven("status", "--json", "--socket", node.address))
    assert shown["pid"] == os.getpid()
    assert shown["catalog"]["resident_chunks"] == 5
    assert shown["namespaces"][0]["chunks"]["memory"] == 5
    assert shown["hit_rate"] == 1.0
    assert {member["role"] for member in shown["members"]} == {"rank 0", "scheduler"}
    assert set(shown["tiers"]) == {"disk"}


def test_status_says_in_what_namespaces_of_one_model_differ(node: NodeThread) -> None:
    common = {"model": "tiny", "weights": "w"}
    unlike = [
        common,
        common | {"parallel.tensor_parallel_size": "2"},
        common | {"parallel.tensor_parallel_size": "2", "model.dtype": "float16"},
        {"model": "other"},
    ]
    digests = []
    for number, fields in enumerate(unlike):
        rank = Rank(node.address, engine=f"e{number}")
        rank.client.identify(fields)
        digests.append(rank.client._attach.namespace.hex()[:16])
        rank.start().close()
    shown = kvhaven("status", "--socket", node.address).splitlines()
    said = sorted(line for line in shown if " differ in " in line)
    assert len(said) == 2, shown
    for line in said:  # the second is between the first and the third
        assert digests[1] in line
        assert (digests[0] in line) == ("parallel.tensor_parallel_size (" in line)
        assert (digests[2] in line) == ("model.dtype (" in line)
        assert " and 1 more" not in line


def test_status_of_an_empty_service(node: NodeThread) -> None:
    assert "hit rate 0.0%" in kvhaven("status", "--socket", node.address)


def test_clear_by_the_first_digits_of_a_namespace(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        engine.save(KEYS)
        flush(node.address)
        digest = engine.ranks[0].attach.namespace.hex()
        wrong = "f" if digest[0] != "f" else "0"
        said = kvhaven("clear", "--namespace", wrong, "--socket", node.address, status=1)
        assert f"0 namespaces start with '{wrong}'; known: {digest[:16]}" in said
        said = kvhaven("clear", "--namespace", digest[:8], "--socket", node.address)
        assert said.startswith("cleared 10 chunks")
        assert engine.load(KEYS) == 0


def test_clear_wants_to_know_what(node: NodeThread) -> None:
    said = kvhaven("clear", "--socket", node.address, status=1)
    assert "specify what to clear: --namespace, --tenant, --tier, or --all" in said
    assert "unknown tier 'tape'" in kvhaven(
        "clear", "--tier", "tape", "--socket", node.address, status=1
    )
    assert kvhaven("clear", "--all", "--socket", node.address).startswith("cleared 0 chunks")


def test_the_only_embedded_service_is_found_without_its_address(short_dir: Path) -> None:
    with NodeThread(short_dir / "engine-0123456789abcdef.sock"):
        said = kvhaven("status", KVHAVEN_RUNTIME_DIR=str(short_dir))
        assert f"pid {os.getpid()}" in said


def test_no_service_is_said_in_one_line(short_dir: Path) -> None:
    said = kvhaven("status", "--socket", str(short_dir / "none.sock"), status=1)
    assert said.startswith("kvhaven: no service answers at ")
    assert said.count("\n") == 1


def test_serve_refuses_a_second_one_at_its_socket(short_dir: Path) -> None:
    path = short_dir / "s.sock"
    with NodeProcess(path, short_dir / "log") as node:
        said = kvhaven("serve", "--socket", str(path), status=1)
        assert said == f"kvhaven: another service runs at {path}\n"
        assert node.process.poll() is None
        node.stop()
    assert sorted(file.name for file in short_dir.iterdir()) == ["log"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_when_told_and_leaves_nothing(short_dir: Path, number: signal.Signals) -> None:
    with NodeProcess(short_dir / "s.sock", short_dir / "log") as node:
        node.process.send_signal(number)
        assert node.process.wait(120) == 0
    assert sorted(file.name for file in short_dir.iterdir()) == ["log"]


def test_serve_replaces_what_a_killed_one_left(short_dir: Path) -> None:
    with NodeProcess(short_dir / "s.sock", short_dir / "log") as node:
        node.kill()
        assert (short_dir / "s.sock").exists()
        node.start()
        node.stop()
    assert sorted(file.name for file in short_dir.iterdir()) == ["log"]


def test_serve_says_why_it_cannot(short_dir: Path) -> None:
    said = kvhaven(
        "serve",
        "--socket",
        str(short_dir / "s.sock"),
        status=1,
        KVHAVEN_MAX_LOCAL_CPU_SIZE="1000000GiB",
        KVHAVEN_ARENA_STRICT="true",
    )
    assert "does not fit" in said
    assert "set max_local_cpu_size to at most" in said
    said = kvhaven("serve", "--socket", "/proc/none/s.sock", status=1)
    assert said.startswith("kvhaven: /proc/none cannot hold a socket: ")
    said = kvhaven("serve", "--socket", "/proc/s.sock", status=1)
    assert said.startswith("kvhaven: /proc/s.sock.lock cannot be created: ")
