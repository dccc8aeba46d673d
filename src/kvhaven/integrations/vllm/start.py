# SPDX-License-Identifier: Apache-2.0
"""Start of the connector's two sides: settings, identity, layout, service."""

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvhaven.config import Resolved, Settings, load_settings
from kvhaven.devices.base import Device
from kvhaven.engine.connect import (
    RANKS_WAIT_MS,
    attach_identified,
    device_of,
    part_session,
    rank_client,
    require_chunk_size,
    require_same_layout,
    scheduler_client,
    start_all,
    test_device,
)
from kvhaven.engine.parts import KvPart
from kvhaven.engine.requests import Permissions
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.engine.worker import PartCopies, WorkerSide
from kvhaven.errors import LayoutError
from kvhaven.identity.background import (
    Attach,
)
from kvhaven.identity.content import DigestMemory
from kvhaven.identity.files import EngineFiles, Source
from kvhaven.integrations.vllm.compat import (
    attention_backend,
    beside_stores,
    drops_last_block,
    drops_outputs_in_flight,
    failure_policy,
    kv_form,
    own_layers,
    require_reuse,
    require_stable_kernels,
    shard_id,
)
from kvhaven.integrations.vllm.events import StoredEvents
from kvhaven.integrations.vllm.loaded_model import watch_model
from kvhaven.integrations.vllm.media import extras_of
from kvhaven.integrations.vllm.model_sources import loading_began_ns, model_sources
from kvhaven.integrations.vllm.namespace import Description, KvFormat, describe_engine
from kvhaven.integrations.vllm.parts import kv_parts, part_fields
from kvhaven.integrations.vllm.platforms import platform_of
from kvhaven.integrations.vllm.portable import layers_field, total_heads
from kvhaven.integrations.vllm.state import (
    require_state_format,
    state_shard,
    with_chunk_size,
)
from kvhaven.keys import namespace_digest
from kvhaven.layouts import (
    PagedLayout,
    PortableLayout,
    describe_kv_caches,
    head_geometry,
    head_shards,
)
from kvhaven.layouts.groups import portable_layout
from kvhaven.protocol import AttachRank, AttachScheduler
from kvhaven.types import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

logger = logging.getLogger(__name__)


def start_worker(
    config: "VllmConfig",
    kv_cache: "KVCacheConfig",
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    member: str,
    before: WorkerSide | None = None,
    *,
    alone: bool = True,
) -> WorkerSide:
    """Read the layout, test the device's copies, attach to the service as a rank.

    With `before`, this rank's side over earlier tensors, that side continues with the new ones.
    `alone` says that the engine has no other connector. Raises `KVHavenError` if the engine is
    refused. If the service does not answer, storage fails, or other ranks are missing or have
    loaded other files, the engine serves without a cache.
    """
    settings = with_chunk_size(resolve_settings(config), kv_cache).settings
    require_state_format(settings, kv_cache)
    own = own_layers(config, tensors)
    tensors = {layer: tensor for layer, tensor in tensors.items() if layer in own}
    for group in kv_cache.kv_cache_groups:
        require_stable_kernels(config, own.intersection(group.layer_names))
    rank = config.parallel_config.rank
    device = before.device if before is not None else device_of(settings, tensors)
    parts = kv_parts(kv_cache, portable=_kv_format(settings) == "portable")
    layouts = [_layout(config, kv_cache, part, tensors, device, settings) for part in parts]
    for layout in layouts:
        require_chunk_size(settings.chunk_size, layout.block_size)
        if settings.self_test:
            test_device(device, layout)
    if before is not None:
        for known, layout in zip(before.layouts, layouts, strict=True):
            require_same_layout(known, layout)
        before.move(*layouts)
        return before
    description = describe_engine(config, _kv_format(settings))
    copies: list[PartCopies] = []
    fields: list[dict[str, str]] = []
    for part, layout in zip(parts, layouts, strict=True):
        blocks = part.stored_blocks(settings.chunk_size) * len(part.groups)
        client = rank_client(
            settings,
            AttachRank(
                id=1,
                session=part_session(_engine_id(config), parts, part),
                member=member if not copies else f"{member}/{part.name}",
                rank=rank,
                world_size=config.parallel_config.world_size,
                namespace=namespace_digest({}),  # replaced once the content of the files is known
                fields={},
                shards=_shards(config, part, layout, rank, blocks),
                shared=isinstance(layout, PortableLayout),
            ),
            device,
            engine_id=_engine_id(config),
            beside=copies[0].client if copies else None,
        )
        copies.append(PartCopies(client, layout, blocks))
        fields.append(
            description.fields
            | _layout_fields(config, layout, several=len(parts) > 1)
            | {"chunk_size": str(settings.chunk_size)}
            | part_fields(
                parts,
                part,
                kv_cache,
                portable_chunk=settings.chunk_size if isinstance(layout, PortableLayout) else 0,
            )
        )

    def attach(content: Mapping[str, str], wait_s: float) -> None:
        for one, own in zip(copies, fields, strict=True):
            one.client.identify({**own, **content})
        start_all([one.client for one in copies], wait_s)

    first = copies[0]
    _attach(settings, config, description, first.client.closing, attach)
    return WorkerSide(
        settings,
        first.client,
        device,
        first.layout,
        rank,
        model=watch_model(),
        heard=platform_of(config).hears_workers,
        alone=alone,
        chunk_blocks=first.chunk_blocks,
        more_parts=copies[1:],
    )


def start_scheduler(config: "VllmConfig", kv_cache: "KVCacheConfig", member: str) -> SchedulerSide:
    """Attach to the service of the ranks. Raises as `start_worker` does."""
    resolved = with_chunk_size(resolve_settings(config), kv_cache)
    for note in resolved.notes:  # here and not in the ranks, to log it once
        logger.warning("%s", note)
    settings = resolved.settings
    block_sizes = [group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups]
    for block_size in block_sizes:
        require_chunk_size(settings.chunk_size, block_size)
    parts = kv_parts(kv_cache, portable=_kv_format(settings) == "portable")
    world_size = config.parallel_config.world_size
    description = describe_engine(config, _kv_format(settings))
    clients = [
        scheduler_client(
            settings,
            AttachScheduler(
                1,
                part_session(_engine_id(config), parts, part),
                member if not number else f"{member}/{part.name}",
                world_size,
                RANKS_WAIT_MS,
            ),
            engine_id=_engine_id(config),
        )
        for number, part in enumerate(parts)
    ]

    def attach(_: Mapping[str, str], wait_s: float) -> None:  # the ranks send the content
        start_all(clients, wait_s)

    _attach(settings, config, description, clients[0].closing, attach)
    events = None
    if settings.kv_events and _publishes_events(config):
        events = StoredEvents(settings.chunk_size)
    return SchedulerSide(
        settings,
        clients[0],
        block_sizes=block_sizes,
        world_size=world_size,
        asynchronous=len(parts) > 1 or _loads_asynchronously(settings, config),
        shared=bool(config.cache_config.enable_prefix_caching),
        events=events,
        extras=extras_of,
        role=_role(config, settings),
        hears_workers=platform_of(config).hears_workers,
        drops_last_block=drops_last_block(config),
        counts_dropped=_counts_dropped(config),
        beside_stores=beside_stores(),
        parts=parts,
        more_clients=clients[1:],
        layered_tokens=_layered_tokens(settings, config, kv_cache),
    )


def resolve_settings(config: "VllmConfig") -> Resolved:
    """Return the settings of this engine. Raises `ConfigError` if one is invalid."""
    transfer = config.kv_transfer_config
    extra = transfer.kv_connector_extra_config if transfer is not None else {}
    resolved = load_settings(extra=extra)
    logging.getLogger("kvhaven").setLevel(resolved.settings.log_level)
    return resolved


def _kv_format(settings: Settings) -> KvFormat:
    return "portable" if settings.format == "portable" else "paged"


def _layout(
    config: "VllmConfig",
    kv_cache: "KVCacheConfig",
    part: KvPart,
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    device: Device,
    settings: Settings,
) -> PagedLayout | PortableLayout:
    """Return the layout of a rank's KV tensors of a part, for the format of the settings.

    Raises `KVHavenError` if the layout or the attention backend is not supported.
    """
    kv_format = settings.format
    groups = [kv_cache.kv_cache_groups[number] for number in part.groups]
    if part.is_state:
        return _state_layout(groups, tensors, kv_cache.num_blocks)
    specs = _layer_specs(groups)
    backend = attention_backend(config, specs)
    if backend is not None:
        require_reuse(backend)
    if len(groups) < len(kv_cache.kv_cache_groups):
        tensors = {layer: tensor for layer, tensor in tensors.items() if layer in specs}
    describe = functools.partial(
        describe_kv_caches,
        layer_specs={name: (spec.page_size_bytes, spec.block_size) for name, spec in specs.items()},
        num_blocks=kv_cache.num_blocks,
        kernel_tag=device.kernel_tag,
        form=kv_form(backend),
    )
    paged = describe(tensors)
    _require_shared_memory(paged, groups, tensors)
    if kv_format != "portable":
        return paged
    if backend is None:
        raise LayoutError(
            "format is portable, but this vLLM does not report the attention backend of its "
            "layers, so the page layout is not known; set format: paged"
        )
    spec = next(iter(specs.values()))
    head_dims: tuple[int, ...] = (spec.head_size,)
    if not config.model_config.use_mla:
        head_dims = (spec.head_size, getattr(spec, "head_size_v", None) or spec.head_size)
    geometry_of = functools.partial(
        head_geometry,
        backend=backend.__name__,
        kernel_tag=device.kernel_tag,
        heads=spec.num_kv_heads,
        head_dims=head_dims,
    )
    if len(groups) == len(kv_cache.kv_cache_groups) == 1:
        return PortableLayout(paged, geometry_of(paged))
    of_groups = [
        {layer: tensors[layer] for layer in group.layer_names if layer in tensors}
        for group in groups
    ]
    return portable_layout(
        paged, [geometry_of(describe(own)) if own else None for own in of_groups]
    )


def _state_layout(
    groups: Sequence["KVCacheGroupSpec"],
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    num_blocks: int,
) -> PagedLayout:
    """Return the layout of a rank's recurrent states: a block of a layer is one piece of bytes.

    vLLM registers a view of all states of a layer, without the padding of its pages.
    """
    specs = _layer_specs(groups)
    layout = describe_kv_caches(
        {layer: tensor for layer, tensor in tensors.items() if layer in specs},
        layer_specs={
            layer: (mamba.state_content_size_bytes, mamba.block_size)
            for layer, mamba in specs.items()
        },
        num_blocks=num_blocks,
        kernel_tag="",
        form="BHNC",
    )
    _require_shared_memory(layout, groups, tensors)
    return layout


def _layer_specs(groups: Sequence["KVCacheGroupSpec"]) -> dict[str, Any]:
    """Return the spec of each layer in these KV groups."""
    specs = {}
    for group in groups:
        nested = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for layer in group.layer_names:
            specs[layer] = nested[layer] if nested is not None else group.kv_cache_spec
    return specs


def _require_shared_memory(
    paged: PagedLayout, groups: Sequence["KVCacheGroupSpec"], tensors: Mapping[str, Any]
) -> None:
    """Raise `LayoutError` if the layers of several KV groups do not share their memory."""
    most = max(len(tensors.keys() & set(group.layer_names)) for group in groups)
    if len(groups) > 1 and len(paged.caches) > most:
        raise LayoutError(
            f"the layers of {len(groups)} KV groups lie in {len(paged.caches)} tensors (got "
            f"{paged.description}); expected {most}, as each group's layers share the memory of "
            "the others. Set --disable-hybrid-kv-cache-manager"
        )


def _attach(
    settings: Settings,
    config: "VllmConfig",
    description: Description,
    closing: threading.Event,
    attach: Attach,
) -> None:
    """Attach one side, as soon as the content of the model's files is identified."""
    named = [Source(f"files.{name}", place) for name, place in description.files.items()]

    def look(memory: DigestMemory) -> EngineFiles:
        return EngineFiles(model_sources(config) + named, memory, loading_began_ns(config))

    attach_identified(settings, look, closing, attach)


def _layout_fields(
    config: "VllmConfig", layout: PagedLayout | PortableLayout, *, several: bool
) -> dict[str, str]:
    """Return the layout's namespace fields, equal in engines that can read each other's shards.

    `several` says that the KV has several parts, which have different layers.
    """
    if isinstance(layout, PagedLayout):
        return {"layout": layout.fingerprint}
    return layout.geometry_fields(
        layers=layers_field(config, layout, several=several), heads=total_heads(config)
    )


def _shards(
    config: "VllmConfig",
    part: KvPart,
    layout: PagedLayout | PortableLayout,
    rank: int,
    blocks: int,
) -> tuple[Shard, ...]:
    """Return a rank's shards of each chunk: one, or in the portable format one for each head.

    Raises `LayoutError` if their number does not match the layout.
    """
    ids = [state_shard(config, rank) if part.is_state else shard_id(config, rank)]
    if isinstance(layout, PortableLayout):
        model, parallel = config.model_config, config.parallel_config
        size = parallel.tensor_parallel_size
        ids = head_shards(
            total_heads(config),
            size,
            rank % size,
            group=0,
            layers=model.get_layers_start_end_indices(parallel),
        )
    if len(ids) != layout.shards:
        raise LayoutError(
            f"rank {rank}: its KV tensors have another number of KV heads than the model's "
            f"configuration (got {layout.shards}, {layout.description}); expected {len(ids)}. "
            "Set format: paged."
        )
    return tuple(Shard(id_, layout.shard_bytes(blocks)) for id_ in ids)


def _loads_asynchronously(settings: Settings, config: "VllmConfig") -> bool:
    """Return whether loads run between steps."""
    reason = _recomputes_wrongly(config)
    if settings.load_mode == "sync" and reason:
        logger.warning("load_mode=sync is ignored: %s", reason)
    if settings.load_mode == "async" or reason:
        return True
    return settings.load_mode == "auto" and platform_of(config).loads_between_steps


def _recomputes_wrongly(config: "VllmConfig") -> str:
    """Return why vLLM may not recompute a failed synchronous load; an empty string if it may.

    By the sources of 0.29 to 0.33: it leaves the blocks in its prefix cache, and has only the first
    of their requests compute them. If that one is preempted, aborted or computed in several steps,
    the others read them as they are. And it continues with the output of a step in flight. (An
    engine that does not hear of failures ends by them.)
    """
    policy = failure_policy(config)
    if policy != "recompute" or not platform_of(config).hears_workers:
        return ""
    reasons = {
        "with prefix caching": bool(config.cache_config.enable_prefix_caching),
        "with asynchronous scheduling": bool(config.scheduler_config.async_scheduling),
        "with pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
    }
    named = ", ".join(name for name, applies in reasons.items() if applies)
    return f"{named}, vLLM cannot recompute failed synchronous loads" if named else ""


def _counts_dropped(config: "VllmConfig") -> bool:
    """Return whether vLLM may count tokens as computed that it dropped at a turn's end.

    By the source of 0.32, its asynchronous scheduler subtracts them (`num_output_placeholders`),
    and the other one computes none but accepted drafts. That of 0.29 does not subtract them, nor
    does it drop the output of the step in flight.
    """
    if config.scheduler_config.async_scheduling:
        return not drops_outputs_in_flight()
    return config.speculative_config is not None


def _layered_tokens(settings: Settings, config: "VllmConfig", kv_cache: "KVCacheConfig") -> int:
    """Return how many tokens a step may load while its forward computes; 0: none."""
    if not settings.layered_load_ms:
        return 0
    reason = _not_layered(settings, config, kv_cache)
    if reason:
        logger.warning("layered_load_ms is ignored: %s", reason)
        return 0
    specs = _layer_specs(kv_cache.kv_cache_groups).values()
    token_bytes = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    rate = platform_of(config).layered_rate
    return int(settings.layered_load_ms / 1000 * rate / token_bytes)


def _not_layered(settings: Settings, config: "VllmConfig", kv_cache: "KVCacheConfig") -> str:
    """Return why loads cannot run during the forward, or an empty string if they can."""
    mode = config.compilation_config.cudagraph_mode
    reasons = {
        "the device is neither CUDA nor ROCm": not platform_of(config).layered_rate,
        "the model has several KV groups": len(kv_cache.kv_cache_groups) > 1,
        "the portable format does not keep layers together": _kv_format(settings) == "portable",
        "the drafter's layers run after the forward": config.speculative_config is not None,
        "a prefill may run as a FULL CUDA graph, which does not wait for layers": (
            mode is not None and mode.mixed_mode().name == "FULL"
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    return next(iter([*found, _recomputes_wrongly(config)]))


def _publishes_events(config: "VllmConfig") -> bool:
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _role(config: "VllmConfig", settings: Settings) -> Permissions:
    """Return what the engine's roles permit.

    By `kv_role`, a producer saves and a consumer loads; by `pd_role`, a sender and a receiver.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    return Permissions(
        load=bool(transfer.is_kv_consumer) and settings.pd_role != "sender",
        save=bool(transfer.is_kv_producer) and settings.pd_role != "receiver",
    )


def _engine_id(config: "VllmConfig") -> str:
    transfer = config.kv_transfer_config
    assert transfer is not None
    return str(transfer.engine_id)
