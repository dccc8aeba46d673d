# SPDX-License-Identifier: Apache-2.0
"""The HTTP API as a child of the service: killed, stopped, and left behind; engines go on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.demo.processes import free_port
from kvhaven.client.embedded import EmbeddedService, embedded_address
from kvhaven.client.handshake import RefusedError
from kvhaven.config import Settings
from kvhaven.service.api_process import ApiProcess
from tests.crash.engine import Engine, prompt
from tests.crash.node import MIB, NodeProcess, NodeThread, eventually
from tests.crash.workload import events_of_this_run

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from tests.gateway_kit import Loading, ask, children_of, state_at

pytestmark = pytest.mark.crash

KEYS = prompt("p", 8)


def test_no_acquire_fails_while_the_api_is_killed_and_stopped(short_dir: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with NodeThread(short_dir / "s.sock") as node, Engine(node.address) as engine:
        engine.save(KEYS)
        eventually(lambda: engine.load(KEYS) == len(KEYS))
        settings = Settings(api_listen=f"127.0.0.1:{port}")
        # The API has a low priority: on a busy machine it is silent for seconds.
        api = ApiProcess(settings, node.address, silence_s=4.0)
        api.start()
        try:
            with Loading(engine, KEYS) as loading:
                for number in range(events_of_this_run(6)):
                    eventually(lambda: state_at(url) == "ok")
                    before, started, loads = api.process, api.started, loading.loads
                    assert before is not None
                    before.send_signal(signal.SIGSTOP if number % 2 else signal.SIGKILL)
                    eventually(lambda s=started: api.started > s)  # type: ignore[misc]
                    eventually(lambda n=loads: loading.loads > n)  # type: ignore[misc]
                eventually(lambda: state_at(url) == "ok")
            assert loading.failed == 0
        finally:
            api.close()
        process = api.process
        assert process is not None
        # One of low priority may live on for some seconds after it was killed.
        eventually(lambda: process.poll() is not None)
        assert state_at(url) == ""
        node.check()


def test_an_api_that_cannot_start_is_tried_less_and_less_often(short_dir: Path) -> None:
    pauses: list[float] = []
    with NodeThread(short_dir / "s.sock") as node:
        missing = short_dir / "none" / "api.sock"
        (short_dir / "none").mkdir()
        api = ApiProcess(Settings(api_listen=f"unix:{missing}"), node.address)
        (short_dir / "none").chmod(0o777)  # another user could run a false API there
        api._stopping.wait = _recording(pauses)  # type: ignore[method-assign]
        api.start()
        eventually(lambda: len(pauses) >= 4)
        api.close()
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6]


def _recording(pauses: list[float]) -> Callable[..., Any]:
    """Return a wait that ends at once and records how long it should have been."""
    return pauses.append


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_api_ends_with_its_service_and_starts_with_the_next(
    short_dir: Path, number: signal.Signals
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    listen = f"127.0.0.1:{port}"
    with NodeProcess(short_dir / "s.sock", short_dir / "log", api_listen=listen) as node:
        eventually(lambda: state_at(url) == "ok")
        (child,) = children_of(node.process.pid)
        ours = os.getpriority(os.PRIO_PROCESS, node.process.pid)
        assert os.getpriority(os.PRIO_PROCESS, child) == max(10, ours)
        node.process.send_signal(number)
        node.process.wait()
        eventually(lambda: state_at(url) == "")
        eventually(lambda: not Path(f"/proc/{child}").exists())
        node.start()
        eventually(lambda: state_at(url) == "ok")
        node.stop()
    assert state_at(url) == ""


def test_an_embedded_service_has_one_too_if_it_is_told_to(short_dir: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = Settings(
        api_listen=f"127.0.0.1:{port}",
        runtime_dir=str(short_dir / "run"),
        max_local_cpu_size=4 * MIB,
        embedded_linger_s=0.1,
    )
    address = embedded_address(settings, "e")
    unsafe = msgspec.structs.replace(settings, api_listen=f"0.0.0.0:{port}")
    with pytest.raises(RefusedError, match="can be reached by other machines"):
        EmbeddedService(unsafe, address).ensure()
    EmbeddedService(settings, address).ensure()
    with Engine(address):
        eventually(lambda: state_at(url) == "ok")
        answer = ask(url, "/config")
        (row,) = [row for row in answer.json["settings"] if row["name"] == "api_listen"]
        assert (row["text"], row["origin"]) == (settings.api_listen, None)
    eventually(lambda: state_at(url) == "")
