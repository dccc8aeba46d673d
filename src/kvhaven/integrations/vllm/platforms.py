# SPDX-License-Identifier: Apache-2.0
"""What vLLM's platforms do and do not do for a connector."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhaven.errors import IncompatibleEngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Platform:
    """How a platform's model runner treats a connector."""

    loads_between_steps: bool
    """Whether an asynchronous load is worth it: its end is reported, and steps go on meanwhile."""
    hears_workers: bool
    """Whether the scheduler's side hears the workers: saves that ended, loads that failed."""


_PLATFORMS = {
    # On a CPU a load would only wait for a step to end.
    "cpu": Platform(loads_between_steps=False, hears_workers=True),
    # vllm-gaudi's runner returns finished transfers of forward steps and nothing else.
    "hpu": Platform(loads_between_steps=False, hears_workers=False),
}
_OTHERS = Platform(loads_between_steps=True, hears_workers=True)


def platform_of(config: "VllmConfig") -> Platform:
    """Return the platform that an engine runs on."""
    return _PLATFORMS.get(str(config.device_config.device_type), _OTHERS)


def require_supported_platform(config: "VllmConfig") -> None:
    """Raise `IncompatibleEngineError` for set-ups that a platform makes wrong."""
    if str(config.device_config.device_type) != "hpu":
        return
    if not config.cache_config.enable_prefix_caching:
        raise IncompatibleEngineError(
            "enable_prefix_caching is off: vllm-gaudi then moves blocks while requests run, and "
            "the block ids that the scheduler knows are not where their KV lies; switch it on"
        )
    if (
        str(config.cache_config.cache_dtype).startswith("fp8")
        and os.environ.get("QUANT_CONFIG") is not None
        and os.environ.get("VLLM_DYNAMIC_KV_QUANT") is not None
    ):
        raise IncompatibleEngineError(
            "VLLM_DYNAMIC_KV_QUANT is set: vllm-gaudi keeps scales beside the KV then, and hands "
            "a connector K alone; unset it, or leave KVHaven out"
        )
