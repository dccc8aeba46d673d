# SPDX-License-Identifier: Apache-2.0
"""Compiles the native code of KVHaven when it is installed or built, where there is a compiler.

There is little of it, and numpy does the same without it, slower. So a compiler that is absent
or fails is no error; `CC=none` makes a wheel for any machine.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

_FOLDER = Path("kvhaven", "devices")
_LIBRARY = "_native.so"
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra")


class NativeCode(BuildHookInterface):  # type: ignore[type-arg]  # of settings that it has none of
    """The hook that hatchling calls."""

    PLUGIN_NAME = "custom"
    _folder: "tempfile.TemporaryDirectory[str] | None" = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with the library is for this make of machine, and any Python."""
        if self.target_name != "wheel":
            return
        package = Path(self.root, "src", _FOLDER)
        self._folder = tempfile.TemporaryDirectory()
        built = Path(self._folder.name, _LIBRARY)
        try:
            _compile(package / "native.c", built)
            if version == "editable":
                _install(built, package / _LIBRARY)
                return
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or error
            self.app.display_warning(f"KVHaven is built without its native code: {said}")
            return
        build_data["force_include"][str(built)] = str(_FOLDER / _LIBRARY)
        build_data["pure_python"] = False
        plain = next(tag for tag in platform_tags() if tag.startswith("linux_"))
        build_data["tag"] = f"py3-none-{plain}"

    def finalize(self, *_: object) -> None:
        """Remove what the wheel has now."""
        if self._folder is not None:
            self._folder.cleanup()


def _compile(source: Path, library: Path) -> None:
    """Raises `OSError`, or `CalledProcessError` with what the compiler said."""
    command = shlex.split(os.environ.get("CC") or "cc")
    if not sys.platform.startswith("linux") or shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} on {sys.platform}: it is for C compilers of Linux")
    command += [*_FLAGS, "-o", str(library), str(source)]
    subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)  # noqa: S603  # CC is the user's own choice


def _install(library: Path, target: Path) -> None:
    """Put it beside the sources, whole or not at all: others may import it now."""
    new = target.with_suffix(f".{os.getpid()}.so")
    try:
        shutil.copy(library, new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
