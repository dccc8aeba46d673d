# SPDX-License-Identifier: Apache-2.0
"""Changes of a settings file in place."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.config import Resolved, load_settings, persist
from kvhaven.config.persist import write_settings
from kvhaven.errors import ConfigError

FILE = """\
# of the platform team
max_local_cpu_size: 16MiB  # small
disk_write:   behind   # as it was

remote_believe_s: 5
tenant_memory:
  ann: 1GiB
  # the next one is new
  bob: 2GiB
log_level: 'INFO'"""


def written(path: Path, **values: object) -> str:
    write_settings(path, values, dry_run=False)
    return path.read_text()


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (FILE, {"disk_write": "through"}, FILE.replace("  behind", '  "through"')),
        (FILE, {"remote_lookup_ttl_s": 9.5}, FILE.replace("_s: 5", "_s: 9.5")),
        (FILE, {"log_level": "DEBUG"}, FILE.replace("'INFO'", '"DEBUG"')),
        (FILE, {"pin_share": 0.5}, f"{FILE}\npin_share: 0.5\n"),
        (
            FILE,
            {"tenant_memory": {"é": "3GiB"}, "verify_memory": "off"},
            FILE[: FILE.index("ann")]
            + f'{{"é":"3GiB"}}{FILE[FILE.index("2GiB") + 4 :]}\nverify_memory: "off"\n',
        ),
        ("", {"verify_memory": "off"}, 'verify_memory: "off"\n'),
        ("# none yet\n", {"pin_share": 0.5}, "# none yet\npin_share: 0.5\n"),
        ("disk_write:\n", {"disk_write": "through"}, 'disk_write: "through"\n'),
        ("{disk_write: behind}", {"disk_write": "through"}, '{disk_write: "through"}'),
        ("  disk_write: behind\n", {"pin_share": 0.5}, "  disk_write: behind\n  pin_share: 0.5\n"),
        ("disk_write: behind\r\n", {"disk_write": "through"}, 'disk_write: "through"\r\n'),
    ],
    ids=range(11),
)
def test_only_the_values_change(
    tmp_path: Path, before: str, values: dict[str, object], after: str
) -> None:
    file = tmp_path / "kvhaven.yaml"
    file.write_bytes(before.encode())
    file.chmod(0o640)
    write_settings(file, values, dry_run=True)
    assert file.read_bytes() == before.encode()
    origins = write_settings(file, values, dry_run=False)
    assert file.read_bytes() == after.encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    resolved = load_settings({}, {}, file)
    assert {name: resolved.origins[name] for name in origins} == origins
    assert [entry.name for entry in tmp_path.iterdir()] == ["kvhaven.yaml"]


@pytest.mark.parametrize(
    "before",
    [
        "log_level: &level INFO\nverify_memory: &x 'off'\ndisk_write: *x\n",
        "{log_level: INFO}",
        "log_level: INFO\n...\n",
        "- log_level\n",
        "log_level: [\n",
        "log_level: INFO\nlog_level: INFO\n",
        b"log_level: \xff\n",
        "? [a, b]\n: 1\n",
        "a: &a [*a]\n",
        "log_lebel: INFO\n",
        "max_local_cpu_size: 16MiB\nwrite_queue_size: 1GiB\n",
    ],
    ids=range(11),
)
def test_a_file_that_cannot_be_edited_remains(tmp_path: Path, before: str | bytes) -> None:
    file = tmp_path / "kvhaven.yaml"
    content = before if isinstance(before, bytes) else before.encode()
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"kvhaven\.yaml"):
        written(file, disk_write="through")
    assert file.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["kvhaven.yaml"]


NAMES = ("disk_write", "verify_memory", "log_level", "pin_share", "tenant_memory")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "disk_write": st.sampled_from(["behind", "through"]),
    "verify_memory": st.sampled_from(["always", "sample", "off"]),
    "log_level": st.sampled_from(["INFO", "DEBUG", "ERROR"]),
    "pin_share": st.floats(0, 0.5),
    "tenant_memory": st.dictionaries(
        st.text("aé: #'\"{}[]&*\\\n", min_size=1), st.integers(1, 9), min_size=1, max_size=3
    ),
}


@given(
    had=st.fixed_dictionaries({}, optional=VALUES),
    given_=st.sampled_from(NAMES).flatmap(lambda n: st.tuples(st.just(n), VALUES[n])),
    style=st.sampled_from([True, False, None]),
)
def test_other_settings_remain_however_the_file_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    had: dict[str, object],
    given_: tuple[str, object],
    style: bool | None,
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    text = yaml.safe_dump(had, default_flow_style=style, allow_unicode=True, sort_keys=False)
    file.write_text(text, encoding="utf-8")
    name, value = given_
    try:
        write_settings(file, {name: value}, dry_run=False)
    except ConfigError:
        assert file.read_text(encoding="utf-8") == text
        return
    one = tmp_path_factory.getbasetemp() / "one.yaml"
    one.write_text(yaml.safe_dump(had | {name: value}, sort_keys=False), encoding="utf-8")
    assert load_settings({}, {}, file).settings == load_settings({}, {}, one).settings


def test_a_link_is_followed_and_a_full_or_closed_directory_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "k.yaml", tmp_path / "k.yaml"
    file.write_text("disk_write: behind\n")
    link.symlink_to("real/k.yaml")
    written(link, disk_write="through")
    assert link.is_symlink()
    assert file.read_text() == 'disk_write: "through"\n'

    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            written(link, disk_write="behind")
    assert file.read_text() == 'disk_write: "through"\n'
    assert [entry.name for entry in file.parent.iterdir()] == ["k.yaml"]
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        written(link, disk_write="behind")


def test_somebody_elses_change_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("disk_write: behind\n")

    def loaded(**given: Any) -> Resolved:
        file.write_text("disk_write: behind\nlog_level: DEBUG\n")
        return load_settings(**given)

    monkeypatch.setattr(persist, "load_settings", loaded)
    with pytest.raises(ConfigError, match="changed meanwhile"):
        written(file, disk_write="through")
    assert file.read_text() == "disk_write: behind\nlog_level: DEBUG\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["k.yaml"]


def test_what_is_not_wanted_any_more_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("disk_write: behind\n")
    write_settings(file, {"disk_write": "through"}, dry_run=False, wanted=lambda: False)
    assert file.read_text() == "disk_write: behind\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_owner_remains_and_a_dry_run_knows_if_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("disk_write: behind\n")
    os.chown(file, 1234, 1235)
    written(file, disk_write="through")
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 1235)

    def refuse(*_: int) -> None:
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Operation not permitted"):
        write_settings(file, {"disk_write": "behind"}, dry_run=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["k.yaml"]
