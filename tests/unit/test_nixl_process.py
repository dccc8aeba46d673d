# SPDX-License-Identifier: Apache-2.0
"""Programs in the place of NIXL's helper, which do not keep to its protocol. NIXL is not needed."""

import os
import sys

import pytest

from kvhaven.peers.nixl_messages import ENCODER, Done, Up
from kvhaven.peers.nixl_process import HelperError, HelperProcess
from kvhaven.service.arena import Arena
from tests.crash.node import eventually

NONSENSE = """
import os, signal, socket
there = socket.socket(fileno=os.dup(0))
for packet in [{packets}]:
    there.send(packet)
signal.pause()
"""
UP = ENCODER.encode(Up(b"", 0, 0, b""))
DONE = ENCODER.encode(Done(1, "there"))
LARGER = b"\x84" + DONE[1:] + b"\xa4more"
"""A message with a further field, which is to follow."""


@pytest.mark.parametrize(
    "packets",
    [
        repr(b"\xff nonsense"),
        f"{LARGER!r} + 50_000 * bytes([0x91]) + bytes([0xC0])",
        repr(DONE.replace(b"there", b"\xff\xff\xff\xff\xff")),
        f"{UP!r}, {UP!r}",
    ],
    ids=["nonsense", "deep", "encoding", "twice"],
)
def test_a_helper_that_sends_nonsense_is_killed_and_counts_as_ended(packets: str) -> None:
    arena = Arena(1 << 20, strict=True, first_bytes=1 << 20)
    program = (sys.executable, "-c", NONSENSE.format(packets=packets))
    helper = HelperProcess("send", "one", arena, [], os.environ, protect=False, program=program)
    try:
        assert helper.ended.wait(60)
        with pytest.raises(HelperError, match="its helper process sent an invalid message"):
            helper.connect(b"", 0, b"", 60, "")
        eventually(lambda: helper.gone)
    finally:
        helper.kill()
        arena.close()
