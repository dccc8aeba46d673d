# SPDX-License-Identifier: Apache-2.0
"""The S3 tier: what it asks for, what it says of errors, and servers that misbehave."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven.errors import ConfigError, TierError, TierMissError
from kvhaven.service.stored_chains import LONGEST_POLL_S
from kvhaven.testing.tiers import (
    content,
    fetch,
    make_namespace,
    make_piece,
    opened,
    page_buffer,
    store,
    until,
)
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.format.header import pack_header
from tests.scripted_http import Answer, ScriptedServer, error
from tests.servers import Bucket

pytest.importorskip("obstore", reason="pip install 'kvhaven[s3]'")
from kvhaven.tiers.s3.tier import s3_tier

SPACE = make_namespace("model", (10_000,))
PIECE = make_piece(SPACE)
RAW = pack_header(PIECE.shard, PIECE.checksum) + PIECE.payload
SECRET = "a-very-secret-key"
ABSENT = error("NoSuchKey", 404)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(s3_server)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda *_: ABSENT).running() as server:
        yield server


def tier_of(*urls: str, **settings: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    defaults: dict[str, Any] = {"retry_s": 0.05, "deadline_s": 30.0}
    return opened(s3_tier("s3://bucket/pre/fix", endpoints=urls, **defaults | settings))


async def test_objects_lie_under_the_prefix_and_folder_of_their_namespace(bucket: Bucket) -> None:
    async with opened(bucket.tier("pre/fix")) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        folder, key = SPACE.digest.hex()[:16], PIECE.shard.key.hex()
        name = f"pre/fix/{folder}/{key[:2]}/{key}.{PIECE.shard.shard}.kv"
        assert bucket.get(name) == RAW
        assert bucket.get(f"pre/fix/{folder}/namespace.json")
    async with opened(bucket.tier()) as other:
        with pytest.raises(TierMissError):
            await fetch(other, PIECE.shard)


async def test_what_was_absent_a_moment_ago_costs_no_request(scripted: ScriptedServer) -> None:
    shards = [make_piece(SPACE, number).shard for number in range(50)]
    async with tier_of(scripted.url, absent_s=60) as tier:
        scripted.requests.clear()
        assert not any(await tier.contains(shards))
        assert len(scripted.requests) == 50
        for _ in range(20):
            assert not any(await tier.contains(shards))
            with pytest.raises(TierMissError):
                await fetch(tier, shards[7])
        assert len(scripted.requests) == 50
    async with tier_of(scripted.url, absent_s=0.1) as tier:
        assert not any(await tier.contains(shards))
        scripted.requests.clear()
        await asyncio.sleep(0.1)
        assert not any(await tier.contains(shards))
        assert len(scripted.requests) == 50


async def test_an_absence_is_forgotten_before_an_awaited_chain_is_asked_for_again(
    scripted: ScriptedServer,
) -> None:
    now = 0.0
    async with tier_of(scripted.url, clock=lambda: now) as tier:
        assert await tier.contains([PIECE.shard]) == [False]
        scripted.requests.clear()
        now += LONGEST_POLL_S
        assert await tier.contains([PIECE.shard]) == [False]
        assert len(scripted.requests) == 1


async def test_what_is_there_is_not_uploaded_again(bucket: Bucket) -> None:
    async with opened(bucket.tier()) as here, opened(bucket.tier()) as there:
        await here.add_namespace(SPACE)
        await there.add_namespace(SPACE)
        await store(here, PIECE)
        wrong = PIECE._replace(payload=page_buffer(PIECE.shard.payload_bytes))
        await there.write(*wrong)  # it is looked for, and found
        assert await fetch(here, PIECE.shard) == content(PIECE)


async def test_a_shard_is_put_in_one_request(scripted: ScriptedServer) -> None:
    scripted.script = lambda method, _: Answer() if method == "PUT" else ABSENT
    async with tier_of(scripted.url) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        asked = [method for method, path in scripted.requests if path.endswith(".kv")]
        assert asked == ["PUT"]


async def test_an_object_that_appears_meanwhile_is_not_written_over(
    scripted: ScriptedServer,
) -> None:
    puts: list[str] = []

    def script(method: str, path: str) -> Answer:
        if method == "PUT" and path.endswith(".kv"):
            puts.append(path)
            return error("PreconditionFailed", 412)
        if method == "HEAD" and puts:
            return Answer(200, b"", len(RAW))
        return Answer() if method == "PUT" else ABSENT

    scripted.script = script
    async with tier_of(scripted.url) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        assert len(puts) == 1


async def test_a_store_without_conditional_puts_is_written_without(
    scripted: ScriptedServer,
) -> None:
    answers = {"PUT": [error("NotImplemented", 501)]}

    def script(method: str, path: str) -> Answer:
        if method == "PUT" and path.endswith(".kv"):
            return answers["PUT"].pop() if answers["PUT"] else Answer()
        return Answer() if method == "PUT" else ABSENT

    scripted.script = script
    async with tier_of(scripted.url, absent_s=0) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        await store(tier, make_piece(SPACE, 1))
        puts = [path for method, path in scripted.requests if method == "PUT" and ".kv" in path]
        assert len(puts) == 3


ERRORS = {
    "no bucket": (error("NoSuchBucket", 404), "the bucket does not exist"),
    "unknown key": (error("InvalidAccessKeyId", 403), "credentials are not accepted"),
    "wrong secret": (error("SignatureDoesNotMatch", 403), "credentials are not accepted"),
    "old token": (error("ExpiredToken", 400), "session token has expired"),
    "no rights": (error("AccessDenied", 403), "s3:ListBucket"),
    "other region": (error("AuthorizationHeaderMalformed", 400), "AWS_REGION"),
    "moved": (error("PermanentRedirect", 301), "another region"),
    "clock": (error("RequestTimeTooSkewed", 403), "clock"),
    "quota": (error("QuotaExceeded", 403), "quota"),
    "no XML": (Answer(418, b"I am a teapot"), "status 418"),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_what_is_wrong_is_said_in_words_and_without_secrets(
    scripted: ScriptedServer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer, words = ERRORS[case]
    scripted.script = lambda *_: answer
    async with tier_of(scripted.url) as tier:
        health = tier.health()
        assert not health.online
        assert words in health.last_error
        assert "bucket bucket at http://127.0.0.1" in health.last_error
        with pytest.raises(TierError, match="offline"):
            await fetch(tier, PIECE.shard)
        assert not scripted.requests[3:]  # such an error is not tried again at once
        scripted.script = lambda *_: ABSENT
        await until(lambda: bool(tier.health().online))
    assert SECRET not in caplog.text + health.last_error


async def test_no_credentials_anywhere_is_said(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    async with tier_of(scripted.url) as tier:
        assert "no credentials were found in the environment" in tier.health().last_error


async def test_credentials_are_read_from_the_file_and_read_anew(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "work")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = no\naws_secret_access_key = no\n"
        f"[work]\naws_access_key_id = mine\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / ".aws" / "config").write_text("[profile work]\nregion = eu-somewhere-1\n")
    async with tier_of(scripted.url) as tier:
        assert tier.health().online
    (authorization,) = set(scripted.authorizations)
    assert "Credential=mine/" in authorization
    assert "/eu-somewhere-1/s3/" in authorization


def process_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a profile whose credentials a program prints; return the program."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    program = folder / "print-credentials"
    told = {"Version": 1, "AccessKeyId": "printed", "SecretAccessKey": SECRET}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    program.chmod(0o700)
    (folder / ".aws").mkdir()
    config = f"[default]\nregion = eu-somewhere-1\ncredential_process = {program}\n"
    (folder / ".aws" / "config").write_text(config)
    return program


async def test_a_profile_that_needs_boto3_gets_its_credentials_from_there(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="pip install boto3")
    process_profile(tmp_path, monkeypatch)
    async with tier_of(scripted.url) as tier:
        assert tier.health().online
    (authorization,) = set(scripted.authorizations)
    assert "Credential=printed/" in authorization


async def test_credentials_that_boto3_cannot_get_are_an_outage(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("boto3", reason="pip install boto3")
    process_profile(tmp_path, monkeypatch).write_text("#!/bin/sh\nexit 1\n")
    async with tier_of(scripted.url) as tier:
        health = tier.health()
        assert not health.online
        assert "credentials" in health.last_error


def test_a_profile_that_needs_boto3_is_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process_profile(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"credential_process, which needs.*pip install boto3"):
        s3_tier("s3://bucket/x")


async def test_requests_go_to_the_endpoints_in_turn(bucket: Bucket) -> None:
    def script(*_: str) -> Answer:
        return ABSENT

    with ScriptedServer(script).running() as one, ScriptedServer(script).running() as two:
        async with tier_of(one.url, two.url, absent_s=0) as tier:
            for _ in range(20):
                await tier.contains([PIECE.shard])
        assert abs(len(one.requests) - len(two.requests)) <= 1


async def test_an_endpoint_that_is_down_is_passed_over(scripted: ScriptedServer) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    async with tier_of(dead, scripted.url, absent_s=0) as tier:
        assert tier.health().online
        for _ in range(30):
            assert list(await tier.contains([PIECE.shard])) == [False]
        assert tier.health().errors == 0


async def test_a_server_that_is_overloaded_is_asked_again_but_not_much_more(
    scripted: ScriptedServer,
) -> None:
    answers = [error("SlowDown", 503), error("InternalError", 500)]
    async with tier_of(scripted.url, absent_s=0, retry_s=60) as tier:
        scripted.requests.clear()
        scripted.script = lambda *_: answers.pop() if answers else ABSENT
        assert list(await tier.contains([PIECE.shard])) == [False]
        assert len(scripted.requests) == 3
        scripted.requests.clear()
        scripted.script = lambda *_: error("SlowDown", 503)
        calls = 0
        while tier.health().online:
            with pytest.raises(TierError, match="status 503"):
                await tier.contains([make_piece(SPACE, number).shard for number in range(30)])
            calls += 30
        assert len(scripted.requests) < calls + 15


async def test_a_server_that_never_answers_costs_its_deadline_and_nobody_else(
    scripted: ScriptedServer,
) -> None:
    async with tier_of(scripted.url, absent_s=0, deadline_s=1, failures=2) as tier:
        scripted.script = lambda *_: Answer(hang=True)
        buffer = page_buffer(PIECE.shard.payload_bytes)
        with pytest.raises(TimeoutError):  # the caller's own, shorter one
            async with asyncio.timeout(0.05):
                await tier.read(PIECE.shard, buffer)
        for _ in range(2):
            with pytest.raises(TierError):
                await tier.read(PIECE.shard, buffer)
        assert not tier.health().online
        with pytest.raises(TierError, match="reads off"):
            await tier.read(PIECE.shard, buffer)
        scripted.script = lambda *_: ABSENT
        scripted.hanging.set()
        await until(lambda: bool(tier.health().online))


async def test_a_server_that_hangs_at_start_does_not_hold_up_the_service(
    scripted: ScriptedServer,
) -> None:
    scripted.script = lambda *_: Answer(hang=True)
    async with tier_of(scripted.url, deadline_s=20) as tier:
        assert "the attempt continues" in tier.health().last_error


DELETED = Answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")
BODIES = {
    "cut": Answer(200, RAW[:-4096], len(RAW)),
    "short": Answer(200, RAW[:-4096]),
    "long": Answer(200, RAW + bytes(4096)),
    "empty": Answer(200, b""),
    "other": Answer(200, bytes(len(RAW))),
    "bit": Answer(200, RAW[:5000] + bytes([RAW[5000] ^ 1]) + RAW[5001:]),
}


@pytest.mark.parametrize("case", BODIES)
async def test_a_body_that_is_wrong_is_never_served(scripted: ScriptedServer, case: str) -> None:
    async with tier_of(scripted.url, absent_s=0) as tier:
        scripted.script = lambda method, _: BODIES[case] if method == "GET" else DELETED
        with pytest.raises((TierMissError, TierError)):
            await fetch(tier, PIECE.shard)
        deletes = [request for request in scripted.requests if request[0] == "POST"]
        assert len(deletes) == (case != "cut")  # what broke off proves nothing
        scripted.script = lambda *_: Answer(200, RAW)
        assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_a_folder_is_listed_beyond_the_first_page(bucket: Bucket) -> None:
    shards: set[StoredShard] = set()
    async with opened(bucket.tier()) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        folder = SPACE.digest.hex()[:16]
        for number in range(1100):
            key = f"{number:064x}"
            name = f"{folder}/{key[:2]}/{key}.{PIECE.shard.shard}.kv"
            await asyncio.to_thread(bucket.put, name, bytes(len(RAW)))
        async for _, found in tier.scan():
            shards.update(found)
    assert len(shards) == 1101


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "https://bucket", "s3://key:secret@bucket", "s3://b?x=secret"]
)
def test_other_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix") as caught:
        s3_tier(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["ceph:7480", "http://ceph:99999", "http://[::1"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        s3_tier("s3://bucket", endpoints=[endpoint])
