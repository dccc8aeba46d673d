# SPDX-License-Identifier: Apache-2.0
"""Programs in the place of NIXL's helper, which do not keep to its protocol. NIXL is not needed."""

import os
import sys

import pytest

from kvhaven.peers.nixl_process import HelperError, HelperProcess
from kvhaven.service.arena import Arena
from tests.crash.node import eventually

NONSENSE = """
import os, signal, socket
socket.socket(fileno=os.dup(0)).send(b"\\xff nonsense")
signal.pause()
"""


def test_a_helper_that_sends_nonsense_is_killed_and_counts_as_ended() -> None:
    arena = Arena(1 << 20, strict=True, first_bytes=1 << 20)
    program = (sys.executable, "-c", NONSENSE)
    helper = HelperProcess("send", "one", arena, [], os.environ, protect=False, program=program)
    try:
        with pytest.raises(HelperError, match="its helper process sent an invalid message"):
            helper.up(60)
        assert helper.ended.wait(60)
        eventually(lambda: helper.gone)
    finally:
        helper.kill()
        arena.close()
