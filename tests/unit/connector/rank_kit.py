# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine without an engine: its worker side, a late device, and a real service."""

import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from kvhaven.client.arena import HostMemory
from kvhaven.client.rank import RankClient
from kvhaven.client.scheduler import LeasedChunks, SchedulerClient
from kvhaven.config import Settings
from kvhaven.engine.jobs import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.worker import WorkerSide
from kvhaven.layouts import describe_kv_caches
from kvhaven.protocol import AttachRank, AttachScheduler
from kvhaven.types import ChunkKey, Shard, ShardId
from tests.simulation.connector_kit import BLOCK, BYTES, CHUNK
from tests.simulation.engine_device import LateDevice
from tests.simulation.node import Node

if TYPE_CHECKING:
    pass

BLOCKS = 20


class Rank:
    """A rank with a device (a late one), and the arena's service to talk to.

    It holds one shard of `parts`, or the same as the other ranks if they are `twins`. `place`
    brings its KV tensors to where the device has its memory, and `registers` the arena to it.
    """

    def __init__(
        self,
        node: Node,
        device: Any,
        rank: int = 0,
        world_size: int = 1,
        *,
        parts: int = 1,
        twins: bool = False,
        layers: int = 1,
        registers: bool = False,
        place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        **more: Any,
    ) -> None:
        self.node = node
        self.device = device
        self.session = session = f"{node.address} {world_size} {layers}"
        self.world_size = world_size
        self.tensors = {
            f"layer{index or ''}": place(
                torch.randint(-9, 9, (BLOCKS, 1, BLOCK, 64), dtype=torch.int16).view(torch.bfloat16)
            )
            for index in range(layers)
        }
        self.tensor = self.tensors["layer"]
        layout = describe_kv_caches(
            self.tensors,
            layer_specs=dict.fromkeys(self.tensors, (BYTES, BLOCK)),
            num_blocks=BLOCKS,
            kernel_tag="" if isinstance(device, LateDevice) else device.kernel_tag,
        )
        first = 0 if twins else rank * parts
        size = layout.payload_bytes(4) // parts
        self.client = RankClient(
            node.address,
            AttachRank(
                id=1,
                session=session,
                member=uuid.uuid4().hex,
                rank=rank,
                world_size=world_size,
                namespace=xxhash.xxh3_128_digest(session.encode()) * 2,
                fields={"model": "rank", "chunk_size": str(CHUNK)},
                shards=tuple(
                    Shard(ShardId(0, (0, 1), (head, head + 1)), size)
                    for head in range(first, first + parts)
                ),
                shared=twins,
            ),
            memory=HostMemory(device.register_host, device.unregister_host)
            if registers
            else HostMemory(),
        )
        self.client.start(10)
        assert self.client.wait_ready(120)
        settings = Settings(chunk_size=CHUNK, save_deadline_ms=2000, **more)
        self.layout = layout
        self.model = LoadedModel()
        self.worker = WorkerSide(settings, self.client, device, layout, rank, model=self.model)

    def step(self, plan: StepPlan) -> tuple[set[str], set[int], StepReport | None]:
        """Do what the runner does in a step; return loads, failed blocks and report."""
        self.worker.fence(plan)
        self.worker.begin(plan)
        self.worker.start_loads()
        self.worker.save()
        return self.worker.finished_loads(), self.worker.failed_blocks(), self.worker.report()

    def settle(self, plan: StepPlan | None = None) -> tuple[set[str], set[int], StepReport]:
        """Let the device finish, then do a step; the watch's thread gets its time."""
        loads, blocks, total = set[str](), set[int](), StepReport()
        for _ in range(20):
            self.device.synchronize()
            more, failed, report = self.step(plan or StepPlan())
            loads, blocks = loads | more, blocks | failed
            total = total.aggregate(report or StepReport())
            time.sleep(0.005)
        return loads, blocks, total

    def load(self, chunks: int = 1, *, asynchronous: bool = True, **more: Any) -> LoadJob:
        job = LoadJob(
            request_id="r",
            lease_id=1,
            service=self.client.service,
            places=tuple((0, 8192 * index) for index in range(chunks)),
            shard_offsets=(0, 4096),
            blocks=(tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(chunks)),),
            asynchronous=asynchronous,
        )
        return LoadJob(**(job.__dict__ | more))

    def place_of(self, job: SaveJob) -> tuple[int, int]:
        """Return where the arena holds the first chunk of a save."""
        return self.places_of(job)[0]

    def places_of(self, job: SaveJob) -> tuple[tuple[int, int], ...]:
        """Return where the arena holds the chunks of a save."""
        attach = AttachScheduler(1, self.session, uuid.uuid4().hex, self.world_size, 5000)
        client = SchedulerClient(
            self.node.address, attach, lookup_deadline_s=10, promote_deadline_s=1
        )
        client.start(10)
        lease_id = client.ask((), tail=job.keys[0]) if job.tail else client.ask(job.keys)
        assert lease_id is not None
        lease = client.wait(lease_id, 10)
        assert isinstance(lease, LeasedChunks)
        client.close()
        return tuple(lease.extents)

    @property
    def reserved(self) -> int:
        return self.node.status().catalog.reserved_bytes

    @property
    def resident(self) -> int:
        return self.node.status().catalog.resident_chunks


def save_job(number: int = 1, chunks: int = 1, *, first_block: int = 0) -> SaveJob:
    keys = tuple(
        ChunkKey(xxhash.xxh3_128_digest(f"{number} {index}".encode()) * 2)
        for index in range(chunks)
    )
    at = range(first_block, first_block + 4 * chunks, 4)
    return SaveJob(number, None, keys, (tuple(tuple(range(b, b + 4)) for b in at),))
