# SPDX-License-Identifier: Apache-2.0
"""The documents say what the code does: messages, headers, keys, settings, links."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml

from kvhaven import protocol
from kvhaven.catalog.ghosts import Reason
from kvhaven.cli import _COMMANDS
from kvhaven.config import load_settings, setting_infos
from kvhaven.config.lmcache import NOT_TAKEN, TAKEN
from kvhaven.config.load import reader_of
from kvhaven.config.values import shown_value
from kvhaven.peers.wire import PeerMessage
from kvhaven.protocol import Message
from kvhaven.service.status import ServiceStatus
from kvhaven.testing.tiers import content, make_namespace, make_piece
from kvhaven.tiers.format import header
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import pack_header
from kvhaven.tiers.format.manifest import pack_manifest
from kvhaven.types import align_up
from tests.e2e.zoo import REFUSED, SERVED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

Rows = dict[str, list[str]]
"""Cells of a table's rows, the first one included, by the first one without backticks."""


def section(page: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n", text, re.MULTILINE)
    assert found, f"docs/{page} has no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str) -> Rows:
    """Return the rows of all tables in a text, without their heads."""
    rows: Rows = {}
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_head = bool(re.fullmatch(r"[|: -]+", line))
        if not line.startswith("|") or is_head:
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if before.startswith("|"):
            rows[cells[0].strip("`")] = cells
    return rows


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(code: str, function: str) -> Callable[..., Any]:
    """Run a code block of a document and return one of its functions."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    found: Callable[..., Any] = scope[function]
    return found


@pytest.mark.parametrize(
    ("title", "union"),
    [
        ("Messages of clients", protocol.ClientMessage),
        ("Messages of the service", protocol.ServiceMessage),
    ],
)
def test_every_message_is_documented_with_its_fields(title: str, union: object) -> None:
    rows = table(section("formats.md", title))
    messages: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(union)}
    assert list(rows) == list(messages)
    for name, message in messages.items():
        named = re.findall(r"`(\w+)`", rows[name][1])
        missing = [field for field in message.__struct_fields__ if field not in named]
        assert not missing, f"{name}: {missing} are not documented"


def test_every_message_between_nodes_is_documented_with_its_fields() -> None:
    rows = table(section("formats.md", "The peer plane"))
    messages = {kind.__name__: kind for kind in PeerMessage.__subclasses__()}
    assert list(rows) == list(messages)
    for name, message in messages.items():
        named = re.findall(r"`(\w+)`", rows[name][1])
        missing = [field for field in message.__struct_fields__ if field not in named]
        assert not missing, f"{name}: {missing} are not documented"


def said_in_source() -> list[str]:
    """Return all texts of the sources, each value that is filled in as a NUL character."""
    texts = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            found = [p.value if isinstance(p, ast.Constant) else "\0" for p in parts]
            if any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts):
                texts.append("".join(str(part) for part in found))
    return texts


def test_the_lines_that_troubleshooting_quotes_are_said() -> None:
    """What stands between dots, numbers and examples in a line is somewhere in the sources."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?) \| ", text, re.MULTILINE)
    starts = re.findall(r"^(`.+?`[:,])", text, re.MULTILINE)
    ours = [cell for cell in (*cells, *starts) if "vLLM's own" not in cell and " " in cell]
    quoted = [line for cell in ours for line in re.findall(r"`(.+?)`", cell)]
    said = said_in_source()
    missing = []
    for line in quoted:
        for piece in re.split(r"\.\.\.|'[^']*'|[0-9][0-9.]*|[()]|: |, | is | for ", line):
            wanted = piece.strip(" ;:,")
            if len(wanted) >= 12 and not any(wanted in text for text in said):
                missing.append((line, wanted))
    assert len(quoted) > 30
    assert not missing


def test_every_message_is_somebodys() -> None:
    said = {*get_args(protocol.ClientMessage), *get_args(protocol.ServiceMessage)}
    assert set(Message.__subclasses__()) == said


def test_reliable_messages_are_named() -> None:
    first = section("formats.md", "Reliable messages").split(" are *reliable*")[0]
    reliable = [kind.__name__ for kind in get_args(protocol.Reliable)]
    assert re.findall(r"`(\w+)`", first) == reliable
    rows = table(section("formats.md", "Messages of clients"))
    assert [name for name, cells in rows.items() if cells[2].startswith("reliable")] == reliable


def test_the_example_of_a_frame_and_the_limits_are_right() -> None:
    text = section("formats.md", "The wire")
    assert f"`{protocol.encode(protocol.Hello()).hex()}`" in text
    assert f"({protocol.FRAME_LIMIT} bytes)" in text
    assert f"`version` is {protocol.VERSION} on both sides" in text


def test_the_header_is_documented_byte_by_byte() -> None:
    rows = table(section("formats.md", "The header"))
    assert rows == table(header.__doc__ or "")
    end = 0
    for offset, cells in rows.items():
        assert int(offset) == end, cells
        end += int(cells[1])
    assert end == header.HEADER_BYTES


def test_the_documented_reader_reads_what_is_stored() -> None:
    (code,) = blocks(section("formats.md", "The header"), "python")
    read_shard = run(code, "read_shard")
    namespace = make_namespace("model", (10_000, 5_000))
    piece = make_piece(namespace, at=1)
    stored, shard = piece.shard, piece.shard.shard
    raw = pack_header(stored, piece.checksum) + bytes(piece.payload)
    assert len(raw) == 4096 + align_up(stored.payload_bytes)
    assert read_shard(raw) == (
        *(stored.key, stored.namespace, shard.group, shard.layers, shard.heads, shard.replica),
        *(bytes(8), content(piece)),
    )
    for at in (0, 20, 4090, 4096):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match=r"not a shard|is damaged"):
            read_shard(bytes(damaged))


@pytest.mark.parametrize("size", [5_001, 300_003])
def test_the_documented_reader_reads_what_is_stored_compressed(size: int) -> None:
    pytest.importorskip("zstandard", reason="pip install 'kvhaven[zstd]'")
    pytest.importorskip("numpy", reason="pip install 'kvhaven[zstd]'")
    (code,) = blocks(section("formats.md", "The header"), "python")
    read_shard = run(code, "read_shard")
    piece = make_piece(make_namespace("model", (size,)))
    raw = b"".join(ShardCodec("test", zstd=True).pack(*piece))
    assert len(raw) < 4096 + align_up(size)
    assert read_shard(raw)[-1] == content(piece)
    for at in (4096, len(raw) - 4096 + 10):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="is damaged"):
            read_shard(bytes(damaged))


def test_the_manifest_is_documented() -> None:
    manifest = json.loads(pack_manifest(make_namespace()))
    assert list(table(section("formats.md", "The manifest"))) == list(manifest)


def test_the_key_vectors_are_the_tests_own_and_the_documented_code_gives_them() -> None:
    page = section("formats.md", "Keys")
    (written,) = blocks(page, "json")
    vectors = json.loads(written)
    file = ROOT / "tests" / "unit" / "key_vectors.json"
    assert vectors == json.loads(file.read_text(encoding="utf-8"))["vectors"]
    (code,) = blocks(page, "python")
    namespace_digest, epoch_root = run(code, "namespace_digest"), run(code, "epoch_root")
    keys = run(code, "keys")
    for vector in vectors:
        root = namespace_digest(vector["namespace"])
        assert root.hex() == vector["namespace_digest"]
        if vector["epoch"]:
            root = epoch_root(root, bytes.fromhex(vector["epoch"]))
        row, extras = vector["tokens"], vector["extras"]
        tokens = [(row["first"] + i * row["step"]) % 2**32 for i in range(row["count"])]
        items = [(item["content_hash"], item["offset"], item["length"]) for item in extras["items"]]
        found, tail = keys(
            root, vector["chunk_size"], tokens, extras["lora"], extras["salt"], items
        )
        assert [key.hex() for key in found] == vector["keys"], vector["name"]
        assert (tail.hex() if tail else "") == vector["tail"], vector["name"]


def test_the_names_of_tenants_are_the_tests_own_and_the_documented_code_gives_them() -> None:
    file = ROOT / "tests" / "unit" / "key_vectors.json"
    known = json.loads(file.read_text(encoding="utf-8"))["tenants"]
    rows = table(section("formats.md", "Tenants"))
    assert {salt.strip("`"): cells[1].strip("`") for salt, cells in rows.items()} | {
        "": ""
    } == known
    tenant_id = run(blocks(section("formats.md", "Keys"), "python")[0], "tenant_id")
    assert {salt: tenant_id(salt).hex() for salt in known} == known


def settings_table() -> str:
    """Return the table of docs/settings.md as the code wants it."""
    lines = ["| setting | default | read by | what it does | allowed |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for info in setting_infos():
        _, default = shown_value(info, info.default)
        cells = [f"`{info.name}`", f"`{default}`", reader_of(info.name), info.doc, info.allowed]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_every_setting_is_in_the_table_as_it_is() -> None:
    text = section("settings.md", "All settings")
    wanted = settings_table()
    assert wanted in text, f"docs/settings.md should have this table:\n{wanted}"


def lmcache_tables() -> tuple[str, str]:
    """Return the two tables on LMCache's settings as the code wants them."""
    taken = ["| LMCache | here | what is different |", "| --- | --- | --- |"]
    taken += [f"| `{name}` | `{t.ours}` | {t.change} |" for name, t in TAKEN.items()]
    left = ["| LMCache | what to do |", "| --- | --- |"]
    left += [f"| {', '.join(f'`{n}`' for n in e.names)} | {e.advice} |" for e in NOT_TAKEN[:-1]]
    return "\n".join(taken), "\n".join(left)


@pytest.mark.parametrize("number", [0, 1])
def test_every_setting_of_lmcache_is_in_the_tables_as_it_is(number: int) -> None:
    wanted = lmcache_tables()[number]
    text = section("settings.md", "LMCache's settings")
    assert wanted in text, f"docs/settings.md should have this table:\n{wanted}"


def test_the_example_settings_file_is_accepted(tmp_path: Path) -> None:
    examples = blocks((DOCS / "settings.md").read_text(encoding="utf-8"), "yaml")
    assert examples
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.yaml"
        file.write_text(example, encoding="utf-8")
        assert yaml.safe_load(example).keys() <= {info.name for info in setting_infos()}
        assert load_settings({}, {}, file).notes == ()


def test_the_status_page_names_are_those_of_the_service() -> None:
    rows = table(section("troubleshooting.md", "What status tells"))
    fields = {field.encode_name for field in msgspec.structs.fields(ServiceStatus)}
    catalog = msgspec.structs.fields(ServiceStatus.__annotations__["catalog"])
    fields |= {f"catalog.{field.encode_name}" for field in catalog}
    assert rows.keys() <= fields, rows.keys() - fields


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("api.md", "Reasons of misses"),
        ("guides/why-did-it-miss.md", "Reasons, and what to do"),
    ],
)
def test_every_reason_of_a_miss_is_explained(page: str, title: str) -> None:
    assert set(table(section(page, title))) == {reason.label for reason in Reason}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                yield page, target


def test_the_zoo_is_in_the_support_tables_as_it_is() -> None:
    text = section("support.md", "Models and features")
    rows = table(text)
    assert list(rows) == [*SERVED, *REFUSED]
    what = {name: one.what for name, one in SERVED.items()}
    what |= {name: one.what for name, one in REFUSED.items()}
    assert {name: cells[1] for name, cells in rows.items()} == what
    for name, one in SERVED.items():
        _, _, dtype, hits, *differences = rows[name]
        assert dtype == one.dtype
        assert re.fullmatch(r"[0-9]+ of [0-9]+", hits)
        assert len(differences) == 4
        assert differences[3] == "-" or 2 in one.ranks
    for name, refused in REFUSED.items():
        assert refused.says in rows[name][2]


def test_links_lead_somewhere() -> None:
    for page, target in links():
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles}
            assert anchor in anchors, f"{page.name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_commands_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    asked = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    assert asked <= targets, asked - targets
    commands = set(re.findall(r"(?:`|^|\$ )kvhaven ([a-z]+)", text, re.MULTILINE))
    assert commands <= set(_COMMANDS), commands - set(_COMMANDS)


def test_files_that_are_named_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(
            r"`((?:src|tests|docs|examples|scripts|requirements|deploy)/[\w./-]+)`", text
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_readme_has_a_place_for_the_demos_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- demo-table -->") == text.count("<!-- /demo-table -->") == 1


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_figure_is_left_open(page: Path) -> None:
    assert re.findall(r"@[A-Z_]+@|TODO|TBD", page.read_text(encoding="utf-8")) == []
