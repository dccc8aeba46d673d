# SPDX-License-Identifier: Apache-2.0
"""From URLs to tiers."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvhaven.errors import ConfigError
from kvhaven.tiers.registry import open_tier


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("{path}", "fs"),
        ("fs://{path}", "fs"),
        ("file://{path}", "fs"),
        ("s3://bucket/prefix", "s3"),
        ("redis://host:6379/1", "redis"),
        ("rediss://user:secret@host", "redis"),
        ("redis+cluster://host:7000", "redis"),
        ("valkey://host", "redis"),
    ],
)
async def test_a_url_gives_its_tier(url: str, name: str, tmp_path: Path) -> None:
    for module in {"s3": ["obstore"], "redis": ["redis"]}.get(name, []):
        pytest.importorskip(module)
    tier = open_tier(url.format(path=tmp_path))
    assert (tier.name, tier.shared) == (name, True)
    assert not tier.health().online
    await tier.close(1)


@pytest.mark.parametrize(
    "url", ["", "relative/path", "fs://host/path", "gs://bucket", "ftp://me:secret@host"]
)
def test_other_urls_are_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigError, match="fs:///") as caught:
        open_tier(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "package", "url"),
    [("s3", "obstore", "s3://bucket"), ("redis", "redis", "redis://host")],
)
def test_a_missing_package_names_its_extra(extra: str, package: str, url: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"  # as if it were not installed
        "from kvhaven.errors import ConfigError\n"
        "from kvhaven.tiers.registry import open_tier\n"
        "try:\n"
        f"    open_tier({url!r})\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'kvhaven[{extra}]'" in done.stdout, done.stderr
    assert f"package {package}" in done.stdout
