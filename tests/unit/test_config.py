# SPDX-License-Identifier: Apache-2.0
"""Settings: sources, precedence, refusals."""

from pathlib import Path

import msgspec
import pytest

from kvhaven.config import Settings, load_settings, setting_infos
from kvhaven.config.load import changes_of, reader_of
from kvhaven.errors import ConfigError

GIB = 1 << 30


def test_without_any_source_all_is_default() -> None:
    resolved = load_settings({}, {})
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.notes == ()


def test_sources_have_precedence_in_order(tmp_path: Path) -> None:
    file = tmp_path / "kvhaven.yaml"
    file.write_text("# ours\nchunk_size: 512\ncopy_threads: 3\nsave_decode_cache: yes\n")
    environ = {
        "KVHAVEN_CONFIG_FILE": str(file),
        "KVHAVEN_CHUNK_SIZE": "1024",
        "KVHAVEN_COPY_THREADS": "2",
    }
    resolved = load_settings({"chunk_size": 128}, environ)
    assert resolved.settings.chunk_size == 128
    assert resolved.settings.copy_threads == 2
    assert resolved.settings.save_decode_cache is True
    assert resolved.origins["chunk_size"] == "kv_connector_extra_config"
    assert resolved.origins["copy_threads"] == "KVHAVEN_COPY_THREADS"
    assert resolved.origins["save_decode_cache"] == f"{file}:4"
    assert resolved.origins["log_level"] == "default"


def test_a_file_given_by_hand_goes_before_the_environments(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text("chunk_size: 512")
    theirs.write_text("chunk_size: 1024")
    resolved = load_settings({}, {"KVHAVEN_CONFIG_FILE": str(theirs)}, ours)
    assert resolved.settings.chunk_size == 512


def test_extra_config_takes_keys_with_and_without_prefix() -> None:
    assert load_settings({"kvhaven.chunk_size": 512}, {}).settings.chunk_size == 512
    with pytest.raises(ConfigError, match=r"given twice.*512 and 256"):
        load_settings({"kvhaven.chunk_size": 512, "chunk_size": 256}, {})


@pytest.mark.parametrize(
    ("extra", "environ", "message"),
    [
        (
            {"chunk_siz": 1},
            {},
            "chunk_siz = 1 in kv_connector_extra_config: did you mean chunk_size",
        ),
        ({}, {"KVHAVEN_LOCALDISK": "/x"}, "KVHAVEN_LOCALDISK.*did you mean KVHAVEN_LOCAL_DISK"),
        ({"zzz": 1}, {}, "zzz.*no known setting is similar"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(
    extra: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(extra, environ)


def test_an_unknown_key_in_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("chunk_size: 256\nmax_local_disc_size: 3\n")
    with pytest.raises(ConfigError, match=r"k\.yaml:2: did you mean max_local_disk_size"):
        load_settings({}, {}, file)


def test_the_value_of_an_unknown_key_that_may_be_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as error:
        load_settings({}, {"KVHAVEN_REDIS_PASSWORD": "hunter2"})
    assert "hunter2" not in str(error.value)


def test_a_renamed_setting_keeps_its_earlier_name_in_every_source(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("remote_believe_s: 7\n")
    for resolved in (
        load_settings({"remote_believe_s": 7}, {}),
        load_settings({"kvhaven.remote_believe_s": 7}, {}),
        load_settings({}, {"KVHAVEN_REMOTE_BELIEVE_S": "7"}),
        load_settings({}, {}, file),
    ):
        assert resolved.settings.remote_lookup_ttl_s == 7
        assert resolved.origins["remote_lookup_ttl_s"] != "default"


def test_a_setting_by_both_of_its_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("remote_believe_s: 7\nremote_lookup_ttl_s: 8\n")
    environ = {"KVHAVEN_REMOTE_BELIEVE_S": "7", "KVHAVEN_REMOTE_LOOKUP_TTL_S": "8"}
    with pytest.raises(ConfigError, match=r"given twice, at .*k\.yaml:1 and .*k\.yaml:2"):
        load_settings({}, {}, file)
    with pytest.raises(ConfigError, match="remote_lookup_ttl_s is given twice"):
        load_settings({}, environ)
    with pytest.raises(ConfigError, match="remote_lookup_ttl_s is given twice"):
        load_settings({"remote_believe_s": 7, "remote_lookup_ttl_s": 8}, {})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("chunk_size", 100, "a positive multiple of 16 tokens"),
        ("chunk_size", 0, "a positive multiple of 16 tokens"),
        ("chunk_size", -16, "a positive multiple of 16 tokens"),
        ("chunk_size", True, "a positive multiple of 16 tokens"),
        ("chunk_size", None, "a positive multiple of 16 tokens"),
        ("chunk_size", 256.5, "a positive multiple of 16 tokens"),
        ("discard_partial_chunks", False, "smaller chunk_size"),
        ("local_cpu", "off", "max_local_cpu_size"),
        ("cache_policy", "random", "LRU, LFU, FIFO, MRU, S3-FIFO, or a policy"),
        ("save_decode_cache", "maybe", "true or false"),
        ("max_local_cpu_size", "4 gigs", "unknown unit gigs"),
        ("max_local_cpu_size", 4 * GIB, "plain number of GiB"),
        ("max_local_cpu_size", 0, "from 1MiB"),
        ("max_local_cpu_size", -1, "from 1MiB"),
        ("local_disk", True, "a path"),
        ("local_disk", "s3://bucket/x", "expected a path, not a URL"),
        ("service_address", "tcp://host:1", "the path of a unix socket"),
        ("service_address", "/" + "x" * 107, "at most 107 bytes"),
        ("stop_deadline_s", "nan", "seconds from 0 to 3600"),
        ("stop_deadline_s", "soon", "seconds from 0 to 3600"),
        ("stop_deadline_s", [1], "seconds from 0 to 3600"),
        ("model_fingerprint", "x" * 257, "1 to 256 characters"),
        ("model_fingerprint", {"a": 1}, "1 to 256 characters"),
        ("log_level", "LOUD", "DEBUG, INFO, WARNING or ERROR"),
        ("write_queue_size", "20GiB", "max_local_cpu_size is 4GiB"),
        ("remote_url", "mnt/kv", "neither a URL nor an absolute path"),
        ("remote_url", "file://mnt/kv", "write file:///path"),
        ("remote_url", "s3://bucket fs:///", "write fs:///path"),
        ("remote_url", 5, "one or more URLs separated by spaces"),
        ("remote_url", "s3://b\x00", "a URL must not contain unprintable characters"),
        ("remote_write", "never", "behind, through or off"),
        ("disk_write", "off", "behind or through"),
        ("remote_store_on", 2, "first or second"),
        ("remote_lookup_ttl_s", 0, "seconds from 0.1 to 3600"),
    ],
)
def test_a_refusal_names_key_source_value_and_what_is_allowed(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings({name: value}, {})
    message = str(error.value)
    assert f"setting {name} = {value!r}, from kv_connector_extra_config" in message
    assert allowed in message
    assert "allowed: " in message


def test_a_wrong_value_is_refused_also_where_another_source_hides_it() -> None:
    with pytest.raises(ConfigError, match="KVHAVEN_CHUNK_SIZE"):
        load_settings({"chunk_size": 256}, {"KVHAVEN_CHUNK_SIZE": "7"})


def test_variables_that_are_no_settings_pass() -> None:
    environ = {
        "KVHAVEN_SEED": "1",
        "KVHAVEN_EVENTS": "1000000",
        "KVHAVEN_TEST_ANYTHING": "x",
        "KVHAVEN_LOCAL_DISK": " ",
        # what Kubernetes sets for services called kvhaven and kvhaven-router
        "KVHAVEN_SERVICE_HOST": "10.0.0.1",
        "KVHAVEN_SERVICE_PORT_HTTP": "80",
        "KVHAVEN_PORT": "tcp://10.0.0.1:80",
        "KVHAVEN_ROUTER_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVHAVEN_ROUTER_SERVICE_PORT": "80",
        "OTHER": "x",
    }
    assert load_settings({}, environ).settings == Settings()


def test_yaml_words_mean_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(
        "disk_direct_io: on\nverify_memory: off\nlocal_disk: ~\nmax_local_cpu_size: 1.5\n"
        'log_level: "debug"\npriority_limit: -3\n'
    )
    settings = load_settings({}, {}, file).settings
    assert settings.disk_direct_io == "on"
    assert settings.verify_memory == "off"
    assert settings.local_disk is None
    assert settings.max_local_cpu_size == 3 * GIB // 2
    assert settings.log_level == "DEBUG"
    assert settings.priority_limit == -3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b", "must contain lines such as"),
        ("chunk_size: [", "is not valid YAML"),
        ("chunk_size: 256\nchunk_size: 512", r"given twice, at .*:1 and .*:2"),
        ("chunk_size: [256]", r"chunk_size = \['256'\]|chunk_size = \[256\]"),
        ("? [a]\n: 1", "unknown setting"),
        ("chunk_size: &a [*a]", "chunk_size"),
        ("\xff: \x00", "is not valid YAML"),
    ],
)
def test_broken_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message):
        load_settings({}, {}, file)


def test_an_empty_yaml_file_sets_nothing_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text("# nothing yet\n")
    assert load_settings({}, {"KVHAVEN_CONFIG_FILE": str(file)}).settings == Settings()
    file.unlink()
    with pytest.raises(ConfigError, match=r"named by KVHAVEN_CONFIG_FILE.*No such file"):
        load_settings({}, {"KVHAVEN_CONFIG_FILE": str(file)})


def test_settings_travel_as_json() -> None:
    extra = {"local_disk": "~/kv", "max_local_cpu_size": "300MiB", "step_budget_ms": 0.5}
    settings = load_settings(extra, {}).settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    extra = {"local_disk": "file:///data/kv/", "runtime_dir": "~/run", "service_address": "unix:s"}
    settings = load_settings(extra, {}).settings
    assert settings.local_disk == "/data/kv"
    assert settings.runtime_path == Path("/home/someone/run")
    assert settings.service_address == str(Path.cwd() / "s")


def test_the_runtime_directory_follows_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Settings().runtime_path == Path("/run/user/7/kvhaven")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert Settings().runtime_path.name.startswith("kvhaven-")


def test_the_write_queue_fits_into_the_arena() -> None:
    assert Settings().write_queue_bytes == GIB // 2
    assert Settings(max_local_cpu_size=GIB // 8).write_queue_bytes == GIB // 16
    assert Settings(write_queue_size=5).write_queue_bytes == 5


def test_settings_without_effect_are_noted() -> None:
    attached = load_settings({"service_address": "/run/s", "max_local_cpu_size": 1}, {})
    assert "max_local_cpu_size" in attached.notes[0]
    no_disk = load_settings({"max_local_disk_size": 1}, {})
    assert "local_disk is not set" in no_disk.notes[0]
    no_remote = load_settings({"remote_write": "off", "write_queue_size": "64MiB"}, {})
    assert [note.split(":")[0] for note in no_remote.notes] == [
        "remote_write without effect",
        "write_queue_size without effect",
    ]
    assert load_settings({"remote_url": "/mnt/kv", "write_queue_size": "64MiB"}, {}).notes == ()


@pytest.mark.parametrize("name", ["transfer_channel", "nixl_backends", "pd_stall_ms"])
def test_settings_that_only_the_service_reads_are_noted_at_an_attached_engine(name: str) -> None:
    value = {"transfer_channel": "tcp", "nixl_backends": "UCX", "pd_stall_ms": 2000}[name]
    (note,) = load_settings({"service_address": "/run/s", name: value}, {}).notes
    assert name in note
    assert (changes_of(name), reader_of(name)) == ("restart", "service")


def test_direct_io_applies_to_shared_directories_as_well() -> None:
    directory = load_settings({"remote_url": "/mnt/kv", "disk_direct_io": "off"}, {})
    assert directory.notes == ()
    bucket = load_settings({"remote_url": "s3://bucket", "disk_direct_io": "off"}, {})
    assert bucket.notes == ("disk_direct_io without effect: local_disk is not set",)


def test_peers_are_shared_tiers_for_the_settings_that_apply_to_them() -> None:
    settings = {"remote_lookup_ttl_s": 0.2, "fill_faster_tiers": False}
    assert load_settings({"peers": "node-a:7420", **settings}, {}).notes == ()
    (note,) = load_settings(settings, {}).notes
    assert note.startswith("remote_lookup_ttl_s, fill_faster_tiers without effect")
    (note,) = load_settings({"peers": "node-a:7420", "remote_write": "off"}, {}).notes
    assert note == "remote_write without effect: remote_url is not set"


def test_urls_are_kept_in_order_and_paths_become_urls() -> None:
    urls = "  /mnt//kv/ s3://bucket/prefix\tredis://host:6379/0 "
    settings = load_settings({"remote_url": urls}, {}).settings
    assert settings.remote_url == "file:///mnt/kv s3://bucket/prefix redis://host:6379/0"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:1/0",
        "rediss://me:hunter2@host",
        "redis://me:hun/hunter2@ter2@host/0",
        "redis://host?password=hunter2&db=1",
        "s3://bucket/x?aws_secret_access_key=hunter2",
    ],
)
def test_what_is_secret_in_a_url_is_shown_nowhere(url: str) -> None:
    resolved = load_settings({"remote_url": url}, {})
    assert resolved.settings.remote_url == url
    (row,) = [row for row in resolved.rows() if row.name == "remote_url"]
    assert "hunter2" not in f"{row.value} {row.text}"
    assert "********" in row.text
    with pytest.raises(ConfigError) as error:
        load_settings({"remote_url": f"{url} nonsense"}, {})
    assert "hunter2" not in str(error.value)


def test_every_setting_is_documented_and_its_default_is_allowed() -> None:
    defaults = Settings()
    for info in setting_infos():
        value = getattr(defaults, info.name)
        assert info.doc.endswith(".")
        if value is not None:
            raw = value / GIB if info.kind == "size" else value
            assert getattr(load_settings({info.name: raw}, {}).settings, info.name) == value
