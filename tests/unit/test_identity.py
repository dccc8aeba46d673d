# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: what is other must have another one, what is the same the same."""

import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvhaven.errors import IncompatibleEngineError
from kvhaven.integrations.vllm.identity import (
    SPOT_BYTES,
    lora_fingerprint,
    namespace_fields,
    weights_fingerprint,
)

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
Tensors = dict[str, torch.Tensor]


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """Write the format by hand, as the reader under test reads it by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body, end = [], 0
    for name, tensor in tensors.items():
        body.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        begin, end = end, end + len(body[-1])
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    path.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *body)))


def weights(names: str = "abc") -> Tensors:
    """Some tensors that are read whole and some that are sampled (24 KiB)."""
    random = torch.Generator().manual_seed(0)
    return {
        f"{name}.{kind}": torch.randn(size, generator=random)
        for name in names
        for kind, size in (("bias", (16,)), ("weight", (48, 128)))
    }


def fingerprint(path: Path, load_format: str = "auto", **more: Any) -> str:
    model = SimpleNamespace(model=str(path), model_weights="", revision=None, **more)
    return weights_fingerprint(model, SimpleNamespace(load_format=load_format, download_dir=None))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_safetensors(path / "model.safetensors", weights())
    (path / "config.json").write_text('{"layers": 2}')
    (path / "tokenizer.json").write_text("{}")
    return path


def test_the_path_does_not_matter(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    assert fingerprint(tmp_path / "elsewhere") == fingerprint(model)


def test_nor_do_links_shards_and_files_that_are_not_the_models(model: Path, tmp_path: Path) -> None:
    before = fingerprint(model)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert fingerprint(linked) == before

    (model / "model.safetensors").unlink()
    write_safetensors(model / "model-00001-of-00002.safetensors", weights("ab"))
    every = weights()
    rest = {name: every[name] for name in every if name.startswith("c")}
    write_safetensors(model / "model-00002-of-00002.safetensors", rest)
    (model / "tokenizer.json").write_text('{"another": 1}')
    (model / "README.md").write_text("hello")
    expected = {**weights("ab"), **rest}
    assert all(torch.equal(expected[name], every[name]) for name in every)
    assert fingerprint(model) == before


SPOTS: list[Callable[[torch.Tensor], int]] = [
    lambda _: 0,
    lambda flat: len(flat) // 2,
    lambda flat: len(flat) - 1,
]


@pytest.mark.parametrize("name", list(weights()))
@pytest.mark.parametrize("spot", SPOTS, ids=["start", "middle", "end"])
def test_one_value_of_any_tensor_matters(
    model: Path, name: str, spot: Callable[[torch.Tensor], int]
) -> None:
    before = fingerprint(model)
    changed = weights()
    flat = changed[name].view(-1)
    flat[spot(flat)] += 1
    write_safetensors(model / "model.safetensors", changed)
    assert fingerprint(model) != before


def test_names_dtypes_shapes_and_configuration_matter(model: Path) -> None:
    prints = [fingerprint(model)]
    everything = weights()

    def with_tensor(**changed: torch.Tensor) -> None:
        tensors = {**everything, **{name.replace("_", "."): t for name, t in changed.items()}}
        write_safetensors(model / "model.safetensors", tensors)
        prints.append(fingerprint(model))

    bias = everything["a.bias"]
    with_tensor(a_bias=bias.view(4, 4))
    with_tensor(a_bias=bias.view(torch.bfloat16))
    with_tensor(d_bias=bias)
    renamed = {name.replace("a.bias", "z.bias"): tensor for name, tensor in everything.items()}
    write_safetensors(model / "model.safetensors", renamed)
    prints.append(fingerprint(model))
    write_safetensors(model / "model.safetensors", everything)
    (model / "config.json").write_text('{"layers": 3}')
    prints.append(fingerprint(model))
    (model / "modeling_own.py").write_text("x = 1")
    prints.append(fingerprint(model))
    assert len(set(prints)) == len(prints)


def test_blobs_of_a_hub_cache_count_by_their_names(model: Path, tmp_path: Path) -> None:
    def cached(name: str, blob: str) -> Path:
        cache = tmp_path / name
        (cache / "blobs").mkdir(parents=True)
        snapshot = cache / "snapshots" / "main"
        snapshot.mkdir(parents=True)
        shutil.copy(model / "model.safetensors", cache / "blobs" / blob)
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
        return snapshot

    one = fingerprint(cached("one", "a" * 64))
    assert fingerprint(cached("same", "a" * 64)) == one
    assert fingerprint(cached("other", "b" * 64)) != one
    assert fingerprint(cached("unnamed", "not-a-hash")) not in {one, ""}


def test_models_of_the_hub_are_found_in_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("c" * 40)
    shutil.copytree(model, snapshot)
    refs = tmp_path / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("c" * 40)
    monkeypatch.chdir(tmp_path)
    hub = SimpleNamespace(model="org/tiny", model_weights="", revision=None)
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "hub"))
    assert weights_fingerprint(hub, load) == fingerprint(model)
    missing = SimpleNamespace(model="org/none", model_weights="", revision=None)
    with pytest.raises(IncompatibleEngineError, match="model_fingerprint"):
        weights_fingerprint(missing, load)


def test_every_value_of_a_torch_file_matters(tmp_path: Path) -> None:
    """Its zip directory has a CRC-32 for each tensor."""

    def saved(value: float) -> str:
        tensors = weights()
        tensors["b.weight"][20, 33] += value
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        return fingerprint(tmp_path)

    same = saved(0)
    assert saved(0) == same
    assert saved(1) != same


def test_torch_files_of_the_old_format_are_sampled(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(weights(), file, _use_new_zipfile_serialization=False)
    same = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == same
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert fingerprint(tmp_path) != same


def test_a_gguf_file_is_sampled(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    content = bytearray(os.urandom(3 * 2**20 + 5))
    file.write_bytes(content)
    before = fingerprint(file)
    for spot in (0, 2**20 + SPOT_BYTES - 1, 2 * 2**20, len(content) - 1):
        content[spot] ^= 1
        file.write_bytes(content)
        assert fingerprint(file) != before
        content[spot] ^= 1
    file.write_bytes(content)
    assert fingerprint(file) == before


@pytest.mark.parametrize(
    ("path", "load_format", "message"),
    [
        ("model", "dummy", "load_format is 'dummy'"),
        ("s3://bucket/model", "runai_streamer", "remote"),
        ("nothing-here", "auto", "no local path"),
    ],
)
def test_nothing_to_sample_is_refused_with_advice(
    model: Path, path: str, load_format: str, message: str
) -> None:
    place = path if "://" in path else str(model.parent / path)
    spec = SimpleNamespace(model=place, model_weights="", revision=None)
    with pytest.raises(IncompatibleEngineError, match=f"{message}.*model_fingerprint"):
        weights_fingerprint(spec, SimpleNamespace(load_format=load_format, download_dir=None))


def test_weights_that_were_streamed_from_afar_are_refused(model: Path) -> None:
    spec = SimpleNamespace(model=str(model), model_weights="s3://bucket/m", revision=None)
    with pytest.raises(IncompatibleEngineError, match="s3://bucket/m are remote"):
        weights_fingerprint(spec, SimpleNamespace(load_format="runai_streamer"))


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10" + bytes(7) + b"x" * 40])
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(IncompatibleEngineError, match="cannot be sampled"):
        fingerprint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(IncompatibleEngineError, match="to sample"):
        fingerprint(tmp_path)


def test_a_thousand_tensors_are_sampled_quickly(tmp_path: Path) -> None:
    block = torch.randn(100, 128)
    for shard in range(4):
        tensors = {f"{shard}.{index}": block + index for index in range(250)}
        write_safetensors(tmp_path / f"model-{shard}.safetensors", tensors)
    start = time.perf_counter()
    fingerprint(tmp_path)
    assert time.perf_counter() - start < 0.5


def test_an_adapter_counts_by_its_files_and_is_kept(tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        adapter = tmp_path / name
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text('{"r": 8}')
        write_safetensors(adapter / "adapter_model.safetensors", weights("a"))
    write_safetensors(tmp_path / "other" / "adapter_model.safetensors", weights("b"))
    one = lora_fingerprint(str(tmp_path / "one"))
    assert lora_fingerprint(str(tmp_path / "same")) == one
    assert lora_fingerprint(str(tmp_path / "other")) != one
    start = time.perf_counter()
    assert lora_fingerprint(str(tmp_path / "one")) == one
    assert time.perf_counter() - start < 0.01

    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 16}')
    assert lora_fingerprint(str(tmp_path / "one")) != one
    with pytest.raises(IncompatibleEngineError):
        lora_fingerprint(str(tmp_path / "none"))


class Config(SimpleNamespace):
    """Stands for a configuration of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def engine(model: Path) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            model_weights="",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            hf_overrides={},
            max_model_len=1024,
            hf_config=Config(
                _name_or_path=str(model), layers=2, rope_parameters={"rope_type": "default"}
            ),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        speculative_config=None,
    )


def fields_of(engine: Any, **changed: Any) -> dict[str, str]:
    known: dict[str, Any] = {
        "chunk_size": 256,
        "kv_format": "portable",
        "layout_fingerprint": "layout",
        "model_fingerprint": "",
    }
    return namespace_fields(engine, **{**known, **changed})


CHANGES: dict[str, Callable[[Any], object]] = {
    "dtype": lambda e: setattr(e.model_config, "dtype", torch.float16),
    "quantization": lambda e: setattr(e.model_config, "quantization", "fp8"),
    "revision": lambda e: setattr(e.model_config, "revision", "abc"),
    "overrides": lambda e: setattr(e.model_config, "hf_overrides", {"rope_theta": 5}),
    "overriding function": lambda e: setattr(e.model_config, "hf_overrides", fields_of),
    "kv dtype": lambda e: setattr(e.cache_config, "cache_dtype", "fp8"),
    "skipped layers": lambda e: setattr(e.cache_config, "kv_cache_dtype_skip_layers", ["0"]),
    "classes": lambda e: setattr(e.model_config, "model_class_overrides", {"a": {"b"}}),
    "configuration": lambda e: setattr(e.model_config.hf_config, "layers", 3),
    "rope": lambda e: e.model_config.hf_config.rope_parameters.update(factor=2.0),
    "draft": lambda e: setattr(
        e,
        "speculative_config",
        SimpleNamespace(method="eagle", draft_model_config=copy.deepcopy(e.model_config)),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_kv_changes_the_namespace(
    model: Path, change: Callable[[Any], object]
) -> None:
    before = fields_of(engine(model))
    changed = engine(model)
    change(changed)
    assert fields_of(changed) != before


def test_the_same_engine_elsewhere_has_the_same_namespace(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other" / "model")
    assert fields_of(engine(model)) == fields_of(engine(tmp_path / "other" / "model"))


def test_the_length_counts_where_the_rope_depends_on_it(model: Path) -> None:
    def fields(rope_type: str, length: int) -> dict[str, str]:
        one = engine(model)
        one.model_config.max_model_len = length
        one.model_config.hf_config.rope_parameters["rope_type"] = rope_type
        return fields_of(one)

    assert fields("default", 1) == fields("default", 2)
    assert fields("longrope", 1) != fields("longrope", 2)


def test_paged_namespaces_carry_the_layout_the_ranks_and_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    one = engine(model)
    two = engine(model)
    two.parallel_config.tensor_parallel_size = 2
    assert fields_of(one) == fields_of(two)
    assert fields_of(one) == fields_of(one, layout_fingerprint="another")
    paged = fields_of(one, kv_format="paged")
    assert paged["engine"] == "vllm 0.32.0"
    assert paged != fields_of(two, kv_format="paged")
    assert paged != fields_of(one, kv_format="paged", layout_fingerprint="another")


def test_a_fingerprint_given_by_hand_needs_no_weights(tmp_path: Path) -> None:
    one = engine(tmp_path / "absent")
    one.load_config.load_format = "dummy"
    fields = fields_of(one, model_fingerprint="mine-v1")
    assert fields["weights"] == "mine-v1"
    assert fields != fields_of(one, model_fingerprint="mine-v2")
    with pytest.raises(IncompatibleEngineError):
        fields_of(one)


def test_all_fields_are_text(model: Path) -> None:
    for name, value in fields_of(engine(model)).items():
        assert isinstance(name, str)
        assert isinstance(value, str)
