# SPDX-License-Identifier: Apache-2.0
"""Identity of LoRA adapters on the scheduler side: the content that the ranks have loaded."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from kvhaven.protocol import AdapterVersion, ModelState

CacheName = tuple[Any, ...]
"""What the engine's own prefix cache knows an adapter by; empty for the model without one."""


class AdapterUse(NamedTuple):
    """What a request's KV is computed with: a loaded adapter.

    `generation` is that of all ranks: a rank that has loaded something else under the number
    since then neither loads nor saves for it.
    """

    adapter: int
    generation: int
    digest: bytes


class Adapters:
    """Names adapters by what the ranks said that they loaded; what they did not say is unknown.

    `models` returns what each rank's model holds; `changed` is called with what the
    engine's own prefix cache knows an adapter by, when requests of it may have been computed with
    another content than the one that is loaded now: blocks of that name may hold either. No file
    is read: a file's content now need not be what was loaded.
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
        """Return the content that adapter number `adapter` has now, None while it is not known.

        `name` is the engine's own name for it. To be asked for every request, cached or not, when
        it comes and whenever it starts to run: it may compute with it.
        """
        self._follow()
        use = self._uses.get(adapter)
        if use is None:
            unknown = self._unknown.setdefault(name, set())
            if adapter not in unknown:
                unknown.add(adapter)
                if self._computed.get(name, (adapter, 1))[0] != adapter:
                    self._changed(name)  # what runs now will be of another content
            return None
        now, unknown = (adapter, use.generation), self._unknown.pop(name, set())
        same = self._computed.get(name, (adapter, 1)) == now
        if not (same and unknown <= {adapter}):
            self._changed(name)
        self._computed[name] = now
        return use

    def _follow(self) -> None:
        """Take in what the ranks said since the last call."""
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
    """Return what all ranks have loaded under one number; None unless they all agree.

    Ranks of one pipeline stage load the same tensors. Stages may load different parts.
    """
    known = [version for version in versions if version is not None]
    if len(known) < len(versions) or len({version.generation for version in known}) > 1:
        return None
    parts = sorted({version.digest for version in known})
    digest = parts[0] if len(parts) == 1 else sha256(b"".join(parts)).digest()
    return AdapterUse(known[0].adapter, known[0].generation, digest)
