# SPDX-License-Identifier: Apache-2.0
"""The dashboard in real Chromium, with a real service behind it."""

import contextlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvhaven.catalog.ghosts import Reason
from kvhaven.client.control import connect
from kvhaven.client.scheduler import Asking
from kvhaven.keys import tenant_id
from tests.crash.engine import CHUNK_SIZE, SHARD_BYTES, Engine, prompt
from tests.crash.node import NodeThread, eventually, flush, status_of

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway.page import FILES
from tests.browser import Console, Page, chromium, number_in, play_load, settled_tokens
from tests.gateway_kit import (
    GatewayThread,
    keys_of,
    make_certificate,
    state_at_rest,
    state_of,
    tiered_node,
    tokens_of,
)

TOKEN = "0123456789abcdef-token"
SCHEMES = ("light", "dark")
WIDTHS = (360, 768, 1440)
TABS = ("Requests", "Prompt", "Namespaces", "Tenants", "Pins", "Settings", "Log")
ASKED = sum(10 * (4 + n % 5) + 3 for n in range(12)) + 60
"""Tokens of the scripted load."""
MOST_BYTES = 60 << 10
NONE = "\N{EN DASH}"

REACHED = """() => [...document.querySelectorAll(".wide")]
    .every((one) => one.scrollWidth <= one.clientWidth || one.tabIndex === 0)"""
"""Whether the keyboard reaches all boxes that scroll."""
PROBES = Path(__file__).parents[1] / "page_probes.js"
"""Functions that run in the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Loaded(NamedTuple):
    """A service with the scripted load behind it, and its API."""

    node: NodeThread
    engine: Engine
    api: GatewayThread


@contextlib.contextmanager
def loaded() -> Iterator[Loaded]:
    with (
        tempfile.TemporaryDirectory(prefix="kvh-") as folder,
        tiered_node(Path(folder)) as node,
        Engine(node.address) as engine,
    ):
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        with GatewayThread(node.address, interval_s=0.1, api_token_file=str(token)) as api:
            eventually(lambda: api.health() == (200, "ok"))
            play_load(node, engine)
            yield Loaded(node, engine, api)


@pytest.fixture(scope="module")
def api() -> Iterator[GatewayThread]:
    """The API of a service that no test changes."""
    with loaded() as shared:
        yield shared.api


@pytest.fixture
def own() -> Iterator[Loaded]:
    """A service of the test's own."""
    with loaded() as own:
        yield own


def opened(browser: Any, api: GatewayThread, **options: Any) -> tuple[Page, Console]:
    """Open the dashboard, and wait until it shows the scripted load."""
    page = browser.new_context(**options).new_page()
    console = Console(page)
    page.goto(api.url)
    until(
        page, "(asked) => document.getElementById('span').textContent.includes(asked)", f"{ASKED:,}"
    )
    page.wait_for_selector("#rows tr[data-id]")
    page.wait_for_selector("#engines tr[data-id]")
    return page, console


def test_an_engine_with_a_long_layout_shows_its_rates_beside_its_name(
    browser: Any, own: Loaded
) -> None:
    """The layout of real engines is a digest of 64 digits, which hid all columns behind it."""
    with Engine(own.node.address, engine="real", more_fields={"layout": "0123456789abcdef" * 4}):
        page, _ = opened(browser, own.api, viewport={"width": 1120, "height": 900})
        row = page.locator("#engines tr[data-id='real#2']")
        until(page, "() => !!document.querySelector(\"#engines tr[data-id='real#2']\")")
        assert row.locator("td").last.inner_text() == "0123456789ab"
        box = row.locator("[data-name=skipped_tokens]").bounding_box()
        assert box["x"] + box["width"] < 1120


def probe(page: Page, name: str) -> Any:
    """Return the result of a function of `PROBES`."""
    return page.evaluate(f"() => {{ {PROBES.read_text()}; return {name}(); }}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_violation(browser: Any, api: GatewayThread, scheme: str, width: int) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed; run `make servers`"
    ).Axe()
    page, _ = opened(browser, api, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.evaluate("() => document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        until(page, REACHED)
        found = axe.run(page)
        assert not found.violations_count, (tab, found.generate_report())


def until(page: Page, true: str, argument: Any = None) -> None:
    """Wait until an expression is true; playwright's own waiting needs eval, which is blocked."""
    eventually(lambda: page.evaluate(true, argument))


def value(page: Page, selector: str) -> float:
    """Return the value behind a text."""
    return float(page.locator(selector).first.get_attribute("data-value"))


# --- without a browser ----------------------------------------------------------------------


def test_the_files_have_no_inline_code_and_are_small(api: GatewayThread) -> None:
    total = 0
    for path, (name, kind) in FILES.items():
        answer = api.get(path)
        assert answer.status == 200
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8", name
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = api.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        total += len(answer.body)
    assert total <= MOST_BYTES
    policy = api.get("/stats").headers["content-security-policy"]
    assert policy == "default-src 'none'; frame-ancestors 'none'"


def test_the_history_has_the_counters_of_the_stats(api: GatewayThread) -> None:
    stats = settled_tokens(api, ASKED)
    recent = api.get("/v1/history").json
    first, *_, (_, asked, sources, reasons, used) = recent["rows"]
    assert asked == ASKED
    assert dict(zip(recent["sources"], sources, strict=True)) == stats["tokens"]["by_source"]
    missed = dict(zip(recent["reasons"], reasons, strict=True))
    assert missed == stats["tokens"]["missed_by_reason"]
    memory = stats["memory"]
    assert used == memory["capacity"] - memory["free"] - memory["waste"]
    assert first[0] <= time.time()


def test_every_reason_is_explained(api: GatewayThread) -> None:
    program = api.get("/dashboard.js").body.decode()
    explained = re.findall(r'^  (\w+): \["', program, re.MULTILINE)
    assert sorted(explained) == sorted(reason.label for reason in Reason)


# --- the page -------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_page_is_readable_and_complains_of_nothing(
    browser: Any, api: GatewayThread, scheme: str, width: int
) -> None:
    page, console = opened(
        browser, api, color_scheme=scheme, viewport={"width": width, "height": 900}
    )
    for summary in page.locator("summary").all():
        summary.click()
    texts: list[tuple[str, float]] = []
    for tab in TABS if width == WIDTHS[-1] else TABS[:1]:
        page.get_by_role("tab", name=tab).click()
        if tab not in {"Prompt", "Pins", "Log"}:
            page.wait_for_selector("#rows tr[data-id]")
        texts += probe(page, "contrasts")
    page.locator("#tiers button").first.click()
    texts += probe(page, "contrasts")
    assert len(texts) > (500 if width == WIDTHS[-1] else 200)
    low = {text: round(ratio, 2) for text, ratio in texts if ratio < 4.5}
    assert not low, low
    page.keyboard.press("Escape")
    # Wide tables scroll in their own boxes.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
    assert dark == (scheme == "dark")
    assert console.lines == []
    page.context.close()


def test_its_values_are_those_of_the_api(browser: Any, api: GatewayThread) -> None:
    page, console = opened(browser, api)
    stats = settled_tokens(api, ASKED)
    tokens, memory = stats["tokens"], stats["memory"]
    sources = tokens["by_source"]
    assert len([name for name, count in sources.items() if count]) >= 4, sources
    found = 1 - sources["none"] / ASKED
    assert value(page, "#hit") == pytest.approx(found)
    assert page.inner_text("#hit") == f"{100 * found:.0f}%"
    for name, count in sources.items():
        assert value(page, f"#sources [data-name={name}]") == count
    for state, size in memory.items():
        if state != "capacity" and size:
            assert value(page, f"#memory-states [data-name={state}]") == size
    used = memory["capacity"] - memory["free"] - memory["waste"]
    assert number_in(page.inner_text("#memory")) == pytest.approx(used / 1024, rel=0.01)
    missed = {name: count for name, count in tokens["missed_by_reason"].items() if count}
    assert page.locator("#missed tbody tr").count() == len(missed)
    for name, count in missed.items():
        cell = page.locator(f"#missed tr[data-id={name}] [data-name=tokens]")
        assert cell.inner_text() == f"{count:,}"
    for tier in stats["tiers"]:
        row = f"#tiers tr[data-id={tier['id']}]"
        assert value(page, f"{row} [data-name=dropped]") == tier["dropped_writes"]
        if not tier["shared"]:
            assert value(page, f"{row} [data-name=used]") == tier["used_bytes"]
            assert value(page, f"{row} [data-name=chunks]") == tier["chunks"]
    page.locator("summary").last.click()
    until(page, "() => document.querySelectorAll('#curve-table tr[data-id]').length > 0")
    curve = api.get("/v1/curve").json
    assert curve["points"][0]["hit_ratio"] > 0
    for point in curve["points"]:
        row = f"#curve-table tr[data-id='{point['memory']:g}']"
        assert value(page, f"{row} [data-name=hit_ratio]") == point["hit_ratio"]
    requests = api.get("/v1/requests").json["rows"]
    for row in requests:
        shown = page.locator(f"#rows tr[data-id='{row['id']}']")
        assert (
            value(page, f"#rows tr[data-id='{row['id']}'] [data-name=prompt]")
            == (row["prompt_tokens"])
        )
        assert shown.locator("[data-name=why]").get_attribute("data-value") == (row["reason"] or "")
    assert page.locator("#rows tbody tr").count() == len(requests)
    page.get_by_role("tab", name="Settings").click()
    page.wait_for_selector("#rows tr[data-id=chunk_size]")
    for setting in api.get("/config").json["settings"]:
        shown = page.locator(f"#rows tr[data-id={setting['name']}] [data-name=value]")
        assert shown.text_content() == setting["text"]
    assert console.lines == []
    page.context.close()


def test_each_engine_has_its_rates(browser: Any, own: Loaded) -> None:
    node, engine, api = own
    page, console = opened(browser, api)
    with Engine(node.address, engine="idle") as idle:
        keys = prompt("rates", 4)
        engine.save(keys)
        for _ in range(3):
            assert engine.load(keys) == 4
        (row,) = (r for r in api.get("/v1/engines").json["rows"] if r["id"] == "engine#1")
        name, other = "#engines tr[data-id='engine#1']", "#engines tr[data-id='idle#2']"

        def as_counted() -> bool:
            """Return whether the rate is that of all loads, over the time since the attach."""
            rate = value(page, f"{name} [data-name=loaded_bytes]")
            seconds = time.time() - row["since"]
            return bool(0.5 <= rate * seconds / (12 * SHARD_BYTES) <= 2)

        eventually(as_counted)
        hit = row["found_tokens"] / row["asked_tokens"]
        assert value(page, f"{name} [data-name=hit]") == pytest.approx(hit)
        assert page.inner_text(f"{name} [data-name=hit]") == f"{100 * hit:.0f}%"
        assert value(page, f"{name} [data-name=saved_bytes]") > 0
        assert value(page, f"{name} [data-name=skipped_tokens]") == 0
        page.wait_for_selector(other)
        assert page.inner_text(f"{other} [data-name=hit]") == NONE
        assert value(page, f"{other} [data-name=loaded_bytes]") == 0
        with connect(node.address) as control:
            control.limit(tenant_id("cid"), 0, None)
        idle.save(prompt("skipped", 3), tenant=tenant_id("cid"))
        skipped = f"{other} [data-name=skipped_tokens]"
        eventually(lambda: value(page, skipped) == 3 * CHUNK_SIZE)
        assert page.inner_text(skipped) == f"{3 * CHUNK_SIZE} tokens"
    assert console.lines == []
    page.context.close()


def test_rates_are_of_the_window_and_before_the_page_was_opened_an_average(
    browser: Any, api: GatewayThread
) -> None:
    page, console = opened(browser, api)
    (real,) = api.get("/v1/engines").json["rows"]
    hour, began = 3600.0, time.time()
    counters = {"asked_tokens": 0, "found_tokens": 0, "saved_bytes": 0, "skipped_tokens": 0}
    old = real | counters | {"id": "old", "since": began - 2 * hour, "loaded_bytes": 7_200_000}
    young = old | {"id": "young", "since": began - hour / 2, "skipped_tokens": 1_800_000}

    def answer(route: Any) -> None:
        route.fulfill(json={"rows": [old, young], "next": None})

    def rate(engine: str) -> float:
        return value(page, f"#engines tr[data-id={engine}] [data-name=loaded_bytes]")

    page.route("**/v1/engines*", answer)
    page.select_option("#window", "3600")
    page.wait_for_selector("#engines tr[data-id=old]")
    assert rate("old") == pytest.approx(1000, rel=0.1)
    assert rate("young") == pytest.approx(4000, rel=0.1)
    tokens = page.locator("#engines tr[data-id=young] [data-name=skipped_tokens]")
    assert tokens.inner_text() == "1.8 M tokens"
    old["loaded_bytes"] += 3_600_000
    eventually(lambda: rate("old") > 1500)
    assert rate("old") == pytest.approx(2000, rel=0.1)
    assert page.inner_text("#engines tr[data-id=old] [data-name=loaded_bytes]").endswith(" kB/s")
    # Another engine of this name, of a service that has started again.
    old |= {"since": time.time() - 1000, "loaded_bytes": 500_000}
    eventually(lambda: rate("old") < 600)
    assert rate("old") == pytest.approx(500, rel=0.1)
    page.select_option("#window", "60")
    eventually(lambda: rate("young") != pytest.approx(4000, rel=0.01))
    assert console.lines == []
    page.context.close()


def test_it_follows_the_service(browser: Any, own: Loaded) -> None:
    _, engine, api = own
    page, console = opened(browser, api)
    until(page, "() => document.getElementById('state').textContent === '● healthy'")
    hostile = "<img src=x onerror=alert(1)>"
    engine.scheduler.acquire(prompt("later", 5), about=Asking(50, 0, hostile))
    until(
        page,
        "(asked) => document.getElementById('span').textContent.includes(asked)",
        f"{ASKED + 50:,}",
    )
    until(
        page,
        "(name) => [...document.querySelectorAll('#rows td')].some((c) => c.textContent === name)",
        hostile,
    )
    page.locator("#missed tr[data-id=partial_chunk] button").click()
    until(
        page,
        "() => [...document.querySelectorAll('#rows [data-name=why]')]"
        ".every((cell) => cell.textContent.includes('partial chunk'))",
    )
    assert "smaller chunk_size" in page.inner_text("#why")
    assert console.lines == []
    page.context.close()


def test_it_says_that_the_service_is_silent_and_what_needs_attention(
    browser: Any, own: Loaded
) -> None:
    node, _, api = own
    page, _ = opened(browser, api)
    assert page.inner_text("#problems") == "(0)"
    answer = api.get(
        "/v1/tiers/disk", method="POST", body=json.dumps({"state": "off"}), headers=bearer()
    )
    assert answer.status == 200
    until(page, "() => document.getElementById('problems').dataset.value === '1'")
    assert page.inner_text("#attention") == "! Tier disk is switched to off."
    assert "off (switched)" in page.inner_text("#tiers tr[data-id=disk] [data-name=state]")
    with frozen(node):
        until(page, "() => document.getElementById('state').textContent.startsWith('✕')")
    until(page, "() => document.getElementById('state').textContent === '● healthy'")
    page.context.close()


@contextlib.contextmanager
def frozen(node: NodeThread) -> Iterator[None]:
    """Stop the service's loop for a while."""
    over = threading.Event()
    node._loop.call_soon_threadsafe(over.wait, 60)
    try:
        yield
    finally:
        over.set()


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKEN}"}


def test_everything_is_reached_by_keyboard(browser: Any, api: GatewayThread) -> None:
    page, console = opened(browser, api)
    wanted = set(probe(page, "focusable"))
    reached = []
    for _ in range(len(wanted) + 3):
        page.keyboard.press("Tab")
        name, outlined = probe(page, "focused")
        assert outlined, page.evaluate("document.activeElement.outerHTML")
        reached.append(name)
    assert wanted <= set(reached)
    assert len(wanted) > 10
    page.get_by_role("tab", name="Requests").focus()
    for tab in (*TABS[1:], TABS[0]):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.textContent") == tab
        assert page.get_by_role("tab", selected=True).inner_text() == tab
    page.locator("#tiers button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    assert page.evaluate("document.activeElement.textContent") == "Switch…"
    # A row that is shown again and again keeps its button, and so the focus.
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.textContent") == "Switch…"
    assert console.lines == []
    page.context.close()


# --- changes --------------------------------------------------------------------------------


def attempt(page: Page, token: str | None = TOKEN) -> str:
    """Run the dry run of the open dialog; return what it says."""
    page.evaluate("document.getElementById('outcome').textContent = ''")
    if token is not None:
        page.fill("#token", token)
    assert page.locator("#apply").is_disabled(), "there was no dry run"
    page.click("#try")
    until(page, "document.getElementById('outcome').textContent !== ''")
    told: str = page.inner_text("#outcome")
    return told


def apply(page: Page) -> str:
    """Make the change of the open dialog; return what it says."""
    page.click("#apply")
    until(page, "document.getElementById('outcome').textContent.startsWith('✓ Done')")
    told: str = page.inner_text("#outcome")
    page.click("#cancel")
    return told


def test_chunks_are_cleared_after_a_token_and_a_dry_run(browser: Any, own: Loaded) -> None:
    node, _, api = own
    page, console = opened(browser, api)
    before = status_of(node.address).catalog.tiers[_DISK].chunks
    assert before
    page.locator("#tiers tr[data-id=disk]").get_by_text("Clear…").click()
    for wrong in ("", "wrong-token-0123456789"):
        assert "Authorization" in attempt(page, wrong)
        assert page.locator("#apply").is_disabled()
    assert [line for line in console.lines if "401" not in line] == []
    console.lines.clear()
    assert attempt(page).startswith(f"{before} chunks")
    assert status_of(node.address).catalog.tiers[_DISK].chunks == before
    page.fill("#token", TOKEN + " ")
    assert page.locator("#apply").is_disabled(), "something changed since the dry run"
    attempt(page)
    assert f"{before} chunks" in apply(page)
    assert status_of(node.address).catalog.tiers[_DISK].chunks == 0
    page.get_by_role("tab", name="Log").click()
    until(page, "document.getElementById('log').textContent.includes('Clear tier disk')")
    assert console.lines == []
    page.context.close()


def test_tiers_quotas_settings_and_pins_are_changed_after_a_dry_run(
    browser: Any, own: Loaded
) -> None:
    api = own.api
    page, console = opened(browser, api)
    page.locator("#tiers tr[data-id=disk]").get_by_text("Switch…").click()
    page.select_option("#fields select", "read_only")
    assert attempt(page).startswith("From on to read only. 0 waiting writes")
    assert tier_state(api) == "on"
    page.select_option("#fields select", "off")
    told = attempt(page)
    assert "chunks would not be found" in told
    apply(page)
    assert tier_state(api) == "off"
    until(page, "() => document.querySelector('#tiers tr[data-id=disk]').innerText.includes('off')")
    page.locator("#tiers tr[data-id=disk]").get_by_text("Switch…").click()
    assert page.locator("#fields select").input_value() == "off", "the row of before"
    page.click("#cancel")

    tenant = tenant_id("ann").hex()
    page.get_by_role("tab", name="Tenants").click()
    page.locator(f"#rows tr[data-id='{tenant}']").get_by_text("Quota…").click()
    page.fill("#fields input >> nth=0", "0.5")
    assert attempt(page, None).startswith("Would be memory: 512.0 MiB, disk: no quota (before: no")
    assert quotas(api, tenant) == {}
    apply(page)
    assert quotas(api, tenant) == {"memory": 1 << 29}

    page.get_by_role("tab", name="Settings").click()
    page.locator("#rows tr[data-id=pin_share]").get_by_text("Change…").click()
    page.fill("#fields input", "0.3")
    assert "0.25 → 0.3" in attempt(page, None)
    assert setting(api, "pin_share") == 0.25
    apply(page)
    assert setting(api, "pin_share") == 0.3

    page.get_by_role("tab", name="Prompt").click()
    page.fill("textarea", ", ".join(map(str, range(2 * CHUNK_SIZE))))
    page.get_by_text("Look up…").click()
    assert "0 of 20 tokens are cached" in attempt(page, None)
    assert "cold" in page.inner_text("#outcome")
    assert not page.locator("#apply").is_visible()
    page.click("#cancel")
    assert console.lines == []
    page.context.close()


def test_a_dry_run_is_the_request_of_the_change(browser: Any, own: Loaded) -> None:
    node, _, api = own
    page, console = opened(browser, api)
    sent: list[tuple[str, str, str | None]] = []
    page.on(
        "request", lambda request: sent.append((request.method, request.url, request.post_data))
    )

    def run(*buttons: str) -> list[str]:
        """Open a dialog, and let it make its change; return what it says before and after."""
        for button in buttons:
            page.get_by_text(button, exact=True).first.click()
        sent.clear()
        before = state_at_rest(node)
        told = [attempt(page)]
        assert state_of(node) == before, buttons
        told.append(apply(page))
        made = [(method, url, body) for method, url, body in sent if method != "GET"]
        (dry, real) = made
        assert "dry_run=true" in dry[1], buttons
        assert (dry[0], dry[1].replace("dry_run=true", "dry_run=false"), dry[2]) == real, buttons
        return told

    tokens = page.locator("textarea")
    page.get_by_role("tab", name="Prompt").click()
    tokens.fill(", ".join(map(str, tokens_of(5, 2))))
    page.get_by_text("Pin…").click()
    assert attempt(page).startswith("✕ pins: the first chunk is in no place"), "as the service says"
    assert page.locator("#apply").is_disabled()
    page.click("#cancel")
    own.engine.save(keys_of(own.engine, tokens_of(5, 2)))
    flush(node.address)
    assert run("Prefetch…")[0].startswith("2 of 2 chunks would be in memory; 0 of them")
    eventually(lambda: api.get("/v1/jobs").json["rows"][-1]["state"] == "done")
    dry, real = run("Pin…")
    assert dry.startswith("20 tokens, 24.0 KiB, would be pinned; 0 chunks of them")
    assert "20 tokens are pinned." in real
    page.get_by_role("tab", name="Pins").click()
    page.wait_for_selector("#rows tr[data-id]")
    dry, real = run("Unpin…")
    assert (dry.split(", ")[0], "can be evicted again" in real) == ("20 tokens", True)
    page.get_by_role("tab", name="Log").click()
    assert run("Flush…")[0] == "0 writes are waiting now."
    eventually(lambda: api.get("/v1/jobs").json["rows"][-1]["state"] == "done")
    dry, real = run("Drain…")
    assert dry.startswith("1 engine stays attached")
    assert "The service is draining." in real
    run("Clear all…")
    page.locator("#tiers tr[data-id=disk]").get_by_text("Switch…").click()
    page.select_option("#fields select", "off")
    run()
    # Expected: the refused pin, and the health of a service that drains.
    assert not [line for line in console.lines if "409" not in line and "503" not in line]
    page.context.close()


_DISK: Any = "disk"


def tier_state(api: GatewayThread) -> str:
    rows = api.get("/v1/tiers").json["rows"]
    state: str = next(row["state"] for row in rows if row["id"] == "disk")
    return state


def quotas(api: GatewayThread, tenant: str) -> dict[str, int]:
    rows = api.get("/v1/tenants").json["rows"]
    found: dict[str, int] = next(row["quotas"] for row in rows if row["id"] == tenant)
    return found


def setting(api: GatewayThread, name: str) -> Any:
    return next(one["value"] for one in api.get("/config").json["settings"] if one["name"] == name)


def test_beyond_loopback_it_asks_for_the_token(browser: Any, own: Loaded, tmp_path: Path) -> None:
    token, certificate = tmp_path / "token", make_certificate(tmp_path)
    token.write_text(TOKEN)
    with GatewayThread(
        own.node.address,
        api_listen="0.0.0.0:0",
        api_token_file=str(token),
        api_tls_certificate=str(certificate),
    ) as remote:
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.goto(remote.url.replace("0.0.0.0", "127.0.0.1"))
        page.wait_for_selector("dialog[open]")
        assert page.inner_text("#dialog-title") == "This API needs its token"
        assert page.locator("#hit").get_attribute("data-value") is None
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        until(
            page,
            "(asked) => document.getElementById('span').textContent.includes(asked)",
            f"{ASKED:,}",
        )
        assert not page.locator("dialog").is_visible()
        page.context.close()


def test_other_code_than_its_own_is_blocked(browser: Any, api: GatewayThread) -> None:
    page, console = opened(browser, api)
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          try { script.text = "window.taken = true"; } catch { }
          document.body.append(script);
          const image = document.createElement("img");
          image.src = "http://127.0.0.1:9/x";
          document.body.append(image);
        }"""
    )
    eventually(lambda: page.evaluate("1") and any("Content Security" in x for x in console.lines))
    assert page.evaluate("window.taken") is None
    page.context.close()


def test_the_page_of_another_service_of_the_node_is_one_choice_away(
    browser: Any, own: Loaded
) -> None:
    folder = Path(own.node.address).parent
    with NodeThread(folder / "engine-1.sock", local_disk=None, remote_url=None) as other:
        page, console = opened(browser, own.api)
        choice = page.locator("#service")
        eventually(lambda: choice.locator("option").all_inner_texts() == ["s", "engine-1"])
        choice.select_option("engine-1")
        page.wait_for_url("**/services/engine-1/")
        service = other.status().service[:8]
        until(
            page,
            "(service) => document.getElementById('facts').textContent.includes(service)",
            service,
        )
        eventually(lambda: page.locator("#service").input_value() == "engine-1")
        assert not [line for line in console.lines if line.startswith("error")]
        page.locator("#service").select_option("s")
        page.wait_for_url(f"{own.api.url}/")
    page.context.close()
