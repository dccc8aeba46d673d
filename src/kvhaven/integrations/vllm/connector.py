# SPDX-License-Identifier: Apache-2.0
"""`KVHavenConnector`: vLLM's v1 connector interface, mapped to KVHaven's two sides."""

import logging
import sys
import uuid
from abc import ABCMeta
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvhaven.engine.hooks import never_raises, report_error
from kvhaven.engine.jobs import StepPlan, StepReport
from kvhaven.integrations.vllm.compat import (
    calls_layer_hooks,
    enclosing_connector,
    is_last_stage,
    require_supported_engine,
    require_supported_model,
)
from kvhaven.integrations.vllm.encoder_cache import watch_encoder_cache
from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS
from kvhaven.integrations.vllm.platforms import require_supported_platform
from kvhaven.integrations.vllm.requests import (
    PlanMetadata,
    ReportMetadata,
    VllmRequest,
    drop_cached,
    held_blocks,
    leaves_uncomputed_blocks,
    scheduled_requests,
)
from kvhaven.integrations.vllm.start import start_scheduler, start_worker
from kvhaven.integrations.vllm.stats import KVHavenPromMetrics, KVHavenStats, hit_sources

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvhaven.engine.scheduler import SchedulerSide
    from kvhaven.engine.worker import WorkerSide

logger = logging.getLogger(__name__)


def _no_results() -> "KVConnectorTransferResults":
    from vllm.distributed.kv_transfer.kv_connector.v1 import (  # noqa: PLC0415 - not in vLLM 0.29
        base,
    )

    return base.KVConnectorTransferResults()


class KVHavenFlatConnector(KVConnectorBase_V1):
    """Connector of one role and process. Only start-up raises, later hooks do not.

    With it, vLLM turns its hybrid KV manager off: all layers of a model are then in one KV group.

    The worker side starts in `register_kv_caches`, because the tensors determine the layout. The
    scheduler side starts in the constructor, which vLLM runs after that. Later hooks log and count
    errors; the exception is `UnreportedLoadError`, which ends the engine.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported_engine(vllm_config, kv_cache_config)
        require_supported_platform(vllm_config)
        self._member = f"{role.name.lower()}-{uuid.uuid4().hex}"
        self.reported_errors: set[str] = set()
        self._errors = 0
        self._handled_before: BaseException | None = None
        self._alone = enclosing_connector() is None
        """Whether the engine has no other connector, which a MultiConnector would have."""
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            watch_encoder_cache()
            self._scheduler = start_scheduler(vllm_config, kv_cache_config, self._member)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KVHaven does not guarantee delivery; a dropped save is a later miss."""
        return False

    def in_doubt(self) -> None:
        """Count an error that did not reach the engine, and restore a consistent state."""
        self._errors += 1
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.doubt()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Require no layout, but refuse unsupported models before vLLM partitions their KV."""
        require_supported_model(vllm_config)
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    # --- worker, start-up -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Read the layout, test the device, attach to the service.

        Raises `KVHavenError`, with advice, if the engine is refused. vLLM may call it again with
        other tensors (on Gaudi when it wakes up): the connection stays, and copies use the new
        ones.
        """
        self._worker = start_worker(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self._member,
            self._worker,
            alone=self._alone,
        )

    # --- worker, each step ------------------------------------------------------------------

    @never_raises(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Fence the saves whose blocks were reallocated, before these are written."""
        if self._worker is not None and isinstance(kv_connector_metadata, PlanMetadata):
            self._worker.fence(kv_connector_metadata.plan)

    @never_raises(lambda: None)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Accept the step's plan; called before the forward."""
        super().bind_connector_metadata(connector_metadata)
        self._handled_before = sys.exception()
        if self._worker is not None and isinstance(connector_metadata, PlanMetadata):
            self._worker.begin(connector_metadata.plan)

    @never_raises(lambda: None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ARG002
        """Start the step's loads; the forward waits for synchronous ones."""
        if self._worker is not None:
            self._worker.start_loads(layer_hooks=calls_layer_hooks(forward_context))

    @never_raises(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Order the layer after its part of layered loads; the whole forward waits for others."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Do nothing: whole chunks are saved after the forward."""

    @never_raises(lambda: None)
    def wait_for_save(self) -> None:
        """Save the chunks that this step completed.

        vLLM's V1 runner calls it in a `finally` block, so also after the forward raised.
        """
        if self._worker is None:
            return
        if sys.exception() is not self._handled_before:
            self._worker.forward_failed()
        else:
            self._worker.save()

    @never_raises(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Return the requests whose asynchronous loads have ended.

        With speculation, vLLM's V1 runner calls it before `wait_for_save`, which follows after the
        drafter has run. A pipeline stage without a drafter never gets `wait_for_save`, but has
        computed everything by now, so its chunks are saved here.
        """
        if self._worker is None:
            return None, None
        if self._vllm_config.speculative_config is not None:
            if sys.exception() is not self._handled_before:
                self._worker.forward_failed()
            elif is_last_stage(self._vllm_config):
                self._worker.end_forward()
            else:
                self._worker.save()
        return None, self._worker.finished_loads() or None

    @never_raises(_no_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Return the requests whose asynchronous loads have ended, and which of these failed.

        vLLM takes failed blocks of models with one KV group, and failed requests of others.
        """
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving |= self._worker.failed_requests(results.finished_recving)
        return results

    @never_raises(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that failed loads left undefined; normally there are none."""
        return self._worker.failed_blocks() if self._worker is not None else set()

    @never_raises(lambda: None)
    def build_connector_worker_meta(self) -> ReportMetadata | None:
        """Return the rank's report of ended saves and failed loads."""
        report = self._worker.report() if self._worker is not None else None
        return ReportMetadata(report) if report is not None else None

    # --- scheduler --------------------------------------------------------------------------

    @never_raises(lambda: None)
    def on_new_request(self, request: "Request") -> None:
        """Start to promote the request's chunks from the tiers."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(VllmRequest(request))

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of further tokens that are leased for loading; None means ask again."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(VllmRequest(request), num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks.

        If a load that the engine relies on cannot be planned, its output would be wrong. It is
        therefore reported as a failed load, for which the engine has a policy.
        """
        if self._scheduler is None:
            return
        block_ids, ours = blocks.get_block_ids(), VllmRequest(request)
        try:
            self._scheduler.allocated(ours, block_ids, num_external_tokens)
        except Exception as error:  # noqa: BLE001 - see above
            report_error(self, "update_state_after_alloc", error)
            if num_external_tokens:
                self._scheduler.never_loaded(ours, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PlanMetadata:
        """Return the step's plan; after an error, one with promised loads and all fences."""
        if self._scheduler is None:
            return PlanMetadata(StepPlan())
        try:
            doubt = leaves_uncomputed_blocks(self._vllm_config, scheduler_output)
            scheduled = scheduled_requests(scheduler_output)
            return PlanMetadata(self._scheduler.plan_step(scheduled, cache_in_doubt=doubt))
        except Exception as error:  # noqa: BLE001 - would end the engine
            report_error(self, "build_connector_meta", error)
            return PlanMetadata(self._scheduler.plan_in_doubt())

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Keep the block pool: it shows which blocks hold KV, and its cache can be dropped."""
        if self._scheduler is not None:
            self._scheduler.held_blocks = lambda: held_blocks(gpu_block_pool)
            self._scheduler.drop_cached = lambda: drop_cached(gpu_block_pool)

    @never_raises(lambda: None)
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Process the ranks' aggregated report."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        self._scheduler.reported(
            report.report if isinstance(report, ReportMetadata) else StepReport(),
            connector_output.finished_recving or (),
        )

    @never_raises(lambda: (False, None))
    def request_finished(
        self,
        request: "Request",
        block_ids: list[int],  # noqa: ARG002 - fences protect them
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; vLLM may free its blocks immediately.

        Returns the parameters for the node that decodes a request which this one has prefilled. A
        MultiConnector raises an error if two of its connectors return the same ones.
        """
        ours, service = VllmRequest(request), ""
        if self._scheduler is not None:
            self._scheduler.finished(ours)
            service = self._scheduler.service
        return False, ours.handover(service) if self._alone else None

    @never_raises(dict)
    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Return the numbers of loaded tokens that came from memory and from tiers."""
        if self._scheduler is None:
            return {}
        return hit_sources(self._scheduler.loaded_offer(VllmRequest(request)), num_external_tokens)

    @never_raises(lambda: ())
    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Return the KV events since the last call, for cache-aware routers."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    @never_raises(lambda: False)
    def reset_cache(self) -> bool | None:
        """Start a new epoch: KV cached before is not found again; other engines keep theirs."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    @never_raises(lambda: None)
    def encodings_dropped(self) -> None:
        """Note that vLLM has reset its encoder cache (see `encoder_cache`)."""
        if self._scheduler is not None:
            self._scheduler.encodings_dropped()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Do nothing: ranks connect through the service."""

    # --- both -------------------------------------------------------------------------------

    @never_raises(lambda: None)
    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """Return the counters since the last call."""
        side = self._scheduler or self._worker
        if side is None:
            return None
        if self._errors:
            side.stats.add("errors", self._errors)
            self._errors = 0
        counted = side.stats.take()
        return KVHavenStats(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Return the statistics class over a report's data."""
        return KVHavenStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """Return the Prometheus counters."""
        return KVHavenPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @never_raises(lambda: None)
    def shutdown(self) -> None:
        """Wait for copies, release leases, disconnect."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        self._scheduler = self._worker = None


class KVHavenConnector(KVHavenFlatConnector):
    """The usual connector: vLLM's hybrid KV manager stays on, as the model wants it."""

    def request_finished_all_groups(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as `request_finished`, for models with any number of KV groups."""
        return self.request_finished(request, block_ids[0])


if REPORTS_FAILED_REQUESTS:  # otherwise models with several KV groups are refused
    ABCMeta.register(SupportsHMA, KVHavenConnector)
