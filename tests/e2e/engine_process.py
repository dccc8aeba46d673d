# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in a process of its own, driven by JSON lines on standard input.

Run by `engines.py`. Every command is an object with `do`; every answer is one JSON line on
the descriptor named by the first argument, since vLLM writes to standard output.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from typing import Any


def main(commands: type["Commands"]) -> None:
    """Start the engine that the second argument describes, then answer commands."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    arguments = json.loads(sys.argv[2])
    from vllm import LLM

    inspect_models_here()
    fork_workers()
    llm = LLM(**arguments)
    print(json.dumps({"ready": True, "pid": os.getpid()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(commands, command.pop("do"))(llm, **command)
        print(json.dumps(result), file=answers)


def inspect_models_here() -> None:
    """Have vLLM ask a model's class here what it can do, which is safe on a CPU.

    Else it starts another Python for that, which imports torch and vLLM: half of a start.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def fork_workers() -> None:
    """Have vLLM fork its own processes, as it does on GPUs; on a CPU it starts new Pythons.

    This process has computed nothing yet, so no thread of torch is lost in a fork. Ranks wait for
    their next step by yielding the core in a loop. If all cores are taken by that, Linux 6.18 lets
    other processes wait for 10 s and longer: the node service answered a lookup too late. So they
    sleep where they would yield.
    """
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda _method=None: get_context("fork")  # type: ignore[assignment]
    os.sched_yield = lambda: time.sleep(0.0002)


class Commands:
    """What an engine can be told."""

    @staticmethod
    def generate(
        llm: Any,
        prompts: list[list[int]],
        max_tokens: int = 1,
        sampling: dict[str, Any] | None = None,
        salts: list[str] | None = None,
        priorities: list[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Generate greedily; return tokens, their log-probabilities, cached tokens.

        `logprob` is that of the first token, `handover` the parameters for another node.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=max_tokens, temperature=0, logprobs=1, ignore_eos=True, **(sampling or {})
        )
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for one, salt in zip(inputs, salts or [], strict=False):
            one["cache_salt"] = salt
        outputs = llm.generate(
            inputs, parameters, use_tqdm=False, **({"priority": priorities} if priorities else {})
        )
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprob": next(iter(output.outputs[0].logprobs[0].values())).logprob,
                "logprobs": [
                    at[token].logprob
                    for at, token in zip(
                        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
                    )
                ],
                "cached": output.num_cached_tokens,
                "handover": output.kv_transfer_params,
            }
            for output in outputs
        ]

    @staticmethod
    def reset(llm: Any, connector: bool = False) -> bool:
        """Empty the engine's own prefix cache (and with `connector` start a new epoch)."""
        return bool(llm.reset_prefix_cache(reset_connector=connector))

    @staticmethod
    def abort_storm(llm: Any, prompts: list[list[int]], seed: int) -> int:
        """Add every prompt and abort all of them at random steps; return how many finished."""
        from vllm import SamplingParams

        engine, chance = llm.llm_engine, random.Random(seed)
        waiting = [f"storm-{seed}-{index}" for index in range(len(prompts))]
        for id_, prompt in zip(waiting, prompts, strict=True):
            engine.add_request(
                id_, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=300, ignore_eos=True)
            )
        finished = 0
        while engine.has_unfinished_requests():
            if waiting and chance.random() < 0.7:
                engine.abort_request([waiting.pop(chance.randrange(len(waiting)))])
            finished += sum(output.finished for output in engine.step())
        return finished

    @staticmethod
    def metrics(llm: Any) -> dict[str, float]:
        """Return the engine's counters of KVHaven, of caches and of preemptions."""
        totals: dict[str, float] = {}
        for metric in llm.get_metrics():
            if any(word in metric.name for word in ("kvhaven", "cache", "preempt")):
                totals[metric.name] = totals.get(metric.name, 0) + getattr(metric, "value", 0)
        return totals

    @staticmethod
    def embed(llm: Any, prompts: list[list[int]]) -> list[list[float]]:
        """Return an embedding of each prompt (engines with `runner="pooling"`)."""
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return [list(output.outputs.embedding) for output in outputs]


if __name__ == "__main__":
    main(Commands)
