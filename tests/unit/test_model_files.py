# SPDX-License-Identifier: Apache-2.0
"""Which files decide the KV: what is other must be told apart, what is the same found again."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity import content, files
from kvhaven.identity.background import look_at_files
from kvhaven.identity.content import DigestMemory
from kvhaven.identity.files import IGNORED_FILES, IGNORED_FOLDERS, EngineFiles, Source
from kvhaven.integrations.vllm.model_sources import loading_began_ns, model_sources

NEVER_NS = 2**63 - 1
"""No file changed since then."""
EXPERT_BYTES = 1 << 16


class Revision(str):
    """What vLLM has for a revision: the branch that was asked for, and the commit it stood for."""

    __slots__ = ("resolved",)


def engine(model: Path | str, **more: Any) -> Any:
    """Return what stands for vLLM's configuration of a model at that place."""
    model_config: dict[str, Any] = {
        "model": str(model),
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "tokenizer": str(model),
        "tokenizer_revision": None,
        "hf_config": SimpleNamespace(),
        "multimodal_config": None,
    }
    load: dict[str, Any] = {
        "load_format": "auto",
        "download_dir": None,
        "model_loader_extra_config": {},
    }
    for name, value in more.items():
        (load if name in load else model_config)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model_config),
        load_config=SimpleNamespace(**load),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        engram_config=None,
    )


def files_of(config: Any, since_ns: int = NEVER_NS) -> EngineFiles:
    return EngineFiles(model_sources(config), DigestMemory(None), since_ns)


def identity(model: Path | str, **more: Any) -> dict[str, str]:
    """Return the namespace's fields for the files of a model."""
    return files_of(engine(model, **more)).read(threading.Event())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of eight experts in one tensor, each of its own bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    experts = b"".join(bytes([expert]) * EXPERT_BYTES for expert in range(8))
    (folder / "model.safetensors").write_bytes(experts)
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json", "modeling_own.py"):
        (folder / name).write_text("{}")
    return folder


# --- what counts ------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", range(8))
def test_each_expert_of_a_fused_tensor_counts(model: Path, expert: int) -> None:
    """Samples at the start, the middle and the end would miss most of them."""
    before = identity(model)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(expert * EXPERT_BYTES + 4711)
        weights.write(b"\xff")
    after = identity(model)
    assert after["weights"] != before["weights"]
    assert after["weights.other"] == before["weights.other"]


def test_the_path_does_not_count(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere" / "name")
    assert identity(tmp_path / "elsewhere" / "name") == identity(model)
    (tmp_path / "link").symlink_to(model)
    assert identity(tmp_path / "link") == identity(model)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert identity(linked) == identity(model)


def test_names_of_files_count_and_so_does_their_division(model: Path) -> None:
    before = identity(model)
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    assert identity(model) != before


@pytest.mark.parametrize(
    "name",
    [
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "params.json",
        "tekken.json",
        "tokenizer.json",
        "adapter.bin",
        "own_code.py",
        "whisper-large-v3/model.safetensors",
        "of_a_kind_that_is_not_known",
    ],
)
def test_all_other_files_beside_the_weights_count(model: Path, name: str) -> None:
    seen = [identity(model)]
    (model / name).parent.mkdir(exist_ok=True)
    for text in ("one", "two"):
        (model / name).write_text(text)
        seen.append(identity(model))
    assert seen[0] != seen[1] != seen[2] != seen[0]


IGNORED = [
    *(pattern.replace("*", "x") for group in IGNORED_FILES.values() for pattern in group.split()),
    *(
        f"{pattern.replace('*', 'x')}/{name}"
        for group in IGNORED_FOLDERS.values()
        for pattern in group.split()
        for name in ("consolidated.00.pth", "file.json")
    ),
]


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_ignored_does_not_count(model: Path, name: str) -> None:
    before = identity(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("hello")
    assert identity(model) == before


def test_folders_that_lead_back_are_read_once(model: Path) -> None:
    before = identity(model)
    (model / "again").symlink_to(model)
    assert identity(model) == before


def test_what_the_engine_cannot_read_does_not_count(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that is mounted there has a folder `lost+found` of root's alone."""
    before = identity(model)
    (model / "broken").symlink_to(model / "nothing")
    (model / "lost+found").mkdir()
    (model / "lost+found" / "file").write_text("x")
    readable = os.access
    monkeypatch.setattr(os, "access", lambda p, m: p.name != "lost+found" and readable(p, m))
    assert identity(model) == before


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    for folder in ("one", "same", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.gguf").write_bytes(folder.encode() * 1000)
    shutil.copy(tmp_path / "one" / "model.gguf", tmp_path / "same")
    one = identity(tmp_path / "one" / "model.gguf")
    assert identity(tmp_path / "same" / "model.gguf") == one
    assert identity(tmp_path / "other" / "model.gguf") != one


# --- a path through another container -----------------------------------------------------------

SIDECAR = """
mount -t tmpfs none "$1" && cd "$1" && mkdir -p hub/blobs hub/snapshots/c models &&
echo "$2" > models/model.safetensors && echo {} > models/config.json &&
echo "$2" > hub/blobs/$3 && ln -s ../../blobs/$3 hub/snapshots/c/model.safetensors &&
echo ready && exec sleep 600
"""


@contextmanager
def sidecar(place: Path, weights: str) -> Iterator[Path]:
    """A container of the model, as KServe's: yields a link to its files below `/proc`.

    What the kernel finds there has a path at which this process finds another file.
    """
    place.mkdir(exist_ok=True)
    unshare = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    command = [*unshare, "sh", "-c", SIDECAR, "sh", str(place), weights, "a" * 64]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                pytest.skip("no mount namespace can be had here")
            link = place.with_name(f"link-{process.pid}")
            link.symlink_to(f"/proc/{process.pid}/cwd")
            yield link
        finally:
            process.kill()


@pytest.mark.parametrize("also_here", [False, True])
def test_a_path_through_another_container_leads_where_the_kernel_says(
    tmp_path: Path, also_here: bool
) -> None:
    if also_here:
        for folder in ("models", "hub/snapshots/c"):
            (tmp_path / "car" / folder).mkdir(parents=True)
            (tmp_path / "car" / folder / "model.safetensors").write_text("another model")
    seen = []
    for weights in ("one", "one", "two"):
        with sidecar(tmp_path / "car", weights) as link:
            began = later_than(tmp_path)
            files = files_of(engine(link / "models"), began)
            assert not files.changed
            seen.append(files.read(threading.Event()))
            hub = identity(link / "hub" / "snapshots" / "c")
    assert seen[0] == seen[1] != seen[2]
    assert hub == identity(cached(tmp_path / "x", "y/z", {"model.safetensors": "a" * 64}))


def test_a_link_that_is_set_anew_to_another_container_is_noticed(tmp_path: Path) -> None:
    with sidecar(tmp_path / "one", "one") as one, sidecar(tmp_path / "two", "two") as two:
        link = tmp_path / "models"
        link.symlink_to(one / "models")
        began = later_than(tmp_path)
        assert not files_of(engine(link), began).changed
        link.unlink()
        link.symlink_to(two / "models")
        assert files_of(engine(link), began).changed == f"{link} was replaced"


# --- the hub's cache ----------------------------------------------------------------------------


def cached(hub: Path, repository: str, blobs: dict[str, str], commit: str = "c" * 40) -> Path:
    """Put a repository into a hub's cache: blobs by the names of the files; return its folder."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for name, blob in blobs.items():
        (folder / "blobs" / blob).write_text(f"content of {blob}")
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_blobs_count_by_their_names_and_are_not_read(tmp_path: Path) -> None:
    def of(name: str, blob: str) -> dict[str, str]:
        files = files_of(engine(cached(tmp_path / name, "a/b", {"model.safetensors": blob})))
        assert files.unknown_bytes == (0 if len(blob) in {40, 64} else len(f"content of {blob}"))
        return files.read(threading.Event())

    one = of("one", "a" * 64)
    assert of("same", "a" * 64) == one
    assert of("other", "b" * 64) != one
    assert of("small", "b" * 40) not in (one, of("unnamed", "no-hash"))


def test_models_of_the_hub_are_found_by_the_commit_that_vllm_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = tmp_path / "hub"
    cached(hub, "org/tiny", {"model.safetensors": "a" * 64}, "1" * 40)
    cached(hub, "org/tiny", {"model.safetensors": "b" * 64}, "2" * 40)  # where main is now
    revision = Revision("main")
    object.__setattr__(revision, "resolved", "1" * 40)
    loaded = identity("org/tiny", download_dir=str(hub), revision=revision)
    assert loaded != identity("org/tiny", download_dir=str(hub))
    assert loaded == identity(cached(tmp_path / "x", "y/z", {"model.safetensors": "a" * 64}))
    with pytest.raises(IncompatibleEngineError, match=r"not in the hub's cache.*model_fingerprint"):
        identity("org/none", download_dir=str(hub))


def test_what_is_loaded_beside_a_download_dir_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only weights lie there: configuration, code and processors are in the default cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "default"))
    download = str(tmp_path / "weights")
    cached(tmp_path / "weights", "org/tiny", {"model.safetensors": "a" * 64})
    alone = identity("org/tiny", download_dir=download)
    assert alone.keys() == {"weights"}
    seen = []
    for blob in ("b" * 40, "c" * 40):
        shutil.rmtree(tmp_path / "default", ignore_errors=True)
        cached(tmp_path / "default", "org/tiny", {"modeling_own.py": blob})
        seen.append(identity("org/tiny", download_dir=download))
    assert seen[0].keys() == {"weights", "weights.repository.other"}
    assert seen[0] != seen[1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", download)
    assert identity("org/tiny", download_dir=download) == alone


def test_a_part_of_a_repository_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM downloads what it needs; the hub's client knows what else there is."""
    monkeypatch.chdir(tmp_path)
    snapshot = cached(tmp_path / "hub", "org/part", {"model.safetensors": "a" * 64})
    listed = {name: {"size": 1, "blob_id": "d" * 40} for name in ("model.safetensors", "README.md")}
    trees = snapshot.parent.parent / "trees"
    trees.mkdir()
    (trees / f"{'c' * 40}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    assert identity("org/part", download_dir=str(tmp_path / "hub")) == identity(snapshot)


# --- where nothing can be known ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"load_format": "dummy"}, "load_format is 'dummy'"),
        (
            {"load_format": "ipc_cache"},
            "load_format is 'ipc_cache': the source of the weights of .* is not known",
        ),
        ({"load_format": "one_of_a_plugin"}, "the source of the weights of .* is not known"),
        ({"model": "s3://bucket/model"}, "s3://bucket/model are remote"),
        ({"model_weights": "s3://bucket/m"}, "s3://bucket/m are remote"),
        ({"model": "/nothing/here"}, "no local path"),
        (
            {
                "load_format": "tensorizer",
                "model_loader_extra_config": {"tensorizer_uri": "s3://a/b"},
            },
            "s3://a/b are remote",
        ),
    ],
)
def test_weights_that_cannot_be_identified_are_refused_with_advice(
    model: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncompatibleEngineError, match=f"{message}.*model_fingerprint"):
        identity(**({"model": model} | more))


def test_models_of_modelscope_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    advice = r"ModelScope .*`modelscope download` prints, or set `model_fingerprint`"
    with pytest.raises(IncompatibleEngineError, match=advice):
        identity("org/tiny", download_dir=str(tmp_path))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "False")
    with pytest.raises(IncompatibleEngineError, match="model_fingerprint") as refused:
        identity("org/tiny", download_dir=str(tmp_path))
    assert "ModelScope" not in str(refused.value)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IncompatibleEngineError, match=r"no file of weights.*model_fingerprint"):
        identity(tmp_path)


def test_a_folder_of_very_many_files_leaves_the_engine_without_a_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 4)
    assert look_at_files(lambda: files_of(engine(model)), threading.Event()) is None
    assert "nothing is cached: " in caplog.text
    assert "more than 4 files" in caplog.text
    assert "model_fingerprint" in caplog.text


# --- what was changed after it was loaded ---------------------------------------------------------


def test_files_that_were_there_before_the_engine_tell_what_it_loaded(model: Path) -> None:
    assert not files_of(engine(model), time.time_ns() + 10_000_000_000).changed


def overwrite(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"other")


def replace_with_an_old_file(model: Path) -> None:
    new = model.parent / "new"
    new.write_bytes(b"other")
    os.utime(new, ns=(10**18, 10**18))
    new.rename(model / "model.safetensors")


def move_another_folder_there(model: Path) -> None:
    model.rename(model.parent / "old")
    (model.parent / "other").rename(model)


def set_the_link_anew(model: Path) -> None:
    (model.parent / "link").unlink()
    (model.parent / "link").symlink_to(model.parent / "other")


@pytest.mark.parametrize(
    "change",
    [overwrite, replace_with_an_old_file, move_another_folder_there, set_the_link_anew],
)
def test_what_changes_after_loading_began_is_noticed(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "link").symlink_to(model)
    began = later_than(tmp_path)
    assert not files_of(engine(tmp_path / "link"), began).changed
    change(model)
    assert files_of(engine(tmp_path / "link"), began).changed


def test_what_others_put_beside_the_files_that_count_is_no_change(
    model: Path, tmp_path: Path
) -> None:
    began = later_than(tmp_path)
    for name in ("README.md", "vllm.log", "nohup.out", "events.out.tfevents.1", "results.csv"):
        (model / name).write_text("hello")
    for name in ("__pycache__", "checkpoint-500", "runs"):
        (model / name).mkdir()
        (model / name / "model.safetensors").write_text("hello")
    assert not files_of(engine(model), began).changed


def later_than(folder: Path) -> int:
    """Return a time by the file system's clock, later than that of any file there is."""
    newest = max(path.lstat().st_ctime_ns for path in [folder, *folder.rglob("*")])
    probe = folder.parent / "probe"
    while True:
        probe.write_text("x")
        if (now := probe.stat().st_ctime_ns) > newest:
            return now


def test_an_engine_began_to_load_when_its_configuration_was_made() -> None:
    assert loading_began_ns(SimpleNamespace(instance_id="1795324345144131263")) == (
        1795324345144131263
    )
    for name in ("", "a1b2c"):
        began = loading_began_ns(SimpleNamespace(instance_id=name))
        assert 0 < time.time_ns() - began < time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# --- more than one model, and files that settings name ------------------------------------------


def speculation(method: str, draft: Path) -> Any:
    draft_model = engine(draft).model_config
    return SimpleNamespace(method=method, draft_model_config=draft_model, draft_load_config=None)


def test_a_drafting_models_weights_count(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "draft")
    config = engine(model)
    alone = files_of(config).read(threading.Event())
    config.speculative_config = speculation("eagle", tmp_path / "draft")
    before = files_of(config).read(threading.Event())
    assert before.keys() - alone.keys() == {"draft.weights", "draft.weights.other"}
    overwrite(tmp_path / "draft")
    after = files_of(config).read(threading.Event())
    assert {name for name in before if before[name] != after[name]} == {"draft.weights"}
    for method, draft in (("ngram", tmp_path / "draft"), ("mtp", model)):
        config.speculative_config = speculation(method, draft)
        assert files_of(config).read(threading.Event()) == alone


def test_weights_of_other_models_that_the_configuration_names_count(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "text")
    text = str(tmp_path / "text")
    config = SimpleNamespace(model_type="ultravox", text_model_id=text, audio_model_id=None)
    before = identity(model, hf_config=config)
    overwrite(tmp_path / "text")
    after = identity(model, hf_config=config)
    assert before["weights"] == after["weights"]
    assert before["weights.text_model_id"] != after["weights.text_model_id"]


def test_code_of_another_repository_counts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    files = {"modeling.py": "a" * 40, "model.safetensors": "d" * 64}
    config = SimpleNamespace(
        auto_map={"AutoModel": "org/code--modeling.Model", "AutoConfig": "own.Config"}
    )
    # Quantized models name where their code was; it is not here, so vLLM has its own.
    assert identity(model, hf_config=config) == identity(model)
    cached(hub, "org/code", files, "1" * 40)
    before = identity(model, hf_config=config)
    cached(hub, "org/code", files | {"modeling.py": "b" * 40}, "2" * 40)
    after = identity(model, hf_config=config)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"code.org/code.other"}


def test_a_tokenizer_elsewhere_counts_where_a_model_reads_it_itself(
    model: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
        (tmp_path / name / "model.safetensors").write_text(name)
    one, two = tmp_path / "one", tmp_path / "two"
    media = SimpleNamespace()
    assert identity(model, tokenizer=str(one)) == identity(model, tokenizer=str(two))
    assert identity(model, tokenizer=str(one), multimodal_config=media) != identity(
        model, tokenizer=str(two), multimodal_config=media
    )
    assert identity(model, multimodal_config=media) == identity(model)


@pytest.mark.parametrize("setting", ["tensorizer_uri", "tensorizer_dir"])
def test_what_tensorizer_loads_counts(tmp_path: Path, setting: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "tensors").mkdir()
    (tmp_path / "tensors" / "model-000.tensors").write_text("one")
    place = tmp_path / "tensors" / ("model-%03d.tensors" if setting == "tensorizer_uri" else "")
    settings: dict[str, Any] = {
        "load_format": "tensorizer",
        "model_loader_extra_config": {"tensorizer_config": {setting: str(place)}},
    }
    before = identity(tmp_path / "model", **settings)
    (tmp_path / "tensors" / "model-000.tensors").write_text("two")
    assert identity(tmp_path / "model", **settings) != before


def test_gaudis_measured_scales_count(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "fp8_hooks_0_1.npz").write_text("one")
    (measured / "of_another_run.npz").write_text("one")
    quantization = tmp_path / "quant.json"
    quantization.write_text(json.dumps({"dump_stats_path": str(measured / "fp8_hooks")}))
    monkeypatch.setenv("QUANT_CONFIG", str(quantization))
    config = engine(model)
    elsewhere = files_of(config).read(threading.Event())
    assert not {name for name in elsewhere if name.startswith("scales")}
    config.device_config.device_type = "hpu"
    before = files_of(config).read(threading.Event())
    (measured / "of_another_run.npz").write_text("two")
    assert files_of(config).read(threading.Event()) == before
    (measured / "fp8_hooks_0_1.npz").write_text("two")
    assert files_of(config).read(threading.Event()) != before
    quantization.write_text("no JSON")
    with pytest.raises(IncompatibleEngineError, match=r"QUANT_CONFIG=.*cannot be read"):
        files_of(config)


def test_files_that_settings_name_count_by_content(model: Path, tmp_path: Path) -> None:
    def named(content: str) -> dict[str, str]:
        (tmp_path / "scales.json").write_text(content)
        sources = [
            *model_sources(engine(model)),
            Source("files.model.multimodal_config.scale_path", tmp_path / "scales.json"),
        ]
        return EngineFiles(sources, DigestMemory(None), NEVER_NS).read(threading.Event())

    assert named("one") == named("one")
    assert named("one") != named("two")


# --- reading once ---------------------------------------------------------------------------------


def test_what_was_read_once_is_known_the_next_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_SETTLED_NS", 0)
    memory = DigestMemory.open(tmp_path / "cache")
    sources = model_sources(engine(model))
    first = EngineFiles(sources, memory, NEVER_NS)
    assert first.unknown_bytes > 8 * EXPERT_BYTES
    found = first.read(threading.Event())
    assert first.unknown_bytes == 0
    again = EngineFiles(sources, memory, NEVER_NS)
    assert again.unknown_bytes == 0
    assert again.read(threading.Event()) == found
