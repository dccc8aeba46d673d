# SPDX-License-Identifier: Apache-2.0
"""Generation that loads prompts' KV from KVHaven, and saves KV that it had to compute."""

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
    cache_argument,
    layer_shapes,
    reason_against_call,
    require_causal,
    require_supported,
)

logger = logging.getLogger(__name__)


class KVHaven:
    """Wraps `model.generate`, so that a common prefix of prompts is computed once.

    `model` is a decoder with full attention in every layer, on one device. `settings` are
    KVHaven's settings by name (`local_disk="/var/cache/kv"`); they override environment variables
    and the YAML file. Raises `IncompatibleEngineError` if the model is not supported, `ConfigError`
    if a setting is invalid.

    The constructor reads all weights once, to identify them, and starts an embedded node service
    unless `service_address` names one. Each call saves the full chunks of its prompts, not those
    of its output. One call at a time uses the cache; concurrent calls of other threads, and nested
    calls, run without it.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        self.cached_tokens = 0
        """Number of tokens in each row of the last call whose KV came from the cache."""
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
        """Disconnect from the service; if a call is running, when the call ends.

        An embedded service ends then; the KV on disk stays. Later calls run without the cache.
        """
        self._closing = True
        if self._lock.acquire(blocking=False):
            self._release()

    def refresh(self) -> None:
        """Identify the model again at the next call; required after writes through `.data`."""
        self._signature = None

    def generate(
        self, inputs: torch.Tensor | None = None, *positional: Any, **arguments: Any
    ) -> Any:
        """Return the result of `model.generate` for the same arguments.

        `inputs` (or `input_ids`) are token ids of shape `[batch, tokens]`, without padding. If the
        KV may depend on more than the tokens (padding, beams, embeddings, hooks, adapters), the
        call runs without the cache, and each reason is logged once. Raises the exceptions of
        `model.generate`, and none of KVHaven.
        """
        names = list(inspect.signature(self._model.generate).parameters)[1:]
        arguments |= zip(names, positional, strict=False)
        ids = inputs if inputs is not None else arguments.pop("input_ids", None)
        self.cached_tokens = 0
        try:
            reason = reason_against_call(self._model, ids, arguments)
        except Exception as error:  # noqa: BLE001 - model.generate checks its arguments
            reason = f"arguments that KVHaven cannot check ({error!r})"
        if not reason and self._closing:
            reason = "KVHaven is closed"
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
        """Release the lock for the next call; disconnect if `close` was called meanwhile."""
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
        except Exception:  # after any error the whole prompt is computed
            logger.exception("a call is not cached")
            cache = DynamicCache(config=self._model.config)
            self._drop(batch)
            batch = None
        try:
            output = self._model.generate(ids, **{cache_argument(self._model): cache}, **arguments)
        except BaseException:
            self._drop(batch)
            raise
        if batch is not None:
            self.cached_tokens = batch.loaded
            try:
                self._prompts.keep(batch, cache)
            except Exception:  # the output is right, and KV that was not saved is a later miss
                logger.exception("a prompt's KV is not saved")
                self._drop(batch)
        return output

    def _drop(self, batch: Batch | None) -> None:
        """Drop a batch, if there is one. Never raises."""
        try:
            if batch is not None:
                self._prompts.drop(batch)
        except Exception:  # the next call identifies the model again, with new connections
            logger.exception("a call's requests could not be dropped; the next call reconnects")
            self._signature = None

    def _follow_model(self) -> None:
        """Reconnect under the model's new identity if the model may have changed."""
        if self._signature is None or not self._signature.is_of(self._model):
            logger.warning("the model may have changed: it is identified again")
            self._prompts.close()
            self._prompts = self._connect()

    def _connect(self) -> Prompts:
        """Connect with the model's present identity.

        Raises `IncompatibleEngineError` if the model is not supported.
        """
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
            logger.warning("a call is not cached (logged once for each reason): %s", reason)
