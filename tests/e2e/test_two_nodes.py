# SPDX-License-Identifier: Apache-2.0
"""Two nodes, each with a service and an arena of its own: B gets what A computed."""

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Control
from tests.e2e.engines import NodeService, assert_nothing_held, assert_same, engine, prompts
from tests.e2e.test_engine import full_chunks
from tests.servers import Bucket

pytestmark = pytest.mark.vllm


def test_a_node_hits_what_another_computed_through_a_directory_and_through_s3(
    model: Path,
    control: Control,
    s3_server: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    short_dir: Path,
) -> None:
    asked = prompts(41, 6)
    expected = control(asked, max_tokens=8)
    bucket = Bucket(s3_server)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "shared").mkdir()
    remote = {"fs": f"file://{tmp_path}/shared", "s3": f"s3://{bucket.name}/kv"}

    def node(name: str, *tiers: str, **settings: object) -> NodeService:
        return NodeService(
            short_dir / name,
            tmp_path / f"{name}.log",
            max_local_cpu_size="64MiB",
            remote_url=" ".join(remote[tier] for tier in tiers),
            s3_endpoint_url=bucket.url,
            **settings,
        )

    a, settings = node("a", "fs", "s3"), {"service_address": str(short_dir / "a")}
    a.start()
    try:
        with engine(model, tmp_path / "a-engine.log", settings, in_process=True) as started:
            a.await_ranks()
            a.await_tiers()
            assert_same(started.generate(asked, max_tokens=8), expected)
        a.flush()
        assert [tier.writes > 0 for tier in a.status().tiers.values()] == [True, True]
    finally:
        a.stop(signal.SIGKILL)

    settings = {"service_address": str(short_dir / "b")}
    log = tmp_path / "b-engine.log"
    with engine(model, log, settings, in_process=True) as started:
        for attached, tier in enumerate(remote, 1):
            b = node("b", tier, remote_write="off")
            b.start()
            try:
                wait_until_attached(log, attached)
                b.await_ranks()
                b.await_tiers()
                started.ask("reset")
                found = started.generate(asked, max_tokens=8)
                assert_same(found, expected)
                for prompt, one in zip(asked, found, strict=True):
                    loaded = one["cached"], full_chunks(prompt), tier
                    assert loaded[0] >= loaded[1], (loaded, b.status().tiers, logs(tmp_path))
                status = b.settled()
                assert status.tiers[tier].reads > 0
                assert_nothing_held(status)
            finally:
                b.stop(signal.SIGKILL)
        assert started.ask("metrics").get("vllm:kvhaven_failed_loads", 0) == 0


def logs(folder: Path) -> str:
    """Return the ends of the nodes' logs, for a failed test."""
    return "\n".join(f"{log}: {log.read_text()[-2000:]}" for log in folder.glob("?.log"))


def wait_until_attached(log: Path, times: int) -> None:
    """Wait until the engine has a service, that it was without, for so many times.

    Its scheduler and its rank say so. The service knows them as members a moment earlier, in
    which what they look up is a miss.
    """
    end = time.monotonic() + 20
    while log.read_text().count("attached to the node service") < 2 * times:
        assert time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.05)
