# SPDX-License-Identifier: Apache-2.0
"""Mappings that never move all of their keys at once."""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvhaven import maps
from kvhaven.maps import OrderedMap, StripedDict


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


KEYS = [key_of(number) for number in range(24)]


class OrderedMapMachine(RuleBasedStateMachine):
    """Compares with Python's own ordered dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.map = OrderedMap[bytes, int]()
        self.model: OrderedDict[bytes, int] = OrderedDict()
        self.division = self.map.divide()
        self.moved: set[bytes] = set()
        """Keys that were appended or moved to the end since the division."""

    absent = precondition(lambda self: len(self.model) < len(KEYS))
    present = precondition(lambda self: self.model)

    @absent
    @rule(data=st.data(), last=st.booleans(), value=st.integers(0, 9))
    def add(self, data: st.DataObject, last: bool, value: int) -> None:
        key = data.draw(st.sampled_from([k for k in KEYS if k not in self.model]))
        self.model[key] = value
        self.model.move_to_end(key, last=last)
        (self.map.append if last else self.map.prepend)(key, value)
        (self.moved.add if last else self.moved.discard)(key)

    @present
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.model)))
        assert self.map.pop(key) == self.model.pop(key)
        self.moved.discard(key)

    @present
    @rule(data=st.data(), value=st.integers(0, 9))
    def change(self, data: st.DataObject, value: int) -> None:
        key = data.draw(st.sampled_from(KEYS))
        if key not in self.model:
            self.moved.add(key)
        self.map[key] = self.model[key] = value

    @rule(data=st.data())
    def move_some(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(KEYS), max_size=12))
        self._move(keys)

    @present
    @rule(data=st.data())
    def move_neighbours(self, data: st.DataObject) -> None:
        keys = list(self.model)
        first = data.draw(st.integers(0, len(keys) - 1))
        self._move(keys[first : first + data.draw(st.integers(1, 12))])

    @present
    @rule(data=st.data())
    def move_to_front(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.model)))
        self.map.to_front(key)
        self.model.move_to_end(key, last=False)
        self.moved.discard(key)

    @rule()
    def divide(self) -> None:
        self.division = self.map.divide()
        self.moved.clear()

    def _move(self, keys: list[bytes]) -> None:
        self.map.to_end(iter(keys))
        for key in keys:
            if key in self.model:
                self.model.move_to_end(key)
                self.moved.add(key)

    @invariant()
    def they_are_equal(self) -> None:
        items = list(self.model.items())
        assert list(self.map.items()) == items
        assert list(self.map) == [key for key, _ in items]
        assert list(self.map.values()) == [value for _, value in items]
        assert list(reversed(self.map)) == [key for key, _ in reversed(items)]
        assert [item for page in self.map.walk() for item in page] == items
        assert [item for page in self.map.walk_back() for item in page] == items[::-1]
        assert len(self.map) == len(items)
        for key in KEYS:
            assert (key in self.map) == (key in self.model)
            assert self.map.get(key) == self.model.get(key)

    @invariant()
    def a_walk_to_the_division_yields_what_was_not_moved_since(self) -> None:
        found = [key for page in self.map.walk(self.division) for key, _ in page]
        assert found == [key for key in self.model if key not in self.moved]

    @invariant()
    def no_page_is_kept_in_vain(self) -> None:
        pages = list(self.map._in_order())
        assert all(page or page is self.map._last for page in pages)
        assert all(len(page) <= maps.PAGE for page in pages)
        assert all(page is self.map._last or len(page) * 4 > page.size for page in pages)


def test_it_does_what_an_ordered_dictionary_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "PAGE", 4)
    run_state_machine_as_test(
        OrderedMapMachine, settings=settings(max_examples=100, stateful_step_count=40)
    )


def test_a_walk_sees_all_that_stays_while_everything_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maps, "PAGE", 4)
    rng = random.Random(1)
    for _ in range(50):
        known = OrderedMap[bytes, int]()
        for number in range(40):
            known.append(key_of(number), number)
        stays = set(range(0, 40, 3))
        seen = set[int]()
        for page in rng.choice([known.walk, known.walk_back])():
            seen.update(number for _, number in page)
            for number in rng.sample(range(40), 5):
                key = key_of(number)
                if number not in stays and key in known:
                    change = rng.randrange(3)
                    if change == 0:
                        known.pop(key)
                    elif change == 1:
                        known.to_front(key)
                    else:
                        known.to_end([key])
            known.append(key_of(rng.randrange(10**9)), 40)
            known.prepend(key_of(rng.randrange(10**9)), 40)
        assert stays <= seen


def test_a_walk_goes_on_where_its_next_pages_are_moved_or_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maps, "PAGE", 4)
    for back in (False, True):
        known = OrderedMap[bytes, int]()
        for number in range(40):
            known.append(key_of(number), number)
        keys = list(known)[:: -1 if back else 1]
        seen: list[int] = []
        for page in known.walk_back() if back else known.walk():
            seen += [number for _, number in page]
            at = len(seen)
            if at == 8:
                known.to_end(sorted(keys[at : at + 4], key=list(known).index))
                for key in keys[at + 4 : at + 8]:
                    known.pop(key)
        expected = [*range(8), *range(16, 40)]
        assert seen == [39 - number for number in expected] if back else expected


def chains(count: int, length: int) -> Iterator[list[bytes]]:
    for number in range(count):
        yield [key_of(number * length + at) for at in range(length)]


def test_keys_that_are_moved_together_are_moved_as_pages() -> None:
    known = OrderedMap[bytes, None]()
    every = list(chains(8, 2 * maps.PAGE))
    for chain in every:
        for key in chain:
            known.append(key, None)
    for chain in every:
        known.to_end(chain)
    pages = [page for page in known._in_order() if page]
    for chain in reversed(every):
        known.to_end(chain)
    moved = [page for page in known._in_order() if page]
    assert {id(page) for page in moved} == {id(page) for page in pages}, "pages were made anew"
    assert list(known) == [key for chain in reversed(every) for key in chain]


def test_a_striped_dictionary_is_a_dictionary() -> None:
    striped, model = StripedDict[bytes, int](), dict[bytes, int]()
    rng = random.Random(1)
    for number in range(3 * maps._WHOLE):
        key = key_of(rng.randrange(2 * maps._WHOLE))
        if rng.random() < 0.7:
            striped[key] = model[key] = number
        elif key in model:
            del striped[key]
            del model[key]
        else:
            assert striped.pop(key, -1) == model.pop(key, -1)
    assert dict(striped.items()) == model
    assert sorted(striped) == sorted(model)
    assert sorted(striped.values()) == sorted(model.values())
    assert len(striped) == len(model)
    assert all(striped.get(key) == striped[key] == value for key, value in model.items())
    assert key_of(-1 % 2**32) not in striped


def test_no_part_of_a_large_dictionary_is_large() -> None:
    striped = StripedDict[bytes, None]()
    for number in range(10 * maps._WHOLE):
        striped[key_of(number)] = None
    sizes = [len(part) for part in striped.parts()]
    assert sum(sizes) == len(striped) == 10 * maps._WHOLE
    assert max(sizes) < maps._WHOLE / 10
