# SPDX-License-Identifier: Apache-2.0
"""Adapters of vLLM's requests, plans and reports to the interface of `kvhaven.engine`."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvhaven.engine.adapters import CacheName
from kvhaven.engine.jobs import StepPlan, StepReport
from kvhaven.engine.request_parameters import RequestParameters
from kvhaven.engine.requests import KeptState, Permissions, ScheduledRequest, Transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class VllmRequest:
    """One of vLLM's requests as an `EngineRequest`; `raw` is vLLM's own object."""

    __slots__ = ("raw",)

    def __init__(self, raw: "Request") -> None:
        self.raw = raw

    @property
    def request_id(self) -> str:
        """The request's id in vLLM."""
        return str(self.raw.request_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return int(self.raw.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.raw.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the request's blocks."""
        return int(self.raw.num_computed_tokens)

    @property
    def tokens(self) -> list[int]:
        """All token ids."""
        ids: list[int] = self.raw._all_token_ids  # noqa: SLF001 - its public view is slower
        return ids

    @property
    def priority(self) -> int:
        """The request's priority in vLLM: a larger number is less important."""
        return int(self.raw.priority)

    @property
    def resumable(self) -> bool:
        """Whether the request is a streaming session."""
        return bool(getattr(self.raw, "resumable", False))

    @property
    def turn(self) -> Hashable:
        """A value that changes when a session gets more input; clients may set `arrival_time`."""
        request = self.raw
        features = getattr(request, "mm_features", None) or ()
        parameters = id(request.sampling_params)
        return request.arrival_time, request.num_prompt_tokens, len(features), parameters

    @property
    def adapter_name(self) -> CacheName:
        """The name of the request's adapter in vLLM's prefix cache."""
        return cache_name(self.raw.lora_request)

    @property
    def adapter(self) -> int | None:
        """The number of the request's LoRA adapter."""
        lora = self.raw.lora_request
        return int(lora.lora_int_id) if lora is not None else None

    @property
    def encoder_adapter(self) -> str | None:
        """The name of the request's LoRA adapter."""
        return getattr(self.raw.lora_request, "lora_name", None)

    @property
    def salt(self) -> object:
        """The tenant's cache salt, as the client sent it."""
        return self.raw.cache_salt

    @property
    def media(self) -> Sequence[Any]:
        """The request's `MultiModalFeatureSpec`s, in order."""
        items: Sequence[Any] = self.raw.mm_features
        return items

    @property
    def _parameters(self) -> RequestParameters:
        """The request's parameters; clients can send any value in their place (`vllm_xargs`)."""
        return RequestParameters(self.raw.kv_transfer_params)

    @property
    def permissions(self) -> Permissions:
        """The transfers that the request's own parameters permit."""
        request = self.raw
        load = save = request.prompt_embeds is None
        sampling = request.sampling_params
        if sampling is not None and getattr(sampling, "prompt_logprobs", None) is not None:
            # The log-probabilities of cached prompt tokens would never be computed.
            load = False
        if getattr(request, "skip_reading_prefix_cache", False):
            load = False
        return self._parameters.permissions(load=load, save=save)

    @property
    def transfer(self) -> Transfer:
        """The request's part in prefill and decode on two nodes, by its own parameters."""
        return self._parameters.transfer

    def handover(self, service: str) -> dict[str, Any] | None:
        """Parameters for the node that decodes the request (see `RequestParameters`)."""
        return self._parameters.handover(self.request_id, service)


def cache_name(lora_request: Any) -> CacheName:
    """Return the part of vLLM's block hashes that identifies an adapter (`LoRARequest` or None).

    That is the name, and in newer versions also the path, so vLLM's own function computes it.
    """
    if lora_request is None:
        return ()
    try:
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 - slow to import, and only here

        hashed = kv_cache_utils._gen_lora_extra_hash_keys  # noqa: SLF001 - no public way
        name = tuple(hashed(SimpleNamespace(lora_request=lora_request)))
        hash(name)
    except Exception:  # noqa: BLE001 - not public: if it changed, the name is used
        name = ()
    return name or (getattr(lora_request, "lora_name", None),)


def scheduled_requests(output: "SchedulerOutput") -> list[ScheduledRequest]:
    """Return the requests of a step that vLLM has scheduled."""
    counts, states = output.num_scheduled_tokens, _kept_states(output)
    scheduled = [
        ScheduledRequest(
            new.req_id,
            new.block_ids,
            new.num_computed_tokens,
            counts.get(new.req_id, 0),
            starts=True,
            states=states.get(new.req_id, ()),
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for index, name in enumerate(cached.req_ids):
        blocks, computed = cached.new_block_ids[index], cached.num_computed_tokens[index]
        own = states.get(name, ())
        scheduled.append(
            ScheduledRequest(name, blocks, computed, counts.get(name, 0), name in resumed, own)
        )
    return scheduled


def _kept_states(output: "SchedulerOutput") -> dict[str, list[KeptState]]:
    """Return the recurrent states that vLLM hands off in a step, by request.

    They are those that its prefix cache keeps (see `prefix_cache_retention_interval`).
    """
    state = output.kv_connector_block_state
    handed: Mapping[str, Any] = state.boundary_state_offloads if state is not None else {}
    return {name: [KeptState(*one) for one in kept] for name, kept in handed.items()}


def leaves_uncomputed_blocks(config: "VllmConfig", output: "SchedulerOutput") -> bool:
    """Return whether vLLM's prefix cache may hold blocks since this step that are not computed.

    With priority scheduling, vLLM (0.29 to 0.33) may preempt a request that it has already
    scheduled in the same step. The blocks of the tokens that it then does not compute stay in the
    prefix cache, if there is one.
    """
    by_priority = config.scheduler_config.policy == "priority"
    caches = bool(config.cache_config.enable_prefix_caching)
    return by_priority and caches and bool(output.preempted_req_ids)


def held_blocks(pool: "BlockPool") -> list[int]:
    """Return the blocks of vLLM's pool that requests use or its prefix cache holds."""
    return [
        block.block_id for block in pool.blocks if block.ref_cnt > 0 or block.block_hash is not None
    ]


def drop_cached(pool: "BlockPool") -> None:
    """Have vLLM's prefix cache forget all blocks; requests keep theirs."""
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """Plan of a step, as sent to the workers."""

    plan: StepPlan
    requests: list[object] = field(default_factory=list)
    """vllm-gaudi's runner reads this; it must be an empty list."""


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Report of one or several ranks, as sent to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportMetadata":
        """Return the sum of the reports of two ranks."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.aggregate(other.report))
