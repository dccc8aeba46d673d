# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, which leaves blocks in its prefix cache that were never computed."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvhaven.integrations.vllm.requests import leaves_uncomputed_blocks
from tests.simulation.engine_world import BLOCK, Setup, make_config, make_kv_cache_config

pytestmark = pytest.mark.slow


def test_a_preemption_in_the_step_that_scheduled_a_request_is_noticed(tmp_path: Path) -> None:
    """If this fails because `low` resumes at 40, vLLM has mended it: then drop the distrust."""
    setup = Setup(asynchronous_scheduling=False, blocks=15, budget=24, policy="priority")
    config = make_config(tmp_path, setup)
    config.kv_transfer_config = None
    config.scheduler_config.long_prefill_token_threshold = 8
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler = Scheduler(
        config,
        make_kv_cache_config(setup),
        StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    requests: dict[str, Request] = {}

    def add(name: str, prompt: range, priority: int) -> None:
        requests[name] = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
            pooling_params=None,
            priority=priority,
            block_hasher=hasher,
        )
        scheduler.add_request(requests[name])

    def step() -> SchedulerOutput:
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: computed[name] + output.num_scheduled_tokens[name] for name in names}
        done.update(ends)
        sampled = [[7] if ends[name] >= requests[name].num_tokens else [] for name in names]
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        return output

    done: dict[str, int] = {}
    add("low", range(50), priority=1)
    assert not leaves_uncomputed_blocks(config, step())
    add("high", range(100, 107), priority=0)
    output = step()
    while not output.preempted_req_ids:
        assert not leaves_uncomputed_blocks(config, output)
        output = step()
    assert output.preempted_req_ids == {"low"}
    assert leaves_uncomputed_blocks(config, output)
    assert done["low"] == 40
    output = step()
    cached = output.scheduled_cached_reqs
    resumed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    assert resumed["low"] == 44  # of these, 4 were never computed
