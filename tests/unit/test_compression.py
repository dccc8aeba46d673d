# SPDX-License-Identifier: Apache-2.0
"""Tiers that compress: what is stored, counted and read, and by whom."""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhaven.errors import TierMissError
from kvhaven.testing.tiers import (
    PAYLOAD,
    Piece,
    content,
    fetch,
    make_namespace,
    make_piece,
    opened,
    page_buffer,
    scanned,
    store,
    until,
)
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import FilesystemStore, filesystem_tier
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.format import compression_policy as worth
from kvhaven.tiers.format.codec import DamagedShardError, ShardCodec
from kvhaven.tiers.format.header import (
    HEADER_BYTES,
    PLAIN,
    Form,
    pack_header,
    stored_bytes,
    unpack_header,
)
from kvhaven.tiers.shared.store import blob_name
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeThread, eventually, flush
from tests.tier_kits import KITS
from tests.tiers import disk_tier, file_of

pytest.importorskip("zstandard", reason="pip install 'kvhaven[zstd]'")
pytest.importorskip("numpy", reason="pip install 'kvhaven[zstd]'")

SPACE = make_namespace("model", (PAYLOAD,))
LARGE = make_namespace("large", (300_000,))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no tier find out that memory is faster than zstd."""
    monkeypatch.setattr(worth, "MOST_SLOWER", math.inf)


def noise(piece: Piece) -> Piece:
    """Return a piece that cannot be compressed, with its checksum."""
    payload = page_buffer(piece.shard.payload_bytes)
    payload[:] = random.Random(piece.shard.key).randbytes(len(payload))
    checksum = xxhash.xxh3_128_digest(payload[: piece.shard.payload_bytes])
    return Piece(piece.shard, payload, Checksum(checksum))


def packed(codec: ShardCodec, piece: Piece) -> bytes:
    return b"".join(codec.pack(*piece))


def unpacked(codec: ShardCodec, piece: Piece, stored: bytes) -> bytes:
    into = page_buffer(piece.shard.payload_bytes)
    into[:] = b"\xa5" * len(into)
    into[: len(stored) - HEADER_BYTES] = stored[HEADER_BYTES:]
    checksum = codec.unpack(stored[:HEADER_BYTES], into, len(stored), piece.shard)
    assert checksum == piece.checksum
    return bytes(into[: piece.shard.payload_bytes])


def test_a_compressed_shard_is_shorter_and_any_reader_reads_it() -> None:
    piece = make_piece(LARGE)
    stored = packed(ShardCodec("here", zstd=True), piece)
    header = unpack_header(stored[:HEADER_BYTES])
    assert header.form.codec == 1
    assert (header.checksum, header.stored) == (piece.checksum, piece.shard)
    assert len(stored) == stored_bytes(header.form.length) < stored_bytes(300_000) * 0.75
    assert unpacked(ShardCodec("there"), piece, stored) == content(piece)


def test_what_does_not_get_shorter_is_stored_as_it_is() -> None:
    codec = ShardCodec("here", zstd=True)
    for piece in (noise(make_piece(LARGE)), make_piece(make_namespace("small", (4096,)))):
        stored = packed(codec, piece)
        assert unpack_header(stored[:HEADER_BYTES]).form == PLAIN
        assert stored == packed(ShardCodec("there"), piece)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_damaged_bytes_are_never_served(data: st.DataObject) -> None:
    piece = make_piece(SPACE)
    stored = bytearray(packed(ShardCodec("here", zstd=True), piece))
    assert unpack_header(bytes(stored[:HEADER_BYTES])).form != PLAIN
    at = data.draw(st.integers(0, len(stored) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "longer", "swap"])):
        case "flip":
            stored[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del stored[HEADER_BYTES + 4096 :]
        case "longer":
            stored += bytes(4096)
        case _:
            stored[at:] = stored[at:][::-1]
    with contextlib.suppress(TierMissError):
        assert unpacked(ShardCodec("there"), piece, bytes(stored)) == content(piece)


def test_two_damages_are_told_apart_and_one_is_known_again() -> None:
    piece = make_piece(SPACE)
    stored = packed(ShardCodec("here", zstd=True), piece)

    def evidence(at: int, before: int) -> bytes:
        """Read into a buffer that held something else before."""
        damaged = bytearray(stored)
        damaged[at] ^= 1
        into = page_buffer(piece.shard.payload_bytes)
        into[:] = bytes([before]) * len(into)
        into[: len(stored) - HEADER_BYTES] = damaged[HEADER_BYTES:]
        with pytest.raises(DamagedShardError) as caught:
            ShardCodec("there").unpack(
                bytes(damaged[:HEADER_BYTES]), into, len(stored), piece.shard
            )
        return caught.value.evidence

    found = [evidence(at, 0) for at in (50, 5000, 9000)]
    assert len(set(found)) == 3
    assert found == [evidence(at, 7) for at in (50, 5000, 9000)]


@pytest.mark.parametrize("form", [Form(2, 2, 5000), Form(1, 8, 5000), Form(7, 0, 1)])
async def test_what_another_version_stored_is_a_miss_and_stays(tmp_path: Path, form: Form) -> None:
    piece = make_piece(SPACE)
    async with opened(filesystem_tier(tmp_path, executor=TierExecutor(), retry_s=0.05)) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, piece)
        file = tmp_path / blob_name(piece.shard)
        head = pack_header(piece.shard, piece.checksum, form)
        file.write_bytes(head + bytes(stored_bytes(form.length) - HEADER_BYTES))
        with pytest.raises(TierMissError, match=f"codec {form.codec}"):
            await fetch(tier, piece.shard)
        assert file.exists()
        assert (tier.health().rejected, tier.health().misses) == (0, 1)
        assert (tier.health().online, tier.health().errors) == (True, 0)


WITHOUT = """
import asyncio, json, sys
from pathlib import Path
sys.modules["zstandard"] = None  # as if it were not installed
from kvhaven.errors import ConfigError, TierMissError
from kvhaven.service.tier_setup import make_tiers
from kvhaven.config import Settings
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import FilesystemStore, filesystem_tier
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.testing.tiers import fetch, make_namespace, make_piece

said = []
for name, value in (("local_disk", "disk"), ("remote_url", "remote")):
    try:
        make_tiers(Settings(**{name: sys.argv[1], f"{value}_compression": "zstd"}))
    except ConfigError as error:
        said.append(str(error))

async def read():
    tier = filesystem_tier(Path(sys.argv[1]), executor=TierExecutor())
    await tier.start()
    try:
        await fetch(tier, make_piece(make_namespace("model", (10_000,))).shard)
    except TierMissError as error:
        said.append(str(error))
    said.append(tier.health().rejected)
    await tier.close(1)

asyncio.run(read())
print(json.dumps(said))
"""


async def test_without_the_package_the_setting_is_refused_and_what_is_there_stays(
    tmp_path: Path, always: None
) -> None:
    piece = make_piece(SPACE)
    tier = filesystem_tier(tmp_path, executor=TierExecutor(), compress=True)
    async with opened(tier):
        await tier.add_namespace(SPACE)
        await store(tier, piece)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WITHOUT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    disk, remote, miss, rejected = json.loads(done.stdout)
    for text in (disk, remote, miss):
        assert "package zstandard" in text
        assert "pip install 'kvhaven[zstd]'" in text
    assert rejected == 0
    async with opened(filesystem_tier(tmp_path, executor=TierExecutor())) as reader:
        assert await fetch(reader, piece.shard) == content(piece)


async def test_a_disk_reads_what_it_wrote_under_another_setting(
    tmp_path: Path, always: None
) -> None:
    pieces = [make_piece(SPACE, number) for number in range(6)]
    for number, compress in enumerate((False, True, False)):
        async with disk_tier(tmp_path / "tier", compress=compress) as tier:
            await tier.add_namespace(SPACE)
            await scanned(tier)
            await store(tier, *pieces[2 * number : 2 * number + 2])
            for piece in pieces[: 2 * number + 2]:
                assert await fetch(tier, piece.shard) == content(piece)
            assert (await tier.check()).problems == ()
    sizes = [file_of(tmp_path / "tier", piece.shard).stat().st_size for piece in pieces]
    assert sizes == [16384, 16384, 12288, 12288, 16384, 16384]


async def test_a_disk_counts_what_is_really_stored(tmp_path: Path, always: None) -> None:
    pieces = [make_piece(LARGE, number) for number in range(4)]
    path = tmp_path / "tier"
    async with disk_tier(path, compress=True) as tier:
        await tier.add_namespace(LARGE)
        taken = [await tier.write(*piece) for piece in pieces]
        assert taken == [file_of(path, piece.shard).stat().st_size for piece in pieces]
        assert taken == [await tier.write(*piece) for piece in pieces]  # it is there already
        assert tier.health().used_bytes == sum(taken) < 4 * stored_bytes(300_000) * 0.75
        (status,) = tier.health().compression or []
        assert (status.on, status.stored_bytes) == (True, sum(taken))
        assert status.payload_bytes == 4 * stored_bytes(300_000)
        await tier.delete([pieces[0].shard])
        assert tier.health().used_bytes == sum(taken[1:])
        assert (await tier.check()).used_bytes == sum(taken[1:])
    async with disk_tier(path) as tier:
        found: dict[Any, int] = {}
        async for _, shards in tier.scan():
            found |= shards
        sizes = zip(pieces[1:], taken[1:], strict=True)
        assert found == {piece.shard: size for piece, size in sizes}
        assert tier.health().used_bytes == sum(taken[1:])
        assert tier.health().compression is None


async def test_credits_that_compression_saved_are_given_back(tmp_path: Path, always: None) -> None:
    limits = Limits(quota_bytes=64 << 20, beat_s=0.05, least_wanted_bytes=1 << 20)
    filesystem = FilesystemStore(
        tmp_path,
        executor=TierExecutor(),
        direct_io="off",
        mode=0o600,
        compress=True,
        deadline_s=10,
        limits=limits,
    )
    assert filesystem.quota_manager is not None
    purse = filesystem.quota_manager.purse
    async with opened(SharedTier(filesystem)) as tier:
        await tier.add_namespace(LARGE)
        await until(lambda: purse._limit > 0)
        written = await tier.write(*make_piece(LARGE))
        assert (
            purse._spent
            == written
            == (tmp_path / blob_name(make_piece(LARGE).shard)).stat().st_size
        )
        assert written < stored_bytes(300_000)
        assert await tier.write(*make_piece(LARGE)) == 0
        assert purse._spent == written


async def test_neither_event_loop_compresses(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhaven.tiers.format.zstd import Zstd

    threads: set[str] = set()
    compress, decompress = Zstd.compress, Zstd.decompress

    def noted(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads.add(threading.current_thread().name)
            return real(*arguments)

        return call

    monkeypatch.setattr(Zstd, "compress", noted(compress))
    monkeypatch.setattr(Zstd, "decompress", noted(decompress))
    kits = [name for name in KITS if name.endswith("-zstd")]
    assert len(kits) >= 4
    for name in kits:
        threads.clear()
        (tmp_path / name).mkdir()
        async with KITS[name](request, tmp_path / name).open() as tier:
            await tier.add_namespace(LARGE)
            await store(tier, make_piece(LARGE))
            assert await fetch(tier, make_piece(LARGE).shard) == content(make_piece(LARGE))
        assert threads
        # The loop threads are kvhaven-tier-s3 and kvhaven-tier-redis.
        assert all(re.fullmatch(r"kvhaven-tier-\d+", thread) for thread in threads)


async def test_what_does_not_pay_is_turned_off_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with disk_tier(tmp_path / "tier", compress=True) as tier:
        await tier.add_namespace(LARGE)
        await store(tier, *(noise(make_piece(LARGE, number)) for number in range(20)))
        await store(tier, make_piece(LARGE, 20))  # it would be shorter, but is not tried
        (status,) = tier.health().compression or []
        assert not status.on
        assert "less than 10%" in status.why
        assert status.stored_bytes == status.payload_bytes
    lines = [r.getMessage() for r in caplog.records if "zstd is" in r.getMessage()]
    assert len(lines) == 1
    assert "zstd is off" in lines[0]


@pytest.fixture
def node(short_dir: Path, always: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeThread]:
    """Run a node whose engines compute the same bytes twice."""

    def twice(key: bytes, head: int, size: int) -> bytes:
        return 2 * hashlib.shake_128(key + bytes([head])).digest(size // 2)

    monkeypatch.setattr("tests.crash.engine.content", twice)
    path = short_dir / "disk"
    with NodeThread(short_dir / "s.sock", local_disk=str(path), disk_compression="zstd") as running:
        yield running


def test_a_node_counts_and_shows_what_is_really_stored(node: NodeThread, short_dir: Path) -> None:
    with Engine(node.address) as engine:
        keys = prompt("p", 5)
        engine.save(keys)
        assert eventually(lambda: engine.load(keys)) == 5
        flush(node.address)
    status = node.status()
    files = list((short_dir / "disk").glob("*/*/*.kv"))
    assert len(files) == 5
    used = sum(file.stat().st_size for file in files)
    assert used == 5 * (4096 + 8192)
    assert status.tiers["disk"].used_bytes == used
    assert [namespace.bytes["disk"] for namespace in status.namespaces] == [used]
    command = [sys.executable, "-m", "kvhaven.cli", "status", "--socket", node.address]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "300"}
    )
    assert "zstd on" in shown.stdout
