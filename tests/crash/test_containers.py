# SPDX-License-Identifier: Apache-2.0
"""A service and its engine in different containers: they share a directory and the user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.engine import Engine, prompt
from tests.crash.node import eventually, settled

pytestmark = pytest.mark.crash

KEYS = prompt("p", 12)
UNSHARE = ("unshare", "--pid", "--fork", "--mount", "--ipc", "--net", "--uts", "--mount-proc")


def test_an_engine_uses_a_service_of_other_namespaces(short_dir: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here: needs root")
    volume = short_dir / "volume"
    volume.mkdir()
    volume.chmod(0o777)  # an emptyDir of Kubernetes
    socket, log = volume / "node" / "service.sock", short_dir / "log"
    command = [*UNSHARE, "--kill-child", sys.executable, "-m", "kvhaven.cli", "serve"]
    with log.open("w") as output:
        service = subprocess.Popen(
            [*command, "--socket", str(socket)],
            env=os.environ | {"KVHAVEN_MAX_LOCAL_CPU_SIZE": "64MiB"},
            stdout=output,
            stderr=output,
        )
    try:
        eventually(lambda: "node service" in log.read_text())
        assert "pid 1," in log.read_text()
        assert volume.joinpath("node").stat().st_mode & 0o777 == 0o700
        with Engine(str(socket), 2) as engine:
            assert engine.save(KEYS) == len(KEYS)
            assert engine.load(KEYS) == len(KEYS)
        settled(str(socket))
    finally:
        service.send_signal(signal.SIGKILL)
        service.wait()


def test_a_socket_directly_in_a_directory_for_all_is_refused(short_dir: Path) -> None:
    volume = short_dir / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    command = [sys.executable, "-m", "kvhaven.cli", "serve", "--socket", str(volume / "s.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "another user could run a false service there" in done.stderr
