# SPDX-License-Identifier: Apache-2.0
"""LMCache's settings: what is understood, what goes before what, what is only named."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvhaven.cli import app
from kvhaven.config import Settings, load_settings
from kvhaven.config.lmcache import NOT_TAKEN, TAKEN
from kvhaven.errors import ConfigError

GIB = 1 << 30
runner = CliRunner()

UNDERSTOOD = [
    ("chunk_size", "512", "chunk_size", 512),
    ("local_cpu", "True", "local_cpu", True),
    ("max_local_cpu_size", "20.0", "max_local_cpu_size", 20 * GIB),
    ("max_local_cpu_size", "0.5", "max_local_cpu_size", GIB // 2),
    ("local_disk", "/data/kv", "local_disk", "/data/kv"),
    ("local_disk", "file:///data/kv/", "local_disk", "/data/kv"),
    ("local_disk", "null", "local_disk", None),
    ("max_local_disk_size", "100", "max_local_disk_size", 100 * GIB),
    ("cache_policy", "LFU", "cache_policy", "LFU"),
    ("cache_policy", "fifo", "cache_policy", "FIFO"),
    ("cache_policy", "MRU", "cache_policy", "MRU"),
    ("cache_policy", "lru", "cache_policy", "LRU"),
    ("save_decode_cache", "true", "save_decode_cache", True),
    ("save_decode_cache", "False", "save_decode_cache", False),
    ("save_unfull_chunk", "true", "pd_tail", True),
    ("save_unfull_chunk", "False", "pd_tail", False),
    ("pd_role", "null", "pd_role", "both"),
    ("transfer_channel", "nixl", "transfer_channel", "auto"),
    ("transfer_channel", "py_socket", "transfer_channel", "tcp"),
    ("nixl_backends", "UCX", "nixl_backends", "UCX"),
    ("nixl_backends", '["UCX", "LIBFABRIC"]', "nixl_backends", "UCX LIBFABRIC"),
    ("priority_limit", "3", "priority_limit", 3),
    ("enable_kv_events", "False", "kv_events", False),
    ("force_skip_save", "1", "force_skip_save", True),
    ("log_level", "DEBUG", "log_level", "DEBUG"),
    ("remote_url", "redis://host:6379", "remote_url", "redis://host:6379"),
    ("remote_url", "s3://bucket/some/prefix", "remote_url", "s3://bucket/some/prefix"),
    ("remote_url", "fs://host:0/mnt/kv", "remote_url", "fs:///mnt/kv"),
    ("s3_endpoint_url", "http://ceph:7480", "s3_endpoint_url", "http://ceph:7480"),
    ("plugins", "plugins.warm:Warm", "plugins", "plugins.warm:Warm"),
    ("runtime_plugin_locations", "['/a/b', '/c']", "runtime_plugin_locations", "/a/b /c"),
]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return tmp_path / "lmcache.yaml"


@pytest.mark.parametrize(
    ("role", "enabled", "taken", "advice"),
    [
        ("sender", "True", "sender", ""),
        ("Receiver", "1", "receiver", ""),
        ("null", "True", "both", ""),
        ("sender", "False", "both", "without enable_pd it has no effect"),
        ("sender", None, "both", "without enable_pd it has no effect"),
        ("middle", "True", "both", "this role is not known"),
    ],
)
def test_a_role_counts_if_prefill_and_decode_are_apart(
    role: str, enabled: str | None, taken: str, advice: str
) -> None:
    environ = {"LMCACHE_PD_ROLE": role} | ({"LMCACHE_ENABLE_PD": enabled} if enabled else {})
    loaded = load_settings({}, environ)
    assert loaded.settings.pd_role == taken
    noted = any(f"pd_role (LMCACHE_PD_ROLE): {advice}" in note for note in loaded.notes)
    assert noted == bool(advice)


def test_a_channel_that_is_not_there_is_named() -> None:
    loaded = load_settings({}, {"LMCACHE_TRANSFER_CHANNEL": "mooncake"})
    assert loaded.settings.transfer_channel == "auto"
    (note,) = loaded.notes
    assert "transfer_channel (LMCACHE_TRANSFER_CHANNEL): this channel is not supported" in note


def test_every_setting_that_is_understood_has_a_case() -> None:
    assert {name for name, *_ in UNDERSTOOD} == TAKEN.keys()


@pytest.mark.parametrize(("name", "written", "ours", "value"), UNDERSTOOD)
def test_it_is_understood_from_the_environment(
    name: str, written: str, ours: str, value: object
) -> None:
    variable = f"LMCACHE_{name.upper()}"
    for text in (written, f'"{written}"', f" '{written}' "):
        resolved = load_settings({}, {variable: text})
        assert getattr(resolved.settings, ours) == value
        assert resolved.origins[ours] == variable


@pytest.mark.parametrize(("name", "written", "ours", "value"), UNDERSTOOD)
def test_it_is_understood_from_the_file(
    name: str, written: str, ours: str, value: object, theirs: Path
) -> None:
    theirs.write_text(f"# a recipe\n{name}: {written}\n")
    resolved = load_settings({}, {"LMCACHE_CONFIG_FILE": str(theirs)})
    assert getattr(resolved.settings, ours) == value
    assert resolved.origins[ours] == f"LMCache's {theirs}:2"


def test_ours_go_before_theirs_and_variables_before_files(tmp_path: Path, theirs: Path) -> None:
    ours = tmp_path / "kvhaven.yaml"
    ours.write_text("chunk_size: 512")
    theirs.write_text("chunk_size: 2048")
    environ = {
        "KVHAVEN_CHUNK_SIZE": "256",
        "KVHAVEN_CONFIG_FILE": str(ours),
        "LMCACHE_CHUNK_SIZE": "1024",
        "LMCACHE_CONFIG_FILE": str(theirs),
    }
    assert load_settings({"chunk_size": 128}, environ).settings.chunk_size == 128
    for variable, size in zip(tuple(environ), (256, 512, 1024, 2048), strict=True):
        assert load_settings({}, environ).settings.chunk_size == size
        del environ[variable]
    assert load_settings({}, environ).origins["chunk_size"] == "default"


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("chunk_size", "100"),
        ("chunk_size", "many"),
        ("local_cpu", "perhaps"),
        ("max_local_cpu_size", "lots"),
        ("max_local_cpu_size", "-1"),
        ("local_disk", "s3://bucket/x"),
        ("max_local_disk_size", "1 gig"),
        ("cache_policy", "BEST"),
        ("save_decode_cache", "2"),
        ("priority_limit", "1.5"),
        ("enable_kv_events", "sometimes"),
        ("force_skip_save", "never"),
        ("log_level", "LOUD"),
    ],
)
def test_a_malformed_value_is_refused_by_the_name_it_has_there(
    name: str, written: str, theirs: Path
) -> None:
    variable = f"LMCACHE_{name.upper()}"
    with pytest.raises(ConfigError, match=rf"from {variable}, is refused.*allowed: "):
        load_settings({}, {variable: written})
    theirs.write_text(f"{name}: {written}")
    with pytest.raises(ConfigError, match=r"from LMCache's .*lmcache.yaml:1, is refused"):
        load_settings({}, {"LMCACHE_CONFIG_FILE": str(theirs)})


def test_what_is_wrong_only_here_gives_way_to_a_setting_of_ours() -> None:
    environ = {"LMCACHE_CHUNK_SIZE": "100", "KVHAVEN_CHUNK_SIZE": "128"}
    assert load_settings({}, environ).settings.chunk_size == 128


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("- a", "must contain lines"),
        ("chunk_size: [", "is not valid YAML"),
        ("a: 1\na: 2", "given twice"),
    ],
)
def test_a_broken_file_is_refused(written: str, message: str, theirs: Path) -> None:
    theirs.write_text(written)
    with pytest.raises(ConfigError, match=message):
        load_settings({}, {"LMCACHE_CONFIG_FILE": str(theirs)})


def test_a_missing_file_is_refused_with_the_variable_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"named by LMCACHE_CONFIG_FILE.*No such file"):
        load_settings({}, {"LMCACHE_CONFIG_FILE": "/nowhere/lmcache.yaml"})


def test_all_that_has_no_counterpart_is_named_in_one_note(theirs: Path) -> None:
    theirs.write_text(
        "remote_url: redis://:hunter2@host:6379\n"
        "remote_serde: cachegen\n"
        "enable_blending: true\n"
        "extra_config: {password: hunter2}\n"
        "frobnicate: 7\n"
        "local_cpu: false\n"
    )
    environ = {
        "LMCACHE_CONFIG_FILE": str(theirs),
        "LMCACHE_REMOTE_URL": "lm://host:65432",
        "LMCACHE_ENABLE_PD": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0",
    }
    resolved = load_settings({}, environ)
    assert resolved.settings == Settings()
    (note,) = resolved.notes
    for named in (
        "remote_url (LMCACHE_REMOTE_URL), remote_serde",
        f"enable_blending (LMCache's {theirs}:3): only prefixes are reused",
        f"extra_config (LMCache's {theirs}:4)",
        f"frobnicate (LMCache's {theirs}:5): unknown setting",
        f"local_cpu (LMCache's {theirs}:6): host memory is always used",
        "enable_pd (LMCACHE_ENABLE_PD): set peer_listen and peers on all nodes",
        "max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE): host memory is always used",
    ):
        assert named in note
    assert "hunter2" not in note


def test_what_is_off_or_no_setting_is_not_worth_a_note() -> None:
    environ = {
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_CONFIG_FILE": "",
        "LMCACHE_CHUNK_SIZE": " ",
        "LMCACHE_ENABLE_BLENDING": "False",
        "LMCACHE_REMOTE_URL": "null",
        "LMCACHE_REMOTE_SERDE": "naive",
        "LMCACHE_MIN_RETRIEVE_TOKENS": "0",
        # what Kubernetes sets for a service called lmcache-server
        "LMCACHE_SERVER_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_SERVER_SERVICE_PORT": "65432",
        "LMCACHE_SERVER_PORT": "tcp://10.0.0.1:65432",
        "LMCACHE_SERVER_PORT_65432_TCP_ADDR": "10.0.0.1",
    }
    resolved = load_settings({}, environ)
    assert resolved.settings == Settings()
    assert resolved.notes == ()


def test_a_disk_of_size_zero_is_none_as_there() -> None:
    environ = {"LMCACHE_LOCAL_DISK": "/data/kv", "LMCACHE_MAX_LOCAL_DISK_SIZE": "0"}
    resolved = load_settings({}, environ)
    assert resolved.settings.local_disk is None
    assert "local_disk (LMCACHE_LOCAL_DISK): max_local_disk_size is 0" in resolved.notes[0]


def test_every_advice_fits_some_name_that_no_other_takes() -> None:
    """The last one takes all; the others are for names that are not understood."""
    assert NOT_TAKEN[-1].names == ("*",)
    names = [name for left in NOT_TAKEN[:-1] for name in left.names]
    assert len(set(names)) == len(names)
    assert not set(names) & TAKEN.keys()


def test_a_service_says_it_once_at_start(short_dir: Path) -> None:
    socket = short_dir / "s.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "kvhaven.cli", "serve", "--socket", str(socket)],
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
            "KVHAVEN_API_LISTEN": "off",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.0625",
            "LMCACHE_REMOTE_URL": "lm://host:65432",
        },
    ) as service:
        try:
            end = time.monotonic() + 30
            while not socket.exists():
                assert service.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            service.send_signal(signal.SIGTERM)
            _, said = service.communicate(timeout=30)
        finally:
            service.kill()
    warnings = [line for line in said.splitlines() if "LMCache" in line]
    assert len(warnings) == 1, said
    assert "WARNING" in warnings[0]
    assert "remote_url (LMCACHE_REMOTE_URL): this store or option is not supported" in warnings[0]


RECIPE = """\
# from a recipe
chunk_size: 512
local_cpu: False
max_local_cpu_size: 20.0
local_disk: "file:///data/kv disk/"
max_local_disk_size: 100
cache_policy: LFU
enable_kv_events: False
enable_pd: True
pd_role: sender
remote_url: "redis://:hunter2@host"
s3_endpoint_url: "http://ceph:7480"
"""


def test_an_imported_file_means_the_same(theirs: Path, tmp_path: Path) -> None:
    theirs.write_text(RECIPE)
    ours = tmp_path / "kvhaven.yaml"
    result = runner.invoke(app, ["config", "import", str(theirs), "-o", str(ours)])
    assert result.exit_code == 0, result.output
    imported = load_settings({}, {}, ours)
    assert imported.settings == load_settings({}, {"LMCACHE_CONFIG_FILE": str(theirs)}).settings
    assert imported.settings.max_local_cpu_size == 20 * GIB
    assert imported.notes == ()


def test_an_imported_file_says_what_is_different(theirs: Path) -> None:
    theirs.write_text(RECIPE)
    result = runner.invoke(app, ["config", "import", str(theirs)])
    told = " ".join(result.output.replace("#", "").split())
    assert "LMCache: max_local_cpu_size: 20.0. LMCache allocates this for each rank; KV" in told
    assert "LMCache: enable_kv_events: False. Enabled by default. kv_events: false" in told
    assert "chunk_size: 512" in result.output.splitlines()
    assert "Not imported: local_cpu (line 3): host memory is always used" in told
    assert "enable_pd (line 9): set peer_listen and peers on all" in told
    assert "Only with enable_pd, as in LMCache: a sender only saves" in told
    assert "stores its own beside it. remote_url: redis://:hunter2@host" in told
    assert all(len(line) <= 100 for line in result.output.splitlines())


def test_an_import_overwrites_nothing_and_refuses_what_is_malformed(theirs: Path) -> None:
    theirs.write_text("chunk_size: 100\n")
    result = runner.invoke(app, ["config", "import", str(theirs)])
    assert isinstance(result.exception, ConfigError)
    assert "chunk_size = '100', from LMCache's" in str(result.exception)
    theirs.write_text("chunk_size: 256\n")
    result = runner.invoke(app, ["config", "import", str(theirs), "-o", str(theirs)])
    assert isinstance(result.exception, ConfigError)
    assert "File exists" in str(result.exception)
    assert theirs.read_text() == "chunk_size: 256\n"


def test_show_names_these_sources(theirs: Path) -> None:
    theirs.write_text("chunk_size: 512\nenable_p2p: true\n")
    environ = {"LMCACHE_CONFIG_FILE": str(theirs), "LMCACHE_CACHE_POLICY": "MRU"}
    output = runner.invoke(app, ["config", "show"], env=environ).output
    assert f"(LMCache's {theirs}:1)" in output
    assert "(LMCACHE_CACHE_POLICY)" in output
    assert "note: settings of LMCache without effect: enable_p2p" in output
