# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM's platforms in their support for a connector."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhaven.errors import IncompatibleEngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Platform:
    """Connector support of a platform's model runner."""

    loads_between_steps: bool
    """Whether asynchronous loads are useful: steps continue meanwhile, and ends are reported."""
    hears_workers: bool
    """Whether the scheduler side receives the workers' reports of ended saves and failed loads."""
    layered_rate: float = 0.0
    """Assumed bytes a second of loads: short ones may run during the forward. 0: none may."""


_PLATFORMS = {
    # On a CPU an asynchronous load would only wait for the running step.
    "cpu": Platform(loads_between_steps=False, hears_workers=True),
    # vllm-gaudi's runner returns only the finished transfers of forward steps.
    "hpu": Platform(loads_between_steps=False, hears_workers=False),
    # NVIDIA and AMD: PCIe 4.0 with 16 lanes has 31.5 GB/s, of which copies reach about 25.
    "cuda": Platform(loads_between_steps=True, hears_workers=True, layered_rate=25e9),
}
_OTHERS = Platform(loads_between_steps=True, hears_workers=True)


def platform_of(config: "VllmConfig") -> Platform:
    """Return the platform that an engine runs on."""
    return _PLATFORMS.get(str(config.device_config.device_type), _OTHERS)


def require_supported_platform(config: "VllmConfig") -> None:
    """Raise `IncompatibleEngineError` for settings with which a platform gives wrong results."""
    if str(config.device_config.device_type) != "hpu":
        return
    if not config.cache_config.enable_prefix_caching:
        raise IncompatibleEngineError(
            "enable_prefix_caching is off: vllm-gaudi then moves blocks while requests run, so "
            "the scheduler's block ids no longer match the KV; switch it on"
        )
    if (
        str(config.cache_config.cache_dtype).startswith("fp8")
        and os.environ.get("QUANT_CONFIG") is not None
        and os.environ.get("VLLM_DYNAMIC_KV_QUANT") is not None
    ):
        raise IncompatibleEngineError(
            "VLLM_DYNAMIC_KV_QUANT is set: vllm-gaudi then keeps scales beside the KV, and passes "
            "only K to a connector; unset it, or serve without KVHaven"
        )
