# SPDX-License-Identifier: Apache-2.0
"""The exceptions of KVHaven; a message names the thing, the value and the way out."""


class KVHavenError(Exception):
    """Base of all errors of KVHaven."""


class ConfigError(KVHavenError):
    """A setting is unknown, malformed, or contradicts another one."""


class ProtocolError(KVHavenError):
    """A peer sent something that is not of the wire format; its connection is closed."""


class ServiceUnavailableError(KVHavenError):
    """The node service cannot be reached or did not answer in time."""


class IncompleteEngineError(ServiceUnavailableError):
    """The service has not all ranks of the engine, or ranks that loaded unlike files.

    No setting is wrong, and it may pass: the engine serves without a cache.
    """


class ArenaError(KVHavenError):
    """Shared memory could not be had, mapped or checked."""


class TierError(KVHavenError):
    """A tier failed (full, read-only, gone): counted by its breaker."""


class TierMissError(KVHavenError):
    """A tier does not hold the shard, or what it holds did not pass its checks: a miss."""


class LayoutError(KVHavenError):
    """KV tensors are laid out in a way that is not understood, so they are not touched."""


class IncompatibleEngineError(KVHavenError):
    """The engine, or how it is configured, is one that KVHaven does not serve; it says why."""


class DeviceCopyError(KVHavenError):
    """A driver refused a copy between the arena and an accelerator."""


class UnreportedLoadError(KVHavenError):
    """A load failed where the engine cannot be told: rather no answer than a wrong one."""
