# SPDX-License-Identifier: Apache-2.0
"""Take the pictures of the dashboard in docs/images: `python -m scripts.dashboard_pictures`.

They show a service with real vLLM that asks about a few documents for a minute and a half, more
than fit into memory. Needs `make setup servers`.
"""

import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.nodes import fresh_node
from benchmarks.results import BENCH
from examples.demo.model import make_model
from examples.demo.processes import Engine, engine, free_port, kvhaven
from examples.demo.text import make_document, make_questions
from tests.browser import chromium

_PICTURES: Final = Path(__file__).parents[1] / "docs" / "images"
_DOCUMENTS: Final = 24
_DOCUMENT_TOKENS: Final = 2000
_ASKING_S: Final = 90.0
_WIDTH: Final = 1120
_HEIGHTS: Final = {"light": 1180, "dark": 560}
_WINDOW: Final = "1 minute"


def main() -> None:
    """Run the service, the engine and the browser."""
    BENCH.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as disk,
        fresh_node(
            "pictures",
            max_local_cpu_size="96MiB",
            local_disk=disk,
            max_local_disk_size="1GiB",
            api_listen=f"127.0.0.1:{port}",
        ) as service,
        engine(
            make_model(BENCH / "model"),
            BENCH / "pictures-vllm.log",
            max_model_len=4096,
            enforce_eager=True,
            kv_transfer_config=kvhaven(service_address=str(service.socket)),
        ) as vllm,
        chromium() as browser,
    ):
        _ask(vllm)
        for scheme, height in _HEIGHTS.items():
            _take(browser, f"http://127.0.0.1:{port}/", scheme, height)


def _ask(vllm: Engine) -> None:
    """Ask about documents, some of them more often than others."""
    documents = [make_document(_DOCUMENT_TOKENS, seed) for seed in range(1, _DOCUMENTS + 1)]
    prompts = [[one.prompt for one in make_questions(document, 3)] for document in documents]
    weights = [1 / place for place in range(1, _DOCUMENTS + 1)]
    chance = random.Random(1)
    vllm.ready()
    end = time.monotonic() + _ASKING_S
    while time.monotonic() < end:
        vllm.ask(chance.choice(chance.choices(prompts, weights)[0]), 4)


def _take(browser: Any, url: str, scheme: str, height: int) -> None:
    """Take one picture of the page."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": _WIDTH, "height": height})
    page = context.new_page()
    page.goto(url)
    page.select_option("#window", label=_WINDOW)
    page.wait_for_timeout(5000)  # it draws once a second
    page.screenshot(path=_PICTURES / f"dashboard-{scheme}.png")
    context.close()


if __name__ == "__main__":
    main()
