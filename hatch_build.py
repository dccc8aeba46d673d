# SPDX-License-Identifier: Apache-2.0
"""Compiles the native code of KVHaven when it is installed or built, where there is a compiler.

There is little of it, and numpy does the same without it, slower. So a compiler that is absent
or fails is no error; `CC=none` makes a wheel for any machine.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src", "kvhaven", "devices")
_LIBRARY = _FOLDER / "_native.so"
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra")


class NativeCode(BuildHookInterface):  # type: ignore[type-arg]  # of settings that it has none of
    """The hook that hatchling calls."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with the library is for this make of machine, and any Python."""
        del version
        if self.target_name != "wheel":
            return
        if self._compiled(Path(self.root, _FOLDER, "native.c"), Path(self.root, _LIBRARY)):
            build_data["artifacts"].append(str(_LIBRARY))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def _compiled(self, source: Path, library: Path) -> bool:
        """Compile to a library, which is there whole or not at all; return whether it is."""
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            why = "there is no C compiler"
        else:
            new = library.with_suffix(f".{os.getpid()}")
            command = [compiler, *_FLAGS, "-o", str(new), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # CC is the user's own choice
            if done.returncode == 0:
                new.replace(library)
                return True
            new.unlink(missing_ok=True)
            why = f"{compiler} said {done.stderr.strip()}"
        library.unlink(missing_ok=True)
        self.app.display_warning(f"KVHaven is built without its native code: {why}")
        return False
