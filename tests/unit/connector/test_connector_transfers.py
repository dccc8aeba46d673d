# SPDX-License-Identifier: Apache-2.0
"""Parameters of requests that one node prefills and another decodes."""

from typing import Any

import pytest

from kvhaven.client.scheduler import SchedulerClient
from kvhaven.engine.requests import NO_TRANSFER, Transfer
from kvhaven.integrations.vllm.requests import VllmRequest
from kvhaven.protocol import UNKNOWN_NODE
from tests.crash.node import eventually, status_of
from tests.simulation.connector_kit import Bench, ask, make_request

ANNOUNCED = {"kvhaven.to": "127.0.0.1:1", "do_remote_decode": True}


def refused(bench: Bench) -> int:
    """Return how many chains the service was told of; without peers it announces none."""
    return status_of(bench.node.address).chains.refused


@pytest.mark.parametrize(
    ("params", "transfer"),
    [
        (None, NO_TRANSFER),
        ({}, NO_TRANSFER),
        ({"do_remote_decode": True}, Transfer(handed=True)),
        ({"do_remote_prefill": True, "kvhaven.from": "p"}, Transfer(awaited=True, source="p")),
        ({"do_remote_prefill": True, "kvhaven.from": "p" * 65}, Transfer(awaited=True)),
        ({"do_remote_prefill": True, "kvhaven.from": ["p"]}, Transfer(awaited=True)),
        ({"do_remote_prefill": True, "remote_block_ids": [1]}, Transfer(awaited=True)),
        ({"do_remote_prefill": "false"}, NO_TRANSFER),
        ({"kvhaven.to": "d:7420"}, Transfer("d:7420")),
        ({"kvhaven.to": 7}, NO_TRANSFER),
        ({"kvhaven.to": "d" * 256}, Transfer("d" * 256)),
        ({"kvhaven.to": "d" * 257}, NO_TRANSFER),
        ({"kvhaven.to": "d\ud800:7420"}, NO_TRANSFER),
        ({"do_remote_prefill": True, "kvhaven.from": "p\ud800"}, Transfer(awaited=True)),
        ({"do_remote_prefill": True, "kvhaven.from": "p\n"}, Transfer(awaited=True)),
        (
            {"kvhaven.to": "d", "disagg_spec": {"receiver_host": "e"}, "do_remote_prefill": 1},
            Transfer("d", awaited=True),
        ),
        (
            {"disagg_spec": {"receiver_host": "d", "receiver_init_port": [7420, 7421]}},
            Transfer("d:7420"),
        ),
        (
            {"disagg_spec": {"req_id": "a", "receiver_host": "d", "receiver_init_port": 7420}},
            Transfer("d:7420"),
        ),
        ({"disagg_spec": {"req_id": "a", "receiver_host": "d"}}, Transfer("d")),
        ({"disagg_spec": "nonsense"}, NO_TRANSFER),
        ({"disagg_spec": {"receiver_host": ["d"], "receiver_init_port": 1}}, NO_TRANSFER),
        ({"disagg_spec": {"receiver_host": "d", "receiver_init_port": {}}}, Transfer("d")),
        ("nonsense", NO_TRANSFER),
        (["kvhaven.to"], NO_TRANSFER),
        ({"disagg_spec": {"receiver_id": "d"}}, NO_TRANSFER),
    ],
)
def test_the_part_of_a_request_is_read(params: Any, transfer: Transfer) -> None:
    assert VllmRequest(make_request(40, params=params)).transfer == transfer


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}])
def test_other_requests_hand_nothing_over(params: Any) -> None:
    assert VllmRequest(make_request(40, params=params)).handover("me") is None


def test_a_prefill_hands_over_what_two_step_proxies_pass_on() -> None:
    handover = VllmRequest(make_request(40, params=ANNOUNCED)).handover("me")
    assert handover is not None
    assert (handover["do_remote_prefill"], handover["do_remote_decode"]) == (True, False)
    decoded = VllmRequest(make_request(40, params=handover)).transfer
    assert decoded == Transfer(awaited=True, source="me")


def test_a_prefill_hands_over_whom_to_ask() -> None:
    request = make_request(40, params={"do_remote_decode": True})
    handover = VllmRequest(request).handover("me")
    decoded = make_request(40, params=handover)
    assert VllmRequest(decoded).transfer == Transfer(awaited=True, source="me")
    assert "kvhaven.from" not in (VllmRequest(request).handover("") or {})


def test_the_node_that_prefilled_a_request_is_asked_for_its_chunks_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[tuple[str, int, bool]] = []

    def note(self: SchedulerClient, source: str, keys: Any, _: Any, tail: Any) -> None:
        pulled.append((source, len(keys), tail is not None))

    monkeypatch.setattr(SchedulerClient, "pull_chain", note)
    params = {"do_remote_prefill": True, "kvhaven.from": "p"}
    side, request = bench.side(), make_request(40, params=params)
    for _ in range(3):
        ask(side, request)
    assert pulled == [("p", 2, True)]
    ask(side, make_request(40, "other", params={"do_remote_prefill": True}))
    assert pulled[1:] == [(UNKNOWN_NODE, 2, True)]
    ask(side, make_request(40, "third"))
    assert len(pulled) == 2


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True, "kvhaven.from": "\ud800"},
        {"do_remote_decode": True, "kvhaven.to": "\ud800:1"},
        {"kvhaven.tags": ["\ud800"], "kvhaven.max_load_tokens": "\ud800"},
        "\ud800",
    ],
    ids=repr,
)
def test_parameters_that_cannot_be_sent_harm_no_request(bench: Bench, params: Any) -> None:
    side = bench.side()
    bench.fill(make_request(40), 2)
    before = refused(bench)
    for name in ("\ud800", "other"):
        request = make_request(40, name, params=params)
        side.on_new_request(request)
        assert ask(side, request)[0]
        side.finished(request)
    assert refused(bench) == before


def test_a_chain_is_announced_once(bench: Bench) -> None:
    side, request = bench.side(), make_request(40, params=ANNOUNCED)
    before = refused(bench)
    side.on_new_request(request)
    for _ in range(3):
        ask(side, request)
    eventually(lambda: refused(bench) == before + 1)
    side.finished(request)
    ask(side, make_request(40))
    assert refused(bench) == before + 1


@pytest.mark.parametrize("tokens", [2, 15])
def test_a_prompt_shorter_than_a_chunk_is_announced_as_a_tail(bench: Bench, tokens: int) -> None:
    side, request = bench.side(), make_request(tokens, params=ANNOUNCED)
    before = refused(bench)
    side.on_new_request(request)
    eventually(lambda: refused(bench) == before + 1)
    side.finished(request)


@pytest.mark.parametrize(
    "params", [ANNOUNCED | {"kvhaven.skip_save": True}, {"do_remote_decode": True}]
)
def test_a_chain_that_is_not_saved_is_not_announced(bench: Bench, params: dict[str, Any]) -> None:
    side, before = bench.side(), refused(bench)
    request = make_request(40, params=params)
    side.on_new_request(request)
    ask(side, request)
    side.finished(request)
    other = make_request(range(100, 140), name="other")
    # Messages are handled in order: after an answer, those before it were handled.
    bench.fill(other, 1)
    ask(side, other)
    assert refused(bench) == before
