# SPDX-License-Identifier: Apache-2.0
"""Sorted pages of the lists: columns of the rows, and cursors that carry the value of a row.

Rows without a value (null) come last in both directions, and rows with the same value are in the
order of their ids, in the same direction. Texts are compared by their first 64 characters. `chunks`
and `bytes` by place are compared by their sums.
"""

import asyncio
import base64
import binascii
import heapq
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, Protocol, TypeVar, get_args

import msgspec

from kvhaven.errors import KVHavenError
from kvhaven.gateway.observer import Observer
from kvhaven.protocol import MOST_ROWS, ListKind

MOST_SORTED: Final = 10_000
"""Rows of a list that is sorted. To collect them takes at least 2 s, as the observer pauses after
each page, and 0.1 s of the service, in pieces."""
MOST_CURSOR: Final = 1024
_KEPT_S: Final = 1.0
_MOST_TEXT: Final = 64
_SUMMED: Final = frozenset({"chunks", "bytes"})

Value = str | int | float | None


class _Row(Protocol):
    @property
    def id(self) -> str: ...


Row = TypeVar("Row", bound=_Row)
T = TypeVar("T")


class WholeLists:
    """Lists of the service as a whole, for pages in another order than that of the ids.

    One of more than a page is collected by one request at a time, and kept for a second: so many
    clients cost the service as little as one, and the pages that a client reads in this time are of
    the same rows.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._collecting: dict[ListKind, asyncio.Lock] = {}
        self._kept: dict[ListKind, Sequence[Any]] = {}

    async def rows(self, kind: ListKind, row: type[T]) -> Sequence[T]:
        """Return all rows. Raises `KVHavenError` if there are more than `MOST_SORTED`."""
        async with self._collecting.setdefault(kind, asyncio.Lock()):
            rows = self._kept.get(kind)
            if rows is None:
                rows = await self._collect(kind, row)
                if len(rows) > MOST_ROWS:
                    self._kept[kind] = rows
                    asyncio.get_running_loop().call_later(_KEPT_S, self._kept.pop, kind)
        if len(rows) > MOST_SORTED:
            raise KVHavenError(
                f"sort: the list has more than {MOST_SORTED} rows; read its pages without sort"
            )
        return rows

    async def _collect(self, kind: ListKind, row: type[T]) -> Sequence[T]:
        """Return all rows, or more than `MOST_SORTED`."""
        found: list[T] = []
        cursor = ""
        while len(found) <= MOST_SORTED:
            raw, cursor = await self._observer.rows(kind, cursor)
            found += msgspec.json.decode(raw, type=list[row])  # type: ignore[valid-type]
            if not cursor:
                break
        return found


class Position(NamedTuple):
    """Place of a row in a sorted list, as its cursor has it: `sort`, and the row's value and id."""

    sort: str
    value: Value
    id: str


class Order:
    """Order of the rows of type `row`: `sort` is a column, descending with a `-` before it.

    Pages begin behind the `cursor` (empty: with the first row). Raises `KVHavenError` for an
    unknown column, and for a cursor that is not of this order.
    """

    def __init__(self, row: type[msgspec.Struct], sort: str, cursor: str = "") -> None:
        self._sort, self._column = sort, sort.removeprefix("-")
        self._descending = sort.startswith("-")
        allowed = columns(row)
        if self._column not in allowed:
            raise KVHavenError(
                f"sort: unknown column (got {sort[:64]!r}); expected one of {', '.join(allowed)}, "
                "with - before it for descending"
            )
        self._behind = (
            self._key(_position_of(cursor, sort, allowed[self._column])) if cursor else None
        )

    def page(self, rows: Iterable[Row], limit: int) -> tuple[list[Row], str | None]:
        """Return a page of the rows, which may come in any order, and the next cursor."""
        keyed = ((self._key(self._position(row)), row) for row in rows)
        if (behind := self._behind) is not None:
            down = self._descending
            keyed = ((k, row) for k, row in keyed if (k < behind if down else k > behind))
        first = heapq.nlargest if self._descending else heapq.nsmallest
        found = [row for _, row in first(limit + 1, keyed, key=lambda item: item[0])]
        more = len(found) > limit
        return found[:limit], self._cursor(found[limit - 1]) if more else None

    def _position(self, row: _Row) -> Position:
        value = getattr(row, self._column)
        if isinstance(value, dict):
            value = sum(value.values())
        if isinstance(value, str):
            value = value[:_MOST_TEXT]
        if isinstance(value, bool):
            value = int(value)
        return Position(self._sort, value, row.id)

    def _key(self, position: Position) -> tuple[bool, Value, str]:
        """Return what the rows are ordered by."""
        unknown = position.value is None
        return unknown != self._descending, 0 if unknown else position.value, position.id

    def _cursor(self, row: _Row) -> str:
        raw = msgspec.json.encode(self._position(row))
        return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _position_of(cursor: str, sort: str, text: bool) -> Position:
    """Return the position in a cursor; `text`: the column has texts, otherwise numbers."""
    try:
        raw = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        position = msgspec.json.decode(raw, type=Position)
    except (binascii.Error, UnicodeError, msgspec.DecodeError) as error:
        raise KVHavenError("cursor: malformed; expected `next` of the previous page") from error
    value = position.value
    if position.sort != sort or (value is not None and isinstance(value, str) != text):
        raise KVHavenError(f"cursor: not of a list with sort={sort}; begin with the first page")
    return position


@cache
def columns(row: type[msgspec.Struct]) -> dict[str, bool]:
    """Return the columns by which rows of a type can be sorted, and whether they are texts."""
    found: dict[str, bool] = {}
    for field in msgspec.structs.fields(row):
        kinds = {k for k in get_args(field.type) or (field.type,) if k is not type(None)}
        if kinds <= {int, float, bool} or field.name in _SUMMED:
            found[field.name] = False
        elif all(kind is str or isinstance(kind, str) for kind in kinds):  # any text, or a few
            found[field.name] = True
    return found
