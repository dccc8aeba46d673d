# SPDX-License-Identifier: Apache-2.0
"""Import of modules that need optional packages."""

import importlib
from types import ModuleType

from kvhaven.errors import ConfigError


def import_optional(module: str, extra: str, user: str, instead: str = "") -> ModuleType:
    """Import `kvhaven.tiers.<module>`, which needs the packages of `kvhaven[<extra>]`.

    Raises `ConfigError` if a package is missing. The message names `user` (the feature that needs
    the package) and the command that installs it, followed by `instead` (an alternative).
    """
    try:
        return importlib.import_module(f"kvhaven.tiers.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvhaven"):
            raise
        raise ConfigError(
            f"{user} needs the package {error.name}, which is not installed: "
            f"pip install 'kvhaven[{extra}]'{instead}"
        ) from error
