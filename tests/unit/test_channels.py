# SPDX-License-Identifier: Apache-2.0
"""The choice between TCP and NIXL, the environment of helpers, and what peers may do to them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvhaven.config import Settings
from kvhaven.peers import channels
from kvhaven.peers.channels import (
    helper_environment,
    rdma_devices,
    reason_for_tcp,
    ucx_advice,
)
from kvhaven.peers.nixl import NixlChannel, TcpOnly
from kvhaven.peers.nixl_process import HelperError, HelperProcess
from kvhaven.service.arena import SEGMENT
from kvhaven.service.nixl_setup import make_channel
from kvhaven.types import Extent
from tests.other_node import new_arena, skip_without_nixl

SIZE = 1 << 20


def device(folder: Path, name: str, *states: str) -> None:
    for number, state in enumerate(states, 1):
        port = folder / name / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")


def test_rdma_devices_have_an_active_port(tmp_path: Path) -> None:
    assert rdma_devices(tmp_path / "absent") == []
    device(tmp_path, "mlx5_0", "1: DOWN", "4: ACTIVE")
    device(tmp_path, "mlx5_1", "1: DOWN")
    device(tmp_path, "efa_0", "4: ACTIVE")
    (tmp_path / "empty").mkdir()
    assert rdma_devices(tmp_path) == ["efa_0", "mlx5_0"]


@pytest.mark.parametrize(
    ("setting", "rdma", "installed", "reason"),
    [
        ("tcp", ["mlx5_0"], True, "transfer_channel is tcp"),
        ("auto", [], True, "no RDMA device is active"),
        ("auto", ["mlx5_0"], False, "not installed: pip install"),
        ("nixl", [], False, "not installed: pip install"),
        ("auto", ["mlx5_0"], True, ""),
        ("nixl", [], True, ""),
    ],
)
def test_nixl_is_chosen_where_it_is_faster_or_asked_for(
    setting: channels.Setting,
    rdma: list[str],
    installed: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "PACKAGES", ("msgspec",) if installed else ("kvhaven_absent",))
    assert reason in reason_for_tcp(setting, rdma)
    assert bool(reason) == bool(reason_for_tcp(setting, rdma))


@pytest.mark.parametrize(
    ("forbidding", "reason"),
    [({"peer_encrypt_data": True}, "does not encrypt"), ({"peer_tenants": False}, "peer_tenants")],
)
def test_settings_that_nixl_would_break_keep_tcp(
    forbidding: dict[str, bool], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PACKAGES", ("msgspec",))
    arena = new_arena(SIZE)
    settings = Settings(peer_listen="127.0.0.1:0", transfer_channel="nixl")
    assert isinstance(make_channel(settings, arena), NixlChannel)
    channel = make_channel(msgspec.structs.replace(settings, **forbidding), arena)
    assert isinstance(channel, TcpOnly)
    assert reason in channel.offer().reason
    arena.close()


def test_a_users_transports_are_kept() -> None:
    assert helper_environment([], {})["UCX_TLS"] == "tcp,self"
    assert helper_environment(["mlx5_0"], {})["UCX_TLS"] == "ib,self"
    assert helper_environment([], {"UCX_TLS": "all"})["UCX_TLS"] == "all"


@pytest.mark.parametrize(
    ("transports", "rdma", "nvidia", "advice"),
    [
        ("tcp,self", False, False, []),
        ("^cuda", False, False, []),
        ("rc,cuda_copy,cuda_ipc", True, False, ["cuda_copy, cuda_ipc: for NVIDIA"]),
        ("rc,cuda_copy,tcp", True, True, []),
        ("rc,ud", False, False, ["rc, ud: no RDMA device is active"]),
        ("rc,tcp", False, False, []),
        ("sm,self", False, False, ["sm: shared memory"]),
        ("all", False, True, ["all: shared memory"]),
    ],
)
def test_advice_on_transports(transports: str, rdma: bool, nvidia: bool, advice: list[str]) -> None:
    given = ucx_advice(transports, ["mlx5_0"] if rdma else [], nvidia=nvidia)
    assert [text[: len(start)] for text, start in zip(given, advice, strict=True)] == advice


def test_the_service_does_not_import_nixl() -> None:
    code = (
        "import sys; import kvhaven.service.main, kvhaven.peers.nixl;"
        "print([m for m in sys.modules if m.startswith(('nixl', 'numpy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_helper_without_nixl_says_so() -> None:
    arena = new_arena(SIZE)
    code = (
        "import os, sys; from kvhaven.peers import nixl_helper;"
        "nixl_helper.MODULES = ('kvhaven_absent',); os._exit(nixl_helper.main())"
    )
    helper = HelperProcess(
        "send",
        "test",
        arena,
        ["UCX"],
        helper_environment([]),
        protect=True,
        program=(sys.executable, "-c", code),
    )
    with pytest.raises(HelperError, match="NIXL is not installed"):
        helper.up(60)
    helper.kill()
    arena.close()


def test_an_unknown_backend_is_named() -> None:
    skip_without_nixl()
    arena = new_arena(SIZE)
    helper = HelperProcess(
        "send", "test", arena, ["TELEPATHY"], helper_environment([]), protect=True
    )
    with pytest.raises(HelperError, match="NIXL has no backend TELEPATHY"):
        helper.up(60)
    helper.kill()
    arena.close()


ROGUE = """
import ctypes, mmap, sys, time
import nixl_cu12 as nixl
config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
agent = nixl.nixl_agent("rogue", config)
memory = mmap.mmap(-1, 4096)
memory[:] = b"x" * 4096
here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
agent.register_memory([(here, 4096, 0, "")], "DRAM")
peer = agent.add_remote_agent(bytes.fromhex(sys.argv[1]))
handle = agent.initialize_xfer(
    "WRITE",
    agent.get_xfer_descs([(here, 4096, 0)], "DRAM"),
    agent.get_xfer_descs([(int(sys.argv[2]), 4096, 0)], "DRAM"),
    peer,
)
agent.transfer(handle)
end = time.monotonic() + 20
try:
    while agent.check_xfer_state(handle) == "PROC" and time.monotonic() < end:
        time.sleep(0.001)
except Exception:
    pass
import os
os._exit(0)
"""


@pytest.mark.parametrize("protect", [True, False])
def test_a_peer_cannot_write_to_a_node_without_rdma(protect: bool) -> None:
    """Unless the mapping is writable, the helper dies instead, and is started again."""
    skip_without_nixl()
    arena = new_arena(SIZE)
    environment = helper_environment([])
    helper = HelperProcess("send", "test", arena, ["UCX"], environment, protect=protect)
    up = helper.up(60)
    helper.lending(1)
    subprocess.run(
        [sys.executable, "-c", ROGUE, up.metadata.hex(), str(up.base)],
        env=environment,
        check=True,
        timeout=60,
    )
    with arena.memory(Extent(SEGMENT, 0, 4096, 0)) as page:
        assert any(page) != protect
    if protect:
        assert helper.ended.wait(120)
        assert helper._process.returncode == -signal.SIGSEGV
    helper.kill()
    arena.close()


def test_addresses_are_those_of_the_arena() -> None:
    arena = new_arena(SIZE)
    with arena.memory(Extent(SEGMENT, 8192, 4096, 0)) as memory:
        there = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert there == arena.address + 8192
    arena.close()


def test_a_helper_that_does_not_listen_is_killed_and_nobody_waits_for_it() -> None:
    skip_without_nixl()
    arena = new_arena(SIZE)
    helper = HelperProcess("send", "test", arena, ["UCX"], helper_environment([]), protect=True)
    helper.up(60)
    os.kill(helper.pid, signal.SIGSTOP)
    for number in range(100_000):
        if helper.ended.is_set():
            break
        helper.lending(number % 2)
    assert helper.ended.wait(120)
    assert helper._process.returncode == -signal.SIGKILL
    arena.close()


def test_closing_does_not_wait_for_a_helper_that_is_starting() -> None:
    arena = new_arena(SIZE)
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    channel = NixlChannel(arena, ["UCX"], helper_environment([]), program=program)
    channel.start()
    wait_for(lambda: channel._starting is not None)
    starting = channel._starting
    assert starting is not None
    channel.close()
    assert not channel._thread.is_alive()
    assert starting.gone
    arena.close()


def test_nixl_waits_until_the_arena_is_allocated() -> None:
    skip_without_nixl()
    arena = new_arena(SIZE)
    arena.allocating = True
    channel = NixlChannel(arena, ["UCX"], helper_environment([]))
    channel.start()
    assert channel.offer().reason == "NIXL is starting"
    assert channel._starting is None
    arena.allocating = False
    wait_for(lambda: not channel.reason)
    assert len(channel.pids) == 2
    assert channel.offer().id
    channel.close()
    assert channel.pids == []
    arena.close()


def wait_for(condition: Callable[[], bool], within_s: float = 50) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
