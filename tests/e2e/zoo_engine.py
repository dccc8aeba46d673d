# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine that serves one prompt after the other, with the features of the zoo."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this is run as a program

from tests.e2e import engine_process
from tests.e2e.oracle_models import picture

OUTPUT = 12
_DRAFTS: list[list[int]] = []
"""What a drafter with KV of its own has proposed, one list for each step."""


def record_drafts() -> None:
    """Note the tokens that a drafter proposes: only these tell of its KV, not the output."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = SpecDecodeBaseProposer.propose

    def propose(proposer: Any, *args: Any, **more: Any) -> Any:
        found = original(proposer, *args, **more)
        _DRAFTS.append(found[0].tolist())
        return found

    SpecDecodeBaseProposer.propose = propose


class Commands(engine_process.Commands):
    """What this engine can be told, too."""

    @staticmethod
    def block_size(llm: Any) -> int:
        """Return the tokens in a block, which vLLM may derive from the model."""
        return int(llm.llm_engine.vllm_config.cache_config.block_size)

    @staticmethod
    def serve(
        llm: Any, prompts: list[list[int]], feature: str, adapter: str, cold: bool = False
    ) -> list[dict[str, Any]]:
        """Answer each prompt with vLLM's own prefix cache emptied before.

        With `cold` every token is computed, and saved.
        """
        result = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            result.append(_answer(llm, prompt, feature, adapter, cold=cold))
        return result

    @staticmethod
    def serve_from_own(
        llm: Any, prompts: list[list[int]], feature: str, adapter: str
    ) -> list[dict[str, Any]]:
        """Answer each prompt with its begin in vLLM's own prefix cache, from the same prompt.

        Kernels round by the number of tokens in a step, so a shorter prompt has other KV.
        """
        result = []
        for prompt in prompts:
            llm.reset_prefix_cache()
            _answer(llm, prompt, feature, adapter, cold=True)
            result.append(_answer(llm, prompt, feature, adapter, cold=False))
        return result


def _answer(
    llm: Any, prompt: list[int], feature: str, adapter: str, *, cold: bool
) -> dict[str, Any]:
    """Return the output's tokens and all log-probabilities, or an embedding in their place."""
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest

    wanted: dict[str, Any] = {"prompt_token_ids": prompt}
    if feature == "salts":
        wanted["cache_salt"] = "ann"
    if feature == "pictures":
        wanted["multi_modal_data"] = {"image": [picture(1)]}
    lora = LoRARequest("adapter", 1, adapter) if feature == "lora" else None
    skip = True if cold else None
    _DRAFTS.clear()
    if feature == "pooling":
        params = PoolingParams(skip_reading_prefix_cache=skip)
        (pooled,) = llm.embed([wanted], pooling_params=params, use_tqdm=False)
        return {
            "tokens": [],
            "logprobs": list(pooled.outputs.embedding),
            "cached": pooled.num_cached_tokens,
            "length": len(pooled.prompt_token_ids),
        }
    (output,) = llm.generate(
        [wanted],
        SamplingParams(
            max_tokens=OUTPUT,
            temperature=0,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=1 if feature == "prompt_logprobs" else None,
            skip_reading_prefix_cache=skip,
        ),
        use_tqdm=False,
        lora_request=lora,
    )
    (completion,) = output.outputs
    places = [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
    tokens = list(completion.token_ids)
    said = [*(prompt[1:] if output.prompt_logprobs else []), *tokens]
    return {
        "tokens": tokens,
        "logprobs": [place[token].logprob for place, token in zip(places, said, strict=True)],
        "cached": output.num_cached_tokens,
        "length": len(output.prompt_token_ids),
        "drafts": list(_DRAFTS),
    }


if __name__ == "__main__":
    record_drafts()
    engine_process.main(Commands)
