# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own methods change in a model is noticed: adapters by content, weights by count."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="it watches vLLM's methods")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.integrations.vllm import loaded_model
from kvhaven.integrations.vllm.loaded_model import watch_model

pytestmark = pytest.mark.slow

NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Watch this process's model, with a state that other tests do not see."""
    import vllm.v1.worker.cpu_worker  # noqa: F401 - as a worker has it by then

    monkeypatch.setattr(loaded_model, "LOADED", LoadedModel())
    return watch_model()


def write_adapter(folder: Path, content: float, *, alpha: int = 4) -> Path:
    """Write the files of a PEFT adapter."""
    folder.mkdir(exist_ok=True)
    config = {"r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "LORA"}))
    tensors = {
        f"{NAME}.lora_A.weight": torch.full((2, 8), content),
        f"{NAME}.lora_B.weight": torch.ones(8, 2),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def manager() -> Any:
    """Return vLLM's manager of adapters as a worker has it, over a model with one layer."""
    from vllm.lora.lora_model import LoRAModel  # these load vLLM's kernels: not when collecting
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    made = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    made._lora_model_cls = LoRAModel
    made.max_position_embeddings = 64
    made.vocab_size = 100
    made.lora_config = SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=8)
    made._adapter_manager = SimpleNamespace(
        supported_lora_modules=["q_proj"],
        packed_modules_mapping={},
        model=SimpleNamespace(),
        moe_ep_load_spec=None,
        _validate_moe_lora_format=lambda _: None,
        _validate_modules_to_save=lambda _: None,
        _validate_token_classification_lora=lambda _: None,
        _validate_classification_head_lora=lambda _: None,  # so called since 0.33
    )
    return made


def test_an_adapter_is_named_when_vllm_loads_it_and_by_what_it_loads(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    one = LoRARequest("a", 1, str(write_adapter(tmp_path / "one", 1.0)))
    vllm = manager()
    vllm._load_adapter(one)
    (first,) = loaded.state().adapters
    vllm._load_adapter(one)
    assert loaded.state().adapters == (first,)
    same = LoRARequest("b", 2, str(write_adapter(tmp_path / "same", 1.0)))
    vllm._load_adapter(same)
    assert [v.digest for v in loaded.state().adapters] == [first.digest] * 2
    write_adapter(tmp_path / "one", 2.0)
    assert loaded.state().adapters[0] == first, "files that nobody loaded change nothing"
    vllm._load_adapter(one)
    changed = next(v for v in loaded.state().adapters if v.adapter == 1)
    assert changed.digest != first.digest
    assert changed.generation == 2
    write_adapter(tmp_path / "one", 2.0, alpha=8)
    vllm._load_adapter(one)
    scaled = next(v for v in loaded.state().adapters if v.adapter == 1)
    assert scaled.digest != changed.digest, "the scaling counts too"


def test_adapters_of_two_engines_in_one_process_are_not_mixed(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """Each has its own adapter 1: neither may be named by what the other one has loaded."""
    ours = LoRARequest("a", 1, str(write_adapter(tmp_path / "ours", 1.0)))
    others = LoRARequest("a", 1, str(write_adapter(tmp_path / "others", 2.0)))
    first, second = manager(), manager()
    first._load_adapter(ours)
    assert loaded.holds(1, 1)
    second._load_adapter(others)
    assert loaded.state().adapters == ()
    del second
    first._load_adapter(ours)
    assert loaded.state().adapters == ()


def test_an_engine_that_follows_another_in_one_process_has_its_own_adapters(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    first = manager()
    for number in (1, 2):
        path = write_adapter(tmp_path / str(number), float(number))
        first._load_adapter(LoRARequest("a", number, str(path)))
    del first
    gc.collect()
    manager_of_the_second = manager()
    manager_of_the_second._load_adapter(LoRARequest("a", 1, str(tmp_path / "1")))
    (version,) = loaded.state().adapters
    assert (version.adapter, version.generation) == (1, 2)


def test_an_adapter_that_could_not_be_loaded_leaves_what_is_known(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    request = LoRARequest("a", 1, str(write_adapter(tmp_path / "one", 1.0)))
    vllm = manager()
    vllm._load_adapter(request)
    before = loaded.state()
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|deserializ"):
        vllm._load_adapter(request)
    assert loaded.state() == before


def test_all_that_reloads_or_transfers_weights_is_counted(loaded: LoadedModel) -> None:
    """Also when it fails midway: then a part of the weights may be others."""
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    watch_model()
    for cls in (Worker, CPUWorker):
        worker = cls.__new__(cls)
        for name in ("reload_weights", "update_weights", "finish_weight_update"):
            before = loaded.weights
            with pytest.raises((AttributeError, TypeError)):  # this worker was never set up
                getattr(worker, name)({})
            assert loaded.weights > before, name
    before = loaded.weights
    AutoWeightsLoader(torch.nn.Linear(2, 2)).load_weights([("weight", torch.ones(2, 2))])
    assert loaded.weights > before


def test_watching_twice_counts_once(loaded: LoadedModel) -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    assert watch_model() is loaded
    AutoWeightsLoader(torch.nn.Linear(2, 2)).load_weights([("weight", torch.ones(2, 2))])
    assert loaded.weights == 1


class Listener:
    def __init__(self) -> None:
        self.heard = 0

    def changed(self) -> None:
        self.heard += 1


def test_who_listens_is_told_as_long_as_it_lives() -> None:
    model, one, two = LoadedModel(), Listener(), Listener()
    model.listen(one.changed)
    model.listen(two.changed)
    model.weights_changed()
    del two
    model.weights_changed()
    assert one.heard == 2
    assert model.state(since=1).weights == 1


NO_CHANGE = {
    "compute_weight_checksums",
    "_weight_checksum_prefix",
    "supports_draft_weight_updates",
    "_set_draft_weight_update_target",  # it says which model the next update is for
    "_check_weight_transfer_engine",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "_start_weight_update",  # of start_weight_update
    "load_model",  # before there is KV
}


def test_every_method_of_vllms_workers_about_weights_is_watched_or_changes_nothing() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    about = {
        name
        for cls in (Worker, CPUWorker)
        for name in dir(cls)
        if callable(getattr(cls, name)) and ("weight" in name or "load_model" in name)
    }
    assert about - NO_CHANGE <= set(loaded_model._CHANGE_WEIGHTS)


def test_weights_that_are_set_to_nothing_are_others(loaded: LoadedModel) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, "reset_weights"):
        pytest.skip("this vLLM has no reset_weights")
    model = torch.nn.Linear(2, 2)
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    before = loaded.weights
    worker.reset_weights()
    assert loaded.weights == before + 1


class Refusing:
    def __init__(self) -> None:
        self.asked = 0

    def refuse(self) -> None:
        self.asked += 1
        raise RuntimeError("a copy is under way")


@pytest.mark.parametrize("name", ["sleep", "discard"])
def test_vllm_gives_no_memory_back_before_it_was_asked_for(loaded: LoadedModel, name: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    if not hasattr(Worker, name):
        pytest.skip(f"this vLLM has no {name}")
    worker, using = Worker.__new__(Worker), Refusing()
    loaded.listen_for_memory(using.refuse)
    with pytest.raises(RuntimeError, match="a copy is under way"):
        getattr(worker, name)(1)
    assert using.asked == 1
