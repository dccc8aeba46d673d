# SPDX-License-Identifier: Apache-2.0
"""KVHaven: a KV-cache layer for inference engines on every accelerator.

The names that this package and `kvhaven.engine` export are the public interface. They change only
in a new minor version, after a version that warns. Everything else may change at any time.
"""

from kvhaven.config import Resolved, Settings, load_settings
from kvhaven.errors import (
    ConfigError,
    DeviceCopyError,
    IncompatibleEngineError,
    KVHavenError,
    LayoutError,
    ServiceUnavailableError,
    UnreportedLoadError,
)
from kvhaven.keys import Extras, KeyInputError, MediaItem
from kvhaven.types import ShardId

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "DeviceCopyError",
    "Extras",
    "IncompatibleEngineError",
    "KVHavenError",
    "KeyInputError",
    "LayoutError",
    "MediaItem",
    "Resolved",
    "ServiceUnavailableError",
    "Settings",
    "ShardId",
    "UnreportedLoadError",
    "__version__",
    "load_settings",
]
