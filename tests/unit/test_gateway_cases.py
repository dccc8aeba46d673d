# SPDX-License-Identifier: Apache-2.0
"""Generated requests of every path of the API, valid and not: none fails, none changes unproved.

schemathesis makes them from `/openapi.json`. Some hundred run with all tests; 10,000 by

    KVHAVEN_EVENTS=10000 .venv/bin/python -m pytest -o timeout=0 tests/unit/test_gateway_cases.py
"""

import contextlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest

from kvhaven.catalog.actions import LeaseId
from kvhaven.types import TenantId
from tests.crash.engine import Engine
from tests.crash.node import NodeThread, eventually, flush
from tests.crash.workload import events_of_this_run, seed_of_this_run

pytest.importorskip("schemathesis", reason="pip install schemathesis, or make setup")
pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

import requests
import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance

from kvhaven.gateway.plugins import PluginSettings
from tests.gateway_kit import (
    TOKEN,
    GatewayThread,
    keys_of,
    state_at_rest,
    state_of,
    steerable,
    tiered_node,
    tokens_of,
)
from tests.tokenizer import Tokenizer

# On Python 3.14 hypothesis does not find what refers to its own generator, since that is frozen
# (gc.freeze in conftest.py), and warns if schemathesis is the first to use it.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random` was passed")

STREAMS: Final = "/events"
"""It never ends, and has tests of its own."""
DRY_RUN: Final = "dry_run"
WITH_TEXT: Final = tuple(f"POST /v1/{name}" for name in ("lookup", "prefetch", "verify", "pins"))
TEXT: Final = "The text of the prompt that is cached."
FEW: Final = 400
_EACH: Final = 8
_EXPECTED: Final = {200, 201, 202, 400, 401, 404, 409}
_MORE: Final = 4
"""Attempts at expected statuses that did not come yet: of 400 requests, 1 to 5 are 201 or 409."""
_REFUSED: Final = 400
_UNAVAILABLE: Final = 503
_BUSY: Final = ("jobs: ", "the service at ")
"""Beginnings of the reasons for 503."""


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer({TEXT: tokens_of(1, 2)}) as tokenizer:
        yield tokenizer


@pytest.fixture
def api(node: NodeThread, tokenizer: Tokenizer, short_dir: Path) -> Iterator[GatewayThread]:
    with steerable(node, short_dir, plugins=PluginSettings(engine_url=tokenizer.url)) as api:
        yield api


class Cases:
    """Requests of all operations, half of them not valid."""

    def __init__(self, api: GatewayThread) -> None:
        self._api = api
        described = api.get("/openapi.json").json
        schema = schemathesis.openapi.from_dict(described)
        found: list[Any] = [one.ok() for one in schema.get_all_operations()]  # type: ignore[union-attr]
        self.operations = [one for one in found if one.path != STREAMS]
        self._session = requests.Session()
        self._session.trust_env = False
        self._random = random.Random(seed_of_this_run())
        self.statuses = Counter[tuple[str, int]]()
        """Number of answers by operation and status."""
        self.of_text = Counter[tuple[str, int]]()
        """Of these, to prompts that are the known text."""

    @property
    def sent(self) -> int:
        """Number of requests so far."""
        return sum(self.statuses.values())

    @property
    def reached(self) -> set[int]:
        """Statuses of the answers so far."""
        return {status for _, status in self.statuses}

    def done_of_text(self) -> set[str]:
        """Return the operations that did something with a text."""
        return {name for name, status in self.of_text if status < _REFUSED}

    def run(self, count: int, *, token: bool, only_changes: bool = False) -> None:
        """Send so many or a few more, with the token or without; some of every operation."""
        end = self.sent + count
        while self.sent < end:
            for operation in self.operations:
                if only_changes and operation.method.upper() == "GET":
                    continue
                for mode in schemathesis.GenerationMode:
                    self._run(operation, mode, lambda case: self._send(case, token=token))

    def run_dry(self, count: int, each: Callable[[Any, int], None]) -> None:
        """Send so many dry runs of changes, or a few more; pass each on with its status."""
        end = self.sent + count
        while self.sent < end:
            for operation in self.operations:
                if DRY_RUN not in [one.name for one in operation.query]:
                    continue
                for mode in schemathesis.GenerationMode:
                    self._run(operation, mode, lambda case: self._send_dry(case, each))

    def real(self, case: Any) -> int:
        """Send the change of a dry run; return its status."""
        del case.query[DRY_RUN]
        return self._send(case, token=True, aimed=True)

    def _send_dry(self, case: Any, each: Callable[[Any, int], None]) -> None:
        if not isinstance(case.query, dict | None):
            return
        case.query = (case.query or {}) | {DRY_RUN: "true"}
        status = self._send(case, token=True)
        if status:
            each(case, status)

    def _run(self, operation: Any, mode: Any, send: Callable[[Any], object]) -> None:
        @hypothesis.seed(self._random.getrandbits(32))
        @hypothesis.settings(
            max_examples=_EACH,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
            deadline=None,
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            send(case)

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # all that it takes is valid
            each()

    def _send(self, case: Any, *, token: bool, aimed: bool = False) -> int:
        """Send a case, and check the answer; return its status, 0 if no client can send this."""
        if not aimed and self._random.random() < 0.5:
            _aim(case, as_text=self._random.random() < 0.5)
        case.headers = {
            name: value for name, value in (case.headers or {}).items() if name == "If-Match"
        }
        if token:
            case.headers["Authorization"] = f"Bearer {TOKEN}"
        try:
            answer = case.call(base_url=self._api.url, session=self._session, timeout=60)
        except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, ValueError):
            return 0
        name = f"{case.method} {case.path}"
        self.statuses[name, answer.status_code] += 1
        if isinstance(case.body, dict) and case.body.get("text") == TEXT:
            self.of_text[name, answer.status_code] += 1
        told = (
            f"{name}: {answer.status_code}: {answer.content[:500]!r}, for {case.as_curl_command()}"
        )
        if answer.status_code == 503:
            reason = str(answer.json().get("error") or answer.json().get("status"))
            assert reason == "stopping" or reason.startswith(_BUSY), told
        assert answer.status_code < 500 or answer.status_code == 503, told
        if not token and case.method != "GET":
            assert answer.status_code in {401, 404, 405}, told
        if str(answer.status_code) in case.operation.definition.raw["responses"]:
            case.validate_response(answer, checks=[response_schema_conformance])
        return int(answer.status_code)


_OF_PROMPTS = {"token_ids", "text", "engine", "ttl_s", "to"}
"""Fields that only bodies with a prompt have; one of them is in most."""


def _aim(case: Any, *, as_text: bool) -> None:
    """Give a case names that exist, so that more than the checks of names is reached."""
    if isinstance(case.body, dict) and not _OF_PROMPTS.isdisjoint(case.body):
        others = {"namespace", "cache_salt", "text", "token_ids"}
        kept = {n: v for n, v in case.body.items() if n not in others}
        prompt = {"text": TEXT} if as_text else {"token_ids": tokens_of(1, 2)}
        case.body = kept | {"engine": "engine#1"} | prompt
    if isinstance(case.body, dict) and "to" in case.body:
        case.body["to"] = "disk"
    if isinstance(case.path_parameters, dict) and "name" in case.path_parameters:
        case.path_parameters["name"] = "disk"


def seen_by(api: GatewayThread) -> dict[str, Any]:
    """Return all that a change could change, as the API shows it."""
    rows = {n: api.get(f"/v1/{n}").json["rows"] for n in ("jobs", "pins", "tenants", "namespaces")}
    tiers = {row["id"]: row["state"] for row in api.get("/v1/tiers").json["rows"]}
    return rows | {"tiers": tiers, "config": api.get("/config").json, "health": api.health()}


def test_no_request_fails_the_api_and_none_changes_anything_without_the_token(
    node: NodeThread, api: GatewayThread, tokenizer: Tokenizer
) -> None:
    cases, count = Cases(api), events_of_this_run(FEW)
    with Engine(node.address) as engine:
        engine.save(keys_of(engine, tokens_of(2, 2)), tenant=TenantId(b"12345678"))
        engine.save(keys_of(engine, tokens_of(1, 2)))
        before = eventually(lambda: (s := seen_by(api))["tenants"] and s)
        cases.run(count // 4, token=False, only_changes=True)
        assert seen_by(api) == before
        assert not tokenizer.texts, "nobody asks an engine without the token"
        cases.run(count - cases.sent, token=True)
        for _ in range(_MORE):
            if cases.reached >= _EXPECTED:
                break
            cases.run(count // 4, token=True)
        seen = sorted((n, c, k) for (n, c), k in cases.statuses.items())
        assert cases.reached >= _EXPECTED, seen
        assert {name for name, _ in cases.statuses} == {
            f"{one.method.upper()} {one.path}" for one in cases.operations
        }
        for _ in range(5):  # a few requests of each path may all have token ids
            if set(WITH_TEXT) <= cases.done_of_text():
                break
            cases.run(1, token=True)
        assert set(WITH_TEXT) <= cases.done_of_text(), cases.of_text
        assert set(tokenizer.texts) - {TEXT}, "generated texts reach the tokenizer, too"
        by_status = Counter(status for _, status in cases.statuses.elements())
        logging.getLogger(__name__).info("answers by status: %s", dict(by_status))
        for row in api.get("/v1/pins").json["rows"]:
            node.call(lambda i=row["id"]: node.service.pins.unpin(LeaseId(int(i))))  # type: ignore[misc]
        node.check()


def test_no_dry_run_changes_anything_and_each_is_refused_like_its_change(
    node: NodeThread, api: GatewayThread
) -> None:
    cases, count = Cases(api), events_of_this_run(FEW)
    refused = Counter[bool]()

    def changes_nothing(case: Any, _: int) -> None:
        assert state_of(node) == before, case.as_curl_command()

    def promises(case: Any, status: int) -> None:
        real = cases.real(case)
        if _UNAVAILABLE not in {status, real}:  # too many jobs, which end meanwhile
            refused[real >= _REFUSED] += 1
            assert real == status or max(real, status) < _REFUSED, (status, real, case)

    with Engine(node.address) as engine:
        engine.save(keys_of(engine, tokens_of(2, 2)), tenant=TenantId(b"12345678"))
        engine.save(keys_of(engine, tokens_of(1, 2)))
        flush(node.address)
        before = state_at_rest(node)
        cases.run_dry(count // 2, changes_nothing)
        cases.run_dry(count // 2, promises)
        assert sum(cases.of_text.values()) > count // 20
        assert refused[True] > count // 20 < refused[False], refused
