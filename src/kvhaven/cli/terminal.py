# SPDX-License-Identifier: Apache-2.0
"""Terminal of a full-screen command: its modes, its size, and its keys."""

import asyncio
import contextlib
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TextIO

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""Alternate screen, no cursor, cleared."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_END_OF_LINE: Final = "\x1b[K"
_BELOW: Final = "\x1b[J"
_RESTORE_MS: Final = 1000
_COLORS: Final[Mapping[str, str]] = {
    "bold": "1",
    "dim": "2",
    "good": "32",
    "warn": "33",
    "bad": "1;31",
    "head": "7",
}

Span = tuple[str, str]
"""A text, and its style: empty, or a key of `_COLORS`."""
Line = Sequence[Span]


def is_screen(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can be drawn on, with keys on standard input."""
    return stream.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colors(stream: TextIO) -> bool:
    """Return whether a stream shows colors, and the user has not set NO_COLOR (no-color.org)."""
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and lines: those of the terminal, else COLUMNS and LINES, else 80 and 24."""
    try:
        found = os.get_terminal_size(stream.fileno())
    except OSError:
        found = shutil.get_terminal_size()
    return (found.columns, found.lines) if found.columns > 0 else (80, 24)


def text_of(line: Line, width: int, *, colors: bool) -> str:
    """Return a line as text of at most `width` columns."""
    parts, left = [], width
    for text, style in line:
        shown = text[:left]
        left -= len(shown)
        code = _COLORS.get(style, "") if colors else ""
        parts.append(f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown)
    return "".join(parts)


class Screen:
    """The terminal of standard output, as a context: drawn on the alternate screen, key by key.

    The terminal is as before when the context ends, also by an exception. Drawing never waits: if
    the terminal takes no output, because the user has stopped it or a connection hangs, a frame is
    left out.
    """

    def __init__(self, on_key: Callable[[str], None]) -> None:
        self._on_key = on_key
        self._input = sys.stdin.fileno()
        self._colors = has_colors(sys.stdout)
        self._encoding = sys.stdout.encoding or "ascii"
        self._unsent = b""

    def __enter__(self) -> Self:
        # An open file of its own: the mode would also apply to the shell's, which waits for us.
        self._output = os.open(
            os.ttyname(sys.stdout.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        )
        self._modes = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        asyncio.get_running_loop().add_reader(self._input, self._read)
        self._send(_ENTER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._input)
        with contextlib.suppress(OSError, termios.error):
            self.leave()
        os.close(self._output)

    def draw(self, lines: Sequence[Line]) -> None:
        """Show a frame, from the top left; `lines` are not more than the terminal has."""
        width, height = self.size
        shown = [text_of(line, width, colors=self._colors) for line in lines[:height]]
        # Cleared before its text: behind the last column, that would be cleared, too.
        body = f"\r\n{_END_OF_LINE}".join(shown)
        below = f"\r\n{_BELOW}" if len(shown) < height else ""
        self._send(f"{_HOME}{_END_OF_LINE}{body}{below}")

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        return size_of(sys.stdout)

    def leave(self) -> None:
        """Give the terminal back as it was; `enter` takes it again."""
        for action in (termios.TCOOFF, termios.TCOON):  # together, they end the user's Ctrl-S
            termios.tcflow(self._output, action)
        poll = select.poll()
        poll.register(self._output, select.POLLOUT)
        while self._unsent and poll.poll(_RESTORE_MS):
            self._send("")
        self._unsent = b""
        if poll.poll(_RESTORE_MS):
            self._send(_LEAVE)
        termios.tcsetattr(self._input, termios.TCSANOW, self._modes)

    def enter(self) -> None:
        """Take the terminal again after `leave`."""
        tty.setcbreak(self._input)
        self._send(_ENTER)

    def _send(self, text: str) -> None:
        """Write as much as the terminal takes; leave out `text` if it has not taken the last."""
        if not self._unsent:
            self._unsent = text.encode(self._encoding, "replace")
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._output, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the terminal is gone
            self._unsent = b""
            self._on_key("q")

    def _read(self) -> None:
        try:
            data = os.read(self._input, 64)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._input)
            self._on_key("q")
        for key in data.decode("latin-1"):
            self._on_key(key)
