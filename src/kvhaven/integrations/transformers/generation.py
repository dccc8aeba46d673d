# SPDX-License-Identifier: Apache-2.0
"""Generation whose prompts' KV comes from KVHaven where it is known, and goes there where not."""

import logging
import threading
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from kvhaven.config import load_settings
from kvhaven.integrations.transformers.identity import namespace_of, numerics, signature
from kvhaven.integrations.transformers.prompts import Prompts
from kvhaven.integrations.transformers.support import (
    layer_shapes,
    reason_against_call,
    require_supported,
)

logger = logging.getLogger(__name__)


class KVHaven:
    """Wraps `model.generate`, so that prompts that begin alike are computed once.

    `model` is a decoder with full attention in every layer, on one device. `settings` are
    KVHaven's settings by their names (`local_disk="/var/cache/kv"`); they precede environment
    variables and the YAML file. Raises `IncompatibleEngineError` for models that are not
    supported, `ConfigError` for settings.

    Making it reads all weights once, to identify them, and starts an embedded node service unless
    `service_address` names one. Calls are serialized. Of each call the full chunks of the prompts
    are kept, not those of the output.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        require_supported(model)
        self.cached_tokens = 0
        """Tokens, of each row of the last call, whose KV came from the cache."""
        self._model = model
        self._settings = load_settings(extra=settings).settings
        self._lock = threading.Lock()
        self._reasons: set[str] = set()
        self._layers = layer_shapes(model)
        self._prompts = self._connect()

    def __enter__(self) -> Self:
        """Return this object, which the `with` block closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Disconnect from the service. An embedded one ends; the KV on disk stays."""
        with self._lock:
            self._prompts.close()

    def refresh(self) -> None:
        """Identify the model anew: needed only after weights were written through `.data`."""
        with self._lock:
            self._reconnect()

    def generate(self, inputs: torch.Tensor | None = None, **arguments: Any) -> Any:
        """Return what `model.generate` returns for the same arguments.

        `inputs` (or `input_ids`) are token ids of shape `[batch, tokens]`, without padding. A call
        whose KV may depend on more than its tokens (padding, beams, embeddings, hooks, adapters)
        runs without the cache; the log says why, once for each reason. Raises what
        `model.generate` raises, and nothing of KVHaven's.
        """
        ids = inputs if inputs is not None else arguments.pop("input_ids", None)
        with self._lock:
            self.cached_tokens = 0
            reason = reason_against_call(self._model, ids, arguments)
            if reason:
                self._explain(reason)
                return self._model.generate(ids, **arguments)
            return self._generate(ids, arguments)

    def _generate(self, ids: torch.Tensor, arguments: dict[str, Any]) -> Any:
        cache = DynamicCache(config=self._model.config)
        batch = None
        try:
            self._follow_model()
            batch = self._prompts.fetch(ids)
            batch.fill(cache)
        except Exception:  # whatever it is, the prompt is computed from its first token on
            logger.exception("a call is not cached")
            cache = DynamicCache(config=self._model.config)
            if batch is not None:
                self._prompts.drop(batch)
                batch = None
        try:
            output = self._model.generate(ids, past_key_values=cache, **arguments)
        except BaseException:
            if batch is not None:
                self._prompts.drop(batch)
            raise
        if batch is not None:
            self.cached_tokens = batch.loaded
            try:
                self._prompts.keep(batch, cache)
            except Exception:  # the output is right, and what was not kept is a later miss
                logger.exception("a prompt's KV is not kept")
                self._prompts.drop(batch)
        return output

    def _follow_model(self) -> None:
        """Take on a new identity if the weights, or torch's precision, have changed."""
        if (signature(self._model), numerics()) != self._signature:
            logger.warning("the model has changed: it is identified anew")
            self._reconnect()

    def _reconnect(self) -> None:
        self._prompts.close()
        self._prompts = self._connect()

    def _connect(self) -> Prompts:
        self._signature = (signature(self._model), numerics())
        namespace = namespace_of(self._model, self._settings.model_fingerprint)
        return Prompts(self._settings, namespace, self._layers)

    def _explain(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("a call is not cached (more of the kind are not logged): %s", reason)
