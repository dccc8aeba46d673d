# SPDX-License-Identifier: Apache-2.0
"""The documentation site has every page; `make docs` (in `.ci/run`) builds it without a warning."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
GENERATED = {"index.md", "reference/cli.md"}


def pages_of(nav: list[dict[str, object]]) -> set[str]:
    found: set[str] = set()
    for entry in nav:
        for value in entry.values():
            found |= pages_of(value) if isinstance(value, list) else {str(value)}
    return found


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages_of(nav) == there | GENERATED
