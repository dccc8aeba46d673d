# SPDX-License-Identifier: Apache-2.0
"""`kvhaven config show` and the command line's frame."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvhaven import __version__
from kvhaven.cli import app, main
from kvhaven.config import setting_infos

runner = CliRunner()


def test_it_prints_every_setting_with_value_origin_and_meaning() -> None:
    result = runner.invoke(app, ["config", "show"], env={"KVHAVEN_CHUNK_SIZE": "512"})
    assert result.exit_code == 0
    assert "chunk_size = 512" in result.output
    assert "(KVHAVEN_CHUNK_SIZE)" in result.output
    for info in setting_infos():
        assert f"{info.name} = " in result.output
        assert info.doc in result.output


def test_it_prints_json(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("max_local_disk_size: 7GiB\n")
    result = runner.invoke(app, ["config", "show", "--json", "--file", str(file)])
    told = json.loads(result.output)
    rows = {row["name"]: row for row in told["settings"]}
    assert list(rows) == [info.name for info in setting_infos()]
    assert rows["max_local_disk_size"]["value"] == 7 << 30
    assert rows["max_local_disk_size"]["origin"] == f"{file}:1"
    assert told["notes"] == ["max_local_disk_size without effect: local_disk is not set"]


def test_a_wrong_setting_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvhaven", "config", "show"])
    monkeypatch.setenv("KVHAVEN_CHUNK_SIZE", "7")
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("kvhaven: setting chunk_size = '7', from KVHAVEN_CHUNK_SIZE")
    assert error.count("\n") == 1


def test_it_tells_its_version() -> None:
    assert runner.invoke(app, ["--version"]).output == f"kvhaven {__version__}\n"


def test_the_command_line_loads_nothing_that_is_slow() -> None:
    code = (
        "import sys, kvhaven.cli; slow = {'torch', 'vllm', 'numpy', 'asyncio', 'rich.table'};"
        "print(*slow & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == []
    assert done.returncode == 0
