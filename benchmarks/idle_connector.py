# SPDX-License-Identifier: Apache-2.0
"""Connector for vLLM that does nothing, to measure vLLM's overhead for any connector."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class IdleConnector(KVConnectorBase_V1):
    """Connector without hits, loads and saves."""

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(
        self,
        request: "Request",  # noqa: ARG002
        num_computed_tokens: int,  # noqa: ARG002
    ) -> tuple[int | None, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan nothing."""

    def build_connector_meta(
        self,
        scheduler_output: "SchedulerOutput",  # noqa: ARG002
    ) -> KVConnectorMetadata:
        """Return an empty plan."""
        return KVConnectorMetadata()
