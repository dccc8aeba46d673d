# SPDX-License-Identifier: Apache-2.0
"""Tiers, eviction policies and devices of other packages, by the example package, installed."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven import plugins
from kvhaven.catalog.policies import make_policy
from kvhaven.config import load_settings
from kvhaven.devices import detect
from kvhaven.devices.cpu import CpuDevice
from kvhaven.errors import ConfigError, IncompatibleEngineError
from kvhaven.tiers.registry import open_tier
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the example package into a folder; return an environment that has it."""
    pytest.importorskip("hatchling", reason="it builds the example package")
    folder = tmp_path_factory.mktemp("plugin")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, *install, "--target", str(folder), str(EXAMPLE)]
    subprocess.run(command, check=True, capture_output=True)
    return os.environ | {"PYTHONPATH": str(folder)}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_package_passes_the_conformance_suites(environment: dict[str, str]) -> None:
    pytest.importorskip("pytest_asyncio", reason="pip install 'kvhaven[testing]'")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", "pyproject.toml"]
    said = run(environment, "-m", "pytest", *options, "tests")
    passed = int(said.rpartition(" passed")[0].split()[-1])
    assert passed > 140, said
    assert "skipped" not in said


def test_settings_take_the_names_of_an_installed_package(environment: dict[str, str]) -> None:
    code = (
        "from kvhaven import load_settings\n"
        "from kvhaven.service.tier_setup import make_tiers\n"
        "from kvhaven.catalog.policies import make_policy\n"
        "from kvhaven.devices.detect import open_device\n"
        "given = {'cache_policy': 'Second-Chance', 'remote_url': 'sqlite:///tmp/none.db'}\n"
        "settings = load_settings(given, {}).settings\n"
        "print(*make_tiers(settings), make_policy(settings.cache_policy).name)\n"
        "print(open_device('plain').name)\n"
    )
    assert run(environment, "-c", code).split() == ["sqlite", "second-chance", "plain"]


def test_a_plugin_of_an_installed_package_is_told_of_requests(
    environment: dict[str, str], short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")
    paths = [environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    log = short_dir / "log"
    settings = {"api_listen": f"127.0.0.1:{free_port()}", "plugins": "Miss-Log"}
    with (
        NodeProcess(short_dir / "s.sock", log, max_local_cpu_size="1MiB", **settings) as node,
        Engine(node.address) as engine,
    ):
        keys = prompt("evicted", 5)
        engine.save(keys)
        for number in range(60):
            engine.save(prompt(f"other {number}", 2))
        eventually(lambda: engine.load(keys) < 5)
        eventually(lambda: "api: listening" in log.read_text())

        def told() -> re.Match[str] | None:
            engine.load(keys)  # again, as the plugin may have been started since
            return re.search(
                r"plugin miss-log: request: \d+ of 50 tokens, evicted", log.read_text()
            )

        eventually(told)
        node.stop()


def test_without_the_package_its_names_are_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match=r"cache_policy.*LRU, LFU.*installed package"):
        load_settings({"cache_policy": "second-chance"}, {})
    with pytest.raises(ConfigError, match=r"cache_policy: unknown.*'second-chance'.*lru"):
        make_policy("second-chance")
    with pytest.raises(ConfigError, match=r"sqlite://.*fs:///path.*install the package"):
        open_tier("sqlite:///var/kv.db")


def test_a_package_that_cannot_be_imported_is_named() -> None:
    broken = EntryPoint("sqlite", "no_such_module:open", plugins.TIERS)
    with pytest.raises(ConfigError, match=r"kvhaven\.tiers: 'sqlite'.*no_such_module"):
        plugins.load(broken)


def test_a_broken_package_stops_no_engine_that_does_not_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EntryPoint("npu", "no_such_module:kind", plugins.DEVICES)
    monkeypatch.setattr(plugins, "installed", lambda _: {"npu": broken})
    detect.open_device("auto", torch_type="cpu").close()
    detect.open_device("cpu").close()
    with pytest.raises(ConfigError, match="no_such_module"):
        detect.open_device("npu")
    with pytest.raises(IncompatibleEngineError, match=r"npu: .*no_such_module"):
        detect.open_device("auto", torch_type="meta")


def test_a_device_of_a_package_is_found_by_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = detect.Kind("meta", lambda: "", CpuDevice)

    class Entry:
        name, group = "npu", plugins.DEVICES

        def load(self) -> detect.Kind:
            return kind

    def installed(group: str) -> dict[str, Any]:
        return {"npu": Entry()} if group == plugins.DEVICES else {}

    monkeypatch.setattr(plugins, "installed", installed)
    assert load_settings({"device": "NPU"}, {}).settings.device == "npu"
    for word in ("npu", "auto"):
        device = detect.open_device(word, torch_type="meta")
        assert device.name == "cpu", "the kind's own device was opened"
        device.close()
