# SPDX-License-Identifier: Apache-2.0
"""KVHaven in Hugging Face transformers: equal output, what is reused, what is refused."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the integration is for transformers")

import torch
from transformers import (
    BertConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvhaven.errors import IncompatibleEngineError
from kvhaven.integrations.transformers import KVHaven
from kvhaven.integrations.transformers.support import layer_shapes
from tests.crash.node import NodeThread

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
CHUNK = 32


def make_model(seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | more))).eval()


def prompt(seed: int = 0, tokens: int = 200, rows: int = 1) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, tokens), generator=dice)


def generate(generator: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    output: torch.Tensor = generator.generate(ids, **(arguments | more))
    return output


def kept(haven: KVHaven, ids: torch.Tensor, tokens: int, **more: Any) -> torch.Tensor:
    """Generate until so many tokens come from the cache: a commit takes a moment."""
    end = time.monotonic() + 30
    while True:
        output = generate(haven, ids, **more)
        if haven.cached_tokens == tokens:
            return output
        assert time.monotonic() < end, f"{haven.cached_tokens} tokens were cached, not {tokens}"


@pytest.fixture
def settings(node: NodeThread) -> dict[str, Any]:
    patient = {"lookup_deadline_ms": 10_000, "save_deadline_ms": 10_000}
    return patient | {"service_address": node.address, "chunk_size": CHUNK}


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def haven(model: Any, settings: dict[str, Any]) -> Iterator[KVHaven]:
    with KVHaven(model, **settings) as made:
        yield made


# --- what is reused -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [CHUNK - 1, CHUNK, CHUNK + 1, 200, 224])
def test_a_prompt_is_computed_once(model: Any, haven: KVHaven, tokens: int) -> None:
    ids = prompt(tokens=tokens)
    expected = generate(model, ids)
    assert torch.equal(generate(haven, ids), expected)
    assert haven.cached_tokens == 0
    whole = tokens // CHUNK * CHUNK
    assert torch.equal(kept(haven, ids, min(whole, tokens - 1)), expected)


def test_prompts_that_begin_alike_share_what_is_alike(model: Any, haven: KVHaven) -> None:
    first, second = prompt(1), prompt(2)
    second[:, :100] = first[:, :100]
    kept(haven, first, 192)  # `second` saves its own chunks, so its first lookup must find these
    assert torch.equal(kept(haven, second, 96), generate(model, second))


def test_rows_of_a_batch_load_what_all_of_them_have(model: Any, haven: KVHaven) -> None:
    ids = prompt(3, rows=3)
    for row, known in enumerate((200, 64, 130)):
        kept(haven, ids[row : row + 1, : max(known, 65)], known // 32 * 32)
    assert torch.equal(kept(haven, ids, 64), generate(model, ids))
    assert torch.equal(kept(haven, ids, 192), generate(model, ids))


def test_sampling_gives_what_it_gives_without(model: Any, haven: KVHaven) -> None:
    ids = prompt(4)
    generate(haven, ids)
    kept(haven, ids, 192)
    torch.manual_seed(7)
    expected = generate(model, ids, do_sample=True)
    torch.manual_seed(7)
    assert torch.equal(generate(haven, ids, do_sample=True), expected)
    assert haven.cached_tokens == 192


def test_another_process_or_a_restart_finds_it(
    model: Any, settings: dict[str, Any], haven: KVHaven
) -> None:
    ids = prompt(5)
    generate(haven, ids)
    haven.close()
    with KVHaven(make_model(), **settings) as other:
        assert torch.equal(kept(other, ids, 192), generate(model, ids))


# --- what is not reused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_model(seed=1),
        lambda: make_model().to(torch.bfloat16),
        lambda: make_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        lambda: make_model(rms_norm_eps=1e-3),
        lambda: make_model(attn_implementation="eager"),
    ],
    ids=["weights", "dtype", "rope", "epsilon", "attention"],
)
def test_another_model_finds_nothing(
    settings: dict[str, Any], haven: KVHaven, other: Callable[[], Any]
) -> None:
    ids = prompt(6)
    generate(haven, ids)
    kept(haven, ids, 192)
    with KVHaven(made := other(), **settings) as stranger:
        assert torch.equal(generate(stranger, ids), generate(made, ids))
        assert stranger.cached_tokens == 0


def test_weights_that_are_written_in_place_are_noticed(model: Any, haven: KVHaven) -> None:
    ids = prompt(7)
    generate(haven, ids)
    kept(haven, ids, 192)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight += 0.5
    assert torch.equal(generate(haven, ids), generate(model, ids))
    assert haven.cached_tokens == 0
    assert torch.equal(kept(haven, ids, 192), generate(model, ids))


def test_after_a_refresh_hidden_changes_are_noticed(model: Any, haven: KVHaven) -> None:
    ids = prompt(8)
    generate(haven, ids)
    kept(haven, ids, 192)
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(2)
    haven.refresh()
    assert torch.equal(generate(haven, ids), generate(model, ids))
    assert haven.cached_tokens == 0


def padded(ids: torch.Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    return {"attention_mask": mask}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda _: {"num_beams": 2}, "num_beams=2"),
        (lambda _: {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
        (lambda _: {"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        (lambda _: {"use_cache": False}, "use_cache=False"),
        (lambda ids: {"position_ids": torch.arange(ids.shape[1])[None] + 9}, "position_ids"),
        (padded, "padding"),
    ],
    ids=["beams", "sequences", "assisted", "no-cache", "positions", "padding"],
)
def test_a_call_that_is_more_than_its_tokens_is_not_cached(
    model: Any,
    haven: KVHaven,
    caplog: pytest.LogCaptureFixture,
    more: Callable[[torch.Tensor], dict[str, Any]],
    said: str,
) -> None:
    ids = prompt(9)
    generate(haven, ids)
    kept(haven, ids, 192)
    torch.manual_seed(1)
    expected = generate(model, ids, **more(ids))
    torch.manual_seed(1)
    assert torch.equal(generate(haven, ids, **more(ids)), expected)
    assert haven.cached_tokens == 0
    assert said in caplog.text
    kept(haven, ids, 192)


def test_defaults_of_the_model_count_beside_a_configuration_that_is_given(
    model: Any, haven: KVHaven
) -> None:
    """transformers fills in what the given one leaves open: here a padding mask, and beams."""
    ids = prompt(14)
    ids[:, :20] = 5
    given = GenerationConfig(max_new_tokens=8, do_sample=False)
    for name, value in (("pad_token_id", 5), ("num_beams", 3)):
        setattr(model.generation_config, name, value)
        expected = model.generate(ids, given)
        assert torch.equal(haven.generate(ids, given), expected)
        assert haven.cached_tokens == 0
        setattr(model.generation_config, name, None)
    generate(haven, ids)
    assert haven.cached_tokens == 0, "nothing was kept of those calls"
    assert torch.equal(kept(haven, ids, 192), generate(model, ids))


def test_what_is_no_tensor_and_changes_the_model_is_noticed(model: Any, haven: KVHaven) -> None:
    ids = prompt(15)
    generate(haven, ids)
    kept(haven, ids, 192)
    for change in (
        lambda: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
        lambda: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
        lambda: model.set_attn_implementation("eager"),
        lambda: model.to(torch.bfloat16),
    ):
        change()
        assert torch.equal(generate(haven, ids), generate(model, ids))
        assert haven.cached_tokens == 0
        kept(haven, ids, 192)


def test_calls_beside_and_within_a_call_are_computed(model: Any, haven: KVHaven) -> None:
    ids, inner = prompt(16), []
    expected = generate(model, ids)

    class Streamer:
        def put(self, _: Any) -> None:
            inner.append(generate(haven, ids))

        def end(self) -> None:
            haven.close()

    assert torch.equal(generate(haven, ids, streamer=Streamer()), expected)
    assert all(torch.equal(one, expected) for one in inner)
    assert len(inner) > 1
    assert torch.equal(generate(haven, ids), expected), "it is closed"
    assert haven.cached_tokens == 0


def test_a_model_that_is_changed_by_hooks_or_training_is_not_cached(
    model: Any, haven: KVHaven, caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(10)
    generate(haven, ids)
    kept(haven, ids, 192)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, output: output * 2)
    assert torch.equal(generate(haven, ids), generate(model, ids))
    assert haven.cached_tokens == 0
    hook.remove()
    model.train()
    generate(haven, ids)
    assert haven.cached_tokens == 0
    model.eval()
    assert "hooks" in caplog.text
    assert "training" in caplog.text
    kept(haven, ids, 192)


def test_what_generate_raises_comes_out_and_nothing_is_kept(
    model: Any, haven: KVHaven, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(11)
    with monkeypatch.context() as patch:

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(model, "generate", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(haven, ids)
    assert torch.equal(generate(haven, ids), generate(model, ids))
    assert haven.cached_tokens == 0
    assert node.status().catalog.leases == 0
    kept(haven, ids, 192)


def test_an_error_of_ours_does_not_reach_the_caller(
    model: Any, haven: KVHaven, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(12)
    generate(haven, ids)
    expected = kept(haven, ids, 192)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    for place in ("fetch", "keep"):
        with monkeypatch.context() as patch:
            patch.setattr(haven._prompts, place, fails)
            assert torch.equal(generate(haven, ids), expected)
    kept(haven, ids, 192)


def test_without_a_service_all_is_computed(model: Any, tmp_path: Path) -> None:
    ids = prompt(13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvhaven.engine.connect.ATTACH_S", 0.05)
        haven = KVHaven(model, service_address=str(tmp_path / "none"), chunk_size=CHUNK)
    with haven:
        assert torch.equal(generate(haven, ids), generate(model, ids))
        assert haven.cached_tokens == 0


# --- refusals -----------------------------------------------------------------------------------


def sliding_window() -> Any:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=32)).eval()


def dynamic_rope() -> Any:
    return make_model(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    )


def encoder_decoder() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=32, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
    )


def bidirectional() -> Any:
    return make_model(is_causal=False)


def made_in_inference_mode() -> Any:
    with torch.inference_mode():
        return make_model()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bidirectional, "tokens after it"),
        (made_in_inference_mode, "inference_mode"),
        (sliding_window, "DynamicSlidingWindowLayer"),
        (dynamic_rope, "dynamic"),
        (encoder_decoder, "encoder-decoder"),
    ],
)
def test_models_whose_kv_is_not_understood_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(IncompatibleEngineError, match=said):
        KVHaven(make())


def test_a_model_that_leaves_nothing_in_its_cache_is_refused() -> None:
    class Forgetful(torch.nn.Module):
        config = BertConfig(num_hidden_layers=1, is_decoder=True)
        device = torch.device("cpu")

        def forward(self, **_: Any) -> None:
            pass

    with pytest.raises(IncompatibleEngineError, match="no KV of its own"):
        layer_shapes(Forgetful())


# --- the example --------------------------------------------------------------------------------


def test_the_example_runs_and_finds_everything_after_a_restart() -> None:
    command = [sys.executable, "examples/transformers/main.py", "--tokens", "600"]
    patient = {f"KVHAVEN_{name}_DEADLINE_MS": "20000" for name in ("LOOKUP", "SAVE", "PROMOTE")}
    for _ in range(3):  # a busy machine may make a miss of the first prompt after a restart
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | patient,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()[1:]}
        if "512" in lines["memory"] and "512" in lines["restart"]:
            break
    else:
        pytest.fail(done.stdout)
    assert done.stdout.count("identical") == 4
