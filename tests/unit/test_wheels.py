# SPDX-License-Identifier: Apache-2.0
"""Wheels for a release: one for any machine, one with native code, on every supported Python.

The installations take half a minute each and are of the long form: `make test-wheels`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvhaven import __version__
from tests.unit.test_bare_environment import ROOT, environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def interpreter(version: str) -> str:
    """Return a Python of this version: from PATH, or one of pyenv's. Skip if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, installed)):
        asked = [str(found), "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        if found is None:
            continue
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.stdout.strip() == version:
            return found
    pytest.skip(f"Python {version} is not installed: pyenv install {version}")


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built without a compiler."""
    return build(tmp_path_factory.mktemp("pure"), CC="none")


def build(folder: Path, **variables: str) -> Path:
    """Build a wheel from these sources, with more environment variables."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        env=environment() | variables,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def libraries(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_a_wheel_that_is_built_without_a_compiler_is_for_any_machine(pure_wheel: Path) -> None:
    assert pure_wheel.name == f"kvhaven-{__version__}-py3-none-any.whl"
    assert libraries(pure_wheel) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")
def test_a_wheel_with_native_code_is_for_any_python_of_this_kind_of_machine(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert wheel.name.startswith(f"kvhaven-{__version__}-py3-none-linux_")
    assert libraries(wheel) == ["kvhaven/devices/_native.so"]


@pytest.mark.skipif(
    "KVHAVEN_EVENTS" not in os.environ, reason="of the long form (set KVHAVEN_EVENTS)"
)
@pytest.mark.parametrize("version", PYTHONS)
def test_pip_installs_it_into_a_bare_python_and_the_service_serves(
    version: str, pure_wheel: Path, tmp_path: Path, short_dir: Path
) -> None:
    python = interpreter(version)
    run(python, "-m", "venv", str(tmp_path / "venv"))
    programs = tmp_path / "venv" / "bin"
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    run(*pip, "install", str(pure_wheel))
    assert run(str(programs / "kvhaven"), "--version") == f"kvhaven {__version__}\n"
    socket = short_dir / "s"
    command = [str(programs / "kvhaven"), "serve", "--socket", str(socket)]
    sizes = {"KVHAVEN_MAX_LOCAL_CPU_SIZE": "16MiB"}
    with subprocess.Popen(command, env=environment() | sizes) as service:
        try:
            while not socket.exists():
                assert service.poll() is None
                time.sleep(0.05)
            shown = run(str(programs / "kvhaven"), "status", "--socket", str(socket))
            assert "16 MiB" in shown
        finally:
            service.send_signal(signal.SIGTERM)
        assert service.wait() == 0
