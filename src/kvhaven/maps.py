# SPDX-License-Identifier: Apache-2.0
"""Mappings for millions of keys in which every operation touches a bounded number of them.

Python copies a whole dictionary when it resizes it, which also happens to one that does not grow.
With a million keys a copy takes 50 to 170 ms, and so does freeing or listing the dictionary. The
mappings here consist of small dictionaries. Keys are bytes whose first byte is evenly distributed,
such as digests.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=bytes)
V = TypeVar("V")
D = TypeVar("D")

_STRIPES = 256
_WHOLE = 4096
"""A mapping with fewer keys is one dictionary, because there may be thousands of small mappings."""
PAGE = 256
"""Maximum number of keys in a page of an `OrderedMap`."""
_ENDS = 0
"""Number of the sentinel page, always empty, that precedes the first page and follows the last."""


class StripedDict(Generic[K, V]):
    """Dictionary in 256 stripes, selected by the first byte of the key.

    Loops that cannot afford a method call per key read `stripes[key[0]]` directly.
    """

    __slots__ = ("_whole", "stripes")

    def __init__(self) -> None:
        self._whole: dict[K, V] | None = {}
        self.stripes: list[dict[K, V]] = [self._whole] * _STRIPES

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        return self.stripes[key[0]].get(key)

    def pop(self, key: K, default: D) -> V | D:
        """Remove a key and return its value, or `default`."""
        return self.stripes[key[0]].pop(key, default)

    def parts(self) -> tuple[dict[K, V], ...]:
        """Return the underlying dictionaries; each holds a few thousand keys of a million."""
        return tuple(self.stripes) if self._whole is None else (self._whole,)

    def values(self) -> Iterator[V]:
        """Yield every value. The mapping must not change during the iteration."""
        for part in self.parts():
            yield from part.values()

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield every key with its value. The mapping must not change during the iteration."""
        for part in self.parts():
            yield from part.items()

    def __getitem__(self, key: K) -> V:
        return self.stripes[key[0]][key]

    def __setitem__(self, key: K, value: V) -> None:
        stripe = self.stripes[key[0]]
        stripe[key] = value
        if stripe is self._whole and len(stripe) > _WHOLE:
            self._split(stripe)

    def __delitem__(self, key: K) -> None:
        del self.stripes[key[0]][key]

    def __contains__(self, key: K) -> bool:
        return key in self.stripes[key[0]]

    def __iter__(self) -> Iterator[K]:
        for part in self.parts():
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self.parts()))

    def _split(self, whole: dict[K, V]) -> None:
        self._whole = None
        self.stripes[:] = [{} for _ in range(_STRIPES)]
        for key, value in whole.items():
            self.stripes[key[0]][key] = value


class _Page(dict[K, V]):
    """Consecutive keys; `size` is the number of keys when the page was created or filled.

    Pages refer to each other by number, which increases from the first page to the last, because
    object references would form cycles.
    """

    __slots__ = ("after", "backwards", "before", "number", "size")

    def __init__(self, number: int, *, backwards: bool = False) -> None:
        self.number = number
        self.before = self.after = _ENDS
        self.backwards = backwards  # the most recently added key comes first
        self.size = 0

    def ordered(self) -> Iterator[K]:
        """Return an iterator over the keys in order."""
        return reversed(self) if self.backwards else iter(self)


class _Walk:
    """Number of the page at which a walk continues; `back` walks towards the first page."""

    __slots__ = ("at", "back")

    def __init__(self, at: int, *, back: bool) -> None:
        self.at = at
        self.back = back


class OrderedMap(Generic[K, V]):
    """Ordered dictionary: pages of up to `PAGE` keys, and a `StripedDict` from key to page.

    Moving a key removes it from its page and adds it to the last page, or to the first. Keys that
    are moved together get their own pages, and the next move moves such pages as a whole.
    """

    __slots__ = ("_count", "_last", "_numbers", "_page", "_pages", "_walks", "_where")

    def __init__(self) -> None:
        self._page = PAGE
        self._count = 0
        self._where = StripedDict[K, _Page[K, V]]()
        self._pages = {_ENDS: _Page[K, V](_ENDS)}  # by number
        self._numbers = 1
        self._last = _Page[K, V](1)  # may be empty
        self._add(self._last, _ENDS)
        self._walks: list[_Walk] = []

    def append(self, key: K, value: V) -> None:
        """Add a key that is not in the map, as the last."""
        last = self._last
        if len(last) >= self._page or last.backwards:
            last = self._add_page()
        last[key] = value
        self._where[key] = last
        self._count += 1

    def prepend(self, key: K, value: V) -> None:
        """Add a key that is not in the map, as the first."""
        first = self._pages[self._pages[_ENDS].after]
        if not first.backwards or len(first) >= self._page:
            behind = first.number
            first = _Page(min(behind, _ENDS) - 1, backwards=True)
            self._add(first, behind)
        first[key] = value
        first.size = max(first.size, len(first))
        self._where[key] = first
        self._count += 1

    def pop(self, key: K) -> V:
        """Remove a key and return its value. Raises `KeyError` if the key is missing."""
        page = self._where.stripes[key[0]].pop(key)
        value = page.pop(key)
        self._count -= 1
        self._tidy(page)
        return value

    def to_end(self, keys: Iterable[K]) -> None:
        """Move each key to the end, one after the other; ignore keys that are not in the map."""
        keys = list(keys)
        if len(keys) * 2 >= self._page and self._last:
            self._add_page()
        stripes, last, most = self._where.stripes, self._last, self._page
        at, end, page = 0, len(keys), last
        while at < end:
            key = keys[at]
            stripe = stripes[key[0]]
            found = stripe.get(key)
            if found is not page:
                if found is None:
                    at += 1
                    continue
                self._tidy(page)
                page = found
                length = len(page)
                if length <= end - at and page is not last and self._is(page, keys, at):
                    last = self._move(page)
                    at += length
                    continue
            value = page.pop(key)
            if page is not last:
                if len(last) >= most or last.backwards:
                    last = self._add_page()
                stripe[key] = last
            last[key] = value
            at += 1
        self._tidy(page)

    def to_front(self, key: K) -> None:
        """Move a key to the front."""
        self.prepend(key, self.pop(key))

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        page = self._where.get(key)
        return None if page is None else page[key]

    def divide(self) -> int:
        """Return a number: `walk` yields only keys that are not moved or appended from now on."""
        return (self._add_page() if self._last else self._last).number

    def walk(self, division: int | None = None) -> Iterator[list[tuple[K, V]]]:
        """Yield keys with values in order, page by page; the map may change between pages.

        A key that is moved or added during the walk may be missed. A page shows the state at the
        moment at which it is yielded. With a `division`, the walk ends there (see `divide`).
        """
        return self._walk(None if division is None else division - 1, back=False)

    def walk_back(self) -> Iterator[list[tuple[K, V]]]:
        """Yield pages as `walk` does, from the last key to the first."""
        for page in self._walk(None, back=True):
            yield page[::-1]

    def values(self) -> Iterator[V]:
        """Yield every value in order. The map must not change during the iteration."""
        for page in self._in_order():
            for key in page.ordered():
                yield page[key]

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield every key with its value in order. The map must not change during the iteration."""
        for page in self._in_order():
            for key in page.ordered():
                yield key, page[key]

    def __getitem__(self, key: K) -> V:
        return self._where[key][key]

    def __setitem__(self, key: K, value: V) -> None:
        """Set the value of a key in place, or append the key if it is missing."""
        page = self._where.get(key)
        if page is None:
            self.append(key, value)
        else:
            page[key] = value

    def __contains__(self, key: K) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[K]:
        for page in self._in_order():
            yield from page.ordered()

    def __reversed__(self) -> Iterator[K]:
        page = self._last
        while page.number != _ENDS:
            yield from iter(page) if page.backwards else reversed(page)
            page = self._pages[page.before]

    def __len__(self) -> int:
        return self._count

    def _in_order(self) -> Iterator[_Page[K, V]]:
        page = self._pages[self._pages[_ENDS].after]
        while page.number != _ENDS:
            yield page
            page = self._pages[page.after]

    def _walk(self, newest: int | None, *, back: bool) -> Iterator[list[tuple[K, V]]]:
        if newest is None:  # keys that are moved before the first page is taken count, too
            newest = self._last.number
        walk = _Walk(newest if back else self._pages[_ENDS].after, back=back)
        self._walks.append(walk)
        try:
            while walk.at != _ENDS and walk.at <= newest:
                page = self._pages[walk.at]
                walk.at = page.before if back else page.after
                if page:
                    yield [(key, page[key]) for key in page.ordered()]
        finally:
            self._walks.remove(walk)

    @staticmethod
    def _is(page: _Page[K, V], keys: list[K], at: int) -> bool:
        """Return whether a page holds exactly the next keys of `keys` from `at`, in that order."""
        if page.backwards or next(iter(page)) != keys[at]:
            return False
        return list(page) == keys[at : at + len(page)]

    def _move(self, page: _Page[K, V]) -> _Page[K, V]:
        """Make a page the last one."""
        self._remove(page)
        self._numbers = page.number = self._numbers + 1
        self._add(page, _ENDS)
        return self._replace_last(page)

    def _add_page(self) -> _Page[K, V]:
        """Append an empty page."""
        self._numbers += 1
        page = _Page[K, V](self._numbers)
        self._add(page, _ENDS)
        return self._replace_last(page)

    def _add(self, page: _Page[K, V], behind: int) -> None:
        """Link a page in front of the page with number `behind`."""
        page.before, page.after = self._pages[behind].before, behind
        self._pages[page.before].after = self._pages[behind].before = page.number
        self._pages[page.number] = page

    def _remove(self, page: _Page[K, V]) -> None:
        """Unlink a page; walks that would continue with it continue with the page after it."""
        for walk in self._walks:
            if walk.at == page.number:
                walk.at = page.before if walk.back else page.after
        self._pages[page.before].after = page.after
        self._pages[page.after].before = page.before
        del self._pages[page.number]

    def _replace_last(self, page: _Page[K, V]) -> _Page[K, V]:
        before, self._last = self._last, page
        before.size = len(before)
        self._tidy(before)
        return page

    def _tidy(self, page: _Page[K, V]) -> None:
        """Free the memory that an emptied page does not need: dictionaries never shrink."""
        if page is self._last or len(page) * 4 > page.size:
            return
        if not page:
            self._remove(page)
            return
        smaller = _Page[K, V](page.number, backwards=page.backwards)
        smaller.update(page)
        smaller.before, smaller.after, smaller.size = page.before, page.after, len(page)
        self._pages[page.number] = smaller
        where = self._where.stripes
        for key in smaller:
            where[key[0]][key] = smaller
