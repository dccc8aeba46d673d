# SPDX-License-Identifier: Apache-2.0
"""Parts of a model's KV, from vLLM's KV groups, and the models whose groups are not served."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvhaven.engine.parts import FULL, KvPart, state_part
from kvhaven.errors import IncompatibleEngineError
from kvhaven.integrations.vllm.namespace_fields import NO_DRAFT_KV
from kvhaven.integrations.vllm.platforms import platform_of
from kvhaven.integrations.vllm.state import is_state, require_state_groups, specs_of, state_fields

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

WITHOUT = "Serve this model without KVHaven: leave --kv-transfer-config out."

FULL_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV that need the whole prefix, by class name, as subclasses may drop blocks."""
_WINDOW_KIND = "SlidingWindowSpec"
_LOCAL_KIND = "ChunkedLocalAttentionSpec"

PORTABLE_GRAIN = 128
"""Tokens to whose multiple a window within a chunk is stored in the portable format. Engines whose
blocks divide it, which are nearly all, store the same."""

_WHOLE = -1
"""In the place of a number of tokens: all of them."""
_STATE = (1, -1)
"""The needs of recurrent states (see `_needs_of`): that after the last token."""

REPORTS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")
"""Whether vLLM (0.30 and newer) can be told of a failed load of a model with several KV groups."""


def kinds_of(spec: Any) -> set[str]:
    """Return the kinds of KV in a group, whose layers may have several similar kinds."""
    return {type(part).__name__ for part in specs_of(spec)}


def kv_parts(kv_cache: "KVCacheConfig", *, portable: bool = False) -> tuple[KvPart, ...]:
    """Return the parts of an engine's KV, for an engine that is served; the first needs it all.

    In the portable format, a part has the same name and stores the same tokens in engines with
    other blocks, and in those that keep more tokens than the window.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(kv_cache.kv_cache_groups):
        groups.setdefault(_needs_of(group.kv_cache_spec), []).append(number)
    parts = []
    for (reach, local), numbers in sorted(groups.items()):
        spec = kv_cache.kv_cache_groups[numbers[0]].kv_cache_spec
        block_size = spec.block_size
        window = reach + 1 - (_extra_tokens(spec) if portable else 0)
        name = f"local:{local}" if local else f"window:{window}"
        if (reach, local) == _STATE:
            parts.append(state_part(numbers, block_size))
        elif reach == _WHOLE:
            parts.append(KvPart(FULL, tuple(numbers), block_size))
        else:
            grain = PORTABLE_GRAIN if portable else 1
            parts.append(KvPart(name, tuple(numbers), block_size, reach, local, grain))
    return tuple(parts)


def require_supported_groups(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    """Raise `IncompatibleEngineError`, with advice, for several KV groups that are not served."""
    groups, name = kv_cache.kv_cache_groups, config.model_config.model
    kinds = sorted({kind for group in groups for kind in kinds_of(group.kv_cache_spec)})
    has = f"{name}: has {len(groups)} KV groups ({', '.join(kinds)})"
    flat = (
        "If all its layers are attention, set --disable-hybrid-kv-cache-manager, which makes them "
        "one group."
    )
    full = [g for g in groups if kinds_of(g.kv_cache_spec) <= set(FULL_KINDS)]
    limited = ({_WINDOW_KIND}, {_LOCAL_KIND})
    windows = [g for g in groups if kinds_of(g.kv_cache_spec) in limited]
    states = [g for g in groups if is_state(g.kv_cache_spec)]
    needs = {_needs_of(group.kv_cache_spec) for group in groups}
    sizes = {
        need: {g.kv_cache_spec.block_size for g in groups if _needs_of(g.kv_cache_spec) == need}
        for need in needs
    }
    others = states or windows
    if not full or not others or len(full) + len(others) < len(groups):
        raise IncompatibleEngineError(
            f"{has}; expected one, or full attention with sliding windows, chunked local "
            f"attention or recurrent states, as other groups are not served yet. {flat}"
        )
    if any(len(found) > 1 for found in sizes.values()) or any(
        not getattr(group.kv_cache_spec, "prefix_cacheable", True)
        or not getattr(group, "enable_kv_transfer", True)
        or getattr(group, "host_resident", False)
        for group in groups
    ):
        raise IncompatibleEngineError(
            f"{has}, of different block sizes, or not for prefix caching; expected groups that "
            f"vLLM's prefix cache shares. {flat}"
        )
    if not REPORTS_FAILED_REQUESTS:
        raise IncompatibleEngineError(
            f"{has}; expected one, as this vLLM ends if a load of several groups fails. Install "
            f"vLLM 0.30 or newer. {flat}"
        )
    if not platform_of(config).hears_workers:
        raise IncompatibleEngineError(
            f"{has}; expected one on this platform ({config.device_config.device_type}), whose "
            f"runner does not report failed loads. {flat}"
        )
    if states:
        require_state_groups(config, kv_cache, has)
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in NO_DRAFT_KV:
        raise IncompatibleEngineError(
            f"{has}, and speculation by {speculative.method}; expected one group with a drafter "
            f"that has KV of its own. {flat}"
        )


def part_fields(
    parts: tuple[KvPart, ...],
    part: KvPart,
    kv_cache: "KVCacheConfig",
    *,
    portable_chunk: int = 0,
) -> dict[str, str]:
    """Return the namespace fields of a part; none if it is the only one.

    In the portable format, with chunks of `portable_chunk` tokens, they do not tell the KV groups,
    which may differ between engines.
    """
    if len(parts) == 1:
        return {}
    if portable_chunk:
        names = ", ".join(one.name for one in parts)
        tokens = part.stored_tokens(portable_chunk)
        return {"part": part.name, "parts": names, "kv_tokens": str(tokens)}
    every = ", ".join(f"{one.name} x {len(one.groups)}" for one in parts)
    fields = {"part": part.name, "parts": every}
    return fields | state_fields(kv_cache) if part.is_state else fields


def _extra_tokens(spec: Any) -> int:
    return max(getattr(part, "extra_retained_tokens", 0) for part in specs_of(spec))


def _needs_of(spec: Any) -> tuple[int, int]:
    """Return how many tokens before the next one a group needs, and the size of local chunks.

    vLLM keeps as many: a window without the next token itself, and `extra_retained_tokens`. For
    recurrent states it is `_STATE`.
    """
    if is_state(spec):
        return _STATE
    needs = set()
    for part in specs_of(spec):
        if type(part).__name__ == _WINDOW_KIND:
            extra = getattr(part, "extra_retained_tokens", 0)
            needs.add((part.sliding_window - 1 + extra, 0))
        elif type(part).__name__ == _LOCAL_KIND:
            needs.add((part.attention_chunk_size - 1, part.attention_chunk_size))
    return max(needs) if needs else (_WHOLE, 0)
