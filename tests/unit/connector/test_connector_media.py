# SPDX-License-Identifier: Apache-2.0
"""Media are named by content, while vLLM's caches go by identifiers that may stand for two."""

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.v1.core.sched.scheduler import Scheduler

from kvhaven.engine import media
from kvhaven.integrations.vllm.connector import KVHavenConnector
from kvhaven.integrations.vllm.encoder_cache import watch_encoder_cache
from kvhaven.integrations.vllm.media import VllmMedia
from kvhaven.protocol import ModelState
from tests.simulation.connector_kit import (
    Bench,
    BrokenFeature,
    VllmSide,
    ask,
    image,
    keys_of,
    known,
    lora,
    make_request,
    run_new,
    saved_chunks,
    scheduled,
    wait_until,
)
from tests.simulation.node import Node

pytestmark = pytest.mark.slow


class Held:
    """Keeps media from being hashed, as behind a large video, until `go_on` is set."""

    def __init__(self, side: VllmSide) -> None:
        self.go_on = threading.Event()
        side._extras.media._hasher.submit(self.go_on.wait, 30)


def run_on(side: VllmSide, name: str, content: float, identifier: str = "mine") -> int:
    """Run a request on the first 8 blocks of another; return how many chunks are saved."""
    request = make_request(40, name, mm_features=[image(content, identifier)])
    return saved_chunks(run_new(side, request, 8, blocks=[*range(8), 20, 21], computed=32))


def test_media_are_named_by_their_content_and_place_and_not_by_vllms_identifier(
    bench: Bench, node: Node
) -> None:
    """With vLLM's caches off an identifier is a counter: another picture has it after a restart."""
    side, restarted = bench.side(), Bench(node, namespace=bench.namespace)
    other = restarted.side()
    cat = keys_of(side, "cat", mm_features=[image(1.0, "renderer0-mm-1-image-0")])
    dog = keys_of(other, "dog", mm_features=[image(2.0, "renderer0-mm-1-image-0")])
    assert len(cat) == len(dog) == 2
    assert not set(cat) & set(dog)
    assert keys_of(other, "same", mm_features=[image(1.0, "renderer0-mm-7-image-0")]) == cat
    moved = keys_of(other, "moved", mm_features=[image(1.0, "moved", offset=3)])
    assert not set(moved) & set(cat)
    assert not set(keys_of(other, "none")) & {*cat, *dog, *moved}
    restarted.close()


def test_media_whose_content_is_not_here_leave_a_request_uncached(bench: Bench) -> None:
    assert keys_of(bench.side(), "elsewhere", mm_features=[image(None)]) == ()


def test_an_identifier_that_came_with_two_contents_names_neither(bench: Bench) -> None:
    """vLLM's encoder cache goes by it: the KV of the second may be the first one's."""
    side = bench.side()
    assert len(keys_of(side, "first", mm_features=[image(1.0, "mine")])) == 2
    assert keys_of(side, "second", mm_features=[image(2.0, "mine")]) == ()
    assert keys_of(side, "third", mm_features=[image(1.0, "mine")]) == ()


def test_a_request_waits_for_its_medias_digests_and_no_longer_than_for_an_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = bench.side(lookup_deadline_ms=100)
    go_on = threading.Event()
    original = side._extras.media._hash
    monkeypatch.setattr(
        side._extras.media, "_hash", lambda features: go_on.wait(30) and original(features)
    )
    request = make_request(40, mm_features=[image(1.0)])
    side.on_new_request(request)
    assert side.matched_tokens(request, 0) == (None, False)
    wait_until(lambda: side.matched_tokens(request, 0) == (0, False))
    side.allocated(request, (list(range(10)),), 0)
    assert saved_chunks(side.plan_step(scheduled(new=[(request, range(10), 0, 20)]))) == 0
    go_on.set()
    wait_until(lambda: not side._states["r"].pending.hashing)
    plan = side.plan_step(scheduled(cached=[(request, None, 20, 20)]))
    assert saved_chunks(plan) == 2, "what it computed meanwhile can be named now"


# --- identifiers that may stand for two contents --------------------------------------------------


def not_cached(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run it without permissions."""
    held.go_on.set()
    run_new(
        side,
        make_request(
            40,
            "first",
            mm_features=features,
            params={"kvhaven.skip_save": True},
            sampling={"prompt_logprobs": 1},
        ),
        40,
    )


def over_before_it_was_hashed(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run it and finish it, while its media wait."""
    request = make_request(40, "first", mm_features=features)
    run_new(side, request, 40)
    side.finished(request)
    held.go_on.set()


def reset_before_it_was_hashed(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run it, and reset the cache while its media wait; vLLM's encoder cache stays."""
    run_new(side, make_request(40, "first", mm_features=features), 40)
    side.reset()
    held.go_on.set()


def with_one_that_is_elsewhere(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run it with another item, which cannot be named."""
    held.go_on.set()
    run_new(side, make_request(40, "first", mm_features=[image(None, "x", 20), *features]), 40)


def with_one_that_cannot_be_read(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run it with another item, whose place cannot be read."""
    held.go_on.set()
    run_new(side, make_request(40, "first", mm_features=[BrokenFeature(), *features]), 40)


def with_content_elsewhere(side: VllmSide, held: Held, _: list[Any]) -> None:
    """Run a request whose item has the identifier, and tensors elsewhere."""
    held.go_on.set()
    run_new(side, make_request(40, "first", mm_features=[image(None, "mine")]), 40)


def in_a_session(side: VllmSide, held: Held, features: list[Any]) -> None:
    """Run a session that is not cached, and gets the media later: vLLM does not ask then."""
    held.go_on.set()
    session = make_request(
        8,
        "first",
        mm_features=[],
        resumable=True,
        params={"kvhaven.skip_save": True},
        sampling={"prompt_logprobs": 1},
    )
    run_new(side, session, 8)
    session.mm_features.extend(features)
    side.plan_step(scheduled(new=[(session, range(10), 8, 32)]))


@pytest.mark.parametrize(
    "first",
    [
        not_cached,
        over_before_it_was_hashed,
        reset_before_it_was_hashed,
        with_one_that_is_elsewhere,
        with_one_that_cannot_be_read,
        with_content_elsewhere,
        in_a_session,
    ],
    ids=lambda first: first.__name__,
)
def test_an_identifier_is_noted_however_its_first_request_ran(
    bench: Bench,
    first: Callable[[VllmSide, Held, list[Any]], None],
) -> None:
    """The second request gets the first one's blocks and encodings from vLLM's caches."""
    side = bench.side(lookup_deadline_ms=20)
    first(side, Held(side), [image(1.0, "mine")])
    assert run_on(side, "second", 2.0) == 0


def test_an_identifier_is_noted_before_it_is_known_what_the_model_is(bench: Bench) -> None:
    """The weights' files are read for a while: the engine serves, and fills vLLM's caches."""
    side = bench.side(start=False)
    for name, content in (("mine", 1.0), ("renderers", 3.0)):
        run_new(side, make_request(40, name, mm_features=[image(content, name)]), 40)
    side._client.start(10)
    assert run_on(side, "second", 2.0) == 0
    assert len(keys_of(side, "same", mm_features=[image(3.0, "renderers")])) == 2


def test_a_conflict_ends_the_saves_of_requests_that_have_their_keys_already(bench: Bench) -> None:
    """One that waits for its turn gets the blocks of one that came later and ran before it."""
    side = bench.side()
    waiting = make_request(48, "waiting", mm_features=[image(1.0, "mine")])
    assert ask(side, waiting) == (0, False)
    assert side._states["waiting"].permissions.save
    assert keys_of(side, "other", mm_features=[image(2.0, "mine")]) == ()
    blocks = [*range(8), 20, 21, 22, 23]
    assert saved_chunks(run_new(side, waiting, 16, blocks=blocks, computed=32)) == 0


def test_nothing_is_saved_while_a_conflict_may_be_found(bench: Bench) -> None:
    """The other request ran, uncached, while its media wait to be hashed."""
    side = bench.side(lookup_deadline_ms=20)
    waiting = make_request(48, "waiting", mm_features=[image(1.0, "mine")])
    assert ask(side, waiting) == (0, False)
    assert side._states["waiting"].permissions.save
    held = Held(side)
    same = make_request(40, "other", mm_features=[image(1.0, "mine")])
    run_new(side, same, 40)
    side.finished(same)
    blocks = [*range(8), 20, 21, 22, 23]
    assert saved_chunks(run_new(side, waiting, 15, blocks=blocks, computed=32)) == 0
    held.go_on.set()
    wait_until(lambda: not side._extras._media["waiting"][1]._names._queue[0].hashing)
    assert saved_chunks(side.plan_step(scheduled(cached=[(waiting, None, 47, 1)]))) == 3


def test_a_request_of_one_step_is_saved_while_others_wait_with_the_same_image(
    bench: Bench,
) -> None:
    """Those have computed nothing yet, so that nothing of theirs can be in its blocks."""
    side = bench.side(lookup_deadline_ms=20)
    first = make_request(40, "first", mm_features=[image(1.0, "cat")])
    assert ask(side, first) == (0, False)
    held = Held(side)
    for name in ("second", "third"):
        ask(side, make_request(40, name, mm_features=[image(1.0, "cat")]))
    assert saved_chunks(run_new(side, first, 40)) == 2
    held.go_on.set()


def test_media_beyond_what_may_wait_are_not_hashed_and_their_names_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = bench.side(lookup_deadline_ms=20)
    held = Held(side)
    one = image(1.0, "queued")
    monkeypatch.setattr(media, "_QUEUED_MOST", VllmMedia().size(one.data))
    ask(side, make_request(40, "queued", mm_features=[one]))
    ask(side, make_request(40, "beyond", mm_features=[image(2.0, "beyond")]))
    held.go_on.set()
    wait_until(lambda: side._extras.media.settled(()) and not side._extras.media._queue)
    numbers = itertools.count()  # a busy machine may answer beyond the deadline

    def known() -> bool:
        again = f"queued again {next(numbers)}"
        return len(keys_of(side, again, mm_features=[image(1.0, "queued")])) == 2

    wait_until(known)
    assert keys_of(side, "beyond again", mm_features=[image(2.0, "beyond")]) == ()
    assert not side._extras.media._queued_bytes


def test_with_too_many_ambiguous_identifiers_new_ones_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "_REFUSED_MOST", 2)
    side = bench.side()
    assert len(keys_of(side, "known", mm_features=[image(9.0, "known")])) == 2
    for number in range(3):
        for content in (1.0, 2.0):
            keys_of(side, f"{number}{content}", mm_features=[image(content, f"{number}")])
    assert keys_of(side, "again", mm_features=[image(2.0, "2")]) == ()
    assert keys_of(side, "new", mm_features=[image(1.0, "new")]) == ()
    keys_of(side, "known again", mm_features=[image(9.0, "known")])
    assert side._states["known again"].permissions.save


# --- encodings that vLLM keeps --------------------------------------------------------------------


def make_connector(side: VllmSide) -> KVHavenConnector:
    """Return a connector around a scheduler's side, without what vLLM makes it of."""
    connector = object.__new__(KVHavenConnector)
    connector._scheduler = side.side
    return connector


def change_weights(bench: Bench, side: VllmSide, changes: int = 1) -> None:
    bench.change_weights(changes)
    wait_until(lambda: side._client.models.get(0) == ModelState(weights=changes))


def test_after_a_change_of_weights_known_media_are_refused_until_vllm_drops_its_encodings(
    bench: Bench,
) -> None:
    """VLLM's encoder cache goes by the identifier, and is not reset by `update_weights`."""
    side = bench.side()
    assert len(keys_of(side, "before", mm_features=[image(1.0, "cat")])) == 2
    change_weights(bench, side)
    assert keys_of(side, "after", mm_features=[image(1.0, "cat")]) == ()
    assert len(keys_of(side, "new", mm_features=[image(2.0, "dog")])) == 2
    assert len(keys_of(side, "without media")) == 2
    connector = make_connector(side)
    watch_encoder_cache()
    cache = SimpleNamespace(reset=lambda: None)
    scheduler = SimpleNamespace(connector=connector, encoder_cache_manager=cache)
    Scheduler.reset_encoder_cache(cast("Scheduler", scheduler))
    assert len(keys_of(side, "reset", mm_features=[image(1.0, "cat")])) == 2


def test_a_reset_of_the_encoder_cache_before_the_weights_changed_proves_nothing(
    bench: Bench,
) -> None:
    side = bench.side()
    keys_of(side, "before", mm_features=[image(1.0, "cat")])
    side.encodings_dropped()
    change_weights(bench, side)
    assert keys_of(side, "after", mm_features=[image(1.0, "cat")]) == ()


def test_media_that_were_not_encoded_between_a_reset_and_a_change_of_weights_are_accepted(
    bench: Bench,
) -> None:
    """As with `pause(clear_cache=True)`, `update_weights`, `resume`, again and again."""
    side = bench.side()
    for weights in range(1, 4):
        request = make_request(40, f"before {weights}", mm_features=[image(1.0, "cat")])
        assert saved_chunks(run_new(side, request, 40)) == 2
        side.finished(request)
        side.encodings_dropped()
        change_weights(bench, side, weights)


@pytest.mark.parametrize(("identifier", "saved"), [("a:cat", 0), ("cat", 2)])
def test_after_an_adapter_was_loaded_anew_what_its_tower_encoded_is_refused(
    bench: Bench, identifier: str, saved: int
) -> None:
    """VLLM marks such encodings by the adapter's name."""
    side = bench.side()
    bench.load_adapter(1, "v1")
    known(side)
    features = [image(1.0, identifier)]
    assert len(keys_of(side, "before", mm_features=features, lora_request=lora())) == 2
    bench.load_adapter(1, "v2", generation=2)
    known(side, generation=2)
    assert keys_of(side, "first", lora_request=lora()) == ()
    assert len(keys_of(side, "after", mm_features=features, lora_request=lora())) == saved
