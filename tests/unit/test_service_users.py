# SPDX-License-Identifier: Apache-2.0
"""One user is one trust domain: whose socket, whose directory, who may connect."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvhaven.client.control import connect
from kvhaven.client.unix import prepare_directory
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from tests.crash.node import NodeThread


def test_the_socket_is_for_its_user_alone(node: NodeThread, short_dir: Path) -> None:
    mode = stat.S_IMODE(Path(node.address).stat().st_mode)
    assert mode == 0o600
    prepare_directory(str(short_dir / "a" / "b" / "s.sock"))
    assert stat.S_IMODE((short_dir / "a" / "b").stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(short_dir: Path) -> None:
    theirs = short_dir / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(KVHavenError, match="another user could run a false service there"):
        prepare_directory(str(theirs / "s.sock"))
    theirs.chmod(0o700)
    prepare_directory(str(theirs / "s.sock"))
    if os.geteuid() == 0:
        os.chown(theirs, 12345, 12345)
        with pytest.raises(KVHavenError, match="belongs to user 12345"):
            prepare_directory(str(theirs / "s.sock"))
    prepare_directory("/tmp/s.sock")  # sticky: nobody can put a socket in our socket's place


def test_an_address_that_is_too_long_is_refused(short_dir: Path) -> None:
    with pytest.raises(KVHavenError, match="Set runtime_dir to a shorter path"):
        prepare_directory(str(short_dir / ("x" * 120) / "s.sock"))


ANOTHER_USER = """
import encodings.idna, os, socket, sys
from kvhaven.client.handshake import shake_hands
from kvhaven.protocol import AttachScheduler, FrameReader, Hello, encode
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(5)
sock.connect(sys.argv[1])
try:
    sock.sendall(encode(Hello()))
    print("said", sock.recv(100))
except OSError as error:
    print("said b''")
other = socket.socket(socket.AF_UNIX)
other.connect(sys.argv[1])
try:
    shake_hands(other, AttachScheduler(1, "e", "m", 1, 0), FrameReader())
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_socket_is_open(
    node: NodeThread, short_dir: Path
) -> None:
    short_dir.chmod(0o755)
    Path(node.address).chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER, node.address],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stdout.splitlines() == [
        "said b''",
        "the service there runs as user 0, this process as 65534: run both as the same user",
    ], done.stderr
    assert node.status().members == []


def test_nobody_listening_is_said_with_what_to_do(short_dir: Path) -> None:
    with (
        pytest.raises(ServiceUnavailableError, match="kvhaven serve"),
        connect(str(short_dir / "none.sock")),
    ):
        pass
