# SPDX-License-Identifier: Apache-2.0
"""Who may attach, who is refused and why, and what a broken connection leaves."""

import contextlib
import logging
import re
import threading
from typing import Any

import msgspec
import pytest

from kvhaven.client.rank import RankClient
from kvhaven.errors import IncompleteEngineError, KVHavenError
from kvhaven.peers.listener import ListenerStatus
from kvhaven.protocol import (
    Attached,
    Hello,
    Refused,
    Reserve,
    Status,
    Welcome,
    encode,
)
from kvhaven.service.status import ChainStatus, describe
from kvhaven.types import Shard, ShardId
from tests.crash.engine import EXTENT_BYTES, Engine, Rank, Scheduler, prompt
from tests.crash.node import NodeThread, eventually, settled
from tests.crash.raw import Raw
from tests.unit.catalog_kit import namespace_of

# --- engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_all_ranks_saved_is_loaded_byte_for_byte(node: NodeThread, world_size: int) -> None:
    keys = prompt("p", 12)
    with Engine(node.address, world_size) as engine:
        assert engine.load(keys) == 0
        assert engine.save(keys) == 12
        assert eventually(lambda: engine.load(keys)) == 12
        assert engine.load(keys[:5]) == 5
        assert engine.load([*keys, *prompt("other", 3)]) == 12
        assert node.status().catalog.resident_chunks == 12
        settled(node.address, members=world_size + 1)
    settled(node.address, members=0)


def test_a_chunk_that_one_rank_has_not_written_is_not_offered(node: NodeThread) -> None:
    keys = prompt("p", 4)
    with Engine(node.address, 2) as engine:
        engine.ranks[0].save(keys)
        assert engine.load(keys) == 0
        engine.ranks[1].save(keys[:2])
        assert eventually(lambda: engine.load(keys)) == 2


def test_the_scheduler_waits_for_its_ranks(node: NodeThread) -> None:
    scheduler = Scheduler(node.address, 2)
    thread = threading.Thread(target=scheduler.start)
    thread.start()
    ranks = [Rank(node.address, n, 2).start() for n in (1, 0)]
    thread.join(5)
    assert scheduler.client.responsive
    assert scheduler.client.namespace == ranks[0].attach.namespace
    scheduler.close()
    for rank in ranks:
        rank.close()


def test_ranks_that_never_come_are_missed(node: NodeThread) -> None:
    rank = Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"not all 2 ranks of engine engine .* within 0\.2 s"):
        Scheduler(node.address, 2, wait_ms=200).start()
    rank.close()


def test_a_scheduler_whose_ranks_come_late_goes_on_asking(node: NodeThread) -> None:
    """Storage of one rank may be in trouble, which must not end the engine."""
    first, scheduler = Rank(node.address, 0, 2).start(), Scheduler(node.address, 2, wait_ms=50)
    with pytest.raises(IncompleteEngineError, match="not all 2 ranks"):
        scheduler.start()
    assert not scheduler.client.responsive
    second = Rank(node.address, 1, 2).start()
    assert eventually(lambda: scheduler.client.responsive)
    for each in (scheduler, first, second):
        each.close()


def test_ranks_that_read_unlike_files_are_left_without_a_cache(node: NodeThread) -> None:
    def rank(number: int, **fields: str) -> Rank:
        made = Rank(node.address, number, 2)
        made.client.identify({"model": "m", "weights": "w"} | fields)
        return made

    first = rank(0).start()
    for name in ("weights", "weights.repository.other", "draft.weights", "files.x", "code.a/b"):
        unlike = rank(1, **{name: "other"})
        with pytest.raises(
            IncompleteEngineError, match=f"differs from that of the other ranks in {name} "
        ):
            unlike.start()
        unlike.close()
    for fields in ({"layout": "other"}, {"layout": "other", "weights": "other"}):
        with pytest.raises(KVHavenError, match="the other ranks in layout") as refused:
            rank(1, **fields).start()
        assert not isinstance(refused.value, IncompleteEngineError)
    first.close()


def test_ranks_that_disagree_are_refused_with_what_differs(node: NodeThread) -> None:
    first = Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"namespace of rank 1 differs .* other ranks in model"):
        Rank(node.address, 1, 2, model="another").start()
    with pytest.raises(
        KVHavenError, match="rank 1 attached with world_size 3, the other ranks with 2"
    ):
        Rank(node.address, 1, 3).start()
    with pytest.raises(KVHavenError, match="rank 0 of engine engine is attached already"):
        Rank(node.address, 0, 2).start()
    with pytest.raises(KVHavenError, match=r"rank 2 is not in 0\.\.1"):
        Rank(node.address, 2, 2).start()
    # The right one is still welcome.
    second = Rank(node.address, 1, 2).start()
    first.close()
    second.close()


def test_stages_of_a_pipeline_with_unlike_numbers_of_layers_serve(node: NodeThread) -> None:
    """61 layers on two ranks: their shards have other layers and other sizes, and make a chunk."""
    keys = prompt("p", 5)
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, layers in enumerate([(0, 31), (31, 61)]):
            stage = Rank(node.address, rank, 2)
            stage.shard_bytes = 500 * (layers[1] - layers[0])
            shards = (Shard(ShardId(0, layers, (0, 1)), stage.shard_bytes),)
            attach = msgspec.structs.replace(stage.attach, shards=shards)
            stage.client = RankClient(node.address, attach)
            ranks.append(stack.enter_context(contextlib.closing(stage.start())))
        scheduler = stack.enter_context(contextlib.closing(Scheduler(node.address, 2).start()))
        assert ranks[0].save(keys, save=1) == 5
        assert scheduler.load(keys, ranks) == 0
        assert ranks[1].save(keys, save=1) == 5
        assert eventually(lambda: scheduler.load(keys, ranks)) == 5


def test_in_what_an_engine_differs_from_the_namespaces_of_its_model_is_logged(
    node: NodeThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvhaven.service.membership")
    common = {"model": "tiny", "cache.block_size": "16", "weights": "w" * 64}
    engines = {
        "a": common,
        "b": common | {"weights": "v" * 64, "parallel.tensor_parallel_size": "2"},
        "c": common | {"cache.block_size": "32"},
        "d": common,
        "e": common | {"model": "other"},
        "f": common | {"rules": "9"},
    }
    for engine, fields in engines.items():
        rank = Rank(node.address, engine=engine)
        rank.client.identify(fields)
        rank.start().close()
    said = [line for line in caplog.messages if "shares nothing" in line]
    assert [line.split()[1].partition("#")[0] for line in said] == ["b", "c", "f"]
    assert said[0].endswith(
        f"of the same model: they differ in parallel.tensor_parallel_size (2, none), "
        f"weights ({'v' * 40}..., {'w' * 40}...)"
    )
    assert said[1].endswith(
        "they differ in cache.block_size (32, 16)"
    )  # not b, which is less alike
    assert said[2].endswith("they differ in rules (9, none)")


def test_an_engine_is_compared_with_the_newest_namespaces_of_its_model(
    node: NodeThread, caplog: pytest.LogCaptureFixture
) -> None:
    """They are never forgotten: a service sees one for each change of an engine's settings."""
    caplog.set_level(logging.INFO, logger="kvhaven.service.membership")
    common = {"model": "tiny", "cache.block_size": "16", "weights": "w"}
    fields = [common, *[{"model": "tiny", "weights": str(number)} for number in range(20)]]
    fields += [{"model": "other"}, common | {"weights": "v"}]
    for number, each in enumerate(fields):
        rank = Rank(node.address, engine=str(number))
        rank.client.identify(each)
        rank.start().close()
    said = [line for line in caplog.messages if "shares nothing" in line]
    assert re.search(r"differ in cache.block_size \(16, none\), weights \(v, 1[2-9]\)$", said[-1])


def test_fields_that_are_too_long_together_are_refused(node: NodeThread) -> None:
    rank = Rank(node.address)
    rank.client.identify({str(number): "x" * 4000 for number in range(140)})
    with pytest.raises(
        KVHavenError, match="rank 0's namespace have 560310 characters; at most 524288"
    ):
        rank.start()
    rank.close()


def test_a_status_says_the_fields_of_the_newest_namespaces(node: NodeThread) -> None:
    """All of them would not fit into a frame."""
    for number in range(12):
        rank = Rank(node.address, engine=str(number))
        fields = {str(name): "x" * 4000 for name in range(100)}
        rank.client.identify(fields | {"model": f"model {number}"})
        rank.start().close()
    shown = node.status().namespaces
    assert [each.model for each in shown] == [f"model {number}" for number in range(12)]
    assert [bool(each.fields) for each in shown] == 10 * [False] + 2 * [True]


def test_a_status_of_many_namespaces_is_made_in_pieces(node: NodeThread) -> None:
    def pieces() -> int:
        service = node.service
        parts = (service.catalog, service.arena, service.verifier, service.sessions)
        described = describe(service.id, *parts, service.tiers, ChainStatus(), ListenerStatus())
        return sum(1 for _ in described)

    def add() -> None:
        for number in range(256):
            node.service.catalog.add_namespace(namespace_of(str(number)))

    before = node.call(pieces)
    node.call(add)
    assert node.call(pieces) - before >= 256 // 64 + 256 // 16


def test_ranks_are_told_in_pieces_that_the_arena_has_grown(node: NodeThread) -> None:
    def pieces() -> int:
        return sum(1 for _ in node.service._membership.announce_growth())

    with Engine(node.address, 3):
        assert node.call(pieces) >= 3


def test_a_shard_without_bytes_is_refused(node: NodeThread) -> None:
    with pytest.raises(KVHavenError, match="expected more than 0"):
        Rank(node.address, shard_bytes=0).start()
    assert not node.status().members


def test_a_namespace_with_another_shard_table_is_refused_and_leaves_nothing(
    node: NodeThread,
) -> None:
    with Engine(node.address, engine="a"):
        rank = Rank(node.address, engine="b")
        other = Rank(node.address, engine="b", shard_bytes=5000)
        other.client._attach = msgspec.structs.replace(
            other.client._attach, namespace=rank.attach.namespace
        )
        with pytest.raises(KVHavenError, match="the digest must name the geometry too"):
            other.start()
        # The engine's name is not blocked by the attempt.
        rank.start()
        rank.close()


def with_shards(rank: Rank, shards: tuple[Shard, ...], **more: Any) -> Rank:
    """Let a rank say that it holds other shards."""
    rank.client._attach = msgspec.structs.replace(rank.client._attach, shards=shards, **more)
    return rank


def test_ranks_whose_shards_do_not_fit_together_are_refused(node: NodeThread) -> None:
    first, second = (Rank(node.address, rank, 2, heads=4).attach.shards for rank in range(2))
    with contextlib.closing(Rank(node.address, 0, 2, heads=4).start()):
        for shards, reason in (
            ((), "holds no shards"),
            (second[::-1], "ascending order"),
            (first, "do not declare that their bytes are equal"),
            ((Shard(ShardId(0, (0, 4), (1, 3)), 4096),), "overlap in part"),
        ):
            with pytest.raises(KVHavenError, match=reason):
                with_shards(Rank(node.address, 1, 2, heads=4), shards).start()
        with pytest.raises(
            KVHavenError, match="with shared=True, the other ranks with shared=False"
        ):
            with_shards(Rank(node.address, 1, 2, heads=4), second, shared=True).start()
        Rank(node.address, 1, 2, heads=4).start().close()


def test_an_engine_with_other_shards_in_a_known_namespace_is_refused(node: NodeThread) -> None:
    with Engine(node.address, 2, engine="a", heads=4):
        for shards in (2, 3):
            rank = Rank(node.address, engine="b", heads=4)
            with pytest.raises(
                KVHavenError,
                match=r"registered with g0-l0\.4-h0\.1-r0 \(10000 bytes\), .* added with",
            ):
                with_shards(rank, rank.attach.shards[:shards]).start()
        with contextlib.closing(Rank(node.address, engine="b", heads=4).start()):
            assert len(node.status().members) == 4


@pytest.mark.parametrize("heads", [2, 4])
def test_engines_that_divide_the_heads_differently_share(node: NodeThread, heads: int) -> None:
    """With two heads, the engine of four ranks has two ranks for each."""
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine(node.address, world_size, engine=f"tp{world_size}", heads=heads)
            )
            for world_size in (1, 2, 4)
        ]
        for number, writer in enumerate(engines):
            keys = prompt(number, 5)
            assert writer.save(keys) == 5
            for reader in engines:
                assert eventually(lambda reader=reader, keys=keys: reader.load(keys)) == 5  # type: ignore[misc]
        assert node.status().catalog.commits == 3 * 5 * heads
        settled(node.address, members=3 + 1 + 2 + 4)
    settled(node.address, members=0)


def test_two_schedulers_over_one_set_of_ranks_are_refused(node: NodeThread) -> None:
    with Engine(node.address), pytest.raises(KVHavenError, match="has a scheduler already"):
        Scheduler(node.address).start()
    with (
        contextlib.closing(Rank(node.address).start()),
        pytest.raises(
            KVHavenError, match="expects 2 ranks, but its ranks attached with world_size 1"
        ),
    ):
        Scheduler(node.address, 2).start()


def test_an_engine_that_restarts_under_its_name_is_a_new_session(node: NodeThread) -> None:
    keys = prompt("p", 3)
    for _ in range(3):
        with Engine(node.address, 2) as engine:
            engine.save(keys)
            assert eventually(lambda: engine.load(keys)) == 3
    settled(node.address, members=0)


def test_a_restarted_engine_does_not_join_the_zombies_of_the_old_one(node: NodeThread) -> None:
    """The old engine's rank 1 still maps the arena; its rank 0 and scheduler are gone."""
    with Engine(node.address, 2) as old:
        old.scheduler.close()
        old.ranks[0].close()
        eventually(lambda: len(node.status().members) == 1)
        with Engine(node.address, 2) as new:
            sessions = [member.session for member in node.status().members]
            assert sorted(sessions) == ["engine#1", "engine#2", "engine#2", "engine#2"]
            assert new.save(prompt("p", 2)) == 2
            assert eventually(lambda: new.load(prompt("p", 2))) == 2
    settled(node.address, members=0)


def test_several_engines_share_what_one_has_saved(node: NodeThread) -> None:
    keys = prompt("p", 6)
    with Engine(node.address, engine="a") as first, Engine(node.address, engine="b") as second:
        assert first.save(keys) == 6
        assert eventually(lambda: second.load(keys)) == 6
        assert second.save(keys) == 0
        assert second.save([*prompt("q", 2)]) == 2


def test_models_do_not_share(node: NodeThread) -> None:
    keys = prompt("p", 6)
    with Engine(node.address, engine="a") as first:
        first.save(keys)
        assert eventually(lambda: first.load(keys)) == 6
        with Engine(node.address, engine="b", model="another") as second:
            assert second.load(keys) == 0


# --- connections that break -------------------------------------------------------------------


def test_a_member_that_comes_back_before_it_was_lost_stays_connected(node: NodeThread) -> None:
    """The old connection is closed, and its end does not count as the member's."""
    attach = Rank(node.address, engine="raw").attach
    with Raw(node) as old, Raw(node) as new:
        old.say(Hello(), attach)
        assert isinstance(old.hear(), Welcome)
        first = old.hear()
        new.say(Hello(), attach)
        assert isinstance(new.hear(), Welcome)
        second = new.hear()
        assert isinstance(first, Attached)
        assert isinstance(second, Attached)
        assert first.segments == second.segments
        assert old.is_closed()
        (member,) = node.status().members
        assert member.connected
        assert new.say(Reserve(1, b"", bytes(32), 1)).hear() is not None


def test_grants_that_never_arrived_end_when_the_rank_is_back(node: NodeThread) -> None:
    with contextlib.closing(Rank(node.address).start()) as rank:
        (kept,) = rank.reserve(prompt("kept", 1))
        rank.reserve(prompt("lost", 3))
        rank.client._holding = {kept.generation}  # as if the answer had not come
        node.cut()
        # What is still used is the kept one's: it may be written at this moment.
        eventually(lambda: node.status().catalog.used_bytes == EXTENT_BYTES)
        assert node.status().catalog.retired_bytes == EXTENT_BYTES
        rank.client.commit([rank.write(kept)])
        settled(node.address)
        assert node.status().arena_used_bytes == 0  # lost before its commit: discarded


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "namespace of rank 0 differs .* in model"),
        ({"shard_bytes": 8192}, "namespace of rank 0 differs .* in bytes"),
        ({"engine": "other"}, "is attached to engine raw#1"),
        ({"world_size": 2}, "world_size 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_member_that_comes_back_as_another_is_refused(
    node: NodeThread, change: dict[str, Any], reason: str
) -> None:
    """Its chunks would get the names of what it was before."""
    was = Rank(node.address, engine="raw", member="m").attach
    now = Rank(node.address, member="m", **{"engine": "raw", **change}).attach
    with Raw(node) as old, Raw(node) as new:
        old.say(Hello(), was)
        assert isinstance(old.hear(), Welcome)
        assert isinstance(old.hear(), Attached)
        new.say(Hello(), now)
        assert isinstance(new.hear(), Welcome)
        refused = new.hear()
        assert isinstance(refused, Refused)
        assert re.search(reason, refused.reason)
        assert old.say(Reserve(1, b"", bytes(32), 1)).hear() is not None


def test_a_client_that_does_not_read_is_disconnected(node: NodeThread) -> None:
    with Raw(node) as raw:
        raw.say(Hello())
        frame = encode(Status(1))
        raw.socket.settimeout(120)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                raw.raw(frame * 200)
                if not node.call(lambda: node.service._connections):
                    break
        eventually(lambda: not node.call(lambda: node.service._connections))
    assert node.status().members == []
