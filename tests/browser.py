# SPDX-License-Identifier: Apache-2.0
"""Real Chromium for tests of the dashboard, and a scripted load for it to show."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.client.control import connect
from kvhaven.client.scheduler import Asking
from kvhaven.keys import tenant_id
from tests.crash.engine import CHUNK_SIZE, Engine, prompt
from tests.crash.node import NodeThread, eventually, flush

Page = Any  # playwright has types, but a quick set-up may lack it

_ARGUMENTS = (
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update"),
    *("--disable-default-apps", "--disable-extensions", "--disable-sync", "--no-first-run"),
    *(
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--font-render-hinting=none",
    ),
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run Chromium; skip the test if it is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed; run `make servers`, or apt-get install chromium")
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; run `make servers`"
    )
    with (
        api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=_ARGUMENTS) as browser,
    ):
        yield browser


class Console:
    """Everything that a page complains of: errors, warnings, blocked content, failed requests."""

    def __init__(self, page: Page) -> None:
        self.lines: list[str] = []
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("requestfailed", lambda request: self._note("failed", request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind not in {"log", "info", "debug"} and "/events" not in text:
            self.lines.append(f"{kind}: {text}")


def play_load(node: NodeThread, engine: Engine) -> None:
    """Send requests of two tenants that hit memory and tiers, and that miss for several reasons."""
    for number in range(12):
        keys = prompt(("common", number % 4), 4 + number % 5)
        tenant = tenant_id(("ann", "ben")[number % 2])
        found = engine.scheduler.acquire(
            keys, tenant, Asking(CHUNK_SIZE * len(keys) + 3, 0, f"request-{number}")
        )
        known = 0
        if found is not None:
            known = len(found.extents)
            engine.scheduler.client.release([found.lease_id])
        if known < len(keys):
            engine.save(keys[known:], keys[known - 1] if known else None, tenant=tenant)
            flush(node.address)
        if number == 7:  # the next ones come from disk and from the shared tier
            with connect(node.address) as control:
                control.clear(tier="memory")
    engine.scheduler.acquire(prompt("new", 6)[2:], about=Asking(60, 20, "with-own-cache"))


def number_in(text: str) -> float:
    """Return the first number of a text."""
    found = re.search(r"[\d,]+(?:\.\d+)?", text)
    assert found, text
    return float(found[0].replace(",", ""))


def settled_tokens(api: Any, asked: int) -> dict[str, Any]:
    """Return the statistics once so many tokens were asked for."""

    def ready() -> dict[str, Any] | None:
        stats: dict[str, Any] = api.get("/stats").json
        return stats if stats["tokens"]["asked"] == asked else None

    return eventually(ready)


def screenshot(page: Page, path: Path) -> None:
    """Write what the page shows."""
    page.screenshot(path=str(path))
