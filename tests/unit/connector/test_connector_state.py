# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states: their parts, their identity, and what is refused with advice."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvhaven.config import Resolved, Settings, load_settings
from kvhaven.errors import IncompatibleEngineError, LayoutError
from kvhaven.integrations.vllm.compat import require_supported_engine
from kvhaven.integrations.vllm.connector import KVHavenConnector
from kvhaven.integrations.vllm.parts import kv_parts, part_fields
from kvhaven.integrations.vllm.requests import scheduled_requests
from kvhaven.integrations.vllm.start import _state_layout
from kvhaven.integrations.vllm.state import (
    HANDS_STATES_OFF,
    require_state_format,
    state_fields,
    state_shard,
    with_chunk_size,
)
from tests.simulation.connector_kit import make_request, scheduled
from tests.simulation.engine_state import state_spec, with_states
from tests.simulation.engine_world import Setup, make_config

if not HANDS_STATES_OFF:
    pytest.skip("vLLM 0.32 and newer hand states off as needed", allow_module_level=True)

BLOCK = 32
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
STATE = state_spec(BLOCK, 4096)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=8
)


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], each) for i, each in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def settings(**given: Any) -> Resolved:
    return load_settings(extra=given, environ={})


def test_states_are_a_part_after_full_attention() -> None:
    groups = caches(STATE, STATE, FULL)
    full, state = parts = kv_parts(groups)
    assert (full.name, full.groups, full.reach) == ("full", (2,), None)
    assert (state.name, state.groups, state.reach, state.is_state) == ("state", (0, 1), 1, True)
    fields = part_fields(parts, state, groups)
    assert fields["part"] == "state"
    assert fields["parts"] == part_fields(parts, full, groups)["parts"] == "full x 1, state x 2"


@pytest.mark.parametrize(
    "change",
    [
        {"dtypes": (torch.bfloat16, torch.bfloat16)},
        {"shapes": ((8, 4), (8,))},
        {"mamba_cache_mode": "all"},
    ],
)
def test_states_of_another_form_are_in_another_namespace(change: dict[str, Any]) -> None:
    other = dataclasses.replace(STATE, **change)
    assert state_fields(caches(other, FULL)) != state_fields(caches(STATE, FULL))
    assert state_fields(caches(STATE, STATE, FULL)) == state_fields(caches(STATE, FULL))


def test_the_padding_of_pages_is_not_part_of_the_identity() -> None:
    padded = dataclasses.replace(STATE, page_size_padded=8192)
    assert state_fields(caches(padded, FULL)) == state_fields(caches(STATE, FULL))


def test_ranks_have_shards_of_their_own_also_where_kv_heads_are_replicated(tmp_path: Path) -> None:
    config = make_config(tmp_path, Setup(service_address="/nowhere", world=2))
    shards = {state_shard(config, rank) for rank in range(2)}
    assert [shard.heads for shard in sorted(shards)] == [(0, 1), (1, 2)]


def pages() -> list[torch.Tensor]:
    """Two tensors of 8 blocks of 4096 bytes, which all groups share."""
    return [torch.zeros(8, 1, BLOCK, 64, dtype=torch.bfloat16) for _ in range(2)]


def state_groups(count: int) -> list[KVCacheGroupSpec]:
    return [
        KVCacheGroupSpec([f"layer.{i}.state{g}" for i in range(2)], STATE) for g in range(count)
    ]


def test_a_stored_state_has_no_padding_and_all_layers() -> None:
    layout = _state_layout(state_groups(2), with_states(pages()), 8)
    assert STATE.page_size_bytes == 4096
    assert [run.page_bytes for run in layout.layers] == [96, 96]
    assert {run.block_stride_bytes for run in layout.layers} == {4096}
    assert layout.shard_bytes(2) == 2 * 2 * 96, "a block of each group"


def test_groups_whose_states_lie_apart_are_refused() -> None:
    one, other = with_states(pages()), with_states(pages())
    apart = {name: (one if "state0" in name else other)[name] for name in one}
    with pytest.raises(LayoutError, match="lie in 4 tensors"):
        _state_layout(state_groups(2), apart, 8)


# --- the size of chunks -------------------------------------------------------------------------


def test_a_chunk_is_a_block_unless_another_size_is_set() -> None:
    groups = caches(STATE, FULL)
    assert with_chunk_size(settings(), groups).settings.chunk_size == BLOCK
    assert with_chunk_size(settings(), caches(FULL)).settings.chunk_size == 256
    own = with_chunk_size(settings(chunk_size=BLOCK), groups)
    assert (own.settings.chunk_size, own.notes) == (BLOCK, ())
    larger = with_chunk_size(settings(chunk_size=4 * BLOCK), groups)
    assert larger.settings.chunk_size == 4 * BLOCK
    assert "only those at the end of a chunk are saved" in larger.notes[0]


def test_a_chunk_that_does_not_end_with_a_block_is_refused() -> None:
    with pytest.raises(IncompatibleEngineError, match=r"every 32 tokens.*Leave chunk_size out"):
        with_chunk_size(settings(chunk_size=48), caches(STATE, FULL))


# --- states that vLLM hands off -----------------------------------------------------------------


def test_states_that_vllm_hands_off_come_with_their_requests() -> None:
    old, new = make_request(40, "old"), make_request(40, "new")
    output = scheduled(new=[(new, [3, 4], 0, 40)], cached=[(old, None, 31, 1)])
    assert [one.states for one in scheduled_requests(output)] == [(), ()]
    handed = {"old": [(1, 9, 32)], "new": [(0, 5, 32), (1, 6, 32)], "gone": [(1, 7, 32)]}
    output.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=handed)
    found = {one.request_id: list(one.states) for one in scheduled_requests(output)}
    assert found == {"old": handed["old"], "new": handed["new"]}


# --- refusals -----------------------------------------------------------------------------------


def stateful_config(folder: Path, **more: Any) -> Any:
    return make_config(folder, Setup(service_address="/nowhere", states=True, **more))


def test_full_attention_with_states_is_served(tmp_path: Path) -> None:
    require_supported_engine(stateful_config(tmp_path), caches(STATE, FULL, STATE))


def test_a_model_with_states_is_looked_at_before_vllm_divides_its_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stateful_config(tmp_path)
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    KVHavenConnector.get_required_kvcache_layout(config)
    config.cache_config.mamba_cache_mode = "none"
    with pytest.raises(
        IncompatibleEngineError, match=r"keeps a recurrent state.*no states to save"
    ):
        KVHavenConnector.get_required_kvcache_layout(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("caching", "prefix caching off.*Set --enable-prefix-caching"),
        ("mode", "mamba_cache_mode 'none'.*--mamba-cache-mode align"),
        ("flat", "needs vLLM's hybrid KV manager"),
        ("speculation", "speculation by ngram"),
        ("runner", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("platform", "does not report failed loads"),
        ("version", "vLLM 0.32 or newer"),
        ("parallel", "decode_context_parallel_size is 2"),
        ("unit", "prefix_match_unit is 16; expected the block of 32 tokens"),
    ],
)
def test_settings_with_which_states_are_not_served_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    config = stateful_config(tmp_path)
    if change == "caching":
        config.cache_config.enable_prefix_caching = False
    elif change == "mode":
        config.cache_config.mamba_cache_mode = "none"
    elif change == "flat":
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    elif change == "speculation":
        object.__setattr__(config, "speculative_config", SimpleNamespace(method="ngram"))
    elif change == "runner":
        monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    elif change == "platform":
        config.device_config.device_type = "hpu"
    elif change == "version":
        monkeypatch.setattr("kvhaven.integrations.vllm.state.HANDS_STATES_OFF", False)
    elif change == "parallel":
        config.parallel_config.decode_context_parallel_size = 2
    else:
        config.cache_config.prefix_match_unit = 16
    with pytest.raises(IncompatibleEngineError, match=words):
        require_supported_engine(config, caches(STATE, FULL))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([dataclasses.replace(STATE, block_size=64), FULL], "blocks of .32, 64. tokens"),
        ([dataclasses.replace(STATE, num_speculative_blocks=1), FULL], "1 blocks for speculation"),
        ([dataclasses.replace(STATE, mamba_cache_mode="all"), FULL], "in mode 'all'"),
        (
            [STATE, FULL, WINDOW],
            "other groups are not served yet",
        ),
        ([STATE, STATE], "other groups are not served yet"),
    ],
)
def test_groups_with_which_states_are_not_served_are_refused(
    tmp_path: Path, specs: list[MambaSpec], words: str
) -> None:
    with pytest.raises(IncompatibleEngineError, match=words):
        require_supported_engine(stateful_config(tmp_path), caches(*specs))


def test_states_have_no_portable_form() -> None:
    portable = Settings(format="portable")
    require_state_format(portable, caches(FULL))
    require_state_format(Settings(), caches(STATE, FULL))
    with pytest.raises(IncompatibleEngineError, match="no portable form; set format: paged"):
        require_state_format(portable, caches(STATE, FULL))
