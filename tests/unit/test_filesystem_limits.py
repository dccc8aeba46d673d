# SPDX-License-Identifier: Apache-2.0
"""A shared directory's owner, its credits and its limits."""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas
from kvhaven.testing.tiers import (
    Piece,
    content,
    fetch,
    make_namespace,
    make_piece,
    opened,
    store,
    until,
)
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem import write_credits as credit
from kvhaven.tiers.filesystem.files import SharedFiles
from kvhaven.tiers.filesystem.ownership import NAME, Ownership
from kvhaven.tiers.filesystem.quota_manager import QuotaManager
from kvhaven.tiers.filesystem.tier import FilesystemStore
from kvhaven.tiers.filesystem.usage import DirectoryUsage, Limits
from kvhaven.tiers.filesystem.write_credits import CreditGrant, Purse, Writer
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.shared.store import Blob, blob_name, folder_of
from kvhaven.tiers.shared.tier import SharedTier

SPACE = make_namespace("model", (252 << 10,))
FILE = 256 << 10
QUICK: dict[str, Any] = {
    "beat_s": 0.05,
    "lease_s": 0.6,
    "credit_s": 0.5,
    "survey_s": 60.0,
    "least_wanted_bytes": FILE,
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SharedFiles]:
    opened_files = SharedFiles(tmp_path, mode=0o600, codec=ShardCodec("test"), known=False)
    yield opened_files
    opened_files.close()


def age(path: Path, seconds: float) -> None:
    """Make a file look changed so long ago, by the server's clock."""
    os.utime(path, (0, path.stat().st_mtime - seconds))


def test_a_lease_is_one_services_until_it_expires(files: SharedFiles, tmp_path: Path) -> None:
    one, two = Ownership(files, "one", 60), Ownership(files, "two", 60)
    assert one.held() is None
    assert one.claim()
    assert one.held() == 1
    assert not two.claim()
    age(tmp_path / NAME, 40)
    assert one.held() is None  # half expired: it must renew before it deletes
    assert not two.claim()
    assert one.renew()
    assert one.held() == 1
    age(tmp_path / NAME, 61)
    assert two.claim()
    assert two.held() == 2
    assert one.held() is None
    assert not one.renew()
    assert two.held() == 2
    two.give_up()
    assert one.claim()


def test_a_lease_from_before_the_servers_clock_was_set_back_is_free(
    files: SharedFiles, tmp_path: Path
) -> None:
    one, two = Ownership(files, "one", 60), Ownership(files, "two", 60)
    assert one.claim()
    age(tmp_path / NAME, -50)
    assert not two.claim()
    age(tmp_path / NAME, -50)
    assert two.claim()
    assert one.held() is None


DEEP = b'{"x": ' + 100_000 * b"["
"""JSON that is nested so deeply that reading it ends with an error of another kind."""


@pytest.mark.parametrize("damage", [b"garbage", DEEP], ids=["garbage", "deep"])
def test_a_damaged_lease_is_anybodys(files: SharedFiles, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / NAME).write_bytes(damage)
    lease = Ownership(files, "one", 60)
    assert not lease.renew()
    assert lease.claim()
    assert lease.held() == 1


def test_nobody_looks_at_the_nodes_clock(
    files: SharedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    one, two = Ownership(files, "one", 60), Ownership(files, "two", 60)
    assert one.claim()
    assert not two.claim()


def test_credits_are_shared_out_and_never_exceed_what_is_free(files: SharedFiles) -> None:
    chosen = random.Random(1)
    spent = dict.fromkeys("abc", 0)
    limits = dict.fromkeys("abc", 0)
    free = 1000
    for _ in range(200):
        writer = chosen.choice("abc")
        available = limits[writer] - spent[writer]
        if available > 0:
            used = chosen.randrange(available + 1)
            spent[writer] += used
        good, _ = credit.tell(files, writer, Writer(spent[writer], chosen.randrange(400)), 60)
        if good is not None:
            limits[writer] = good.limit
        if chosen.random() < 0.5:
            found = credit.accounts(files, 60)
            told = sum(account.spent for account in found.values())
            outstanding = sum(account.outstanding for account in found.values())
            credit.grant(files, found, free - told - outstanding)
        assert sum(spent.values()) <= free
    assert sum(spent.values()) > 900


def test_grants_survive_their_owner(files: SharedFiles) -> None:
    credit.tell(files, "a", Writer(10, 500), 60)
    assert credit.grant(files, credit.accounts(files, 60), 300) == 200
    account = credit.accounts(files, 60)["a"]  # as another owner finds it
    assert (account.limit, account.outstanding) == (310, 300)
    assert credit.grant(files, {"a": account}, 0) == 200
    assert credit.tell(files, "a", Writer(10, 500), 60)[0] == CreditGrant(310)


@pytest.mark.parametrize("damage", [b"garbage", DEEP], ids=["garbage", "deep"])
def test_damaged_credits_count_as_absent(files: SharedFiles, tmp_path: Path, damage: bytes) -> None:
    credit.tell(files, "a", Writer(10, 500), 60)
    credit.grant(files, credit.accounts(files, 60), 300)
    (tmp_path / "grants" / "a").write_bytes(damage)
    assert credit.tell(files, "a", Writer(10, 500), 60)[0] is None
    (tmp_path / "writers" / "a").write_bytes(damage)
    assert credit.accounts(files, 60)["a"].wants == 0


def test_who_is_silent_gets_no_grant_and_is_forgotten_later(
    files: SharedFiles, tmp_path: Path
) -> None:
    credit.tell(files, "a", Writer(0, 100), 60)
    credit.grant(files, credit.accounts(files, 60), 1000)
    age(tmp_path / "writers" / "a", 61)
    (tmp_path / "grants" / "a").stat()
    account = credit.accounts(files, 60)["a"]
    assert not account.alive
    assert account.outstanding == 100  # it may not have noticed yet
    for folder in ("writers", "grants"):
        age(tmp_path / folder / "a", 181)
    assert credit.accounts(files, 60) == {}
    assert not (tmp_path / "grants" / "a").exists()


def test_a_purse_is_empty_when_its_grant_is_old() -> None:
    now = [0.0]
    purse = Purse(lambda: now[0], 10)
    with pytest.raises(TierError, match="no credit"):
        purse.take(1)
    purse.granted(CreditGrant(100), 5)
    purse.take(60)
    with pytest.raises(TierError):
        purse.take(60)
    purse.refund(20)
    purse.take(60)
    assert purse.beat() == Writer(100, 122)
    assert purse.beat() == Writer(100, 10)
    purse.granted(CreditGrant(1000), 5)
    now[0] = 5
    with pytest.raises(TierError):
        purse.take(1)


def survey_of(*found: Blob) -> DirectoryUsage:
    survey = DirectoryUsage()
    for one in found:
        survey.add(one.name.partition("/")[0], [one])
    return survey


def test_the_oldest_go_and_no_more_than_has_to() -> None:
    limits = Limits(quota_bytes=100 * 4096)
    found = [Blob(f"a/00/{at}.kv", 4096, 1000 + 7 * at) for at in range(120)]
    survey = survey_of(*found)
    deletions = survey.deletions(limits, 2000, 0)
    gone = [one for one in found if deletions.take(one)]
    assert gone == found[: len(gone)]
    assert (120 - len(gone)) * 4096 <= limits.floor_bytes
    assert len(gone) <= 42
    few = survey_of(*found[:90]).deletions(limits, 2000, 0)
    assert not any(few.take(one) for one in found)


def test_what_nobody_used_for_long_goes_and_a_namespace_has_its_own_limit() -> None:
    limits = Limits(quota_bytes=1 << 30, namespace_bytes=10 * 4096, ttl_s=500)
    old = [Blob(f"a/00/{at}.kv", 4096, 400) for at in range(3)]
    many = [Blob(f"b/00/{at}.kv", 4096, 900 + 10 * at) for at in range(15)]
    deletions = survey_of(*old, *many).deletions(limits, 1000, 0)
    assert all(deletions.take(one) for one in old)
    assert [deletions.take(one) for one in many] == [True] * 5 + [False] * 10
    assert not deletions.take(Blob("c/00/x.kv", 4096, 0))  # came after the survey


def test_a_tenant_has_its_own_limit_in_all_namespaces_together() -> None:
    ann, ben = tenant_id("ann"), tenant_id("ben")
    limits = Limits(tenants=Quotas({ann: 6 * 4096}, others=3 * 4096), namespace_bytes=11 * 4096)
    one, two = "1" * 16, "2" * 16

    def files_of(folder: str, *used_at: float) -> list[Blob]:
        return [Blob(f"{folder}/00/{at}.kv", 4096, at) for at in used_at]

    found = [
        *files_of(f"{one}.t{ann.hex()}", 100, 200, 300, 400, 500),
        *files_of(f"{two}.t{ann.hex()}", 150, 250, 350, 450),
        *files_of(f"{one}.t{ben.hex()}", 1000, 1100, 1200, 1300),
        *files_of(one, 900, 910, 920, 930, 940),
        *files_of(two, 50),
    ]
    deletions = survey_of(*found).deletions(limits, 2000, 0)
    gone = {(one.name.partition("/")[0], one.used_at) for one in found if deletions.take(one)}
    assert gone == {
        *((f"{one}.t{ann.hex()}", at) for at in (100, 200)),
        (f"{two}.t{ann.hex()}", 150),
        (f"{one}.t{ben.hex()}", 1000),
    }
    # What tenants have left counts in their namespace: it has 3 + 3 + 5, its limit is 11.
    less = msgspec.structs.replace(limits, namespace_bytes=9 * 4096)
    deletions = survey_of(*found).deletions(less, 2000, 0)
    more = {(one.name.partition("/")[0], one.used_at) for one in found if deletions.take(one)}
    assert more - gone == {(f"{one}.t{ann.hex()}", at) for at in (300, 400)}


class Service(NamedTuple):
    """A tier with limits, and the part of it that keeps to them."""

    tier: SharedTier
    quota_manager: QuotaManager


def limited(path: Path, quota: int | None, **limits: Any) -> Service:
    shared_store = FilesystemStore(
        path,
        executor=TierExecutor(),
        direct_io="off",
        mode=0o600,
        compress=False,
        deadline_s=10,
        limits=Limits(quota_bytes=quota, **(QUICK | limits)),
    )
    assert shared_store.quota_manager is not None
    return Service(SharedTier(shared_store, retry_s=0.05), shared_store.quota_manager)


@contextlib.asynccontextmanager
async def service(path: Path, quota: int | None, **limits: Any) -> AsyncIterator[Service]:
    made = limited(path, quota, **limits)
    async with opened(made.tier):
        await made.tier.add_namespace(SPACE)
        yield made


def used(path: Path) -> int:
    total = 0
    for file in path.rglob("*.kv"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


async def store_with_credit(tier: SharedTier, piece: Piece) -> None:
    """Write a piece as soon as there is credit for it."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await store(tier, piece)
            except TierError:
                await asyncio.sleep(0.02)


async def test_the_owner_keeps_a_tenant_to_its_quota_and_leaves_others_alone(
    tmp_path: Path,
) -> None:
    ann, ben = tenant_id("ann"), tenant_id("ben")
    quotas = Quotas({ann: 3 * FILE})
    async with service(tmp_path, None, tenants=quotas, survey_s=0.2) as one:
        for number in range(8):
            for tenant in (ann, ben):
                piece = make_piece(SPACE, number, tenant=tenant)
                await store_with_credit(one.tier, piece)
        assert one.quota_manager.owner
        folders = {tenant: tmp_path / folder_of(SPACE.digest, tenant) for tenant in (ann, ben)}
        await until(lambda: used(folders[ann]) <= 3 * FILE)
        assert used(folders[ann]) == 3 * FILE
        assert used(folders[ben]) == 8 * FILE


async def test_writers_wait_for_credit_and_the_quota_holds(tmp_path: Path) -> None:
    quota = 40 * FILE
    most = written = refused = 0
    async with service(tmp_path, quota) as one, service(tmp_path, quota) as two:
        number = 0
        while written < 100 or not refused:
            number += 1
            tier = random.Random(number).choice([one, two]).tier
            try:
                await store(tier, make_piece(SPACE, number))
                written += 1
            except TierError:
                refused += 1
                await asyncio.sleep(0.01)
            most = max(most, used(tmp_path))
        assert most <= quota * 1.05
        assert one.quota_manager.owner != two.quota_manager.owner
        number += 1
        await store_with_credit(one.tier, make_piece(SPACE, number))
        right = 0
        for at in range(1, number + 1):
            piece = make_piece(SPACE, at)
            with contextlib.suppress(TierMissError):
                assert await fetch(two.tier, piece.shard) == content(piece)
                right += 1
        assert right, "how many remain depends on how often a write was refused"
        assert not one.tier.health().errors


async def test_another_service_takes_over(tmp_path: Path) -> None:
    async with service(tmp_path, 10 * FILE) as two:
        async with service(tmp_path, 10 * FILE) as one:
            await until(lambda: bool(one.quota_manager.owner or two.quota_manager.owner))
        await until(lambda: two.quota_manager.owner)


async def test_old_files_go_and_used_ones_stay(tmp_path: Path) -> None:
    pieces = [make_piece(SPACE, number) for number in range(6)]
    tier, _ = limited(tmp_path, 100 * FILE)
    async with opened(tier):
        await tier.add_namespace(SPACE)
        for piece in pieces:
            await _insist(tier, piece)
        for piece in pieces:
            age(tmp_path / blob_name(piece.shard), 7200)
        for piece in pieces[:2]:
            assert await fetch(tier, piece.shard) == content(piece)  # that makes it new again
    tier, quota_manager = limited(tmp_path, 100 * FILE, ttl_s=3700.0)
    async with opened(tier):
        await until(lambda: used(tmp_path) == 2 * FILE)
        assert quota_manager.removed_files == 4
        for piece in pieces[:2]:
            assert await fetch(tier, piece.shard) == content(piece)


async def _insist(tier: SharedTier, piece: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(TierError):
                await store(tier, piece)
                return
            await asyncio.sleep(0.02)


async def test_who_has_no_limits_where_others_have_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(tmp_path, 1 << 30) as one:
        await until(lambda: one.quota_manager.owner)
        store = FilesystemStore(
            tmp_path,
            executor=TierExecutor(),
            direct_io="off",
            mode=0o600,
            deadline_s=10,
            limits=None,
            compress=False,
        )
        await store.open()
        await store.close(5)
    assert "set max_remote_size and the other limits as they do" in caplog.text
