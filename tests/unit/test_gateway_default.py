# SPDX-License-Identifier: Apache-2.0
"""The API that `kvhaven serve` starts by itself: its address, its token, and a busy port."""

import contextlib
import json
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.gateway.access import DEFAULT
from kvhaven.service import api_process
from kvhaven.service.api_process import ApiProcess, api_for, own_token
from tests.crash.node import NodeProcess, NodeThread, eventually, status_of

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from tests.gateway_kit import Answer, ask


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock", runtime_dir=str(short_dir / "run")) as node:
        yield node


@contextlib.contextmanager
def started(api: ApiProcess | None) -> Iterator[None]:
    assert api is not None
    api.start()
    try:
        yield
    finally:
        api.close()


def answer_at(url: str, path: str, **how: Any) -> Answer | None:
    with contextlib.suppress(OSError):
        answer = ask(url, path, **how)
        return answer if answer.status == 200 else None
    return None


def test_the_recipes_examples_run_with_the_token_that_was_made(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEFAULT == "127.0.0.1:8888"
    listen = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(api_process, "DEFAULT", listen)
    url = f"http://{listen}"
    with started(api_for(node.settings, node.address, by_default=True)):
        for path in ("/health", "/stats", "/config", "/inference_info"):
            eventually(lambda path=path: answer_at(url, path))  # type: ignore[misc]
        stats = ask(url, "/stats").json
        assert {"cache_hits", "cache_misses", "hit_rate"} <= stats.keys()
        assert {"total_cached_tokens", "storage_used_gb"} <= stats.keys()
        body = json.dumps({"lmcache.chunk_size": 512, "lmcache.save_decode_cache": True})
        headers = {"Content-Type": "application/json"}
        assert ask(url, "/config", method="POST", headers=headers, body=body).status == 401
        file = node.settings.runtime_path / "api-token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        headers["Authorization"] = f"Bearer {file.read_text().strip()}"
        assert ask(url, "/config", method="POST", headers=headers, body=body).status == 200


def test_a_busy_port_is_no_reason_not_to_start(short_dir: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program has it, which is as good
            taken.bind(("127.0.0.1", 8888))
            taken.listen()
        settings = {"api_listen": "", "runtime_dir": short_dir}
        with NodeProcess(short_dir / "s.sock", short_dir / "log", **settings) as node:
            assert status_of(node.address).version
            log = short_dir / "log"
            eventually(lambda: "no HTTP API: 127.0.0.1:8888 is not free" in log.read_text())
            assert status_of(node.address).version


def test_without_a_descriptor_no_address_is_free() -> None:
    """So the thread that waits for the address goes on waiting."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open("rb") as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 1, hard))
        try:
            assert not api_process._is_free("127.0.0.1:0")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert api_process._is_free("127.0.0.1:0")


def test_an_api_that_was_asked_for_is_not_left_out(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.service.api_process.find_spec", lambda _: None)
    monkeypatch.setattr(api_process, "DEFAULT", f"127.0.0.1:{free_port()}")
    assert api_for(node.settings, node.address, by_default=True) is None
    with pytest.raises(ConfigError, match=r"pip install 'kvhaven\[api\]'"):
        api_for(Settings(api_listen="127.0.0.1:1"), node.address, by_default=True)
    assert api_for(Settings(api_listen="off"), node.address, by_default=True) is None
    assert api_for(Settings(), node.address, by_default=False) is None


def test_a_token_is_made_once_and_others_may_not_read_it(short_dir: Path) -> None:
    first = Path(own_token(short_dir / "run")).read_text()
    assert len(first) == 65
    assert Path(own_token(short_dir / "run")).read_text() == first
    assert [file.name for file in (short_dir / "run").iterdir()] == ["api-token"]
    (short_dir / "run" / "api-token").chmod(0o644)
    with pytest.raises(ConfigError, match="other users"):
        own_token(short_dir / "run")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_no_token(short_dir: Path, *, there: bool) -> None:
    """Who may write to the directory must not choose the token, or the file that gets it."""
    (short_dir / "run").mkdir(mode=0o700)
    other = short_dir / "other"
    if there:
        other.write_text("a secret of this user\n")
        other.chmod(0o600)
    (short_dir / "run" / "api-token").symlink_to(other)
    with pytest.raises(ConfigError, match="no file; remove it"):
        own_token(short_dir / "run")
    assert other.exists() == there


def test_the_api_gets_none_of_the_services_settings(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might refuse them without the others, and need not know passwords."""
    monkeypatch.setenv("KVHAVEN_WRITE_QUEUE_SIZE", "20GiB")
    monkeypatch.setenv("KVHAVEN_REMOTE_URL", "redis://:hidden@127.0.0.1:1")
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "redis://:hidden@127.0.0.1:1")
    environment = ApiProcess(Settings(api_listen="127.0.0.1:1"), node.address)._environment
    assert "hidden" not in str(environment)
    assert "KVHAVEN_WRITE_QUEUE_SIZE" not in environment
