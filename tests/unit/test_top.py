# SPDX-License-Identifier: Apache-2.0
"""`kvhaven top` in a real terminal, and in a pipe."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.cli.terminal import text_of
from kvhaven.cli.top_screen import View, clean, frame
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, NodeThread, eventually
from tests.terminals import Terminal

QUICK = ("--interval", "0.1")


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock", local_disk=str(short_dir / "disk")) as node:
        yield node
        node.check()


@pytest.fixture
def engine(node: NodeThread) -> Iterator[Engine]:
    with Engine(node.address, model="evil\x1b[2J\x07name") as engine:
        engine.save(prompt("known", 3))
        engine.load(prompt("known", 3))
        engine.load(prompt("unknown", 5))
        yield engine


def command(address: str, *options: str) -> list[str]:
    return ["top", "--socket", address, *options]


def piped(address: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvhaven.cli", *command(address, *options)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def fits(screen: str, starts: list[str]) -> bool:
    """Return whether the first lines begin like this: no line has been broken into two."""
    lines = screen.splitlines()
    return all(line.startswith(start) for line, start in zip(lines, starts, strict=False))


def bottom(screen: str, height: int) -> str:
    lines = screen.splitlines()
    return lines[-1] if len(lines) == height else ""


def test_a_table_is_sorted_by_one_column_after_the_other(
    node: NodeThread, engine: Engine, short_dir: Path
) -> None:
    def first(screen: str, column: str) -> set[str]:
        lines = screen.splitlines()
        head = next(at for at, line in enumerate(lines) if column in line)
        return set(lines[head + 1].split())

    assert engine.ranks
    with Terminal(short_dir, command(node.address, *QUICK)) as terminal:
        terminal.shows("TIER")
        terminal.press("tt")
        assert "50" in first(terminal.shows("TOKENS", "FOUND", "WAIT"), "TOKENS")  # the last one
        terminal.press("s")
        assert "50" in first(terminal.shows("TOKENS v"), "TOKENS v")
        terminal.press("s")
        assert {"30", "100%"} <= first(terminal.shows("FOUND v"), "FOUND v")
        terminal.press("ss")
        eventually(lambda: " v" not in terminal.shows("TOKENS", "FOUND"))
        terminal.press("tts")  # another table begins unsorted
        terminal.shows("USED v")


def test_it_shows_tokens_misses_and_tables_in_any_size(
    node: NodeThread, engine: Engine, short_dir: Path
) -> None:
    with Terminal(short_dir, command(node.address, *QUICK)) as terminal:
        screen = terminal.shows("1 engine", "Missed since start  cold 100%", "TIER", "q quit")
        lines = screen.splitlines()
        assert lines[0].startswith("KVHaven")
        assert any(line.split()[:1] == ["memory"] and " 38%  30" in line for line in lines)
        terminal.press("t")
        screen = terminal.shows("ENGINE", "engine#1", "1 of 1")
        assert "evil?[2J?name" in screen
        terminal.press("t")
        screen = terminal.shows("REQUEST", "WHY")
        assert any({"50", "cold", "0"} <= set(line.split()) for line in screen.splitlines())
        for width, height in ((200, 50), (30, 8), (12, 3), (80, 24)):
            terminal.resize(width, height)
            starts = ["KVHaven", "Prompt tokens"[:width], "  memory"]
            eventually(lambda: fits(terminal.screen(), starts[: height - 1]))  # noqa: B023
            if height > 20:
                eventually(lambda n=height: bottom(terminal.screen(), n).startswith("q quit"))  # type: ignore[misc]
        terminal.press("p")
        terminal.shows("paused")
        engine.load(prompt("another", 33))
        assert " 330 " not in terminal.screen()
        terminal.press("p")
        terminal.shows(" 330 ")
        terminal.press("q")
        assert terminal.ended() == 0


@pytest.mark.parametrize("how", ["C-c", "SIGTERM", "SIGHUP", "C-s and SIGTERM"])
def test_the_terminal_is_as_before_however_it_ends(
    node: NodeThread, short_dir: Path, how: str
) -> None:
    with Terminal(short_dir, command(node.address, *QUICK)) as terminal:
        terminal.shows("KVHaven", "none yet")
        if how.startswith("C-"):
            terminal.press(how[:3])
        if "C-s" in how:
            terminal.stopped()  # a key reaches the terminal after tmux has taken it
        if "SIG" in how:
            terminal.kill(signal.Signals[how.rsplit(maxsplit=1)[-1]])
        assert terminal.ended() == 0


def test_it_can_be_suspended_and_continued(node: NodeThread, short_dir: Path) -> None:
    with Terminal(short_dir, command(node.address, *QUICK)) as terminal:
        terminal.shows("none yet")
        terminal.kill(signal.SIGTSTP)
        terminal.shows("BEFORE")
        terminal.kill(signal.SIGCONT)
        terminal.shows("none yet")
        terminal.press("q")
        assert terminal.ended() == 0


def test_a_killed_service_is_told_and_one_that_is_back_is_shown(short_dir: Path) -> None:
    node = NodeProcess(short_dir / "s.sock", short_dir / "log")
    with node, Terminal(short_dir, command(node.address, *QUICK)) as terminal:
        first = terminal.shows("none yet", " ok ").split()[2]
        node.kill()
        terminal.shows("no answer", "silent for")
        node.start()
        terminal.shows(" ok ")
        terminal.lacks(first)
        terminal.lacks("silent for")


def test_colors_are_left_out_if_the_user_wants_none(node: NodeThread, short_dir: Path) -> None:
    for name, environment, wanted in (("a", {}, True), ("b", {"NO_COLOR": "1"}, False)):
        folder = short_dir / name
        folder.mkdir()
        with Terminal(folder, command(node.address, *QUICK), environment=environment) as terminal:
            terminal.shows("none yet")
            assert ("\x1b[" in terminal.screen(colors=True)) == wanted


def test_a_pipe_gets_plain_text(node: NodeThread, engine: Engine) -> None:
    once = piped(node.address, "--once", COLUMNS="60")
    assert once.returncode == 0, once.stderr
    assert "\x1b" not in once.stdout
    assert max(map(len, once.stdout.splitlines())) <= 60
    assert "cold 100%" in once.stdout
    snapshot = json.loads(piped(node.address, "--once", "--json").stdout)
    assert snapshot["engines"] == 1


def test_without_a_terminal_it_prints_a_line_a_second(node: NodeThread, engine: Engine) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvhaven.cli", *command(node.address, *QUICK)],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        found = ""
        while "ok, engines 1" not in found:
            found = process.stdout.readline()
            assert found
        assert "total 38%" in found
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_snapshots_are_streamed_as_json_until_the_service_is_silent(short_dir: Path) -> None:
    node = NodeProcess(short_dir / "s.sock", short_dir / "log")
    arguments = [sys.executable, "-m", "kvhaven.cli", *command(node.address, *QUICK, "--json")]
    with (
        node,
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        ) as process,
    ):
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())["service"]
        node.kill()
        node.start()
        while json.loads(process.stdout.readline())["service"] == first:
            pass  # snapshots from before the kill
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_a_service_that_does_not_answer_is_an_error(short_dir: Path) -> None:
    found = piped(str(short_dir / "none.sock"), "--once")
    assert (found.returncode, found.stdout) == (1, "")
    assert "no service answers" in found.stderr


def test_texts_of_others_take_one_column_a_character_and_move_no_cursor() -> None:
    lines = frame(View("/s.sock", [], "tiers", [], "no\x1b[2Janswer"), 10, 2)
    assert [text_of(line, 10, colors=False) for line in lines] == ["KVHaven /s", "no?[2Jansw"]
    assert clean("a\x1b[31m\x9b\n\u200b字e\u0301") == "a?[31m????e?"
