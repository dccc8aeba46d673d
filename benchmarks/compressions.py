# SPDX-License-Identifier: Apache-2.0
"""`zstd.*`: gain and cost of compressing stored shards, on real KV.

The KV is from a disk tier, written by real vLLM when it prefilled a document, in bf16 and in
float32, with two models: the demo's (`demo`), which copies codes and thus is more repetitive than
any trained model, and one of the same shape with random weights (`random`), whose mantissas are
noise. No trained model's KV is available here, and neither model is a substitute for it.

- `zstd.ratio.*`: bytes stored per payload byte; the limit is the same without byte planes.
- `zstd.write.*`, `zstd.read.*`: GB/s of payload in one thread, with headers, and with the checksum
  on reading, which uncompressed shards get, too; the limit is `memcpy`.

The decision of `tiers/format/compression_policy.py` is printed for the local disk, and for stores
of several speeds.
"""

import asyncio
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.nodes import fresh_folder, fresh_node
from benchmarks.results import BENCH, Result
from examples.demo.demo import CHUNK, PATIENT
from examples.demo.model import make_model
from examples.demo.processes import engine, kvhaven
from examples.demo.text import make_document
from kvhaven.arena.segment import Segment
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.compression_policy import TRIAL_SHARDS
from kvhaven.tiers.format.header import HEADER_BYTES, stored_bytes, unpack_header
from kvhaven.tiers.format.zstd import Zstd
from kvhaven.tiers.local.tier import DiskTier
from kvhaven.types import Checksum, NamespaceDigest, Shard, ShardTable, align_up

_TOKENS = 5200
_REPETITIONS = 5
_SPEEDS_GB_S = (0.1, 0.3, 1.0, 3.0, 10.0)


class _Piece(NamedTuple):
    """A shard of real KV, page-aligned."""

    shard: StoredShard
    payload: memoryview
    checksum: Checksum


def measure(say: Callable[[str], None]) -> list[Result]:
    """Create the KV of each model in each type, and measure all of it."""
    demo = make_model(BENCH / "model")
    results: list[Result] = []
    for name, model in (("demo", demo), ("random", _random_model(demo))):
        for dtype, short in (("bfloat16", "bf16"), ("float32", "f32")):
            pieces = _real_kv(model, dtype)
            kind = f"{name}.{short}"
            say(f"{kind}: {len(pieces)} chunks of {pieces[0].shard.payload_bytes >> 10} KiB")
            results += _speeds(kind, pieces)
            _show_choices(kind, pieces, say)
    return results


def _random_model(like: Path) -> Path:
    """Return a model of the same shape with weights as initialised for training."""
    folder = BENCH / "random-model"
    if (folder / "model.safetensors").exists():
        return folder
    import torch  # noqa: PLC0415 - slow
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow

    torch.manual_seed(0)
    shutil.copytree(like, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(like))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _real_kv(model: Path, dtype: str) -> list[_Piece]:
    """Prefill a document with vLLM; return the shards that it stored in a disk tier."""
    with fresh_folder("compression-disk") as disk:
        with fresh_node("compression", local_disk=disk) as service:
            config = kvhaven(service_address=str(service.socket), chunk_size=CHUNK, **PATIENT)
            log = BENCH / "compression.log"
            with engine(model, log, kv_transfer_config=config, dtype=dtype) as vllm:
                vllm.ask(make_document(_TOKENS), 1)
                service.flush()
        return [_piece(file) for file in sorted(disk.glob("*/*/*.kv"))]


def _piece(file: Path) -> _Piece:
    raw = file.read_bytes()
    header = unpack_header(raw[:HEADER_BYTES])
    payload = _pages(align_up(header.stored.payload_bytes))
    payload[:] = raw[HEADER_BYTES:]
    return _Piece(header.stored, payload, header.checksum)


def _pages(size: int) -> memoryview:
    segment = Segment.create(0, size)
    segment.memory[:] = bytes(size)
    return segment.memory


def _speeds(kind: str, pieces: Sequence[_Piece]) -> list[Result]:
    """Pack and unpack all pieces, alternating with plain copies of them."""
    total = sum(piece.shard.payload_bytes for piece in pieces)
    into = _pages(max(len(piece.payload) for piece in pieces))
    rates: dict[str, list[float]] = {"write": [], "read": [], "memcpy": []}
    zstd, stored, unsplit = Zstd(), 0, 0
    for piece in pieces:
        found = zstd.compress(piece.payload, 1, 2 * len(piece.payload))
        assert found is not None
        unsplit += stored_bytes(found[1])
    for repetition in range(-1, _REPETITIONS):
        codec = ShardCodec(kind, zstd=True)
        for piece in pieces:  # the trial of compression, which takes longer
            codec.pack(*piece)
        seconds = dict.fromkeys(rates, 0.0)
        stored = 0
        for piece in pieces:
            began = time.perf_counter()
            into[: len(piece.payload)] = piece.payload
            seconds["memcpy"] += time.perf_counter() - began
            began = time.perf_counter()
            head, body = codec.pack(*piece)
            seconds["write"] += time.perf_counter() - began
            stored += HEADER_BYTES + len(body)
            into[: len(body)] = body
            buffer = into[: len(piece.payload)]
            began = time.perf_counter()
            checksum = codec.unpack(head, buffer, HEADER_BYTES + len(body), piece.shard)
            seconds["read"] += time.perf_counter() - began
            assert checksum == piece.checksum
        if repetition >= 0:  # the first repetition is a warm-up
            for name, spent in seconds.items():
                rates[name].append(total / spent / 1e9)
    plain = sum(stored_bytes(piece.shard.payload_bytes) for piece in pieces)
    memcpy = statistics.median(rates["memcpy"])
    ratio = Result(
        f"zstd.ratio.{kind}",
        stored / plain,
        "stored",
        unsplit / plain,
        len(pieces),
        "zstd with the same settings, without byte planes",
        "less than 1.00",
        stored < unsplit,
    )
    speeds = [
        Result(
            f"zstd.{name}.{kind}",
            statistics.median(rates[name]),
            "GB/s",
            memcpy,
            _REPETITIONS,
            "memcpy in one thread",
        )
        for name in ("write", "read")
    ]
    return [ratio, *speeds]


def _show_choices(kind: str, pieces: Sequence[_Piece], say: Callable[[str], None]) -> None:
    """Print the decisions for the local disk, and for stores of several speeds."""
    say(f"{kind}, the disk here: {asyncio.run(_choice_of_disk(pieces))}")
    for speed in _SPEEDS_GB_S:
        codec = ShardCodec(kind, zstd=True)
        for number in range(TRIAL_SHARDS + 1):
            piece = pieces[number % len(pieces)]
            size = codec.pack(*piece).size
            codec.moved(Lane.WRITE, piece.shard.namespace, size, size / speed / 1e9)
        (status,) = codec.status()
        say(f"{kind}, a store of {speed} GB/s: {'on' if status.on else 'off'}: {status.why}")


async def _choice_of_disk(pieces: Sequence[_Piece]) -> str:
    """Write to a disk tier and read, with as many concurrent shards as the catalog."""
    folder = BENCH / "compression-tier"
    shutil.rmtree(folder, ignore_errors=True)
    tier = DiskTier(folder, 8 << 30, executor=TierExecutor(), compress=True)
    await tier.start()
    first = pieces[0].shard
    table = ShardTable((Shard(first.shard, first.payload_bytes),))
    await tier.add_namespace(Namespace(NamespaceDigest(first.namespace), {}, table))
    into = _pages(len(pieces[0].payload))
    for piece in pieces[: TRIAL_SHARDS - 1]:  # the decision needs reads, too
        await tier.write(*piece)
        await tier.read(piece.shard, into)
    await asyncio.gather(*(tier.write(*piece) for piece in pieces[TRIAL_SHARDS - 1 :]))
    (status,) = tier.health().compression or []
    await tier.close(10)
    shutil.rmtree(folder, ignore_errors=True)
    return f"{'on' if status.on else 'off'}: {status.why}"
