# SPDX-License-Identifier: Apache-2.0
"""Choice of the channel by which shards are read from peers: TCP or NIXL.

Without RDMA, TCP moved 1.7 times as many bytes per second as NIXL (`peer.nixl.tcp` in the
benchmarks), so `auto` chooses NIXL only where a network card can do RDMA.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

Setting = Literal["auto", "tcp", "nixl"]

PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
INSTALL: Final = "pip install 'kvhaven[nixl]' && pip install --no-deps nixl-cu12"
"""NIXL's wheels require torch, which they do not need (1.5.1): without dependencies."""

UCX_TLS: Final = "UCX_TLS"
_RDMA: Final = Path("/sys/class/infiniband")
_NVIDIA: Final = Path("/proc/driver/nvidia")
_OF_NVIDIA: Final = ("cuda", "gdr_copy")
_OF_RDMA: Final = ("ib", "rc", "dc", "ud", "srd")
_SHARED_MEMORY: Final = ("sm", "shm", "posix", "sysv", "cma", "xpmem", "knem", "mm", "all")


def rdma_devices(folder: Path = _RDMA) -> list[str]:
    """Return the names of RDMA devices with a port that is up (InfiniBand, RoCE, EFA)."""
    return sorted(
        device.name
        for device in (folder.iterdir() if folder.is_dir() else ())
        if any("ACTIVE" in _text(state) for state in device.glob("ports/*/state"))
    )


def has_nvidia() -> bool:
    """Return whether this machine has NVIDIA's driver."""
    return _NVIDIA.exists()


def reason_for_tcp(setting: Setting, rdma: list[str]) -> str:
    """Return why shards are read over TCP; empty if NIXL is to be used."""
    if setting == "tcp":
        return "transfer_channel is tcp"
    if setting == "auto" and not rdma:
        return "transfer_channel is auto, and no RDMA device is active"
    if not any(find_spec(name) for name in PACKAGES):
        return f"NIXL is not installed: {INSTALL}"
    return ""


def helper_environment(rdma: list[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of helpers: this one, with defaults for UCX's transports.

    The arena is host memory. UCX's own default would open accelerators, for a context of hundreds
    of MB on each, and shared memory between nodes of one host, whose other side may write a mapping
    after its owner was killed. With RDMA, plain TCP is left out: if RDMA does not work, the
    self-test fails, and the service's own TCP is faster than UCX's.
    """
    environment = dict(os.environ if environ is None else environ)
    environment.setdefault(UCX_TLS, "ib,self" if rdma else "tcp,self")
    environment.setdefault("NIXL_LOG_LEVEL", "WARN")
    return environment


def ucx_advice(transports: str, rdma: list[str], *, nvidia: bool) -> list[str]:
    """Return what is wrong with a user's UCX_TLS for this machine, a sentence each.

    UCX itself only warns of names that it does not know.
    """
    if transports.startswith("^"):
        return []
    names = [name.strip() for name in transports.split(",")]
    advice = []
    cuda = [name for name in names if name.startswith(_OF_NVIDIA)]
    if cuda and not nvidia:
        advice.append(f"{', '.join(cuda)}: for NVIDIA's driver, which is not here; leave it out")
    of_rdma = [name for name in names if name.startswith(_OF_RDMA)]
    if of_rdma and not rdma and "tcp" not in names and "all" not in names:
        advice.append(f"{', '.join(of_rdma)}: no RDMA device is active; use tcp,self")
    shared = [name for name in names if name in _SHARED_MEMORY]
    if shared:
        advice.append(
            f"{', '.join(shared)}: shared memory between processes of one host; killing a helper "
            "may not end its transfers, so leave it out"
        )
    return advice


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
