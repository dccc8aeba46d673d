# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine as a child process: JSON lines in, JSON lines out (driven by `processes.py`).

    engine.py FD MODEL OPTIONS

FD is the descriptor for answers, since vLLM writes to standard output; MODEL a folder; OPTIONS
further arguments of vLLM's `LLM`, as JSON. The first answer, `{"ready": ...}`, says that the
engine serves. Then each line `{"prompt": ..., "max_tokens": ...}` is a request, served
alone and greedily, with the engine's own prefix cache emptied before. Its answer has:

- `ttft`: seconds from handing the prompt over to the first token, tokenization included;
- `total`: seconds to the last token; `tokens` and `text`: the output;
- `prompt_tokens`, and in `sources` how many of them were `computed`, or came from the `engine`'s
  own prefix cache, from `memory`, from `disk`, or from `elsewhere` (a connector that does not
  say). These are vLLM's own counters (`vllm:prompt_tokens`, `vllm:prompt_tokens_by_source` and
  `vllm:prompt_tokens_cached_by_source`), before and after.

The engine ends when its standard input does.
"""

import itertools
import json
import os
import sys
import time
from typing import Any

_SOURCES = {
    "device": "engine",
    "host": "memory",
    "disk": "disk",
    "p2p": "elsewhere",
    "external_unspecified": "elsewhere",
}
"""vLLM's words for where cached tokens came from, and ours."""


def main() -> None:
    """Start the engine, then answer requests until standard input ends."""
    descriptor, model, options = sys.argv[1:]
    answers = os.fdopen(int(descriptor), "w", buffering=1)
    began = time.perf_counter()
    from vllm import LLM  # noqa: PLC0415 - slow, and is to be timed

    defaults = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 16384,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
    }
    llm = LLM(model=model, **(defaults | json.loads(options)))
    print(json.dumps({"ready": time.perf_counter() - began}), file=answers)
    ids = itertools.count()
    for line in sys.stdin:
        print(json.dumps(answer(llm, str(next(ids)), **json.loads(line))), file=answers)


def answer(llm: Any, id_: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    """Serve one request. `llm` is vLLM's `LLM` (its types cannot be followed)."""
    from vllm import SamplingParams  # noqa: PLC0415 - loaded by now

    llm.reset_prefix_cache()
    before = counters(llm)
    began = time.perf_counter()
    llm.llm_engine.add_request(
        id_, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    )
    first, output = 0.0, None
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if not first and output.outputs[0].token_ids:
                first = time.perf_counter() - began
    total = time.perf_counter() - began
    assert output is not None
    spent = {name: value - before[name] for name, value in counters(llm).items()}
    return {
        "ttft": first,
        "total": total,
        "tokens": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
        "prompt_tokens": spent.pop("prompt"),
        "sources": spent,
    }


def counters(llm: Any) -> dict[str, int]:
    """Return vLLM's counters of prompt tokens, summed over its engines."""
    totals = dict.fromkeys(("prompt", "computed", "engine", "memory", "disk", "elsewhere"), 0)
    for metric in llm.get_metrics():
        if metric.name == "vllm:prompt_tokens":
            totals["prompt"] += int(metric.value)
        elif metric.name == "vllm:prompt_tokens_by_source":
            if metric.labels["source"] == "local_compute":
                totals["computed"] += int(metric.value)
        elif metric.name == "vllm:prompt_tokens_cached_by_source":
            totals[_SOURCES[metric.labels["source"]]] += int(metric.value)
    return totals


if __name__ == "__main__":
    main()
