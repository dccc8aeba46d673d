# SPDX-License-Identifier: Apache-2.0
"""Process of one plugin: `python -m kvhaven.gateway.plugin_host` with a socket to the API.

Messages are JSON, a line each. In: `start`, a hook with its arguments, and answers. Out: `done`
after each hook, and what the plugin asks of `engine`. The process needs only the standard library
and two small modules of ours, so that it is small, and a plugin cannot meet versions that we have
chosen.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvhaven import plugins
from kvhaven.niceness import run_when_idle

ROLE: Final = "worker"
_LMCACHE: Final = "lmcache.v1.plugin.plugin_base"
_ANSWER_S: Final = 0.5
"""Longest wait for an answer; it is part of the time that a hook has."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_FILES: Final = 256


class Link:
    """The socket to the API. Threads of a plugin may use it, too."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lines = sock.makefile("rb")
        self._sending = threading.Lock()
        self._answers: dict[int, dict[str, Any]] = {}
        self._answered = threading.Condition()
        self._next = 1

    def messages(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        """Pass on every message but answers, until the API closes the socket."""
        for line in self._lines:
            message = json.loads(line)
            if message["do"] != "answer":
                on_message(message)
                continue
            with self._answered:
                if message["id"] in self._answers:
                    self._answers[message["id"]] = message
                    self._answered.notify_all()

    def send(self, **message: Any) -> None:
        """Send a message."""
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def ask(self, what: str, **more: Any) -> dict[str, Any]:
        """Send a question and return its answer. Raises `RuntimeError` if it is refused."""
        with self._answered:
            id_, self._next = self._next, self._next + 1
            self._answers[id_] = {}
        try:
            self.send(do=what, id=id_, **more)
            with self._answered:
                if not self._answered.wait_for(lambda: self._answers[id_], _ANSWER_S):
                    raise RuntimeError(f"{what}: no answer within {_ANSWER_S} s")
                answer = self._answers[id_]
        finally:
            with self._answered:
                del self._answers[id_]
        if "error" in answer:
            raise RuntimeError(f"{what}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found


class Engine:
    """What a plugin can ask of the service, as `self.engine`.

    A prompt is a text or a list of token ids. A text needs the setting `plugin_engine_url`.
    `engine` names an attached engine, and may be left out if all have the same namespace.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def prefetch(self, prompt: str | Sequence[int], *, engine: str = "", salt: str = "") -> None:
        """Promote the chunks of a prompt to memory, in the background.

        With `plugin_engine_url`, a prompt that is not cached is computed, too. The log says if it
        fails.
        """
        self._link.send(do="prefetch", id=0, **_prompt(prompt, engine, salt))

    def lookup(
        self, prompt: str | Sequence[int], *, engine: str = "", salt: str = ""
    ) -> dict[str, Any]:
        """Return where a prompt's tokens are, as `POST /v1/lookup` does."""
        return self._link.ask("lookup", **_prompt(prompt, engine, salt))

    def pin(
        self, prompt: str | Sequence[int], ttl_s: float, *, engine: str = "", salt: str = ""
    ) -> dict[str, Any]:
        """Pin a prompt's chunks, as `POST /v1/pins` does; needs `plugin_may_change`."""
        return self._link.ask("pin", ttl_s=ttl_s, **_prompt(prompt, engine, salt))


def _prompt(prompt: str | Sequence[int], engine: str, salt: str) -> dict[str, Any]:
    given = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
    return {"prompt": given, "engine": engine, "salt": salt}


class Config(types.SimpleNamespace):
    """Settings as attributes; `get` takes a default, as a mapping does."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting."""
        return getattr(self, name, default)


class Host:
    """The plugin, and the thread that runs its hooks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plugin: Any = None

    def run(self) -> None:
        """Run hooks until the API closes the socket."""
        pending: list[dict[str, Any]] = []
        wake = threading.Condition()

        def note(message: dict[str, Any]) -> None:
            with wake:
                pending.append(message)
                wake.notify()

        def read() -> None:
            with contextlib.suppress(OSError, ValueError):
                self._link.messages(note)
            os._exit(0)  # the API is gone; a hook may never end

        threading.Thread(target=read, daemon=True).start()
        while True:
            with wake:
                wake.wait_for(lambda: pending)
                message = pending.pop(0)
            error = self._handle(message)
            sys.stdout.flush()
            self._link.send(do="done", error=error)
            if message["do"] == "on_shutdown":
                return

    def _handle(self, message: Mapping[str, Any]) -> str:
        """Run a hook; return the kind of its error, or an empty text."""
        try:
            if message["do"] == "start":
                self._start(message)
            else:
                self._hook(message["do"], message["arguments"])
        except Exception as error:  # noqa: BLE001  a plugin's own; it is counted, and logged here
            traceback.print_exc()
            return type(error).__name__
        return ""

    def _start(self, message: Mapping[str, Any]) -> None:
        kind = _load(message["plugin"])
        config = Config(**message["config"])
        self._plugin = kind.__new__(kind)
        self._give_engine()  # its constructor may use it, or set it to another value
        self._plugin.__init__(config, ROLE, 1, 0)
        self._give_engine()
        self._hook("on_startup", [])

    def _give_engine(self) -> None:
        with contextlib.suppress(AttributeError):  # a class with slots
            self._plugin.engine = Engine(self._link)

    def _hook(self, name: str, arguments: Sequence[Any]) -> None:
        if name == "on_request_complete":
            arguments = [arguments[0], plugins.RequestStats(**arguments[1])]
        hook = getattr(self._plugin, name, None)
        if hook is not None:
            hook(*arguments)


def _load(name: str) -> Any:
    """Return a plugin's class by `module:Class` or the name of its entry point."""
    module, _, attribute = name.partition(":")
    if attribute:
        return getattr(importlib.import_module(module), attribute)
    return plugins.load(plugins.installed(plugins.PLUGINS)[module])


def stand_in_for_lmcache() -> None:
    """Provide LMCache's base class of plugins where LMCache is not installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module(_LMCACHE)
        return
    parent = None
    words = _LMCACHE.split(".")
    for count in range(1, len(words) + 1):
        name = ".".join(words[:count])
        module = sys.modules.get(name)
        if module is None:
            module = sys.modules[name] = types.ModuleType(name)
            module.__path__ = []
        if parent is not None:
            setattr(parent, words[count - 1], module)
        parent = module
    assert parent is not None
    parent.PluginBase = plugins.PluginBase  # type: ignore[attr-defined]


def limit(memory: int) -> None:
    """Limit this process, and end it with its parent. `memory` is in bytes.

    Processes that it starts stay its descendants when their own parents end, so they count too.
    """
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(0)
    run_when_idle()
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def main() -> None:
    """Run the plugin that the API names, or become the script of the command line."""
    memory, *rest = sys.argv[1:]
    limit(int(memory))
    if rest[0] != "--socket":
        os.execvp(rest[0], rest)  # noqa: S606  the operator's script
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand_in_for_lmcache()
    sys.path.insert(0, str(Path.cwd()))
    Host(Link(socket.socket(fileno=int(rest[1])))).run()


if __name__ == "__main__":
    main()
