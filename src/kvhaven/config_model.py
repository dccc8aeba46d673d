# SPDX-License-Identifier: Apache-2.0
"""Every setting there is: its type, its default, what it does and what it may be.

`config` finds their values and checks them.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvhaven.config_sizes import GIB, MIB
from kvhaven.config_values import duration, quotas, setting, size, switch


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting with its default. Sizes are bytes, paths absolute.

    Make one with `load_settings`, which checks; directly in tests. It travels to the embedded
    service as JSON (`msgspec.json`).
    """

    chunk_size: Annotated[
        int,
        setting(
            "Tokens in a chunk, the unit of caching; a whole number of the engine's blocks.",
            "a positive multiple of 16 tokens, at most 65536",
            least=16,
            most=65536,
            step=16,
        ),
    ] = 256
    discard_partial_chunks: Annotated[
        bool, setting("Do not keep the incomplete chunk at a prompt's end.", "true")
    ] = True
    save_decode_cache: Annotated[
        bool, switch("Also keep the KV of generated tokens, not only of prompts.")
    ] = False
    device: Annotated[
        Literal["auto", "hpu", "cuda", "rocm", "xpu", "cpu"],
        setting(
            "The kind of device that holds the engine's KV; auto asks the KV tensors themselves.",
            "auto, hpu, cuda, rocm, xpu or cpu",
        ),
    ] = "auto"
    load_mode: Annotated[
        Literal["auto", "sync", "async"],
        setting(
            "When loads run: before the forward (sync), between steps (async), or as the "
            "platform does it best (auto).",
            "auto, sync or async",
        ),
    ] = "auto"
    format: Annotated[
        Literal["auto", "paged", "portable"],
        setting(
            "How a shard's bytes are arranged: as the device holds its pages (paged), or so that "
            "engines of another make, block size or tensor-parallel degree can read them "
            "(portable). auto is paged.",
            "auto, paged or portable",
        ),
    ] = "auto"
    model_fingerprint: Annotated[
        str | None,
        setting(
            "Identity of the model's files, instead of one by their content.",
            "a text of 1 to 256 characters that only equal weights share, or none",
            least=1,
            most=256,
        ),
    ] = None
    priority_limit: Annotated[
        int | None,
        setting("Do not save requests with a larger priority value.", "a whole number, or none"),
    ] = None
    force_skip_save: Annotated[bool, switch("Save nothing; only load what is there.")] = False

    local_cpu: Annotated[
        bool, setting("Keep chunks in host memory, where everything lands first.", "true")
    ] = True
    max_local_cpu_size: Annotated[
        int, size("Size of the arena: host memory for chunks, shared by a service's engines.")
    ] = 4 * GIB
    arena_strict: Annotated[
        bool, switch("Refuse to start where memory does not suffice, not take a smaller arena.")
    ] = False
    cache_policy: Annotated[
        Literal["LRU", "LFU", "FIFO", "MRU", "S3-FIFO"],
        setting("Which chunks leave the arena first.", "LRU, LFU, FIFO, MRU or S3-FIFO"),
    ] = "LRU"
    verify_memory: Annotated[
        Literal["off", "sample", "always"],
        setting(
            "Which resident shards are checked again: none, some behind answers, or all before.",
            "off, sample or always",
        ),
    ] = "sample"
    copy_threads: Annotated[
        int,
        setting(
            "Threads of a worker that copy; 0: one for each core it may use, at most 4.",
            "a whole number from 0 to 256",
            least=0,
            most=256,
        ),
    ] = 0

    tenant_memory: Annotated[
        str | None,
        quotas("Bytes of the arena that each tenant (a cache salt) may take; none: any number."),
    ] = None

    local_disk: Annotated[
        str | None,
        setting(
            "Directory of the disk tier, which outlives restarts; none: no disk tier.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    max_local_disk_size: Annotated[int, size("Bytes that the disk tier may take.")] = 20 * GIB
    tenant_disk: Annotated[
        str | None, quotas("Bytes of the disk tier that each tenant may take; none: any number.")
    ] = None
    disk_direct_io: Annotated[
        Literal["auto", "on", "off"],
        setting(
            "Bypass the page cache: where the filesystem can (auto), or else no disk tier (on).",
            "auto, on or off",
        ),
    ] = "auto"
    disk_write: Annotated[
        Literal["behind", "through"],
        setting(
            "Whether what waits to be written to the disk may be evicted before (behind), or "
            "stays in memory until then (through).",
            "behind or through",
        ),
    ] = "behind"
    disk_compression: Annotated[
        Literal["off", "zstd"],
        setting(
            "Compress what goes to the disk, without loss (zstd), where that is found to pay. "
            "What is there is read in any case.",
            "off or zstd",
        ),
    ] = "off"
    disk_store_on: Annotated[
        Literal["first", "second"],
        setting(
            "Whether chunks go to the disk when they were computed, or when they are used again.",
            "first or second",
        ),
    ] = "first"
    remote_url: Annotated[
        str | None,
        setting(
            "Tiers that several nodes share, the fastest first; none: none.",
            "one or more URLs separated by spaces: file:///mnt/kv, s3://bucket/prefix, "
            "redis://host:6379; or none",
            kind="urls",
        ),
    ] = None
    s3_endpoint_url: Annotated[
        str | None,
        setting(
            "Where the S3 store of remote_url answers, if it is not AWS; several take turns.",
            "one or more URLs separated by spaces, such as http://ceph:7480, or none",
            kind="urls",
        ),
    ] = None
    max_remote_size: Annotated[
        int | None,
        size(
            "Bytes that a shared directory may hold, set alike on all nodes; the least recently "
            "used go first. none: nobody limits it."
        ),
    ] = None
    max_remote_namespace_size: Annotated[
        int | None,
        size("The same for each namespace, that is for each model, format and so on."),
    ] = None
    tenant_remote: Annotated[
        str | None,
        quotas(
            "Bytes of a shared directory that each tenant may take, set alike on all nodes; none: "
            "any number."
        ),
    ] = None
    remote_ttl_s: Annotated[
        float | None,
        duration(
            "What nobody used for so long leaves a shared directory, or Redis; none: stays in a "
            "directory, and a day in Redis.",
            "seconds",
            most=10 * 365 * 86400,
            least=1,
        ),
    ] = None
    remote_write: Annotated[
        Literal["behind", "through", "off"],
        setting(
            "The same as disk_write for shared tiers; off: only read.", "behind, through or off"
        ),
    ] = "behind"
    remote_store_on: Annotated[
        Literal["first", "second"],
        setting("The same as disk_store_on for shared tiers.", "first or second"),
    ] = "first"
    remote_compression: Annotated[
        Literal["off", "zstd"],
        setting("The same as disk_compression for shared tiers.", "off or zstd"),
    ] = "off"
    remote_believe_s: Annotated[
        float,
        duration(
            "How long it is believed what a shared tier said: that it has a chunk, or has not.",
            "seconds",
            most=3600,
            least=0.1,
        ),
    ] = 5.0
    fill_faster_tiers: Annotated[
        bool,
        setting(
            "Write what was read from a tier to the faster ones as well: from a shared one to "
            "the disk.",
            "true or false",
        ),
    ] = True
    write_queue_size: Annotated[
        int | None,
        size(
            "Bytes that may wait for each tier, the oldest are dropped beyond; "
            "none: an eighth of the arena, at least 64MiB, at most half the arena.",
            "half of max_local_cpu_size",
        ),
    ] = None
    breaker_pause_s: Annotated[
        float,
        duration(
            "How long a failing tier is left alone before it is tried again.",
            "seconds",
            most=3600,
            least=0.1,
        ),
    ] = 5.0

    service_address: Annotated[
        str | None,
        setting(
            "Unix socket of a node service to attach to; none: an embedded service of our own.",
            "the path of a unix socket, at most 107 bytes, or none",
            kind="socket",
        ),
    ] = None
    runtime_dir: Annotated[
        str | None,
        setting(
            "Directory of sockets and locks; none: $XDG_RUNTIME_DIR/kvhaven, else "
            "/tmp/kvhaven-<user id>.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    embedded_linger_s: Annotated[
        float,
        duration("How long an embedded service outlives its last session.", "seconds", most=3600),
    ] = 2.0
    stop_deadline_s: Annotated[
        float,
        duration("How long a stopping service may finish its writes.", "seconds", most=3600),
    ] = 10.0

    lookup_deadline_ms: Annotated[
        float,
        duration("How long until an unanswered look-up is a miss.", "milliseconds", most=600_000),
    ] = 100.0
    promote_deadline_ms: Annotated[
        float,
        duration(
            "How long a request waits for chunks from a tier; then it takes what is ready.",
            "milliseconds",
            most=600_000,
        ),
    ] = 2000.0
    save_deadline_ms: Annotated[
        float,
        duration(
            "How long until an unanswered reservation makes a save be skipped.",
            "milliseconds",
            most=600_000,
        ),
    ] = 50.0
    step_budget_ms: Annotated[
        float,
        duration(
            "How long KVHaven may hold up the scheduler in one step, all requests together.",
            "milliseconds",
            most=1000,
        ),
    ] = 2.0

    kv_events: Annotated[
        bool, switch("Report stored chunks as KV events, for cache-aware routers.")
    ] = True
    self_test: Annotated[bool, switch("Write, read and compare bytes on the device at start.")] = (
        True
    )
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        setting("Least severity that is logged.", "DEBUG, INFO, WARNING or ERROR"),
    ] = "INFO"

    @property
    def runtime_path(self) -> Path:
        """The directory of sockets and locks, whether it is set or not; it may not exist yet."""
        if self.runtime_dir is not None:
            return Path(self.runtime_dir)
        if base := os.environ.get("XDG_RUNTIME_DIR"):
            return Path(base) / "kvhaven"
        return Path(f"/tmp/kvhaven-{os.getuid()}")  # noqa: S108  its owner and mode are checked by who makes it

    @property
    def write_queue_bytes(self) -> int:
        """Bytes that may wait for each tier, whether set or not."""
        if self.write_queue_size is not None:
            return self.write_queue_size
        half = self.max_local_cpu_size // 2
        return min(half, max(64 * MIB, self.max_local_cpu_size // 8))
