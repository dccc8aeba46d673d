# SPDX-License-Identifier: Apache-2.0
"""How tenants and quotas are written, and that no salt is ever shown."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvhaven.cli import app, main
from kvhaven.config import load_settings
from kvhaven.errors import ConfigError
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas, parse_quotas, parse_tenant, quotas_of, tenant_name
from kvhaven.types import NO_TENANT, TenantId

SALT = "horse-battery"
HORSE = tenant_id(SALT)
NAME = tenant_name(HORSE)
MIB = 1 << 20

tenants = st.binary(min_size=8, max_size=8).map(TenantId)
sizes = st.none() | st.integers(0, 1 << 50)
quotas = st.builds(Quotas, st.dictionaries(tenants, sizes), sizes)


@given(quotas)
def test_what_is_written_is_read_again(written: Quotas) -> None:
    assert parse_quotas(f" {written} ,") == written if str(written) else not written


@pytest.mark.parametrize(
    "text", [f"{SALT}=2MiB *=1MiB", f"{NAME}=2MiB,*=1MiB", f" *=1MiB,{NAME}=2MiB"]
)
def test_a_salt_and_its_name_mean_the_same_tenant(text: str) -> None:
    found = parse_quotas(text)
    assert found == Quotas({HORSE: 2 * MIB}, MIB)
    assert (found.of(HORSE), found.of(tenant_id("x")), found.of(NO_TENANT)) == (2 * MIB, MIB, None)
    assert SALT not in str(found)


def test_a_mapping_takes_any_salt_and_none_lifts_what_all_others_have() -> None:
    found = parse_quotas({"two words, one comma": "1MiB", "a=b": 1, "*": "3MiB", SALT: None})
    assert found.of(tenant_id("two words, one comma")) == MIB
    assert found.of(tenant_id("a=b")) == 1 << 30
    assert found.of(HORSE) is None
    assert parse_quotas("a=b=1MiB").of(tenant_id("a=b")) == MIB
    assert quotas_of(None) == Quotas()
    assert not Quotas({HORSE: None})


def test_a_tenant_is_named_by_16_hex_digits_in_either_case() -> None:
    assert parse_tenant(NAME.upper().replace("TENANT", "tenant")) == HORSE
    assert parse_tenant(SALT) == HORSE
    for wrong in ("tenant:12", "tenant:" + "g" * 16, ""):
        with pytest.raises(ValueError, match=r"hex digits|empty"):
            parse_tenant(wrong)


WRONG = {
    f"{SALT}": "pair 1: no = found",
    f"a=1MiB {SALT}=much": "pair 2: no valid size after the =",
    f"{SALT}=1MiB a=1MiB {NAME}=2MiB": "pairs 1 and 3 name the same tenant",
    f"{SALT}=2000000TiB": "pair 1: the size is too large",
    "*=1MiB *=2MiB": "pair 2: second quota for *",
    "=1MiB": "pair 1: empty salt; expected the salt or the name of a tenant",
    f"tenant:{SALT}=1MiB": ("pair 1: malformed tenant name; expected tenant: and 16 hex digits"),
}


@pytest.mark.parametrize("setting", ["tenant_memory", "tenant_disk", "tenant_remote"])
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_setting_is_refused_without_its_salts(setting: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({setting: text}, {})
    said = str(refused.value)
    assert WRONG[text] in said
    assert setting in said
    assert SALT not in said


def test_wrong_names_and_files_of_settings_repeat_no_salt(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    for text in (
        f"tenant_memory: {{{SALT}: 1MiB, {SALT}: 2MiB}}",
        f"tenant_memory: [{SALT}]",
        f"tenant_memory: {{[{SALT}]: 1MiB}}",
        f'tenant_memory: "{SALT}=1MiB',
        f"tenant_memories: {SALT}=1MiB",
        f"tenant_memory: {{{SALT}: {{a: b}}}}",
    ):
        file.write_text(text + "\n")
        with pytest.raises(ConfigError) as refused:
            load_settings({}, {}, file)
        assert SALT not in str(refused.value), text
    with pytest.raises(ConfigError) as refused:
        load_settings({"tenant_disk": f"{SALT}=1MiB", "kvhaven.tenant_disk": f"{SALT}=2MiB"}, {})
    assert SALT not in str(refused.value)


def test_settings_and_config_show_know_names_alone(tmp_path: Path) -> None:
    file = tmp_path / "k.yaml"
    file.write_text(f'tenant_memory:\n  {SALT}: 512MiB\n  "0123": none\n  "*": 1GiB\n')
    resolved = load_settings({}, {"KVHAVEN_TENANT_DISK": f"{SALT}=7GiB"}, file)
    assert resolved.settings.tenant_memory is not None
    assert parse_quotas(resolved.settings.tenant_memory) == Quotas(
        {HORSE: 512 * MIB, tenant_id("0123"): None}, 1 << 30
    )
    assert resolved.notes == ("tenant_disk without effect: local_disk is not set",)
    environment = {"KVHAVEN_TENANT_DISK": f"{SALT}=7GiB"}
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        shown = CliRunner().invoke(app, [*arguments, "--file", str(file)], env=environment).output
        assert f"{NAME}=512MiB" in shown
        assert f"{NAME}=7GiB" in shown
        assert SALT not in shown
    rows = {row["name"]: row for row in json.loads(shown)["settings"]}
    assert rows["tenant_disk"]["origin"] == "KVHAVEN_TENANT_DISK"


def test_a_quota_of_a_shared_tier_that_is_no_directory_is_noted() -> None:
    extra = {"tenant_remote": "*=1GiB", "remote_url": "redis://host:6379"}
    assert load_settings(extra, {}).notes == (
        "tenant_remote without effect: remote_url names no shared directory",
    )
    assert load_settings(extra | {"remote_url": "/mnt/kv"}, {}).notes == ()
    assert load_settings({"tenant_remote": "*=1GiB"}, {}).notes == (
        "tenant_remote without effect: remote_url is not set",
    )


def test_a_salt_is_read_from_standard_input_and_its_name_printed() -> None:
    result = CliRunner().invoke(app, ["tenant"], input=f"{SALT}\n")
    assert result.output == f"{NAME}\n"
    assert CliRunner().invoke(app, ["tenant"], input="two words\r\n").output == (
        f"{tenant_name(tenant_id('two words'))}\n"
    )


def test_a_wrong_option_repeats_no_salt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["clear"], ["limit", "--memory", "1GiB"]):
        monkeypatch.setattr("sys.argv", ["kvhaven", *arguments, "--tenant", f"tenant:{SALT}"])
        with pytest.raises(SystemExit) as exited:
            main()
        assert exited.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(
            "kvhaven: --tenant is refused (malformed tenant name; "
            "expected tenant: and 16 hex digits)"
        )
        assert SALT not in said
