# SPDX-License-Identifier: Apache-2.0
"""Connection of an engine's two sides to the node service."""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvhaven.client.arena import HostMemory
from kvhaven.client.embedded import EmbeddedService, embedded_address
from kvhaven.client.rank import RankClient
from kvhaven.client.scheduler import SchedulerClient
from kvhaven.config import Settings
from kvhaven.devices.base import Device
from kvhaven.devices.cpu import usable_cores
from kvhaven.devices.detect import open_device
from kvhaven.devices.selftest import scratch_bytes, self_test
from kvhaven.engine.adapters import Adapters
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.parts import KvPart
from kvhaven.engine.requests import EVERYTHING, ExtrasSource, Permissions
from kvhaven.engine.save_planner import SaveEvents
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.engine.worker import WorkerSide
from kvhaven.errors import (
    IncompatibleEngineError,
    IncompleteEngineError,
    KVHavenError,
    LayoutError,
    ServiceUnavailableError,
)
from kvhaven.identity.background import Attach, attach_when_known, digest_memory, look_at_files
from kvhaven.identity.content import DigestMemory
from kvhaven.identity.files import EngineFiles
from kvhaven.keys import namespace_digest
from kvhaven.layouts import Layout, PagedLayout, describe_kv_caches
from kvhaven.protocol import AttachRank, AttachScheduler
from kvhaven.types import Shard, ShardId

logger = logging.getLogger(__name__)

EMBEDDED_START_S = 60.0
"""Maximum duration of an embedded service's start."""
ATTACH_S = 10.0
"""Maximum wait for a service that is not embedded, at the engine's start."""
RANKS_WAIT_MS = 20_000
"""Maximum wait of the service for an engine's ranks before it answers the scheduler side."""

_COPY_THREADS_MOST = 4
_NAMED = ("model", "weights")


@dataclass(frozen=True)
class EngineIdentity:
    """Identity of one running engine; equal on its scheduler side and on all its ranks.

    `engine_id` is unique among the running engines of the node. `namespace` has a text for each
    field that determines KV besides tokens and extras: `model` (its name), `weights` (a digest of
    their content), and every other setting of the engine that changes KV, such as dtype,
    attention implementation, rotary scaling, the engine's version. Engines with equal namespaces
    share KV, so a missing field can cause wrong output.

    Raises `IncompatibleEngineError` if `model` or `weights` is missing or empty.
    """

    engine_id: str
    namespace: Mapping[str, str]
    world_size: int = 1

    def __post_init__(self) -> None:
        for field in _NAMED:
            if not self.namespace.get(field):
                raise IncompatibleEngineError(
                    f"namespace: field {field!r} is missing (got {sorted(self.namespace)}); "
                    "expected a text that is equal only for engines with the same KV. Add it."
                )


def connect_worker(
    settings: Settings,
    identity: EngineIdentity,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    block_size: int,
    num_blocks: int,
    rank: int = 0,
    shard: ShardId | None = None,
    model: LoadedModel | None = None,
) -> WorkerSide:
    """Return the worker side of a rank, connected to the service.

    All ranks must connect before the scheduler side. `kv_caches` has a tensor of shape
    `[num_blocks, heads, block_size, content]` for each layer (content: K and V of a head and token
    next to each other), or `[num_blocks, block_size, content]`; the dimensions may have any order
    in memory that keeps a block's bytes dense. `block_size` is in tokens and divides the setting
    `chunk_size`. `shard` names the layers and heads of the model that the rank holds. The default
    is all of them, which requires a `world_size` of 1.

    Raises `LayoutError` if the layout of the tensors is not supported, `ConfigError` if settings
    are invalid, `IncompatibleEngineError` if the engine is refused for another reason. If the
    service does not answer, no error is raised: the engine runs without a cache until it does.
    """
    if settings.format == "portable":
        raise IncompatibleEngineError(
            "format: the page layout of this engine is not described (got 'portable'); "
            "expected 'paged'. Set format: paged."
        )
    if shard is None and identity.world_size > 1:
        raise IncompatibleEngineError(
            f"shard: missing, with a world size of {identity.world_size}; expected the layers "
            f"and heads that rank {rank} holds. Pass shard=ShardId(...)."
        )
    require_chunk_size(settings.chunk_size, block_size)
    device = device_of(settings, kv_caches)
    layout = paged_layout(kv_caches, block_size=block_size, num_blocks=num_blocks, device=device)
    if settings.self_test:
        test_device(device, layout)
    payload_bytes = layout.shard_bytes(settings.chunk_size // block_size)
    fields = {
        **identity.namespace,
        "layout": layout.fingerprint,
        "format": "paged",
        "chunk_size": str(settings.chunk_size),
    }
    whole = ShardId(0, (0, len(kv_caches)), (0, 1))
    client = rank_client(
        settings,
        AttachRank(
            id=1,
            session=identity.engine_id,
            member=f"rank-{uuid.uuid4().hex}",
            rank=rank,
            world_size=identity.world_size,
            namespace=namespace_digest(fields),
            fields=fields,
            shards=(Shard(shard or whole, payload_bytes),),
        ),
        device,
    )
    start_or_warn(client.start, settings)
    return WorkerSide(settings, client, device, layout, rank, model=model)


def paged_layout(
    kv_caches: Mapping[str, torch.Tensor], *, block_size: int, num_blocks: int, device: Device
) -> PagedLayout:
    """Return the layout of KV tensors for `WorkerSide.move`; shapes as for `connect_worker`."""
    page_bytes = {
        layer: tensor.numel() * tensor.element_size() // num_blocks
        for layer, tensor in kv_caches.items()
    }
    return describe_kv_caches(
        kv_caches,
        layer_specs={layer: (size, block_size) for layer, size in page_bytes.items()},
        num_blocks=num_blocks,
        kernel_tag=device.kernel_tag,
    )


def connect_scheduler(
    settings: Settings,
    identity: EngineIdentity,
    *,
    block_size: int,
    asynchronous: bool = False,
    prefix_cache: bool = False,
    role: Permissions = EVERYTHING,
    events: SaveEvents | None = None,
    extras: Callable[[Adapters], ExtrasSource] | None = None,
) -> SchedulerSide:
    """Return the scheduler side of an engine, connected to the service.

    If `asynchronous`, loads run between steps, otherwise before the forward of the step that
    admits their request. `prefix_cache` says that the engine keeps KV of finished requests; the
    engine must then set `held_blocks` of the result, and for synchronous loads also `drop_cached`.
    The other arguments are those of `SchedulerSide`. Raises as `connect_worker` does.
    """
    require_chunk_size(settings.chunk_size, block_size)
    attach = AttachScheduler(
        1,
        identity.engine_id,
        f"scheduler-{uuid.uuid4().hex}",
        identity.world_size,
        RANKS_WAIT_MS,
    )
    client = scheduler_client(settings, attach)
    start_or_warn(client.start, settings)
    return SchedulerSide(
        settings,
        client,
        block_sizes=[block_size],
        world_size=identity.world_size,
        asynchronous=asynchronous,
        shared=prefix_cache,
        events=events,
        role=role,
        extras=extras,
    )


def rank_client(
    settings: Settings,
    attach: AttachRank,
    device: Device,
    *,
    engine_id: str = "",
    beside: RankClient | None = None,
) -> RankClient:
    """Return a rank's client, not started, that registers its arena with the device.

    `engine_id` is the engine's, if it is not the session's name. `beside` is the rank's client of
    the KV's first part, whose arena this one uses.
    """
    address, ensure = _service(settings, engine_id or attach.session)
    memory = HostMemory(device.register_host, device.unregister_host)
    return RankClient(address, attach, memory=memory, ensure_service=ensure, beside=beside)


def scheduler_client(
    settings: Settings, attach: AttachScheduler, *, engine_id: str = ""
) -> SchedulerClient:
    """Return a scheduler side's client, not started, with the deadlines of the settings.

    `engine_id` is the engine's, if it is not the session's name.
    """
    address, ensure = _service(settings, engine_id or attach.session)
    return SchedulerClient(
        address,
        attach,
        lookup_deadline_s=settings.lookup_deadline_ms / 1000,
        promote_deadline_s=settings.promote_deadline_ms / 1000,
        ensure_service=ensure,
    )


def start_or_warn(start: Callable[[float], None], settings: Settings) -> None:
    """Start a client; if no service answers, log it, and the client continues to retry."""
    with serving_without_a_cache():
        start(wait_seconds(settings))


def start_all(clients: Sequence[RankClient | SchedulerClient], wait_s: float) -> None:
    """Start the clients of all parts, also if the service is away: each then retries.

    Raises as `Link.start` does.
    """
    away: KVHavenError | None = None
    for client in clients:
        try:
            client.start(0.0 if away is not None else wait_s)
        except (IncompleteEngineError, ServiceUnavailableError) as error:
            away = away or error
    if away is not None:
        raise away


def attach_identified(
    settings: Settings,
    look: Callable[[DigestMemory], EngineFiles],
    closing: threading.Event,
    attach: Attach,
) -> None:
    """Attach one side of an engine, as soon as the content of the model's files is identified.

    `look` lists the files; the setting `model_fingerprint` takes the place of their content. If
    that takes long, a thread attaches the side, and the engine serves without a cache meanwhile.
    If no service answers, `attach`'s clients retry. Storage errors, too many files, and a refusal
    after a late read are logged; other errors of `look` and `attach` propagate.
    """
    wait_s = wait_seconds(settings)
    with serving_without_a_cache():
        if settings.model_fingerprint:
            attach({"weights": settings.model_fingerprint}, wait_s)
            return
        files = look_at_files(lambda: look(digest_memory(settings.runtime_path)), closing)
        if files is not None:
            attach_when_known(files, closing, attach, wait_s)


def wait_seconds(settings: Settings) -> float:
    """Return the seconds that a start waits for the service that the settings name."""
    return EMBEDDED_START_S if settings.service_address is None else ATTACH_S


@contextmanager
def serving_without_a_cache() -> Iterator[None]:
    """Log a missing service or missing ranks instead of raising; the engine serves uncached."""
    try:
        yield
    except IncompleteEngineError as error:
        logger.error("serving without a cache: %s", error)  # noqa: TRY400 - not a bug
    except ServiceUnavailableError as error:
        logger.warning("serving without a cache for now: %s", error)


def device_of(
    settings: Settings, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> Device:
    """Open the device that holds an engine's KV tensors, whichever is the thread's current one.

    Raises `IncompatibleEngineError` if the device is not supported, or is not one alone.
    """
    places = {
        part.device
        for tensor in tensors.values()
        for part in ((tensor,) if isinstance(tensor, torch.Tensor) else tensor)
    }
    if len(places) > 1:
        raise IncompatibleEngineError(
            f"the KV tensors are on several devices (got {', '.join(sorted(map(str, places)))}); "
            "expected one for each rank. Put the model on one device"
        )
    (place,) = places
    threads = settings.copy_threads or min(_COPY_THREADS_MOST, len(usable_cores()))
    device = open_device(settings.device, threads, torch_type=place.type)
    index: int | None = place.index  # a CPU's have none
    if index is not None and index != device.current():
        device.set_current(index)
    return device


def test_device(device: Device, layout: Layout) -> None:
    """Write, read and compare bytes of the layout. Raises `LayoutError` if they differ."""
    self_test(device, layout, memoryview(bytearray(scratch_bytes(layout))))


def require_chunk_size(chunk_size: int, block_size: int) -> None:
    """Raise `IncompatibleEngineError` if a chunk is not a whole number of blocks."""
    if chunk_size % block_size:
        raise IncompatibleEngineError(
            f"chunk_size is {chunk_size} tokens and the engine's block {block_size}: a chunk "
            f"must be a whole number of blocks; set chunk_size to a multiple of {block_size}, "
            "or the engine's --block-size to a divisor"
        )


def require_same_layout(before: Layout, now: Layout) -> None:
    """Raise `LayoutError` if KV tensors have another layout than the first registered ones."""
    if (before.description, before.num_blocks) != (now.description, now.num_blocks):
        raise LayoutError(
            "KV caches: registered again with another layout "
            f"(got {now.num_blocks} blocks, {now.description}); expected {before.num_blocks} "
            f"blocks, {before.description}. Restart the engine."
        )


def part_session(engine_id: str, parts: Sequence[KvPart], part: KvPart) -> str:
    """Return the name of a part's session: the engine's id, for the first part."""
    return engine_id if part == parts[0] else f"{engine_id}/{part.name}"


def _service(settings: Settings, engine_id: str) -> tuple[str, Callable[[], None]]:
    """Return the service's socket, and a function that ensures that a service listens there."""
    if settings.service_address is not None:
        return settings.service_address, lambda: None
    address = embedded_address(settings, engine_id)
    return address, EmbeddedService(settings, address).ensure
