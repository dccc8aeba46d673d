# SPDX-License-Identifier: Apache-2.0
"""The core works where neither torch nor vLLM is installed: a fresh environment proves it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from kvhaven import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment with our wheel and the pinned core only."""
    folder = tmp_path_factory.mktemp("bare")
    wheels = folder / "wheels"
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    run(sys.executable, *build, str(ROOT))
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    requirements = ROOT / "requirements" / "core.txt"
    wheel = next(wheels.glob("kvhaven-*.whl"))
    install = [*pip, "install", "--no-deps", "--no-compile"]
    run(str(programs / "python"), *install, "-r", str(requirements), str(wheel))
    return programs


def run(*command: str) -> str:
    """Run a command in an environment without hints to our sources; return what it printed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env=environment()
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}


def test_nothing_but_the_core_is_installed(bare: Path) -> None:
    code = (
        "import importlib.util as u, kvhaven, json; names = ('torch', 'vllm', 'numpy', 'pytest');"
        "print(json.dumps([kvhaven.__file__, [n for n in names if u.find_spec(n)]]))"
    )
    where, found = json.loads(run(str(bare / "python"), "-c", code))
    assert Path(where).is_relative_to(bare.parent)
    assert found == []


def test_the_pinned_core_is_complete(bare: Path) -> None:
    assert "No broken requirements" in run(str(bare / "python"), "-m", "pip", "check")


def test_the_command_line_runs(bare: Path) -> None:
    assert run(str(bare / "kvhaven"), "--version") == f"kvhaven {__version__}\n"
    assert "chunk_size = 256" in run(str(bare / "kvhaven"), "config", "show")


def test_the_service_starts_and_ends_when_asked(bare: Path, short_dir: Path) -> None:
    path = short_dir / "service.sock"
    with subprocess.Popen(
        [str(bare / "kvhaven"), "serve", "--socket", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=environment() | {"KVHAVEN_MAX_LOCAL_CPU_SIZE": "64MiB"},
    ) as service:
        try:
            wait_for(path, service)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
            service.send_signal(signal.SIGTERM)
            said, _ = service.communicate(timeout=30)
            assert service.returncode == 0, said
        finally:
            service.kill()


def test_the_quick_tests_are_collected() -> None:
    absent = (
        "import sys, pytest\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'transformers', 'vllm'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    quick = "not vllm and not slow and not crash"
    command = [sys.executable, "-c", absent, "--collect-only", "-qq", "-m", quick]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch is not installed" in done.stdout


def wait_for(path: Path, service: subprocess.Popen[str], seconds: float = 30) -> None:
    """Wait until the socket is there; fail at once, with what it said, if the service ends."""
    end = time.monotonic() + seconds
    while not path.exists():
        if service.poll() is not None:
            said, _ = service.communicate()
            pytest.fail(f"the service ended with status {service.returncode}: {said}")
        assert time.monotonic() < end, "no socket in time"
        time.sleep(0.02)
