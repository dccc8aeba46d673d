# SPDX-License-Identifier: Apache-2.0
"""Tenants over a real service: usage, quotas, clear and limit, the disk and shared directories."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvhaven.client.control import connect
from kvhaven.errors import KVHavenError
from kvhaven.keys import tenant_id
from kvhaven.protocol import NO_LIMIT, Prefetch
from kvhaven.service.status import TenantStatus
from kvhaven.tenants import tenant_name
from kvhaven.types import NO_TENANT, TenantId
from tests.crash.engine import SHARD_BYTES, Engine, prompt
from tests.crash.node import MIB, NodeThread, audit_disk, eventually, flush, settled

SALT = "ann's secret"
ANN, BEN = tenant_id(SALT), tenant_id("ben")
CHUNK = SHARD_BYTES + -SHARD_BYTES % 4096
"""What a chunk of one rank takes of the arena."""
STORED = CHUNK + 4096
KEYS = {ANN: prompt("ann", 4), BEN: prompt("ben", 3), NO_TENANT: prompt("nobody", 2)}


def cli(*arguments: str, stdin: str = "", status: int = 0) -> str:
    """Run the command line; return what it printed."""
    command = [sys.executable, "-m", "kvhaven.cli", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, input=stdin
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert SALT not in done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock", local_disk=str(short_dir / "disk")) as node:
        yield node
        settled(node.address, members=0)
        node.check()


def save_all(engine: Engine, address: str) -> None:
    for tenant, keys in KEYS.items():
        assert engine.save(keys, tenant=tenant) == len(keys)
        assert eventually(lambda k=keys, t=tenant: engine.load(k, t)) == len(keys)  # type: ignore[misc]
    flush(address)


def loads(engine: Engine) -> dict[TenantId, int]:
    return {tenant: engine.load(keys, tenant) for tenant, keys in KEYS.items()}


def tenants(node: NodeThread) -> dict[str, TenantStatus]:
    return {one.tenant: one for one in node.status().tenants}


def test_nothing_of_a_tenant_is_read_by_another(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        save_all(engine, node.address)
        for place in ("memory", "disk"):
            for owner, keys in KEYS.items():
                for other in KEYS.keys() - {owner}:
                    assert engine.load(keys, other) == 0, place
            with connect(node.address) as control:
                control.clear(tier="memory")
        assert node.status().catalog.foreign == 2 * 6
        assert loads(engine) == {ANN: 4, BEN: 3, NO_TENANT: 2}


def test_status_shows_what_each_has_and_may_have(short_dir: Path) -> None:
    settings = {"tenant_memory": f"{tenant_name(ANN)}={4 * CHUNK}B", "tenant_disk": "*=1MiB"}
    disk = str(short_dir / "disk")
    with (
        NodeThread(short_dir / "s.sock", local_disk=disk, **settings) as node,
        Engine(node.address) as engine,
    ):
        save_all(engine, node.address)
        ann, ben = tenants(node)[ANN.hex()], tenants(node)[BEN.hex()]
        assert ann.chunks == {"memory": 4, "disk": 4}
        assert ann.bytes == {"memory": 4 * CHUNK, "disk": 4 * STORED}
        assert ann.quotas == {"memory": 4 * CHUNK, "disk": MIB}
        assert ben.quotas == {"disk": MIB}
        assert len(tenants(node)) == 2
        (namespace,) = node.status().namespaces
        assert namespace.chunks == {"memory": 9, "disk": 9}
        table = cli("status", "--socket", node.address)
        shown = json.loads(cli("status", "--json", "--socket", node.address))
    assert ANN.hex() in table
    assert " of 1 MiB" in table
    assert msgspec.to_builtins(ann) in shown["tenants"]


def test_a_tenant_over_its_quota_pays_itself(short_dir: Path) -> None:
    with (
        NodeThread(short_dir / "s.sock", tenant_memory=f"*={2 * CHUNK}B") as node,
        Engine(node.address) as engine,
    ):
        engine.save(KEYS[NO_TENANT])
        engine.save(KEYS[BEN][:2], tenant=BEN)
        assert engine.save(KEYS[ANN][:2], tenant=ANN) == 2
        assert engine.save(prompt("more", 2), tenant=ANN) == 2
        assert eventually(lambda: engine.load(prompt("more", 2), ANN)) == 2
        assert loads(engine) == {ANN: 0, BEN: 2, NO_TENANT: 2}
        assert node.status().catalog.quota_evictions == 2


def test_clear_by_tenant_leaves_the_others(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        save_all(engine, node.address)
        settled(node.address)
        said = cli("clear", "--tenant", tenant_name(BEN), "--socket", node.address)
        assert said == f"cleared 6 chunks, {3 * CHUNK + 3 * STORED} bytes\n"
        assert loads(engine) == {ANN: 4, BEN: 0, NO_TENANT: 2}
        said = cli("clear", "--tenant", "-", "--socket", node.address, stdin=f"{SALT}\n")
        assert said.startswith("cleared 8 chunks")
        assert loads(engine) == {ANN: 0, BEN: 0, NO_TENANT: 2}
        assert tenants(node) == {}


def test_a_service_that_knows_no_tenants_is_not_asked_to_clear_one(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.service.membership.FEATURES", 0)
    with (
        connect(node.address) as control,
        pytest.raises(KVHavenError, match="does not support tenants"),
    ):
        control.clear(tenant=ANN)


def test_limit_counts_at_once_and_shows_what_counts(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        save_all(engine, node.address)
        settled(node.address)
        said = cli(
            *("limit", "--tenant", "-", "--memory", f"{2 * CHUNK}B", "--disk", f"{3 * STORED}B"),
            *("--socket", node.address),
            stdin=f"{SALT}\n",
        )
        name = tenant_name(ANN)
        assert said.splitlines() == [
            f"{name}: {2 * CHUNK} bytes in memory, a quota of {2 * CHUNK}",
            f"{name}: {3 * STORED} bytes in disk, a quota of {3 * STORED}",
        ]
        assert tenants(node)[ANN.hex()].chunks == {"memory": 2, "disk": 3}
        assert tenants(node)[BEN.hex()].chunks == {"memory": 3, "disk": 3}
        with connect(node.address) as control:
            now = control.limit(ANN, memory=NO_LIMIT)
            assert (now.memory, now.disk) == (None, 3 * STORED)
            with pytest.raises(KVHavenError, match="have no tenant and no quota"):
                control.limit(NO_TENANT, memory=0)
        said = cli("limit", "--tenant", name, "--disk", "much", "--socket", node.address, status=2)
        assert "--disk 'much' is not a quota" in said


def test_a_limit_reaches_what_is_leased_when_the_lease_ends(node: NodeThread) -> None:
    with Engine(node.address) as engine:
        save_all(engine, node.address)
        settled(node.address)
        lease = engine.scheduler.acquire(KEYS[ANN], ANN)
        assert lease is not None
        with connect(node.address) as control:
            assert control.limit(ANN, memory=CHUNK).memory_bytes == 4 * CHUNK
        assert engine.ranks[0].load(lease, KEYS[ANN]) == 4
        eventually(lambda: tenants(node)[ANN.hex()].bytes["memory"] == CHUNK)


def test_a_restart_finds_whose_the_disks_chunks_are(short_dir: Path) -> None:
    disk = short_dir / "disk"
    with (
        NodeThread(short_dir / "s.sock", local_disk=str(disk)) as node,
        Engine(node.address) as engine,
    ):
        save_all(engine, node.address)
    names = [file.name for file in disk.rglob("*.kv")]
    assert sum(f".t{ANN.hex()}." in name for name in names) == 4
    assert sum(".t" in name for name in names) == 7
    settings = {"local_disk": str(disk), "tenant_disk": f"{tenant_name(ANN)}={2 * STORED}B"}
    with NodeThread(short_dir / "s.sock", **settings) as node, Engine(node.address) as engine:
        eventually(lambda: len(tenants(node)) == 2 and tenants(node)[BEN.hex()].chunks["disk"] == 3)
        eventually(lambda: tenants(node)[ANN.hex()].chunks["disk"] == 2)
        assert engine.load(KEYS[BEN], ANN) == engine.load(KEYS[BEN]) == 0
        assert engine.load(KEYS[BEN], BEN) == 3
        assert engine.load(KEYS[NO_TENANT]) == 2
        flush(node.address)
    assert audit_disk(disk).clean
    assert sum(f".t{ANN.hex()}." in file.name for file in disk.rglob("*.kv")) == 2


def test_a_shared_directory_has_a_folder_for_each_and_is_cleared_by_it(short_dir: Path) -> None:
    shared = short_dir / "shared"
    shared.mkdir()
    url = f"file://{shared}"
    with NodeThread(short_dir / "a.sock", remote_url=url) as node, Engine(node.address) as engine:
        save_all(engine, node.address)
        (folder,) = shared.glob(f"*.t{ANN.hex()}")
        assert len(list(folder.rglob("*.kv"))) == 4
        assert (folder / "namespace.json").read_bytes() == (
            shared / folder.name[:16] / "namespace.json"
        ).read_bytes()
    with NodeThread(short_dir / "b.sock", remote_url=url) as node, Engine(node.address) as engine:
        assert engine.load(KEYS[ANN], BEN) == 0
        assert loads(engine) == {ANN: 4, BEN: 3, NO_TENANT: 2}
        with connect(node.address) as control:
            cleared = control.clear(tier="fs", tenant=ANN)
            assert (cleared.chunks, cleared.bytes) == (4, 4 * STORED)
            control.clear(tier="memory")
        assert loads(engine) == {ANN: 0, BEN: 3, NO_TENANT: 2}


def test_half_a_name_closes_the_connection_and_changes_nothing(
    node: NodeThread, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(node.address) as engine:
        save_all(engine, node.address)
        with caplog.at_level(logging.WARNING):
            engine.scheduler.client._link.post(Prefetch(b"", b"half"))
            eventually(lambda: "tenant: malformed name (got 4 bytes)" in caplog.text)
        eventually(lambda: engine.load(KEYS[ANN], ANN) == 4)
