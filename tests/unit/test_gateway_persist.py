# SPDX-License-Identifier: Apache-2.0
"""Settings that are changed through the API and written to the settings file."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvhaven.config.persist import write_settings
from kvhaven.service import runtime_settings
from tests.crash.node import NodeProcess, NodeThread, eventually

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from tests.gateway_kit import GatewayThread, post, steerable


def row_of(api: GatewayThread, name: str) -> dict[str, Any]:
    rows = api.get("/config").json["settings"]
    found: dict[str, Any] = next(row for row in rows if row["name"] == name)
    return found


def test_a_persisted_setting_holds_after_a_restart_and_another_does_not(short_dir: Path) -> None:
    file, log = short_dir / "k.yaml", short_dir / "log"
    file.write_text("# ours\ndisk_write: behind\n")
    node = NodeProcess(short_dir / "s.sock", log, config_file=file)
    with node, steerable(node, short_dir) as api:
        change = {"lmcache.disk_write": "through", "verify_memory": "always"}
        planned = post(api, "/config?persist=true&dry_run=true", change)
        assert (planned.status, planned.json["file"]) == (200, str(file))
        assert file.read_text() == "# ours\ndisk_write: behind\n"
        done = post(api, "/config?persist=true", change)
        assert (done.status, done.json["file"]) == (200, str(file))
        assert file.read_text() == '# ours\ndisk_write: "through"\nverify_memory: "always"\n'
        assert row_of(api, "disk_write")["origin"] == f"{file}:2"
        assert row_of(api, "verify_memory")["origin"] == f"{file}:3"
        assert post(api, "/config", {"pin_share": 0.5}).json["file"] is None
        assert row_of(api, "pin_share")["origin"] == "HTTP API"
        node.stop()
        node.start()
        eventually(lambda: api.health() == (200, "ok"))
        found = {name: row_of(api, name)["value"] for name in ("disk_write", "verify_memory")}
        assert found == {"disk_write": "through", "verify_memory": "always"}
        assert row_of(api, "pin_share")["value"] == 0.25


def test_a_setting_that_the_file_does_not_decide_is_refused(short_dir: Path) -> None:
    file = short_dir / "k.yaml"
    file.write_text("disk_write: behind\n")
    node = NodeProcess(short_dir / "s.sock", short_dir / "log", config_file=file, pin_share="0.2")
    with node, steerable(node, short_dir) as api:
        before = api.get("/config").json
        for values, words in (
            ({"pin_share": 0.5}, "set by KVHAVEN_PIN_SHARE, which has precedence"),
            ({"disk_write": "through", "save_decode_cache": True}, "a setting of engines"),
            ({"disk_write": "through", "chunk_size": 512}, "a setting of engines"),
            ({"local_disk": "/tmp"}, "read only when the service starts"),
        ):
            answer = post(api, "/config?persist=true", values)
            assert answer.status == 409
            assert words in answer.json["error"]
        assert api.get("/config").json == before
        assert file.read_text() == "disk_write: behind\n"
        file.write_text("[")
        answer = post(api, "/config?persist=true", {"disk_write": "through"})
        assert answer.status == 409
        assert "is not valid YAML" in answer.json["error"]
        assert api.get("/config").json == before


def test_no_other_change_comes_between(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is being written, another change is refused, and the loop goes on."""
    file, begun, may_end = short_dir / "k.yaml", threading.Event(), threading.Event()
    file.write_text("")

    def slowly(*given: Any, **more: Any) -> dict[str, str]:
        begun.set()
        assert may_end.wait(60)
        return write_settings(*given, **more)

    monkeypatch.setattr(runtime_settings, "write_settings", slowly)
    with NodeThread(short_dir / "s.sock") as node, steerable(node, short_dir) as api:
        refused = post(api, "/config?persist=true", {"pin_share": 0.5})
        assert refused.status == 409
        assert "no settings file" in refused.json["error"]
        node.call(lambda: setattr(node.service.settings, "_file", file))
        writer = threading.Thread(
            target=lambda: post(api, "/config?persist=true", {"pin_share": 0.5})
        )
        writer.start()
        try:
            assert begun.wait(60)
            answer = post(api, "/config", {"verify_memory": "off"})
            assert answer.status == 409
            assert "being written to the settings file" in answer.json["error"]
        finally:
            may_end.set()
            writer.join()
        assert row_of(api, "pin_share")["value"] == 0.5
        assert post(api, "/config", {"verify_memory": "off"}).status == 200


def test_a_file_system_that_hangs_delays_neither_changes_for_ever_nor_the_end(
    short_dir: Path,
) -> None:
    """A pipe that nobody writes stands for it: to open it waits."""
    file = short_dir / "k.yaml"
    file.write_text("disk_write: behind\n")
    node = NodeProcess(short_dir / "s.sock", short_dir / "log", config_file=file)
    with node, steerable(node, short_dir) as api:
        file.unlink()
        os.mkfifo(file)
        hung = post(api, "/config?persist=true", {"disk_write": "through"})
        assert hung.status == 409
        assert "its file system does not answer" in hung.json["error"]
        assert row_of(api, "disk_write")["value"] == "behind"
        refused = post(api, "/config", {"verify_memory": "off"})
        assert "being written to the settings file" in refused.json["error"]
        with file.open("w") as pipe:  # it answers again: reads end
            pipe.write("[")
        eventually(lambda: post(api, "/config", {"verify_memory": "off"}).status == 200)
        assert post(api, "/config?persist=true", {"disk_write": "through"}).status == 409
        node.stop()
