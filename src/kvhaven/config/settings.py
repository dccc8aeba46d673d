# SPDX-License-Identifier: Apache-2.0
"""Definitions of all settings: type, default, description and allowed values.

`config.load` reads and checks their values.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvhaven.config.sizes import GIB, MIB
from kvhaven.config.values import duration, quotas, setting, size, switch
from kvhaven.plugins import DEVICES, EVICTION_POLICIES


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings with their defaults. Sizes are in bytes, paths are absolute.

    `load_settings` creates and checks an instance; only tests create one directly. The engine
    passes it to an embedded service as JSON (`msgspec.json`).
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
        bool,
        setting(
            "Do not store the incomplete chunk at a prompt's end in tiers. Cannot be disabled "
            "(pd_tail keeps it in memory).",
            "true",
        ),
    ] = True
    save_decode_cache: Annotated[
        bool, switch("Also save the KV of generated tokens, not only of prompts.")
    ] = False
    window_every: Annotated[
        int,
        setting(
            "For models with sliding windows: the windows of prompts are saved at each multiple of "
            "so many tokens, and at a prompt's end. 0: only at the end.",
            "0, or a number of tokens, at most 16777216",
            least=0,
            most=1 << 24,
        ),
    ] = 4096
    pd_tail: Annotated[
        bool,
        switch(
            "Also keep the incomplete chunk at a prompt's end (the tail) in host memory for 60 s, "
            "for exact repeats of the prompt. Prompts that another node decodes always keep it."
        ),
    ] = False
    pd_role: Annotated[
        Literal["both", "sender", "receiver"],
        setting(
            "Role of an engine whose prompts and answers are computed on two nodes: a sender only "
            "saves, a receiver only loads.",
            "both, sender or receiver",
        ),
    ] = "both"
    device: Annotated[
        str,
        setting(
            "Device type that holds the engine's KV; auto: the device type of the KV tensors.",
            "auto, hpu, cuda, rocm, xpu, cpu, or a device of an installed package",
            choices=("auto", "hpu", "cuda", "rocm", "xpu", "cpu"),
            plugins=DEVICES,
        ),
    ] = "auto"
    load_mode: Annotated[
        Literal["auto", "sync", "async"],
        setting(
            "When loads run: before the forward pass (sync), between steps (async), or the "
            "platform's default (auto).",
            "auto, sync or async",
        ),
    ] = "auto"
    layered_load_ms: Annotated[
        float,
        duration(
            "Experimental, never measured on a GPU: loads of up to this duration run during the "
            "forward pass, layer by layer. 0: off.",
            "milliseconds",
            most=100,
        ),
    ] = 0.0
    format: Annotated[
        Literal["auto", "paged", "portable"],
        setting(
            "Format of shards: the device's own pages (paged), or a format that engines with "
            "other accelerators, block sizes or tensor-parallel degrees can read (portable). "
            "auto: paged.",
            "auto, paged or portable",
        ),
    ] = "auto"
    model_fingerprint: Annotated[
        str | None,
        setting(
            "Identifier of the model's weights, used instead of a digest of their content.",
            "a string of 1 to 256 characters that only equal weights share, or none",
            least=1,
            most=256,
        ),
    ] = None
    priority_limit: Annotated[
        int | None,
        setting(
            "Do not save KV of requests with a larger priority value.", "a whole number, or none"
        ),
    ] = None
    force_skip_save: Annotated[bool, switch("Load only; save nothing.")] = False

    local_cpu: Annotated[
        bool, setting("Keep chunks in host memory. Cannot be disabled.", "true")
    ] = True
    max_local_cpu_size: Annotated[
        int, size("Size of the arena: host memory for chunks, shared by all engines of a service.")
    ] = 4 * GIB
    arena_strict: Annotated[
        bool, switch("Refuse to start if memory is insufficient, instead of using a smaller arena.")
    ] = False
    cache_policy: Annotated[
        str,
        setting(
            "Eviction policy of host memory.",
            "LRU, LFU, FIFO, MRU, S3-FIFO, or a policy of an installed package",
            choices=("LRU", "LFU", "FIFO", "MRU", "S3-FIFO"),
            plugins=EVICTION_POLICIES,
        ),
    ] = "LRU"
    verify_memory: Annotated[
        Literal["off", "sample", "always"],
        setting(
            "Verify checksums of leased shards again: never (off), a sample after replying "
            "(sample), or all before replying (always).",
            "off, sample or always",
        ),
    ] = "sample"
    pin_share: Annotated[
        float,
        setting(
            "Largest share of host memory that pins of the HTTP API may hold.",
            "a number from 0 to 0.5",
            least=0,
            most=0.5,
        ),
    ] = 0.25
    copy_threads: Annotated[
        int,
        setting(
            "Copy threads of each worker; 0: one for each available core, at most 4.",
            "a whole number from 0 to 256",
            least=0,
            most=256,
        ),
    ] = 0

    tenant_memory: Annotated[
        str | None,
        quotas("Limit of host memory for each tenant (a cache salt). Default: no limit."),
    ] = None

    local_disk: Annotated[
        str | None,
        setting(
            "Directory of the disk tier, which survives restarts. Default: no disk tier.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    max_local_disk_size: Annotated[int, size("Size limit of the disk tier.")] = 20 * GIB
    tenant_disk: Annotated[
        str | None, quotas("Limit of the disk tier for each tenant. Default: no limit.")
    ] = None
    disk_direct_io: Annotated[
        Literal["auto", "on", "off"],
        setting(
            "Bypass the page cache, on the local disk and in shared directories: if the filesystem "
            "supports it (auto), always (on: without support the tier is disabled), or never "
            "(off).",
            "auto, on or off",
        ),
    ] = "auto"
    disk_write: Annotated[
        Literal["behind", "through"],
        setting(
            "Whether chunks queued for the disk may be evicted from memory (behind), or stay "
            "there until they are written (through).",
            "behind or through",
        ),
    ] = "behind"
    disk_compression: Annotated[
        Literal["off", "zstd"],
        setting(
            "Compress chunks on disk losslessly (zstd) where it saves time. Compressed and "
            "uncompressed chunks are always readable.",
            "off or zstd",
        ),
    ] = "off"
    disk_store_on: Annotated[
        Literal["first", "second"],
        setting(
            "Write chunks to disk when they are computed (first), or when they are used again "
            "(second).",
            "first or second",
        ),
    ] = "first"
    remote_url: Annotated[
        str | None,
        setting(
            "Shared tiers, fastest first. Default: none.",
            "one or more URLs separated by spaces: file:///mnt/kv, s3://bucket/prefix, "
            "redis://host:6379; or none",
            kind="urls",
        ),
    ] = None
    s3_endpoint_url: Annotated[
        str | None,
        setting(
            "Endpoints of the S3 store in remote_url, used in turn. Default: AWS.",
            "one or more URLs separated by spaces, such as http://ceph:7480, or none",
            kind="urls",
        ),
    ] = None
    max_remote_size: Annotated[
        int | None,
        size(
            "Size limit of a shared directory; set the same value on all nodes. The least "
            "recently used entries are deleted first. Default: no limit."
        ),
    ] = None
    max_remote_namespace_size: Annotated[
        int | None,
        size("Size limit of each namespace (model, format, ...) in a shared directory."),
    ] = None
    tenant_remote: Annotated[
        str | None,
        quotas(
            "Limit of a shared directory for each tenant; set the same value on all nodes. "
            "Default: no limit."
        ),
    ] = None
    remote_ttl_s: Annotated[
        float | None,
        duration(
            "Delete entries of a shared directory or of Redis that were unused for this long. "
            "Default: never in a directory, one day in Redis.",
            "seconds",
            most=10 * 365 * 86400,
            least=1,
        ),
    ] = None
    remote_write: Annotated[
        Literal["behind", "through", "off"],
        setting("Like disk_write, for shared tiers; off: read only.", "behind, through or off"),
    ] = "behind"
    remote_store_on: Annotated[
        Literal["first", "second"],
        setting("Like disk_store_on, for shared tiers.", "first or second"),
    ] = "first"
    remote_compression: Annotated[
        Literal["off", "zstd"],
        setting("Like disk_compression, for shared tiers.", "off or zstd"),
    ] = "off"
    remote_lookup_ttl_s: Annotated[
        float,
        duration(
            "How long to cache lookup results of shared tiers; those of peers for half a "
            "second at most.",
            "seconds",
            most=3600,
            least=0.1,
        ),
    ] = 5.0
    peer_listen: Annotated[
        str | None,
        setting(
            "Address at which other nodes read chunks from this node's memory.",
            "host:port, such as 0.0.0.0:7420, or none",
            least=1,
            most=256,
        ),
    ] = None
    peers: Annotated[
        str | None,
        setting(
            "Other nodes whose memory is read. dns://name:port stands for all nodes behind a name, "
            "redis://host:port/db for all that register there.",
            "one or more host:port or such URLs separated by spaces, or none",
            least=1,
            most=4096,
        ),
    ] = None
    peer_address: Annotated[
        str | None,
        setting(
            "Address that this node registers in Redis, where other nodes reach its peer_listen.",
            "host:port, or none: the address of the interface towards Redis",
            least=1,
            most=256,
        ),
    ] = None
    peer_token_file: Annotated[
        str | None,
        setting(
            "File with the token that all nodes share. Needed unless peer_listen is on loopback.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    peer_cert: Annotated[
        str | None,
        setting(
            "Certificate (PEM) of this node for TLS with other nodes; with peer_key and peer_ca.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    peer_key: Annotated[
        str | None, setting("Key (PEM) of peer_cert.", "a path, or none", kind="path")
    ] = None
    peer_ca: Annotated[
        str | None,
        setting(
            "Certificate (PEM) of the authority whose certificates other nodes must have.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    peer_encrypt_data: Annotated[
        bool,
        setting(
            "Encrypt chunks, too, and not only control messages. Slower; needs peer_cert.",
            "true or false",
        ),
    ] = False
    peer_tenants: Annotated[
        bool,
        setting(
            "Send chunks of requests with a tenant or cache_salt to other nodes, and read theirs.",
            "true or false",
        ),
    ] = True
    peer_streams: Annotated[
        int,
        setting(
            "Shards read concurrently from one peer.",
            "a whole number from 1 to 16",
            least=1,
            most=16,
        ),
    ] = 4
    peer_deadline_ms: Annotated[
        float,
        duration(
            "Longest silence of a peer before it counts as failed.",
            "milliseconds",
            most=60_000,
            least=10,
        ),
    ] = 1000.0
    transfer_channel: Annotated[
        Literal["auto", "tcp", "nixl"],
        setting(
            "How shards are read from peers; auto: NIXL between nodes with RDMA, else TCP.",
            "auto, tcp or nixl",
        ),
    ] = "auto"
    nixl_backends: Annotated[
        str,
        setting(
            "Backends of NIXL by which nodes read from each other.",
            "one or more names separated by spaces, such as UCX or LIBFABRIC",
            least=1,
            most=256,
        ),
    ] = "UCX"
    pd_wait_ms: Annotated[
        float,
        duration(
            "How long a request that another node has prefilled waits for its chunks.",
            "milliseconds",
            most=600_000,
        ),
    ] = 10_000.0
    pd_stall_ms: Annotated[
        float,
        duration(
            "Longest silence of a node that announced chunks; then they are computed here.",
            "milliseconds",
            most=60_000,
            least=500,
        ),
    ] = 1000.0
    fill_faster_tiers: Annotated[
        bool,
        setting(
            "Also write chunks read from a shared tier to the faster tiers.",
            "true or false",
        ),
    ] = True
    write_queue_size: Annotated[
        int | None,
        size(
            "Size limit of the chunks queued for a tier; the oldest are dropped. Default: an "
            "eighth of host memory, at least 64MiB, at most half.",
            "half of max_local_cpu_size",
        ),
    ] = None
    breaker_pause_s: Annotated[
        float,
        duration(
            "Pause before a failing tier is tried again. It doubles with each failed try, up to "
            "60 s.",
            "seconds",
            most=3600,
            least=0.1,
        ),
    ] = 5.0

    service_address: Annotated[
        str | None,
        setting(
            "Unix socket of the node service. Default: the engine starts an embedded one.",
            "the path of a unix socket, at most 107 bytes, or none",
            kind="socket",
        ),
    ] = None
    runtime_dir: Annotated[
        str | None,
        setting(
            "Directory of sockets and locks. Default: $XDG_RUNTIME_DIR/kvhaven, else "
            "/tmp/kvhaven-<user id>.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    embedded_linger_s: Annotated[
        float,
        duration(
            "How long an embedded service runs after its last engine has exited.",
            "seconds",
            most=3600,
        ),
    ] = 2.0
    stop_deadline_s: Annotated[
        float,
        duration(
            "How long a stopping service may spend on its pending writes.", "seconds", most=3600
        ),
    ] = 10.0
    api_listen: Annotated[
        str | None,
        setting(
            "Address of the HTTP API. A service with this setting starts `kvhaven api`. Default: "
            "127.0.0.1:8888 for `kvhaven serve`, if that is free; none for an embedded service.",
            "host:port, such as 127.0.0.1:8888, unix:/path, off, or none",
            least=1,
            most=256,
        ),
    ] = None
    api_token_file: Annotated[
        str | None,
        setting(
            "File with the token of the HTTP API, for changes. Needed beyond loopback. Default: "
            "api-token in runtime_dir, which `kvhaven serve` creates.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    api_read_token_file: Annotated[
        str | None,
        setting(
            "File with a further token of the HTTP API for all GET requests beyond loopback, which "
            "changes nothing.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    api_metrics_token_file: Annotated[
        str | None,
        setting(
            "File with a further token of the HTTP API that reads only /metrics beyond loopback: "
            "for Prometheus.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    api_tls_certificate: Annotated[
        str | None,
        setting(
            "TLS certificate of the HTTP API, with its chain (PEM). Needed beyond loopback.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    api_tls_key: Annotated[
        str | None,
        setting(
            "Private key of api_tls_certificate (PEM). Default: it is in the same file.",
            "a path, or none",
            kind="path",
        ),
    ] = None
    api_hosts: Annotated[
        str | None,
        setting(
            "Host names by which clients may address the HTTP API, besides localhost and the "
            "address in api_listen.",
            "one or more names separated by spaces, or none",
            least=1,
            most=4096,
        ),
    ] = None
    plugins: Annotated[
        str | None,
        setting(
            "Plugins, each run by the HTTP API in a process of its own.",
            "module:Class or names of entry points, separated by spaces, or a list of mappings "
            "with module and class; or none",
            kind="plugins",
        ),
    ] = None
    runtime_plugin_locations: Annotated[
        str | None,
        setting(
            "Scripts that the HTTP API runs while it runs, or directories of such scripts. Names: "
            "ROLE[_ID]_text.py or .sh, as for LMCache.",
            "paths without spaces, separated by spaces or commas, or a list; or none",
            kind="paths",
        ),
    ] = None
    plugin_engine_url: Annotated[
        str | None,
        setting(
            "URL of an engine's OpenAI-compatible server, which tokenizes texts that plugins or "
            "requests to the API name, and computes prompts that plugins prefetch.",
            "a URL such as http://127.0.0.1:8000, or none",
            least=1,
            most=4096,
        ),
    ] = None
    plugin_may_change: Annotated[
        bool, switch("Allow plugins to pin prompts. All of them may look up and prefetch.")
    ] = False
    plugin_memory: Annotated[
        int, size("Largest memory of a plugin, with that of its child processes.")
    ] = 512 * MIB

    lookup_deadline_ms: Annotated[
        float,
        duration(
            "Deadline of a lookup; a late answer counts as a miss.", "milliseconds", most=600_000
        ),
    ] = 100.0
    promote_deadline_ms: Annotated[
        float,
        duration(
            "How long a request waits for chunks from tiers; then it loads those that are ready.",
            "milliseconds",
            most=600_000,
        ),
    ] = 2000.0
    load_or_recompute: Annotated[
        Literal["auto", "always"],
        setting(
            "Whether KV is loaded from a tier that is slower than the prefill. auto: a request "
            "waits no longer than it would take to compute the tokens, and tiers that are too slow "
            "by measurement are skipped; always: it waits for promote_deadline_ms.",
            "auto or always",
        ),
    ] = "auto"
    save_deadline_ms: Annotated[
        float,
        duration(
            "Deadline of a reservation; after it the save is skipped.",
            "milliseconds",
            most=600_000,
        ),
    ] = 50.0
    step_budget_ms: Annotated[
        float,
        duration(
            "Time that KVHaven may wait in one scheduler step, for all requests in total.",
            "milliseconds",
            most=1000,
        ),
    ] = 2.0

    kv_events: Annotated[
        bool, switch("Publish KV events about stored chunks, for cache-aware routers.")
    ] = True
    self_test: Annotated[bool, switch("Test copies on the device at start.")] = True
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        setting("Minimum severity of log messages.", "DEBUG, INFO, WARNING or ERROR"),
    ] = "INFO"

    @property
    def runtime_path(self) -> Path:
        """The directory of sockets and locks, set or default; it may not exist yet."""
        if self.runtime_dir is not None:
            return Path(self.runtime_dir)
        if base := os.environ.get("XDG_RUNTIME_DIR"):
            return Path(base) / "kvhaven"
        return Path(f"/tmp/kvhaven-{os.getuid()}")  # noqa: S108  its creator checks owner and mode

    @property
    def write_queue_bytes(self) -> int:
        """Bytes that may be queued for each tier, set or default."""
        if self.write_queue_size is not None:
            return self.write_queue_size
        half = self.max_local_cpu_size // 2
        return min(half, max(64 * MIB, self.max_local_cpu_size // 8))
