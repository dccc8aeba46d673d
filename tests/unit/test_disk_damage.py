# SPDX-License-Identifier: Apache-2.0
"""Files that are not what they should be are misses and are never served."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.errors import TierMissError
from kvhaven.testing.tier_damage import DAMAGE
from kvhaven.testing.tiers import (
    PAYLOAD,
    content,
    fetch,
    make_namespace,
    make_piece,
    page_buffer,
    store,
)
from kvhaven.tiers.format.header import HEADER_BYTES, stored_bytes
from kvhaven.tiers.local.tier import DiskTier
from tests.tiers import disk_tier, file_of

SPACE = make_namespace("model", (PAYLOAD, PAYLOAD))
PIECE = make_piece(SPACE)
FILE_BYTES = stored_bytes(PAYLOAD)


@pytest.fixture(params=["auto", "off"])
async def tier(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DiskTier]:
    """A tier that holds `PIECE`."""
    async with disk_tier(tmp_path / "tier", direct_io=request.param) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        yield tier


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_a_miss_and_set_aside(tier: DiskTier, damage: str) -> None:
    file = file_of(tier.path, PIECE.shard)
    file.write_bytes(DAMAGE[damage](file.read_bytes(), PIECE))
    assert not (await tier.check()).clean
    with pytest.raises(TierMissError):
        await fetch(tier, PIECE.shard)
    health = tier.health()
    assert (health.rejected, health.errors, health.used_bytes) == (1, 0, 0)
    assert health.online
    assert health.writable
    assert not file.exists()
    assert len(list((tier.path / "rejected").iterdir())) == 1
    assert (await tier.check()).problems == ()
    await store(tier, PIECE)
    assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_the_reason_is_told(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(tier.path, PIECE.shard)
    file.write_bytes(DAMAGE["another chunk's file"](file.read_bytes(), PIECE))
    with pytest.raises(TierMissError, match=r"key .* instead of"):
        await fetch(tier, PIECE.shard)
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "set a file aside" in line
    assert PIECE.shard.key.hex() in line


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe"])
async def test_what_is_no_file_is_a_miss_and_set_aside(tier: DiskTier, kind: str) -> None:
    file = file_of(tier.path, PIECE.shard)
    moved = file.rename(tier.path / "moved")
    match kind:
        case "link":
            file.symlink_to(moved)
        case "dangling link":
            file.symlink_to("nowhere")
        case "folder":
            file.mkdir()
        case _:
            os.mkfifo(file)
    async with asyncio.timeout(5):
        with pytest.raises(TierMissError):
            await fetch(tier, PIECE.shard)
    assert tier.health().rejected == 1
    await store(tier, PIECE)
    assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_a_file_that_was_removed_is_a_miss_and_can_be_written_again(tier: DiskTier) -> None:
    file_of(tier.path, PIECE.shard).unlink()
    assert (await tier.check()).problems
    with pytest.raises(TierMissError, match="not stored"):
        await fetch(tier, PIECE.shard)
    assert (tier.health().rejected, tier.health().used_bytes) == (0, 0)
    await store(tier, PIECE)
    assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_only_the_newest_rejected_files_are_kept(tmp_path: Path) -> None:
    pieces = [make_piece(SPACE, number) for number in range(6)]
    async with disk_tier(tmp_path / "tier", keep_rejected=2) as tier:
        await tier.add_namespace(SPACE)
        for piece in pieces:
            await store(tier, piece)
            file_of(tier.path, piece.shard).write_bytes(b"garbage")
            with pytest.raises(TierMissError):
                await fetch(tier, piece.shard)
        kept = sorted(file.name for file in (tier.path / "rejected").iterdir())
        assert [name.split("-")[1][:64] for name in kept] == [
            piece.shard.key.hex() for piece in pieces[4:]
        ]
        assert tier.health().rejected == 6


async def test_nothing_is_kept_when_none_is_to_be(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier", keep_rejected=0) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        file_of(tier.path, PIECE.shard).write_bytes(b"garbage")
        with pytest.raises(TierMissError):
            await fetch(tier, PIECE.shard)
        assert not list((tier.path / "rejected").iterdir())


@given(
    changes=st.lists(
        st.tuples(st.integers(0, FILE_BYTES - 1), st.integers(1, 255))
        | st.tuples(st.integers(0, FILE_BYTES), st.none()),
        min_size=1,
        max_size=20,
    )
)
def test_any_changed_byte_or_cut_is_a_miss_or_changes_only_padding(
    changes: list[tuple[int, int | None]],
) -> None:
    """One change at a time: a byte is changed, or (None) the file is cut there."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with disk_tier(Path(folder), keep_rejected=0) as tier:
                await tier.add_namespace(SPACE)
                for at, change in changes:
                    await store(tier, PIECE)
                    file = file_of(tier.path, PIECE.shard)
                    raw = bytearray(file.read_bytes())
                    if change is None:
                        del raw[at:]
                    else:
                        raw[at] ^= change
                    file.write_bytes(raw)
                    buffer = page_buffer(PAYLOAD)
                    try:
                        await tier.read(PIECE.shard, buffer)
                    except TierMissError:
                        assert at < HEADER_BYTES + PAYLOAD or change is None
                    else:
                        assert at >= HEADER_BYTES + PAYLOAD
                        assert bytes(buffer[:PAYLOAD]) == content(PIECE)

    asyncio.run(run())
