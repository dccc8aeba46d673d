# SPDX-License-Identifier: Apache-2.0
"""Sorted lists of the HTTP API: each row on exactly one page, and no walk over endless lists."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.errors import KVHavenError
from kvhaven.keys import tenant_id
from kvhaven.protocol import List
from kvhaven.service.snapshot import Observation
from tests.crash.engine import Engine
from tests.crash.node import NodeThread, eventually, flush
from tests.unit.catalog_kit import namespace_of

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway import sorting
from kvhaven.gateway.sorting import Order, columns
from tests.gateway_kit import GatewayThread, keys_of, post, steerable, tiered_node, tokens_of

LISTS = ("engines", "namespaces", "tenants", "tiers", "pins", "jobs")


class Row(msgspec.Struct, frozen=True):
    """A row with columns of each kind."""

    id: str
    name: str | None = None
    state: Literal["on", "off"] = "on"
    size: int | None = None
    since: float = 0.0
    online: bool = False
    bytes: dict[str, int] = {}
    result: dict[str, int] = {}


NUMBERS = st.integers(-3, 3) | st.none()
ROWS = st.lists(
    st.builds(
        Row,
        id=st.text(max_size=3),
        name=st.sampled_from(["", "a", "é", "\0" * 99, "z" * 64, "z" * 65]) | st.none(),
        state=st.sampled_from(["on", "off"]),
        size=st.just(2**70) | NUMBERS,
        since=st.sampled_from([0.1, 1e300, -2.5]),
        online=st.booleans(),
        bytes=st.dictionaries(st.sampled_from(["memory", "disk"]), st.integers(0, 3)),
    ),
    unique_by=lambda row: row.id,
    max_size=12,
)


def pages(rows: list[Row], sort: str, limit: int) -> list[Row]:
    """Return all rows, page by page."""
    found: list[Row] = []
    cursor: str | None = ""
    while cursor is not None:
        assert len(found) <= len(rows)
        page, cursor = Order(Row, sort, cursor).page(rows, limit)
        assert len(page) == limit or cursor is None
        assert cursor is None or len(cursor) <= sorting.MOST_CURSOR
        found += page
    return found


def value_of(row: Row, column: str) -> Any:
    value = getattr(row, column)
    if isinstance(value, dict):
        return sum(value.values())
    return value[:64] if isinstance(value, str) else value


def test_columns_are_texts_numbers_and_what_places_hold() -> None:
    assert list(columns(Row)) == ["id", "name", "state", "size", "since", "online", "bytes"]


@given(ROWS, st.sampled_from(list(columns(Row))), st.booleans(), st.integers(1, 4))
def test_pages_are_the_sorted_rows_and_those_without_a_value_come_last(
    rows: list[Row], column: str, down: bool, limit: int
) -> None:
    found = pages(rows, "-" * down + column, limit)
    known = [row for row in rows if value_of(row, column) is not None]
    known.sort(key=lambda row: (value_of(row, column), row.id), reverse=down)
    assert found[: len(known)] == known
    assert found[len(known) :] == sorted(
        (row for row in rows if value_of(row, column) is None), key=lambda r: r.id, reverse=down
    )


@given(ROWS, ROWS, st.sampled_from(["name", "-size", "bytes", "-since"]), st.data())
def test_rows_that_stay_as_they_are_are_on_exactly_one_page(
    rows: list[Row], others: list[Row], sort: str, data: st.DataObject
) -> None:
    ids = {row.id for row in rows}
    more = [row for row in others if row.id not in ids]
    staying = data.draw(st.sets(st.sampled_from(sorted(ids)))) if rows else set()
    first, cursor = Order(Row, sort).page(rows, 3)
    if cursor is None:
        return
    changed = [row for row in rows if row.id in staying] + more
    rest = []
    while cursor is not None:
        page, cursor = Order(Row, sort, cursor).page(changed, 2)
        rest += page
        assert len(rest) <= len(changed)
    seen = [row.id for row in (*first, *rest)]
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


def forged(*position: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


@pytest.mark.parametrize(
    "cursor",
    [
        *("x", "é", "====", forged(), forged("size", 1), forged("size", [], "a")),
        *(forged("-size", 1, "a"), forged("size", "1", "a"), forged("size", True, "a")),
        *(forged("size", 1, None), base64.urlsafe_b64encode(b"\xff" * 9).decode()),
        forged("size", 1, "a")[:-6],
    ],
)
def test_a_cursor_of_something_else_is_refused(cursor: str) -> None:
    with pytest.raises(KVHavenError, match=r"^cursor: "):
        Order(Row, "size", cursor)


# --- over HTTP ------------------------------------------------------------------------------


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def api(node: NodeThread, short_dir: Path) -> Iterator[GatewayThread]:
    with steerable(node, short_dir) as api:
        yield api


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kinds of the pages that the service has made, as it makes them."""
    kinds: list[str] = []
    rows = Observation.rows

    def counted(self: Observation, message: List) -> Iterator[bool]:
        kinds.append(message.kind)
        return rows(self, message)

    monkeypatch.setattr(Observation, "rows", counted)
    return kinds


def rows_of(api: GatewayThread, kind: str, sort: str, limit: int = 100) -> list[dict[str, Any]]:
    """Return all rows of a list, page by page."""
    rows: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = api.get(f"/v1/{kind}?limit={limit}&sort={sort}&cursor={quote(cursor)}")
        assert answer.status == 200, answer.body
        rows += answer.json["rows"]
        assert len({row["id"] for row in rows}) == len(rows)
        cursor = answer.json["next"]
    return rows


def test_every_list_is_sorted_by_every_column_that_the_description_names(
    node: NodeThread, api: GatewayThread
) -> None:
    described = api.get("/openapi.json").json["paths"]
    with Engine(node.address) as engine, Engine(node.address, engine="other", model="other"):
        for number, name in enumerate(("", "ann", "ben", "cid"), 1):
            tokens = tokens_of(number, number)
            tenant = tenant_id(name)
            engine.save(keys_of(engine, tokens, name), tenant=tenant)
        flush(node.address)
        for tokens in (tokens_of(1, 1), tokens_of(1, 1)):
            pin = {"engine": "engine#1", "token_ids": tokens}
            assert post(api, "/v1/pins", pin | {"ttl_s": 60}).status == 201
        assert post(api, "/v1/flush").status == 202
        assert post(api, "/v1/flush").status == 202
        eventually(lambda: all(job["ended"] for job in api.get("/v1/jobs").json["rows"]))
        for kind in LISTS:
            parameters = {p["name"]: p for p in described[f"/v1/{kind}"]["get"]["parameters"]}
            sorts = parameters["sort"]["schema"]["enum"]
            rows = api.get(f"/v1/{kind}").json["rows"]
            assert len(rows) >= 2, kind
            assert len(sorts) == 2 * len([name for name in sorts if name[0] != "-"])
            for sort in sorts:
                found = rows_of(api, kind, sort, 1)
                assert sorted(map(repr, found)) == sorted(map(repr, rows)), (kind, sort)
                values = [_sum(row[sort.removeprefix("-")]) for row in found]
                known = [value for value in values if value is not None]
                assert values[: len(known)] == known
                assert known == sorted(known, reverse=sort.startswith("-")), (kind, sort)
        by_size = rows_of(api, "tenants", "-bytes")
        assert [row["id"] for row in by_size] == [
            tenant_id(name).hex() for name in ("cid", "ben", "ann")
        ]


def _sum(value: Any) -> Any:
    return sum(value.values()) if isinstance(value, dict) else value


def test_an_unknown_column_is_refused_with_the_known_ones(
    api: GatewayThread, listed: list[str]
) -> None:
    for kind in LISTS:
        for sort in ("", "-", "size", "--id", "rows", "+id"):
            answer = api.get(f"/v1/{kind}?sort={quote(sort)}")
            assert answer.status == 400
            assert answer.json["error"].startswith("sort: unknown column (got ")
            assert "expected one of id, " in answer.json["error"]
    long = api.get(f"/v1/tenants?sort=bytes&cursor={'a' * (sorting.MOST_CURSOR + 1)}")
    other = api.get("/v1/tenants?sort=bytes&cursor=" + forged("-bytes", 1, "a"))
    assert (long.status, other.status) == (400, 400)
    # What is refused costs the service nothing.
    assert set(listed) <= {"tenants"}  # of the metrics
    assert listed.count("tenants") <= 1


def test_a_list_beyond_the_bound_is_refused_and_its_pages_are_not(
    node: NodeThread, api: GatewayThread, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "MOST_SORTED", 250)
    for number in range(1000):
        namespace = namespace_of(f"n{number}")
        node.call(lambda n=namespace: node.service.catalog.add_namespace(n))  # type: ignore[misc]
        if number == 249:
            assert len(rows_of(api, "namespaces", "-id", 100)) == 250
            listed.clear()
    eventually(lambda: api.get("/v1/namespaces?sort=id").status == 400)
    assert listed.count("namespaces") == 3  # not all ten pages
    answer = api.get("/v1/namespaces?sort=id")
    assert answer.json["error"].startswith("sort: the list has more than 250 rows")
    assert len(api.get("/v1/namespaces?limit=100").json["rows"]) == 100


def test_many_clients_of_a_long_list_cost_the_service_one_walk_and_short_lists_are_fresh(
    node: NodeThread, api: GatewayThread, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "_KEPT_S", 600.0)
    for number in range(230):
        namespace = namespace_of(f"n{number}")
        node.call(lambda n=namespace: node.service.catalog.add_namespace(n))  # type: ignore[misc]
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(lambda _: rows_of(api, "namespaces", "-id", 50), range(8)))
    assert [len(rows) for rows in found] == [230] * 8
    assert listed.count("namespaces") == 3
    assert not rows_of(api, "engines", "since")
    with Engine(node.address):
        assert len(rows_of(api, "engines", "-since")) == 1
