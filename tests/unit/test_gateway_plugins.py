# SPDX-License-Identifier: Apache-2.0
"""Plugins of the API, in real processes: their hooks, and that a bad one harms nothing."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven.catalog.actions import LeaseId
from kvhaven.client.control import connect
from kvhaven.config import load_settings
from kvhaven.errors import ConfigError
from tests.crash.engine import Engine
from tests.crash.node import NodeProcess, NodeThread, eventually, flush
from tests.crash.workload import events_of_this_run

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway import plugin_process
from kvhaven.gateway.plugin_process import MOST_EVENTS, Limits, Plugin
from kvhaven.gateway.plugins import PluginSettings, plugin_settings
from tests.gateway_kit import (
    TOKEN,
    GatewayThread,
    Loading,
    children_of,
    engine_server,
    keys_of,
    post,
    state_at,
    tiered_node,
    tokens_of,
)
from tests.metrics_kit import samples_of

QUICK = Limits(hook_s=2.0, first_pause_s=0.05, failures=3)

RECORDER = """
    import json, os
    from kvhaven.plugins import PluginBase

    class Recorder(PluginBase):
        def on_startup(self):
            config = self.config
            place = self.role, self.worker_count, self.worker_id
            self.note("start", *place, config.chunk_size, config.save_decode_cache)

        def on_request_complete(self, request_id, stats):
            self.note("request", request_id, stats.cache_hit, stats._asdict())

        def on_config_changed(self, changes):
            self.note("config", changes)

        def on_tier_state(self, tier, state):
            self.note("tier", tier, state)

        def on_shutdown(self):
            self.note("shutdown")

        def note(self, *what):
            with open(os.environ["NOTES"], "a") as file:
                file.write(json.dumps(what) + "\\n")
"""

RECIPE = """
    from lmcache.v1.plugin.plugin_base import PluginBase


    class CacheWarmupPlugin(PluginBase):
        def __init__(self, config, role, worker_count, worker_id):
            super().__init__(config, role, worker_count, worker_id)
            self.prompts = ["You are a helpful assistant."]

        def on_startup(self):
            if self.role == "worker" and self.worker_id == 0:
                for prompt in self.prompts:
                    self.engine.prefetch(prompt)
                print(f"warmed up {len(self.prompts)} prompts")

        def on_request_complete(self, request_id, stats):
            if stats.cache_hit:
                print(f"cache hit for {request_id}")
"""


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def engine(node: NodeThread) -> Iterator[Engine]:
    with Engine(node.address) as engine:
        yield engine


@pytest.fixture
def code(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that makes a module which plugins are loaded from."""
    folder = short_dir / "code"
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("NOTES", str(short_dir / "notes"))

    def write(name: str, text: str) -> None:
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))

    return write


def gateway(node: NodeThread, *plugins: str, **more: Any) -> GatewayThread:
    settings = PluginSettings(plugins, limits=more.pop("limits", QUICK), **more.pop("own", {}))
    return GatewayThread(node.address, plugins=settings, **more)


def notes(folder: Path) -> list[list[Any]]:
    try:
        return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    except OSError:
        return []


def row_of(api: GatewayThread, name: str) -> dict[str, Any]:
    rows = {row["id"]: row for row in api.get("/v1/plugins").json["rows"]}
    return dict(rows.get(name, {}))


def events(api: GatewayThread, plugin: str, hook: str) -> dict[str, float]:
    """Return the events of a plugin's hook by result."""
    samples = samples_of(api.get("/metrics").body.decode())["kvhaven_plugin_events_total"]
    return {
        dict(labels)["result"]: count
        for labels, count in samples.items()
        if dict(labels)["plugin"] == plugin and dict(labels)["hook"] == hook
    }


def running(word: str) -> list[str]:
    """Return the command lines of all processes with a word in them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(file.read_bytes().decode(errors="replace"))
    return [line for line in found if word in line]


# --- hooks ----------------------------------------------------------------------------------


def test_hooks_tell_requests_settings_tiers_and_the_end(
    node: NodeThread, engine: Engine, code: Callable[[str, str], None], short_dir: Path
) -> None:
    code("recorder", RECORDER)
    token = short_dir / "token"
    token.write_text(TOKEN)
    known = keys_of(engine, tokens_of(1, 2))
    engine.save(known)
    engine.load(known)  # before the start: not told
    with gateway(node, "recorder:Recorder", api_token_file=str(token)) as api:
        eventually(lambda: row_of(api, "recorder:Recorder").get("state") == "running")
        assert notes(short_dir) == [["start", "worker", 1, 0, 256, False]]
        engine.load(known)
        engine.load(keys_of(engine, tokens_of(2, 3)))
        eventually(lambda: len(notes(short_dir)) == 3)
        hit, miss = notes(short_dir)[1:]
        assert hit[:3] == ["request", "request", True]
        assert (hit[3]["prompt_tokens"], hit[3]["cached_tokens"]) == (20, 20)
        assert hit[3]["by_source"] == {"memory": 20}
        assert (miss[2], miss[3]["cached_tokens"], miss[3]["reason"]) == (False, 0, "cold")
        assert post(api, "/config", {"save_decode_cache": True}).status == 200
        eventually(lambda: notes(short_dir)[-1] == ["config", {"save_decode_cache": True}])
        assert post(api, "/v1/tiers/disk", {"state": "off"}).status == 200
        eventually(lambda: notes(short_dir)[-1] == ["tier", "disk", "off"])
        os.kill(row_of(api, "recorder:Recorder")["pid"], signal.SIGKILL)
        # It starts again with the settings as they are now.
        eventually(lambda: notes(short_dir)[-1] == ["start", "worker", 1, 0, 256, True])
        pid = row_of(api, "recorder:Recorder")["pid"]
    assert notes(short_dir)[-1] == ["shutdown"]
    assert not Path(f"/proc/{pid}").exists()


def test_the_recipes_plugin_runs_unchanged(
    node: NodeThread,
    engine: Engine,
    code: Callable[[str, str], None],
    short_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    code("plugins/cache_warmup_plugin", RECIPE)
    file = short_dir / "kvhaven.yaml"
    file.write_text(
        "plugins:\n  - module: plugins.cache_warmup_plugin\n    class: CacheWarmupPlugin\n"
    )
    tokens = tokens_of(1, 2)
    known = keys_of(engine, tokens)
    engine.save(known)
    flush(node.address)
    with connect(node.address) as control:
        control.clear(tier="memory")
    with engine_server(tokens) as server:
        wanted = load_settings({"plugin_engine_url": server.url}, {}, file).settings
        own = plugin_settings(wanted)._replace(limits=QUICK)
        with GatewayThread(node.address, plugins=own) as api:
            (name,) = own.plugins
            eventually(lambda: f"plugin {name}: warmed up 1 prompts" in caplog.text)
            eventually(lambda: events(api, name, "prefetch") == {"ok": 1})
            assert node.status().catalog.resident_chunks == 2
            engine.load(known)
            eventually(lambda: "cache hit for request" in caplog.text)


ASKING = """
    from kvhaven.plugins import PluginBase

    class Asking(PluginBase):
        def on_request_complete(self, request_id, stats):
            try:
                print("found", self.engine.lookup([1] * 25)["reason"])
                self.engine.prefetch([2] * 25)
                self.engine.pin(range(1000, 1020), 60)
                print("pinned")
            except RuntimeError as error:
                print("refused:", error)
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_plugins_look_up_and_compute_and_pin_only_if_they_may(
    node: NodeThread,
    engine: Engine,
    code: Callable[[str, str], None],
    caplog: pytest.LogCaptureFixture,
    *,
    allowed: bool,
) -> None:
    caplog.set_level(logging.INFO)
    code("asking", ASKING)
    engine.save(keys_of(engine, tokens_of(1, 2)))
    with engine_server([]) as server:
        own = {"engine_url": server.url, "may_change": allowed}
        with gateway(node, "asking:Asking", own=own) as api:
            eventually(lambda: row_of(api, "asking:Asking").get("state") == "running")

            def ends() -> int:
                return caplog.text.count("pinned\n") + caplog.text.count("refused: ")

            while ("pinned\n" if allowed else "refused: pin: plugin_may") not in caplog.text:
                before = ends()  # under load, an answer may be late, which is another refusal
                engine.load(keys_of(engine, tokens_of(1, 2)))
                eventually(lambda n=before: ends() > n)  # type: ignore[misc]
            assert "found cold" in caplog.text
            eventually(lambda: server.computed)
            assert {tuple(one["prompt"]) for one in server.computed} == {(2,) * 25}
            assert server.computed[0]["max_tokens"] == 1
            pins = api.get("/v1/pins").json["rows"]
            assert {pin["chunks"] for pin in pins} == ({2} if allowed else set())
            for pin in pins:
                node.call(lambda i=pin["id"]: node.service.pins.unpin(LeaseId(int(i))))  # type: ignore[misc]


# --- bad plugins ----------------------------------------------------------------------------

ASK = b'{"do": "lookup", "id": "%s"}\n' % (b"x" * 1000)
BAD = {
    "hangs": ("while True: pass", "on_request_complete took longer than"),
    "stops": ("os.kill(os.getpid(), signal.SIGSTOP)", "on_request_complete took longer than"),
    "dies": ("os._exit(3)", "exit status 3"),
    "leaves": ("os._exit(0)", "exit status 0"),
    "leaks": (
        "self.held = mmap.mmap(-1, 200 << 20); all(map(self.held.write, [bytes(1 << 20)] * 200))",
        "MiB of memory, at most 128",
    ),
    "leaks in children": (
        "[subprocess.Popen([sys.executable, '-c', 'x = b\"x\" * (70 << 20); input()'], "  # noqa: ISC004
        "stdin=subprocess.PIPE) for _ in range(2)]; sys.stdin.read()",
        "MiB of memory, at most 128",
    ),
    "hides children": (
        "[subprocess.Popen(['setsid', '-f', sys.executable, '-c', "  # noqa: ISC004
        "'import time; kvhaven_hidden = b\"x\" * (70 << 20); time.sleep(1000)']) "
        "for _ in range(2)]; time.sleep(1000)",
        "MiB of memory, at most 128",
    ),
    "forks": (
        "[subprocess.Popen(['sleep', '1000']) for _ in range(40)]; time.sleep(1000)",
        "more than 32 processes",
    ),
    "floods the log": ("[print('x' * 900) for _ in range(10 ** 6)]", "took longer than"),
    "floods the service": (
        "[self.engine.prefetch([1] * 20) for _ in range(10 ** 6)]",
        "took longer than",
    ),
    "does not read": (
        "s = socket.socket(fileno=os.dup(int(sys.argv[3]))); all(map(s.send, [ASK] * 10 ** 6))",
        "took longer than|does not read its answers",  # what comes first
    ),
    "is rude": ("os.write(int(sys.argv[3]), b'x' * (2 << 20))", "sent a message"),
    "is malformed": ("os.write(int(sys.argv[3]), b'[]\\n')", "a message that is not valid"),
}


def test_bad_plugins_are_ended_and_harm_nothing(
    node: NodeThread, engine: Engine, code: Callable[[str, str], None], short_dir: Path
) -> None:
    limits = QUICK._replace(memory=128 << 20, processes=32, failures=2, log_burst=4096)
    code("recorder", RECORDER)
    bad = {f"bad{number}:Bad": one for number, one in enumerate(BAD.values())}
    for name, (statement, _) in bad.items():
        code(
            name.partition(":")[0],
            "import mmap, os, signal, socket, subprocess, sys, time\n"
            "from kvhaven.plugins import PluginBase\n"
            f"ASK = {ASK!r}\n"
            "class Bad(PluginBase):\n"
            "    def on_request_complete(self, request_id, stats):\n"
            f"        {statement}\n",
        )
    known = keys_of(engine, tokens_of(1, 2))
    engine.save(known)
    with gateway(node, *bad, "recorder:Recorder", limits=limits) as api:
        for name in (*bad, "recorder:Recorder"):
            eventually(lambda n=name: row_of(api, n).get("state") == "running")  # type: ignore[misc]
        with Loading(engine, known) as loading:
            for name, (_, why) in bad.items():
                row = eventually(lambda n=name: (r := row_of(api, n))["state"] == "off" and r)  # type: ignore[misc]
                assert re.search(why, row["error"]), f"{name}: {row['error']}"
            before = loading.loads
            eventually(lambda: loading.loads > before)
        assert loading.failed == 0
        eventually(lambda: not running("kvhaven_hidden"))
        assert {what[0] for what in notes(short_dir)} == {"start", "request"}
        row = row_of(api, "recorder:Recorder")
        assert (row["starts"], row["state"]) == (1, "running")
        assert api.health() == (200, "ok")


def test_a_plugin_that_waits_for_a_core_is_not_ended_for_it(
    node: NodeThread, engine: Engine, code: Callable[[str, str], None]
) -> None:
    """It shares a core with processes of other sessions that never rest."""
    code(
        "slow",
        "import time\n"
        "from kvhaven.plugins import PluginBase\n"
        "class Slow(PluginBase):\n"
        "    def on_request_complete(self, *_):\n"
        "        end = time.process_time() + 0.4\n"
        "        while time.process_time() < end: pass\n",
    )
    known = keys_of(engine, tokens_of(1, 2))
    engine.save(known)
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    limits = QUICK._replace(hook_s=1.0)
    with contextlib.ExitStack() as stack, gateway(node, "slow:Slow", limits=limits) as api:
        row = eventually(lambda: (r := row_of(api, "slow:Slow")).get("state") == "running" and r)
        os.sched_setaffinity(row["pid"], [core])
        for _ in range(6):
            busy = subprocess.Popen([sys.executable, "-c", pinned], start_new_session=True)
            stack.enter_context(busy)
            stack.callback(busy.kill)
        began = time.monotonic()
        engine.load(known)
        eventually(lambda: events(api, "slow:Slow", "on_request_complete") == {"ok": 1})
        assert time.monotonic() - began > limits.hook_s, "it had to wait"
        assert row_of(api, "slow:Slow")["starts"] == 1
        assert os.sched_getscheduler(row["pid"]) == os.SCHED_IDLE


async def _no_answer(_: dict[str, Any]) -> dict[str, Any]:
    return {}


def test_a_plugin_is_not_ended_because_the_api_was_late(code: Callable[[str, str], None]) -> None:
    """The hook's end has come in time; the loop that reads of it was held for longer than that."""
    code("quick", "from kvhaven.plugins import PluginBase\nclass Quick(PluginBase): pass")

    async def until(holds: Callable[[], bool], pause_s: float) -> None:
        while not holds():  # noqa: ASYNC110  plugins signal nothing
            await asyncio.sleep(pause_s)

    async def run() -> Plugin:
        plugin = Plugin("quick:Quick", dict, _no_answer, QUICK._replace(hook_s=0.5))
        task = asyncio.create_task(plugin.run())
        try:
            async with asyncio.timeout(120):
                await until(lambda: plugin.state == "running", 0.05)
                for count in (2, 3, 4):
                    plugin.offer("on_finish", "engine")
                    await until(lambda: not plugin.queued, 0)
                    await asyncio.sleep(0)  # it is sent
                    time.sleep(2 * plugin.limits.hook_s)  # noqa: ASYNC251  holds the loop
                    await until(lambda c=count: plugin.counts.total() >= c, 0.05)  # type: ignore[misc]
            return plugin
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    plugin = asyncio.run(run())
    assert plugin.counts == {("on_startup", "ok"): 1, ("on_finish", "ok"): 3}, plugin.error
    assert plugin.starts == 1


@pytest.mark.parametrize(("step", "deadlines"), [(1, 12.0), (3, 0.5)])
async def test_a_hook_whose_end_the_api_reads_late_was_in_time(
    step: int, deadlines: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late: the loop is held for longer than any deadline, or in the last step of one."""
    seconds, looks = 0.2, itertools.count()
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def hook() -> str:
        line = asyncio.create_task(reader.readline())  # as a plugin's messages are read
        return (await line).decode()

    def hold() -> None:
        theirs.send(b"end\n")
        time.sleep(deadlines * seconds)

    def used(_: Sequence[int]) -> float:
        if next(looks) == step:  # after so many steps, so in the next one
            asyncio.get_running_loop().call_soon(hold)
        return 0.0

    monkeypatch.setattr(plugin_process, "_cpu_seconds", used)
    plugin = Plugin("none", dict, _no_answer, QUICK)
    plugin.pid = os.getpid()
    assert await plugin._within(seconds, hook()) == "end\n"
    writer.close()
    theirs.close()


async def test_a_deadline_comes_although_a_child_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the child had used of a core is missing from what is read then."""
    read: list[float] = []

    def used(_: Sequence[int]) -> float:
        read.append(1000.0 if len(read) < 2 else float(len(read)))
        return read[-1]

    monkeypatch.setattr(plugin_process, "_cpu_seconds", used)
    monkeypatch.setattr(plugin_process, "_may_run", lambda _: True)
    monkeypatch.setattr(plugin_process, "_LATE", 1e9)
    plugin = Plugin("none", dict, _no_answer, QUICK)
    plugin.pid = os.getpid()
    with pytest.raises(TimeoutError):
        await plugin._within(0.2, asyncio.sleep(3600, ""))
    assert len(read) < 3 * plugin_process._STEPS


@pytest.fixture(params=["zombie", "reaped"])
def ended_pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if request.param == "reaped":
            child.wait()
        yield child.pid


async def test_a_process_that_has_ended_is_not_late(
    ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load, the API hears of its end later than the deadline, which is not the reason."""
    looks, heard = itertools.count(), asyncio.Event()

    async def hook() -> str:
        await heard.wait()
        return "end"

    def used(_: Sequence[int]) -> float:
        if next(looks) == 3 * plugin_process._STEPS:
            heard.set()
        return 0.0

    monkeypatch.setattr(plugin_process, "_cpu_seconds", used)
    monkeypatch.setattr(plugin_process, "_LATE", 1e9)
    plugin = Plugin("none", dict, _no_answer, QUICK)
    plugin.pid = ended_pid
    assert await plugin._within(0.2, hook()) == "end"


def test_an_error_of_a_hook_is_counted_and_the_plugin_goes_on(
    node: NodeThread,
    engine: Engine,
    code: Callable[[str, str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    code(
        "broken",
        "from kvhaven.plugins import PluginBase\n"
        "class Broken(PluginBase):\n"
        "    def on_request_complete(self, *_):\n"
        "        try:\n"
        "            bytearray(1 << 30)\n"
        "        except MemoryError:\n"
        "            raise ValueError('hm')\n",
    )
    code("absent", "class Absent:\n    def __init__(self): pass")
    known = keys_of(engine, tokens_of(1, 2))
    with gateway(node, "broken:Broken", "absent:Absent", "nothing:Here") as api:
        eventually(lambda: row_of(api, "broken:Broken").get("state") == "running")
        for count in (1, 2):
            engine.load(known)
            wanted = {"error": count}
            eventually(lambda w=wanted: events(api, "broken:Broken", "on_request_complete") == w)  # type: ignore[misc]
        assert row_of(api, "broken:Broken")["starts"] == 1
        assert "ValueError: hm" in caplog.text
        for name in ("absent:Absent", "nothing:Here"):
            row = eventually(lambda n=name: (r := row_of(api, n))["state"] == "off" and r)  # type: ignore[misc]
            assert row["error"] == "on_startup failed: see the log"


async def test_events_that_a_plugin_does_not_take_are_dropped_oldest_first() -> None:
    async def refuse(message: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(message)

    plugin = Plugin("one:One", dict, refuse, QUICK)
    for number in range(MOST_EVENTS + 7):
        plugin.offer("on_request_complete" if number else "on_tier_state", str(number))
    assert plugin.queued == MOST_EVENTS
    assert plugin.counts == {("on_tier_state", "dropped"): 1, ("on_request_complete", "dropped"): 6}
    assert plugin._events[0] == ("on_request_complete", ("7",))


# --- scripts --------------------------------------------------------------------------------


def test_scripts_of_lmcache_run_with_its_variables_and_end_with_the_api(
    node: NodeThread, short_dir: Path
) -> None:
    folder = short_dir / "scripts"
    folder.mkdir()
    say = f"echo $LMCACHE_RUNTIME_PLUGIN_ROLE $LMCACHE_RUNTIME_PLUGIN_WORKER_ID >> {short_dir}/said"
    stubborn = "sh -c \"trap '' TERM; exec sleep 1000\""
    wait = f"{stubborn} & echo $! >> {short_dir}/pids; wait"
    (folder / "worker_0_wait.sh").write_text(f"{say}\n{wait}\n")
    (folder / "all_once.sh").write_text(say)
    (folder / "worker_1_other.sh").write_text(say)
    (folder / "scheduler_config.py").write_text(
        "import json, os, pathlib\n"
        "config = json.loads(os.environ['LMCACHE_RUNTIME_PLUGIN_CONFIG'])\n"
        f"pathlib.Path({str(short_dir / 'config')!r}).write_text(str(config['chunk_size']))\n"
    )
    (folder / "notes.txt").write_text("no script")
    (folder / "strange.py").write_text("raise SystemExit(1)")
    own = PluginSettings(locations=(str(folder),), limits=QUICK)
    with GatewayThread(node.address, plugins=own) as api:
        states = {
            "all_once.sh": "ended",
            "scheduler_config.py": "ended",
            "worker_0_wait.sh": "running",
        }
        eventually(
            lambda: (
                {row["id"]: row["state"] for row in api.get("/v1/plugins").json["rows"]} == states
            )
        )
        assert (short_dir / "config").read_text() == "256"
        eventually(lambda: (short_dir / "said").read_text() == "worker 0\n" * 2)
        pids = short_dir / "pids"  # written after that
        pid = int(eventually(lambda: pids.read_text() if pids.exists() else ""))
        assert Path(f"/proc/{pid}").exists()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plugins: [{module: a.b, class: C}, {module: d, class: E}]", "a.b:C d:E"),
        ("plugins: a.b:C, d:E", "a.b:C d:E"),
        ("plugins: none", None),
        ("plugins: [{module: a}]", "must have the keys module and class"),
        ("plugins: [{module: a, class: 'B; rm'}]", "neither module:Class nor a name"),
        ("plugins: missing", "no installed package has a plugin"),
        ("plugins: a:B a:B", "named twice"),
        ("plugins: {module: a, class: B}", "no plugins"),
    ],
)
def test_plugins_are_named_by_the_recipes_list_or_in_words(
    tmp_path: Path, text: str, wanted: str | None
) -> None:
    file = tmp_path / "kvhaven.yaml"
    file.write_text(text)
    if wanted is None or wanted.startswith("a.b"):
        assert load_settings({}, {}, file).settings.plugins == wanted
        lmcache = load_settings({}, {"LMCACHE_CONFIG_FILE": str(file)})
        assert lmcache.settings.plugins == wanted
    else:
        with pytest.raises(ConfigError, match=wanted):
            load_settings({}, {}, file)


# --- kills ----------------------------------------------------------------------------------


@pytest.mark.crash
def test_no_acquire_fails_while_plugins_are_killed_and_stopped(
    node: NodeThread, engine: Engine, code: Callable[[str, str], None], short_dir: Path
) -> None:
    code("recorder", RECORDER)
    known = keys_of(engine, tokens_of(1, 8))
    engine.save(known)
    limits = Limits(hook_s=1.0, first_pause_s=0.01, failures=10**6, steady_s=0.0)
    with (
        gateway(node, "recorder:Recorder", limits=limits) as api,
        Loading(engine, known) as loading,
    ):
        for number in range(events_of_this_run(4)):
            row = eventually(
                lambda: (r := row_of(api, "recorder:Recorder")).get("state") == "running" and r
            )
            os.kill(row["pid"], signal.SIGSTOP if number % 2 else signal.SIGKILL)
            starts, loads = row["starts"], loading.loads
            eventually(lambda n=starts: row_of(api, "recorder:Recorder")["starts"] > n)  # type: ignore[misc]
            eventually(lambda n=loads: loading.loads > n)  # type: ignore[misc]
        assert api.health() == (200, "ok")
    assert loading.failed == 0


@pytest.mark.crash
def test_plugins_end_with_an_api_that_is_killed_and_start_with_the_next(
    code: Callable[[str, str], None], short_dir: Path
) -> None:
    code("recorder", RECORDER)
    port = free_port()
    settings = {"api_listen": f"127.0.0.1:{port}", "plugins": "recorder:Recorder"}
    with NodeProcess(short_dir / "s.sock", short_dir / "log", **settings) as node:
        starts = 0
        for _ in range(2):
            eventually(lambda n=starts: len(notes(short_dir)) > n)  # type: ignore[misc]
            starts = len(notes(short_dir))
            eventually(lambda: state_at(f"http://127.0.0.1:{port}") == "ok")
            (api,) = children_of(node.process.pid)
            (plugin,) = children_of(api)
            os.kill(plugin, signal.SIGSTOP)  # so that it cannot see the API's end
            os.kill(api, signal.SIGKILL)
            eventually(lambda p=plugin: not Path(f"/proc/{p}").exists())  # type: ignore[misc]
        eventually(lambda: len(notes(short_dir)) > starts)
        node.stop()
    assert [what[0] for what in notes(short_dir)] == ["start", "start", "start", "shutdown"]
