# SPDX-License-Identifier: Apache-2.0
"""A real terminal for tests: tmux, whose screen can be read, resized and typed into."""

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import pytest

from tests.crash.node import eventually

_TAKES_MS: Final = 300
"""Time in which a terminal that is not stopped takes what it was given; no limit for a test."""

TMUX_MISSING: Final = "there is no tmux: apt-get install tmux, or make servers"


class Terminal:
    """A shell in tmux that runs one command of KVHaven, and says so before and after."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        size: tuple[int, int] = (80, 24),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip(TMUX_MISSING)
        self._server = ["tmux", "-f", "/dev/null", "-S", str(folder / "tmux")]
        self._before, self._after = folder / "before", folder / "after"
        self._pid, self._status = folder / "pid", folder / "status"
        run = shlex.join([sys.executable, "-m", "kvhaven.cli", *command])
        # `exec` in a shell of its own: the file has the command's process.
        script = (
            f"echo BEFORE; stty -a > {self._before}; "
            f"sh -c 'echo $$ > {self._pid}; exec {run}'; echo $? > {self._status}; "
            f"stty -a > {self._after}; echo AFTER; sleep 1000"
        )
        self._script, self._size = script, size
        self._environment = {
            name: value for name, value in os.environ.items() if name not in {"TMUX", "NO_COLOR"}
        } | dict(environment or {})

    def __enter__(self) -> Self:
        width, height = map(str, self._size)
        self._tmux("new-session", "-d", "-x", width, "-y", height, self._script)
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def screen(self, *, colors: bool = False) -> str:
        """Return the text of the screen; with `colors`, their escape sequences, too."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colors else []))

    def shows(self, *texts: str) -> str:
        """Wait until the screen shows these texts, and return it."""

        def seen() -> str | None:
            screen = self.screen()
            return screen if all(text in screen for text in texts) else None

        try:
            return eventually(seen)
        except AssertionError as error:
            raise AssertionError(f"{texts} not on the screen:\n{self.screen()}") from error

    def lacks(self, text: str) -> None:
        """Wait until the screen does not show a text."""
        eventually(lambda: text not in self.screen())

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Give the terminal another size."""
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the command."""
        os.kill(int(self._pid.read_text()), number)

    def stopped(self) -> None:
        """Wait until the terminal takes no output, because a Ctrl-S has reached it."""
        name = self._tmux("display-message", "-p", "#{pane_tty}").strip()
        output = os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            poll = select.poll()
            poll.register(output, select.POLLOUT)
            eventually(lambda: not poll.poll(_TAKES_MS))
        finally:
            os.close(output)

    def ended(self) -> int:
        """Wait for the command's end, check that the terminal is as before, return its status."""
        eventually(lambda: self._after.exists() and "rows" in self._after.read_text())
        self.shows("BEFORE", "AFTER")
        assert self._tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}") == "0 1\n"
        modes = [file.read_text().partition(";")[2] for file in (self._before, self._after)]
        assert _without_size(modes[0]) == _without_size(modes[1])
        return int(self._status.read_text())

    def _tmux(self, *command: str) -> str:
        return subprocess.run(
            [*self._server, *command],
            capture_output=True,
            text=True,
            check=True,
            env=self._environment,
        ).stdout


def _without_size(modes: str) -> str:
    return "".join(
        part for part in modes.split(";") if "rows" not in part and "columns" not in part
    )
