# SPDX-License-Identifier: Apache-2.0
"""What a disk tier finds when it starts over a directory that was used before."""

import shutil
from pathlib import Path

import pytest

from kvhaven.errors import TierMissError
from kvhaven.testing.tiers import content, fetch, make_namespace, make_piece, scanned, store
from kvhaven.tiers.format.manifest import folder_name, pack_manifest, unpack_manifest
from kvhaven.tiers.local import files as disk_files
from tests.tiers import disk_tier, file_of

SPACE = make_namespace("model", (10_000, 5000))
OTHER = make_namespace("other model")
PIECES = [make_piece(SPACE, number, at) for number in range(5) for at in range(2)]


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """The directory of a tier that holds `PIECES` and the empty namespace `OTHER`."""
    async with disk_tier(tmp_path / "tier") as tier:
        await tier.add_namespace(SPACE)
        await tier.add_namespace(OTHER)
        await store(tier, *PIECES)
    return tmp_path / "tier"


def everything(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


async def test_debris_is_removed(path: Path) -> None:
    folder = path / folder_name(SPACE)
    shards = next(folder.glob("?/"))
    debris = [
        path / ".0123abcd.7.tmp",
        folder / ".0123abcd.8.tmp",
        shards / ".0123abcd.9.tmp",
        shards / "something",
        shards / f"{'0' * 64}.g9-l0.1-h0.1-r0.kv",
    ]
    for file in debris:
        file.write_bytes(b"debris")
    (path / ".0123abcd.10.tmp").mkdir()
    async with disk_tier(path) as tier:
        assert not (await tier.check()).clean
        _, shards_found = await scanned(tier)
        assert shards_found == {piece.shard for piece in PIECES}
        assert not any(file.exists() for file in debris)
        assert (await tier.check()).problems == ()


async def test_an_audit_changes_nothing(path: Path) -> None:
    (path / ".0123abcd.7.tmp").write_bytes(b"debris")
    file_of(path, PIECES[0].shard).write_bytes(b"short")
    before = everything(path)
    async with disk_tier(path) as tier:
        assert not (await tier.check()).clean
        assert not (await tier.check()).clean
    assert everything(path) == before


async def test_files_whose_size_does_not_fit_are_not_offered(path: Path) -> None:
    for piece, size in zip(PIECES, (0, 4096, 20_000), strict=False):
        file = file_of(path, piece.shard)
        file.write_bytes(bytes(size))
    async with disk_tier(path) as tier:
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in PIECES[3:]}
        assert tier.health().rejected == 3
        assert (await tier.check()).problems == ()


async def test_a_file_in_the_wrong_folder_is_removed(path: Path) -> None:
    file = file_of(path, PIECES[0].shard)
    wrong = next(f for f in (path / folder_name(SPACE)).glob("?/") if f != file.parent)
    file.rename(wrong / file.name)
    async with disk_tier(path) as tier:
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in PIECES[1:]}


@pytest.mark.parametrize(
    "damage", ["absent", "empty", "garbage", "deep", "changed", "other", "version"]
)
async def test_a_folder_without_a_valid_manifest_is_not_offered(path: Path, damage: str) -> None:
    manifest = path / folder_name(SPACE) / "namespace.json"
    raw = manifest.read_bytes()
    match damage:
        case "absent":
            manifest.unlink()
        case "empty":
            manifest.write_bytes(b"")
        case "garbage":
            manifest.write_bytes(b"\xff\x00{")
        case "deep":
            manifest.write_bytes(b'{"x": ' + 100_000 * b"[")
        case "changed":
            manifest.write_bytes(raw.replace(b"10000", b"10001"))
        case "other":
            shutil.copy(path / folder_name(OTHER) / "namespace.json", manifest)
        case _:
            manifest.write_bytes(raw.replace(b'"version": 1', b'"version": 2'))
    async with disk_tier(path) as tier:
        namespaces, shards = await scanned(tier)
        assert (namespaces, shards) == ({OTHER.digest}, set())
        assert tier.health().rejected == 1
        assert (await tier.check()).problems == ()
        await tier.add_namespace(SPACE)
        await store(tier, PIECES[0])
        assert await fetch(tier, PIECES[0].shard) == content(PIECES[0])


OLD_MANIFEST = """{
  "version": 1,
  "digest": "b6980387d480236951c65fee87c454bb75198e34ada2a61a6ff5a2960b160141",
  "fields": {
    "chunk_size": "256",
    "format": "paged",
    "model": "tiny",
    "weights": "abababababababababababababababababababababababababababababababab",
    "config": "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "layout": "efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef",
    "engine": "vllm 0.32.0",
    "parallel.tensor_parallel_size": "1",
    "parallel.pipeline_parallel_size": "1"
  },
  "table": {
    "shards": [
      {
        "id": {"group": 0, "layers": [0, 2], "heads": [0, 2], "replica": 0},
        "payload_bytes": 5000
      }
    ]
  },
  "checksum": "a3cf7ea04f1793875bce0e00706590f5"
}"""
"""As version 0.1 wrote it, when a namespace had other fields (rules 1)."""


async def test_namespaces_of_earlier_rules_are_scanned_and_age_out(tmp_path: Path) -> None:
    old = unpack_manifest(OLD_MANIFEST.encode(), "b6980387d4802369")
    pieces = [make_piece(old, number) for number in range(3)]
    async with disk_tier(tmp_path / "tier") as tier:
        await tier.add_namespace(old)
        await store(tier, *pieces)
    (tmp_path / "tier" / "b6980387d4802369" / "namespace.json").write_text(OLD_MANIFEST)
    async with disk_tier(tmp_path / "tier") as tier:
        namespaces, shards = await scanned(tier)
        assert namespaces == {old.digest}
        assert shards == {piece.shard for piece in pieces}
        assert (await tier.check()).clean
        await tier.delete([piece.shard for piece in pieces])
        assert not any(file.suffix == ".kv" for file in everything(tmp_path))


async def test_a_manifest_is_mended_when_its_namespace_is_known(path: Path) -> None:
    (path / folder_name(SPACE) / "namespace.json").write_bytes(b"garbage")
    async with disk_tier(path) as tier:
        await tier.add_namespace(SPACE)
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in PIECES}


async def test_folders_of_others_are_left_alone(path: Path) -> None:
    (path / "lost+found").mkdir()
    (path / "notes.txt").write_text("mine")
    async with disk_tier(path) as tier:
        await scanned(tier)
        assert (await tier.check()).problems == ()
    assert (path / "lost+found").is_dir()
    assert (path / "notes.txt").read_text() == "mine"


async def test_a_namespace_folder_that_vanished_is_made_again(path: Path) -> None:
    async with disk_tier(path) as tier:
        await scanned(tier)
        shutil.rmtree(path / folder_name(SPACE))
        for piece in PIECES:
            with pytest.raises(TierMissError):
                await fetch(tier, piece.shard)
        await store(tier, *PIECES)
        assert (await tier.check()).problems == ()
    async with disk_tier(path) as tier:
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in PIECES}


async def test_a_scan_comes_in_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "BATCH", 2)
    async with disk_tier(path) as tier:
        batches = [batch async for _, batch in tier.scan()]
        assert max(len(batch) for batch in batches) <= 2
        assert sum(len(batch) for batch in batches) == len(PIECES)


async def test_what_is_deleted_while_a_listing_is_on_its_way_stays_deleted(path: Path) -> None:
    async with disk_tier(path) as tier:
        await tier.add_namespace(SPACE)
        async for _, _ in tier.scan():
            await tier.delete([piece.shard for piece in PIECES])
        assert tier.health().used_bytes == 0
        assert (await tier.check()).problems == ()


async def test_a_scan_that_is_given_up_holds_nothing_up(path: Path) -> None:
    async with disk_tier(path) as tier:
        scan = tier.scan()
        await anext(scan)
        await scan.aclose()  # type: ignore[attr-defined]
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in PIECES}


def test_a_manifest_is_read_back() -> None:
    assert unpack_manifest(pack_manifest(SPACE), folder_name(SPACE)) == SPACE
    with pytest.raises(TierMissError, match="belongs to namespace"):
        unpack_manifest(pack_manifest(SPACE), folder_name(OTHER))


async def test_a_tier_that_is_left_alone_for_an_hour_after_failures_opens(path: Path) -> None:
    async with disk_tier(path, retry_s=3600) as tier:
        assert tier.health().online
