# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine that plays rounds of the oracle: requests, aborts and events at steps."""

import copy
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this is run as a program

from tests.e2e import engine_process
from tests.e2e.oracle_models import picture
from tests.e2e.oracle_mutations import PATCHES, mutate

_MOST_STEPS = 100_000
"""A round of so many steps does not end: the engine waits for something in vain."""

_VERSIONS: dict[int, str] = {}
"""Of each adapter's number: a digest of the file that the engine loaded last."""


class _Play:
    """One request of a round, and what came of it."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.wanted = wanted
        self.id = ""
        self.request: Any = None
        self.error: str | None = None
        self.finished = self.disturbed = self.aborted = False
        self.version = ""
        self.ended = ""
        self.steps = 0
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.embedding: list[float] | None = None
        self.external = self.cached = 0

    @property
    def adapter(self) -> int:
        """The number of its adapter, 0 for none."""
        return int((self.wanted.get("adapter") or {"id": 0})["id"])

    @property
    def running(self) -> bool:
        return bool(self.id) and not self.finished

    def result(self) -> dict[str, Any]:
        """Return what the oracle compares."""
        everything = list(self.request._all_token_ids) if self.request is not None else []
        return {
            "error": self.error,
            "disturbed": self.disturbed,
            "aborted": self.aborted,
            "version": self.version,
            "ended": self.ended,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "embedding": self.embedding,
            "all": everything,
            "external": self.external,
            "cached": self.cached,
        }


class Commands(engine_process.Commands):
    """What the oracle's engines can be told besides."""

    @staticmethod
    def play(
        llm: Any, requests: list[dict[str, Any]], events: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Play a round to its end; return what came of each request, in order."""
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        plays = [_Play(wanted) for wanted in requests]
        coming = sorted(events, key=lambda event: event["step"], reverse=True)
        waiting = sorted(plays, key=lambda play: play.wanted["arrive"], reverse=True)
        step = 0
        # With a connector and asynchronous scheduling, as on a GPU, vLLM frees the blocks of
        # aborted requests a step later; before, it cannot reset its prefix cache.
        while (
            waiting
            or coming
            or engine.has_unfinished_requests()
            or scheduler.has_finished_requests()
        ):
            while waiting and waiting[-1].wanted["arrive"] <= step:
                _start(llm, waiting.pop())
            while coming and coming[-1]["step"] <= step:
                event = coming.pop()
                _happen(llm, event)
                for play in plays if event["do"] != "reset" else ():
                    play.disturbed |= play.running
            _step(engine, [play for play in plays if play.running])
            step += 1
            if step > _MOST_STEPS:
                stuck = scheduler.requests.values()
                raise RuntimeError(f"requests never end: {[vars(request) for request in stuck]}")
        return [play.result() for play in plays]

    @staticmethod
    def happen(llm: Any, event: dict[str, Any]) -> str:
        """Do something to the engine while it is idle; return an error's kind, if any."""
        return _happen(llm, event)

    @staticmethod
    def mutate(llm: Any, name: str) -> None:
        """Break KVHaven in a named way; "" mends it again."""
        del llm
        PATCHES.undo()
        if name:
            mutate(name)


def _step(engine: Any, running: list[_Play]) -> None:
    """Make a step, take its outputs, and abort what is to be aborted now."""
    stats: dict[str, Any] = {}
    processor = engine.output_processor
    process = type(processor).process_outputs

    def noting(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if output.prefill_stats is not None:
                stats[output.request_id] = output.prefill_stats
        return process(processor, outputs, *args, **kwargs)

    processor.process_outputs = noting
    before = dict(_VERSIONS)
    outputs = {output.request_id: output for output in engine.step()}
    for play in running:
        version = _VERSIONS.get(play.adapter, "")
        play.disturbed |= play.steps > 0 and version != before.get(play.adapter, "")
        play.version = version
        found = stats.get(play.id)
        if found is not None:
            play.external = found.num_external_cached_tokens
            play.cached = found.num_cached_tokens
        output = outputs.get(play.wanted["name"])
        if output is not None:
            _take(play, output)
        play.steps += 1
        if play.running and play.ended == "error":
            # A session whose load failed: vLLM's scheduler ended it, and its frontend still
            # waits for the answer to the session's next input, which never comes.
            engine.abort_request([play.id], internal=True)
            play.finished = True
        end = play.wanted.get("abort")
        if play.running and end is not None and play.steps >= end:
            engine.abort_request([play.id], internal=True)
            play.aborted = play.finished = True


def _take(play: _Play, output: Any) -> None:
    play.finished = output.finished
    if not hasattr(output.outputs, "__getitem__"):
        play.embedding = [float(x) for x in output.outputs.data.flatten()]
        return
    for completion in output.outputs:
        play.ended = str(completion.finish_reason)
        play.tokens += list(completion.token_ids)
        play.logprobs += [
            {token: value.logprob for token, value in position.items()}
            for position in completion.logprobs or []
        ]


def _start(llm: Any, play: _Play) -> None:
    """Hand a request to the engine; one that it refuses is over, with the error's kind."""
    engine, wanted = llm.llm_engine, play.wanted
    adapter = wanted.get("adapter")
    lora = _adapter(**adapter) if adapter else None
    if lora is not None and not wanted["healthy"] and lora.lora_int_id not in engine.list_loras():
        # vLLM would end with the engine.
        play.error, play.finished = "adapter that cannot be loaded", True
        return
    try:
        if wanted.get("turns"):
            play.id = start_session(engine, wanted, lora)
        else:
            play.id = engine.add_request(
                wanted["name"], _prompt(wanted), _parameters(llm, wanted), lora_request=lora
            )
    except Exception as error:  # noqa: BLE001 - both engines must refuse it alike
        play.error, play.finished = type(error).__name__, True
        return
    play.request = engine.engine_core.engine_core.scheduler.requests[play.id]


def start_session(engine: Any, wanted: dict[str, Any], lora: Any) -> str:
    """Begin a streaming session as `AsyncLLM` does, with all of its turns waiting."""
    inputs = engine.input_processor
    tasks = engine.get_supported_tasks()

    def request(name: str, tokens: list[int], **more: Any) -> Any:
        return inputs.process_inputs(
            name,
            _prompt(wanted | {"tokens": tokens}),
            _sampling(wanted),
            supported_tasks=tasks,
            lora_request=lora,
            **more,
        )

    end = request(wanted["name"], [0])
    inputs.assign_request_id(end)
    turns = [wanted["tokens"], *wanted["turns"]]
    parts = [request(end.request_id, turn, resumable=True) for turn in turns]
    for part in (*parts, end):
        part.external_req_id = wanted["name"]
        engine.output_processor.add_request(part, None, None, 0)
        # Both extend the list of tokens; in `AsyncLLM` a process is between, and each has its own.
        apart = copy.copy(part)
        apart.prompt_token_ids = list(part.prompt_token_ids)
        engine.engine_core.add_request(apart)
    return str(end.request_id)


def _prompt(wanted: dict[str, Any]) -> dict[str, Any]:
    import torch

    prompt: dict[str, Any] = {"prompt_token_ids": wanted["tokens"]}
    if wanted.get("embeds") is not None:
        chance = torch.Generator().manual_seed(wanted["embeds"])
        prompt = {"prompt_embeds": torch.randn(len(wanted["tokens"]), 128, generator=chance)}
    if wanted.get("pictures"):
        prompt["multi_modal_data"] = {"image": [picture(seed) for seed in wanted["pictures"]]}
    if wanted.get("names"):
        prompt["multi_modal_uuids"] = {"image": wanted["names"]}
    if wanted.get("processing"):
        prompt["mm_processor_kwargs"] = wanted["processing"]
    if wanted.get("salt") is not None:
        prompt["cache_salt"] = wanted["salt"]
    return prompt


def _parameters(llm: Any, wanted: dict[str, Any]) -> Any:
    from vllm import PoolingParams

    if llm.model_config.runner_type == "pooling":
        return PoolingParams(task="embed")
    return _sampling(wanted)


def _sampling(wanted: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    pattern = wanted.get("pattern")
    return SamplingParams(
        max_tokens=wanted["max_tokens"],
        temperature=0,
        logprobs=5,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=wanted.get("stop"),
        prompt_logprobs=wanted.get("prompt_logprobs"),
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(regex=pattern) if pattern else None,
    )


def _adapter(name: str, id: int, path: str, again: bool = False) -> Any:  # noqa: A002 - vLLM's word
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, id, path, load_inplace=again)


def _happen(llm: Any, event: dict[str, Any]) -> str:
    """Do something to the engine; return an error's kind, if any."""
    engine = llm.llm_engine
    try:
        _DEEDS[event["do"]](llm, engine, event)
    except Exception as error:  # noqa: BLE001 - both engines must fail alike
        return type(error).__name__
    return ""


def _reset(llm: Any, engine: Any, event: dict[str, Any]) -> None:
    del llm
    done = engine.reset_prefix_cache(
        reset_running_requests=event.get("running", False),
        reset_connector=event.get("connector", False),
    )
    assert done, "the prefix cache was not reset"


def _sleep(llm: Any, *_: Any) -> None:
    llm.sleep(1)
    llm.wake_up()


_DEEDS: dict[str, Callable[[Any, Any, dict[str, Any]], object]] = {
    "reset": _reset,
    "sleep": _sleep,
    "weights": lambda llm, _, event: llm.collective_rpc(
        "reload_weights", kwargs={"weights_path": event["path"]}
    ),
    "load": lambda _, engine, event: engine.add_lora(_adapter(**event["adapter"])),
    "unload": lambda _, engine, event: engine.remove_lora(event["id"]),
}


def _note_versions() -> None:
    """Note what is loaded of each adapter, apart from KVHaven, which does so too."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter

    def noting(manager: Any, request: Any) -> Any:
        model = load(manager, request)
        content = (Path(request.lora_path) / "adapter_model.safetensors").read_bytes()
        _VERSIONS[request.lora_int_id] = hashlib.sha256(content).hexdigest()[:16]
        return model

    WorkerLoRAManager._load_adapter = noting


if __name__ == "__main__":
    _note_versions()
    engine_process.main(Commands)
