# SPDX-License-Identifier: Apache-2.0
"""For tests of the scheduler's side: a real node, a rank that fills it, and vLLM's own objects."""

import ctypes
import itertools
import time
import uuid
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from kvhaven.client.rank import RankClient
from kvhaven.client.scheduler import SchedulerClient
from kvhaven.config import Settings
from kvhaven.engine.jobs import LoadJob, StepPlan, StepReport
from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import PendingLoad
from kvhaven.engine.requests import EVERYTHING, Permissions
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.integrations.vllm.events import StoredEvents
from kvhaven.integrations.vllm.media import extras_of
from kvhaven.integrations.vllm.requests import VllmRequest, scheduled_requests
from kvhaven.keys import Extras, KeyChain, tenant_id
from kvhaven.protocol import AdapterVersion, AttachRank, AttachScheduler, ModelState
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, Shard, ShardId
from tests.simulation.node import Node

BLOCK = 4
CHUNK = 16
BYTES = 512


class BrokenFeature:
    """A feature whose place cannot be read: as it is when vLLM's class changes."""

    identifier = modality = "image"
    data = None

    @property
    def mm_position(self) -> Any:
        raise OSError(116, "Stale file handle")


class VllmSide:
    """A scheduler side that takes vLLM's objects, as the connector does.

    `side` is the engine-neutral one; all that takes none of vLLM's objects is its own.
    """

    def __init__(self, side: SchedulerSide) -> None:
        self.side = side

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "side":
            super().__setattr__(name, value)
        else:
            setattr(self.side, name, value)

    def on_new_request(self, request: Request) -> None:
        self.side.on_new_request(VllmRequest(request))

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        return self.side.matched_tokens(VllmRequest(request), computed)

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        self.side.allocated(VllmRequest(request), blocks, tokens)

    def never_loaded(self, request: Request, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        self.side.never_loaded(VllmRequest(request), blocks, tokens)

    def plan_step(self, output: SchedulerOutput, *, cache_in_doubt: bool = False) -> StepPlan:
        return self.side.plan_step(scheduled_requests(output), cache_in_doubt=cache_in_doubt)

    def finished(self, request: Request) -> None:
        self.side.finished(VllmRequest(request))

    def loaded_offer(self, request: Request) -> PendingLoad | None:
        return self.side.loaded_offer(VllmRequest(request))


class Bench:
    """An engine's ranks at a node, without an engine: `side` makes its scheduler's side."""

    def __init__(
        self, node: Node, world_size: int = 1, namespace: NamespaceDigest | None = None
    ) -> None:
        self.node = node
        self.world_size = world_size
        self.session = uuid.uuid4().hex
        own = NamespaceDigest(xxhash.xxh3_128_digest(self.session.encode()) * 2)
        self.namespace = namespace or own
        self.ranks = [self._rank(rank) for rank in range(world_size)]
        self._saves = itertools.count(1_000_000)
        self._clients: list[SchedulerClient] = []
        self._adapters: dict[int, AdapterVersion] = {}

    def side(
        self,
        *,
        asynchronous: bool = False,
        shared: bool = True,
        events: bool = False,
        start: bool = True,
        role: Permissions = EVERYTHING,
        hears_workers: bool = True,
        drops_last_block: bool = False,
        counts_dropped: bool = False,
        beside_stores: bool = False,
        layered_tokens: int = 0,
        parts: Sequence[KvPart] = (),
        groups: int = 1,
        **settings: Any,
    ) -> VllmSide:
        """Return an attached scheduler's side; `settings` are the settings that differ."""
        chosen = Settings(**({"chunk_size": CHUNK, "lookup_deadline_ms": 2000} | settings))
        client = SchedulerClient(
            self.node.address,
            AttachScheduler(1, self.session, uuid.uuid4().hex, self.world_size, 5000),
            lookup_deadline_s=chosen.lookup_deadline_ms / 1000,
            promote_deadline_s=chosen.promote_deadline_ms / 1000,
        )
        self._clients.append(client)
        if start:
            client.start(10)
        side = SchedulerSide(
            chosen,
            client,
            block_sizes=[BLOCK] * groups,
            world_size=self.world_size,
            asynchronous=asynchronous,
            shared=shared,
            events=StoredEvents(CHUNK) if events else None,
            extras=extras_of,
            role=role,
            hears_workers=hears_workers,
            drops_last_block=drops_last_block,
            counts_dropped=counts_dropped,
            beside_stores=beside_stores,
            layered_tokens=layered_tokens,
            parts=parts,
        )
        return VllmSide(side)

    def load_adapter(self, adapter: int, content: str, generation: int = 1) -> None:
        """Have every rank say that it has loaded this content under a number."""
        self._adapters[adapter] = AdapterVersion(adapter, digest_of(content), generation)
        for rank in self.ranks:
            rank.model_changed(ModelState(adapters=tuple(self._adapters.values())))

    def change_weights(self, changes: int) -> None:
        """Have every rank say that its weights were changed so often."""
        for rank in self.ranks:
            rank.model_changed(ModelState(weights=changes))

    def keys(self, request: Request, extras: Extras | None = None) -> list[ChunkKey]:
        """Return the keys of a request's full chunks, which has these extras besides its salt."""
        known = extras or Extras(salt=request.cache_salt or "")
        chain = KeyChain(self.namespace, CHUNK, known)
        chain.extend(list(request.all_token_ids))
        return chain.keys

    def fill(
        self,
        request: Request,
        chunks: int | None = None,
        salt: str | None = None,
        extras: Extras | None = None,
    ) -> None:
        """Store a request's first chunks (all) as the ranks do, or as those of another salt."""
        tenant = tenant_id((request.cache_salt if salt is None else salt) or "")
        keys = self.keys(request, extras)[:chunks]
        number = next(self._saves)
        for rank in self.ranks:
            reservation = rank.reserve(None, keys, number, tenant)
            assert reservation is not None
            granted = rank.grants(reservation, time.monotonic() + 5)
            written = []
            for grant in granted:
                assert grant is not None
                ctypes.memset(grant.address, 7, BYTES)
                written.append((grant, [Checksum(xxhash.xxh3_128_digest(bytes([7]) * BYTES))]))
            rank.commit(written)
        wait_until(lambda: self.node.status().catalog.resident_chunks >= len(keys))

    def leases(self) -> int:
        """Return how many leases the node holds."""
        return self.node.status().catalog.leases

    def close(self) -> None:
        """Disconnect, and wait until the node has seen that."""
        for scheduler in self._clients:
            scheduler.close()
        for rank in self.ranks:
            rank.close()
        wait_until(lambda: not any(self.session in m.session for m in self.node.status().members))

    def _rank(self, rank: int) -> RankClient:
        client = RankClient(
            self.node.address,
            AttachRank(
                id=1,
                session=self.session,
                member=uuid.uuid4().hex,
                rank=rank,
                world_size=self.world_size,
                namespace=self.namespace,
                fields={"model": "bench", "chunk_size": str(CHUNK)},
                shards=(Shard(ShardId(0, (0, 1), (rank, rank + 1)), BYTES),),
            ),
        )
        client.start(10)
        assert client.wait_ready(120)
        return client


def digest_of(content: str) -> bytes:
    """Return what stands for an adapter's content in these tests."""
    return sha256(content.encode()).digest()


def make_request(
    tokens: int | Sequence[int] = 40,
    name: str = "r",
    *,
    params: Mapping[str, Any] | str | Sequence[str] | None = None,
    sampling: Mapping[str, Any] | None = None,
    pooling: bool = False,
    **more: Any,
) -> Request:
    """Return one of vLLM's requests, by default of 40 tokens."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    own = dict(params) if isinstance(params, Mapping) else params
    extra = {"kv_transfer_params": own} if own is not None else None
    given = SamplingParams(max_tokens=8, extra_args=extra, **(sampling or {}))
    return Request(
        request_id=name,
        prompt_token_ids=ids,
        sampling_params=None if pooling else given,
        pooling_params=PoolingParams(task="embed") if pooling else None,
        **more,
    )


def lora(name: str = "a", adapter: int = 1) -> LoRARequest:
    """Return what a request says of its adapter."""
    return LoRARequest(name, adapter, f"/adapters/{name}")


def image(
    content: float | None, identifier: str = "image", offset: int = 2, length: int = 4
) -> MultiModalFeatureSpec:
    """Return an item as the scheduler's process has it; None: its tensors are elsewhere."""
    data: Any = None
    if content is not None:
        data = UserDict({"pixel_values": SimpleNamespace(data=torch.full((3, 4), content))})
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=identifier, mm_position=place
    )


def scheduled(
    new: Sequence[tuple[Request, Sequence[int], int, int]] = (),
    cached: Sequence[tuple[Request, Sequence[int] | None, int, int]] = (),
    resumed: Sequence[str] = (),
) -> SchedulerOutput:
    """Return vLLM's plan of a step: `(request, blocks, computed, scheduled)` for each."""
    output = SchedulerOutput.make_empty()
    for request, blocks, computed, count in new:
        request.num_computed_tokens = computed
        output.scheduled_new_reqs.append(NewRequestData.from_request(request, (list(blocks),)))
        output.num_scheduled_tokens[request.request_id] = count
    data = CachedRequestData.make_empty()
    for request, more, computed, count in cached:
        data.req_ids.append(request.request_id)
        data.new_block_ids.append((list(more),) if more is not None else None)
        data.num_computed_tokens.append(computed)
        output.num_scheduled_tokens[request.request_id] = count
    data.resumed_req_ids.update(resumed)
    output.scheduled_cached_reqs = data
    return output


def ask(side: VllmSide, request: Request, computed: int = 0) -> tuple[int, bool]:
    """Ask as the engine does until the answer is not None."""
    end = time.monotonic() + 10
    while True:
        tokens, later = side.matched_tokens(request, computed)
        side.plan_step(scheduled())
        if tokens is not None:
            return tokens, later
        assert time.monotonic() < end, "always: ask again"
        time.sleep(0.001)


def admit(side: VllmSide, request: Request, tokens: int, blocks: Sequence[int]) -> LoadJob | None:
    """Allocate blocks for `tokens` loaded tokens; return the load that is planned."""
    side.allocated(request, (list(blocks),), tokens)
    plan = side.plan_step(scheduled())
    return plan.loads[0] if plan.loads else None


def run_new(
    side: VllmSide,
    request: Request,
    count: int,
    *,
    blocks: Sequence[int] | None = None,
    computed: int = 0,
) -> StepPlan:
    """Have a request asked for, admitted and scheduled for `count` tokens."""
    ask(side, request, computed)
    ids = list(blocks if blocks is not None else range(-(-request.num_tokens // BLOCK)))
    side.allocated(request, (ids,), 0)
    return side.plan_step(scheduled(new=[(request, ids, computed, count)]))


def saved_chunks(plan: StepPlan) -> int:
    """Return how many chunks a plan saves."""
    return sum(len(job.keys) for job in plan.saves)


def keys_of(side: VllmSide, name: str, **more: Any) -> tuple[ChunkKey, ...]:
    """Return the keys under which a request of 40 tokens is saved; none if it is not."""
    plan = run_new(side, make_request(40, name, **more), 40)
    return tuple(key for job in plan.saves for key in job.keys)


def known(side: VllmSide, adapter: int = 1, generation: int = 1, rank: int = 0) -> None:
    """Wait until the scheduler's side has heard what a rank has loaded."""
    models = side._client

    def heard() -> bool:
        loaded = models.models.get(rank, ModelState()).adapters
        return any((v.adapter, v.generation) == (adapter, generation) for v in loaded)

    wait_until(heard, 20)


def report(side: VllmSide, plan: StepPlan, ranks: int = 1, *finished: str) -> None:
    """Report all saves of a plan as ended and written by so many ranks."""
    side.reported(StepReport({job.id: ranks for job in plan.saves}), finished)


def wait_until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something that another process does is seen."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
