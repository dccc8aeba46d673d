# SPDX-License-Identifier: Apache-2.0
"""Identity of LoRA adapters on the scheduler side, from the content that the ranks loaded."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from kvhaven.protocol import AdapterVersion, ModelState

CacheName = tuple[Any, ...]
"""Name of an adapter in the engine's prefix cache; empty for the model without an adapter."""


class AdapterUse(NamedTuple):
    """Loaded adapter that a request's KV is computed with.

    `generation` is the same on all ranks: a rank that has since loaded other content under the
    number `adapter` neither loads nor saves KV for it.
    """

    adapter: int
    generation: int
    digest: bytes


class Adapters:
    """Identifies adapters by the content that the ranks reported; others are unknown.

    `models` returns the state of each rank's model. `changed` is called with an adapter's name in
    the engine's prefix cache when its requests may have been computed with other content than the
    loaded one: blocks under that name may hold KV of either. Files are not read, since their
    present content may differ from the loaded one.
    """

    def __init__(
        self,
        world_size: int,
        models: Callable[[], Mapping[int, ModelState]],
        changed: Callable[[CacheName], None],
    ) -> None:
        self._world = world_size
        self._models = models
        self._changed = changed
        self._seen: Mapping[int, ModelState] = {}
        self._uses: dict[int, AdapterUse] = {}
        self._computed: dict[CacheName, tuple[int, int]] = {}  # adapter and generation
        self._unknown: dict[CacheName, set[int]] = {}  # adapters that ran before being known

    def use_of(self, name: CacheName, adapter: int) -> AdapterUse | None:
        """Return the present content of adapter number `adapter`, None while it is unknown.

        `name` is its name in the engine's prefix cache. Must be called for every request, cached
        or not, when it arrives and whenever it starts to run, since it computes with the adapter.
        """
        self._follow()
        use = self._uses.get(adapter)
        if use is None:
            unknown = self._unknown.setdefault(name, set())
            if adapter not in unknown:
                unknown.add(adapter)
                if self._computed.get(name, (adapter, 1))[0] != adapter:
                    self._changed(name)  # requests that run now use other content
            return None
        now, unknown = (adapter, use.generation), self._unknown.pop(name, set())
        same = self._computed.get(name, (adapter, 1)) == now
        if not (same and unknown <= {adapter}):
            self._changed(name)
        self._computed[name] = now
        return use

    def _follow(self) -> None:
        """Process the ranks' reports since the last call."""
        models = self._models()
        if models is self._seen:
            return
        self._seen = models
        self._uses = {}
        if len(models) < self._world:
            return
        first, *others = (
            {version.adapter: version for version in model.adapters} for model in models.values()
        )
        for adapter, version in first.items():
            versions = [version, *(other.get(adapter) for other in others)]
            use = _united(versions)
            if use is not None:
                self._uses[adapter] = use


def _united(versions: "list[AdapterVersion | None]") -> AdapterUse | None:
    """Return the adapter that all ranks have loaded under one number; None unless all agree.

    Ranks of one pipeline stage load the same tensors. Stages may load different parts, so their
    digests are combined.
    """
    known = [version for version in versions if version is not None]
    if len(known) < len(versions) or len({version.generation for version in known}) > 1:
        return None
    parts = sorted({version.digest for version in known})
    digest = parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()
    return AdapterUse(known[0].adapter, known[0].generation, digest)
