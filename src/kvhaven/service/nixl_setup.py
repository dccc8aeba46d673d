# SPDX-License-Identifier: Apache-2.0
"""Setup of the channel to peers: its choice, and what the log says of it."""

import logging
import os

from kvhaven.config import Settings
from kvhaven.peers.channels import (
    UCX_TLS,
    has_nvidia,
    helper_environment,
    rdma_devices,
    reason_for_tcp,
    ucx_advice,
)
from kvhaven.peers.nixl import NixlChannel, TcpOnly
from kvhaven.peers.nixl_process import ArenaMemory

_log = logging.getLogger(__name__)


def make_channel(settings: Settings, memory: ArenaMemory) -> NixlChannel | TcpOnly:
    """Return the channel of the settings, not started yet."""
    if settings.peers is None and settings.peer_listen is None:
        return TcpOnly("")
    rdma = rdma_devices()
    reason = _forbidden(settings) or reason_for_tcp(settings.transfer_channel, rdma)
    if reason:
        asked = settings.transfer_channel == "nixl"
        _log.log(logging.WARNING if asked else logging.INFO, "peers: TCP is used: %s", reason)
        return TcpOnly(reason)
    for advice in ucx_advice(os.environ.get(UCX_TLS, ""), rdma, nvidia=has_nvidia()):
        _log.warning("%s=%s: %s", UCX_TLS, os.environ[UCX_TLS], advice)
    environment = helper_environment(rdma)
    _log.info(
        "peers: NIXL (%s) is tested, %s=%s", settings.nixl_backends, UCX_TLS, environment[UCX_TLS]
    )
    # Network cards register memory for writing, which a read-only mapping does not allow.
    return NixlChannel(memory, settings.nixl_backends.split(), environment, protect=not rdma)


def _forbidden(settings: Settings) -> str:
    """Return why NIXL may not be used; empty if it may."""
    if settings.peer_encrypt_data:
        return "peer_encrypt_data is on, and NIXL does not encrypt"
    if not settings.peer_tenants:
        return "peer_tenants is off, and with NIXL a peer could read all of this node's memory"
    return ""
