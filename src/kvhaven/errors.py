# SPDX-License-Identifier: Apache-2.0
"""Exceptions of KVHaven; messages name the object, the value and the remedy."""


class KVHavenError(Exception):
    """Base class of all errors of KVHaven."""


class ConfigError(KVHavenError):
    """A setting is unknown or malformed, or contradicts another setting."""


class ProtocolError(KVHavenError):
    """A peer violated the wire format; its connection is closed."""


class ServiceUnavailableError(KVHavenError):
    """The node service, or an engine's server, is unreachable or did not answer well in time."""


class IncompleteEngineError(ServiceUnavailableError):
    """Ranks of the engine have not attached to the service, or loaded different files.

    No setting is wrong and the condition may be temporary. The engine serves without a cache.
    """


class ArenaError(KVHavenError):
    """Shared memory cannot be allocated, mapped or checked."""


class TierError(KVHavenError):
    """A tier failed (full, read-only, gone); its breaker counts the failure."""


class TierMissError(KVHavenError):
    """A tier does not hold the shard, or the stored shard failed its checks: a miss."""


class LayoutError(KVHavenError):
    """The layout of the KV tensors is not supported."""


class IncompatibleEngineError(KVHavenError):
    """The engine or its configuration is not supported; the message has the reason."""


class DeviceCopyError(KVHavenError):
    """A driver refused a copy between the arena and an accelerator."""


class UnreportedLoadError(KVHavenError):
    """A load failed and cannot be reported; the engine must end to avoid wrong output."""
