# SPDX-License-Identifier: Apache-2.0
"""Generation whose prompts' KV comes from KVHaven where it is known, and goes there where not."""

import inspect
import logging
import threading
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from kvhaven.config import load_settings
from kvhaven.integrations.transformers.identity import Signature, namespace_of
from kvhaven.integrations.transformers.prompts import Batch, Prompts
from kvhaven.integrations.transformers.support import (
    layer_shapes,
    reason_against_call,
    require_causal,
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
    `service_address` names one. Of each call the full chunks of the prompts are kept, not those of
    the output. One call at a time uses the cache; calls of other threads that run meanwhile, or
    from within it, are computed.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        self.cached_tokens = 0
        """Tokens, of each row of the last call, whose KV came from the cache."""
        self._model = model
        self._settings = load_settings(extra=settings).settings
        self._lock = threading.Lock()
        self._closing = False
        self._reasons: set[str] = set()
        self._signature: Signature | None = None
        self._prompts = self._connect()

    def __enter__(self) -> Self:
        """Return this object, which the `with` block closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Disconnect from the service, if a call is running at its end.

        An embedded service ends then; the KV on disk stays. Later calls run without the cache.
        """
        self._closing = True
        if self._lock.acquire(blocking=False):
            self._release()

    def refresh(self) -> None:
        """Identify the model anew at the next call: after its weights were written by `.data`."""
        self._signature = None

    def generate(
        self, inputs: torch.Tensor | None = None, *positional: Any, **arguments: Any
    ) -> Any:
        """Return what `model.generate` returns for the same arguments.

        `inputs` (or `input_ids`) are token ids of shape `[batch, tokens]`, without padding. A call
        whose KV may depend on more than its tokens (padding, beams, embeddings, hooks, adapters)
        runs without the cache; the log says why, once for each reason. Raises what
        `model.generate` raises, and nothing of KVHaven's.
        """
        names = list(inspect.signature(self._model.generate).parameters)[1:]
        arguments |= zip(names, positional, strict=False)
        ids = inputs if inputs is not None else arguments.pop("input_ids", None)
        self.cached_tokens = 0
        try:
            reason = reason_against_call(self._model, ids, arguments)
        except Exception as error:  # noqa: BLE001 - odd arguments are for model.generate to judge
            reason = f"arguments that are not understood ({error!r})"
        if not reason and self._closing:
            reason = "it is closed"
        if not reason and not self._lock.acquire(blocking=False):
            reason = "another call is running"
        if reason:
            self._explain(reason)
            return self._model.generate(ids, **arguments)
        try:
            return self._generate(ids, arguments)
        finally:
            self._release()

    def _release(self) -> None:
        """Let the next call use the cache; close if that was asked for meanwhile."""
        try:
            if self._closing:
                self._prompts.close()
        finally:
            self._lock.release()

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
            self._drop(batch)
            batch = None
        try:
            output = self._model.generate(ids, past_key_values=cache, **arguments)
        except BaseException:
            self._drop(batch)
            raise
        if batch is not None:
            self.cached_tokens = batch.loaded
            try:
                self._prompts.keep(batch, cache)
            except Exception:  # the output is right, and what was not kept is a later miss
                logger.exception("a prompt's KV is not kept")
                self._drop(batch)
        return output

    def _drop(self, batch: Batch | None) -> None:
        """Give up a batch, if there is one. Never raises."""
        try:
            if batch is not None:
                self._prompts.drop(batch)
        except Exception:  # the next call identifies the model anew, with new connections
            logger.exception("a call could not be given up")
            self._signature = None

    def _follow_model(self) -> None:
        """Connect anew if the model has changed, under its new identity."""
        if self._signature is None or not self._signature.is_of(self._model):
            logger.warning("the model may have changed: it is identified anew")
            self._prompts.close()
            self._prompts = self._connect()

    def _connect(self) -> Prompts:
        """Connect for the model as it is now. Raises `IncompatibleEngineError`."""
        self._signature = None
        require_supported(self._model)
        layers = layer_shapes(self._model)
        require_causal(self._model)
        signature = Signature(self._model)
        namespace = namespace_of(self._model, self._settings.model_fingerprint)
        prompts = Prompts(self._settings, namespace, layers)
        self._signature = signature
        return prompts

    def _explain(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("a call is not cached (more of the kind are not logged): %s", reason)
