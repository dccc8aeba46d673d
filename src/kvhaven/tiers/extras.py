# SPDX-License-Identifier: Apache-2.0
"""Modules that need packages which are not installed with KVHaven itself."""

import importlib
from types import ModuleType

from kvhaven.errors import ConfigError


def import_extra(extra: str, what: str, instead: str = "") -> ModuleType:
    """Return `kvhaven.tiers.<extra>`, which needs the packages of `kvhaven[<extra>]`.

    Raises `ConfigError` when one is absent; it says that `what` needs it, and what to do.
    """
    try:
        return importlib.import_module(f"kvhaven.tiers.{extra}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvhaven"):
            raise
        raise ConfigError(
            f"{what} needs the package {error.name}, which is not installed: "
            f"pip install 'kvhaven[{extra}]'{instead}"
        ) from error
