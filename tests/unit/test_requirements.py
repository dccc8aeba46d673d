# SPDX-License-Identifier: Apache-2.0
"""The pinned requirements are complete, on every Python that they are for.

They are installed without resolution, so nothing else says that one is absent; and tests of an
optional part are skipped where what it needs cannot be imported.
"""

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
FILES = (
    "browser.txt",
    "core.txt",
    "dev.txt",
    "nixl.txt",
    "tiers.txt",
    "torch-cpu.txt",
    "vllm-cpu.txt",
)
PYTHONS = ("3.11.0", "3.11.2", "3.11.9", "3.12.0", "3.13.0", "3.14.0")
LEFT_OUT: Final = {"torchaudio", "torchcodec", "torchvision"}
"""By scripts/setup-venv: built for another torch, they break vLLM's imports."""


def pinned() -> list[Requirement]:
    lines = [line for name in FILES for line in (FOLDER / name).read_text().splitlines()]
    return [Requirement(line.split(" #")[0]) for line in lines if line[:1].isalpha()]


def holds(requirement: Requirement, python: str) -> bool:
    minor = ".".join(python.split(".")[:2])
    environment = {"python_full_version": python, "python_version": minor, "extra": ""}
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", PYTHONS)
def test_whatever_a_pinned_package_needs_is_pinned(python: str) -> None:
    versions = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
        for pin in pinned()
        if holds(pin, python)
    }
    lacking, looked_at = [], 0
    for name in versions:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another Python, or of vLLM in a quick set-up
            continue
        looked_at += 1
        for need in map(Requirement, needs):
            other = canonicalize_name(need.name)
            if other in LEFT_OUT or not holds(need, python):
                continue
            version = versions.get(other)
            if version is None or not need.specifier.contains(version, prereleases=True):
                lacking.append(f"{name} needs {need}; pinned is {version}")
    assert lacking == []
    assert looked_at > 30


def test_errors_of_each_permitted_msgspec_are_value_errors() -> None:
    """Decoders of files and messages of others catch those; before 0.21 they were not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (n for n in map(Requirement, project["dependencies"]) if n.name == "msgspec")
    assert not needed.specifier.contains("0.20.0")
    assert issubclass(msgspec.DecodeError, ValueError)
