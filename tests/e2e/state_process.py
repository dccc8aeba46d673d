# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine whose handling of recurrent states can be broken on purpose."""

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this is run as a program

from tests.e2e import engine_process
from tests.e2e.oracle_mutations import PATCHES


class Commands(engine_process.Commands):
    """What this engine can be told, too."""

    @staticmethod
    def block_size(llm: Any) -> int:
        """Return the tokens in a block, which vLLM derives from the model."""
        return int(llm.llm_engine.vllm_config.cache_config.block_size)

    @staticmethod
    def session(llm: Any, turns: list[list[int]], stop: int) -> list[int]:
        """Play a streaming session whose turns end with `stop`; return the tokens that it keeps."""
        from tests.e2e.oracle_process import start_session

        engine = llm.llm_engine
        wanted = {"name": "session", "tokens": turns[0], "turns": turns[1:]}
        name = start_session(engine, wanted | {"max_tokens": 20, "stop": [stop]}, None)
        request = engine.engine_core.engine_core.scheduler.requests[name]
        while engine.has_unfinished_requests():
            engine.step()
        return list(request._all_token_ids)

    @staticmethod
    def store_states_of_the_chunk_after(llm: Any) -> None:
        """Save each state under the key of the chunk before its own."""
        from kvhaven.engine.requests import KeptState
        from kvhaven.engine.save_planner import SavePlanner

        original = SavePlanner._plan_states

        def plan(saves: Any, state: Any, part: Any, number: int, end: int, states: Any) -> Any:
            kept: Sequence[KeptState] = states
            size, state.step_begin = state.chunk_size, 0
            early = [one._replace(tokens=one.tokens - size) for one in kept if one.tokens > size]
            return original(saves, state, part, number, end, early)

        PATCHES.setattr(SavePlanner, "_plan_states", plan)

    @staticmethod
    def load_synchronously(llm: Any) -> None:
        """Load within the step, which copies the state before it is there."""
        from kvhaven.engine.load_planner import LoadPlanner
        from kvhaven.engine.scheduler import SchedulerSide

        matched, original = SchedulerSide.matched_tokens, LoadPlanner.plan

        def found(side: Any, *args: Any) -> Any:
            return matched(side, *args)[0], False

        def plan(planner: Any, *args: Any) -> Any:
            planner._asynchronous = False
            return original(planner, *args)

        PATCHES.setattr(SchedulerSide, "matched_tokens", found)
        PATCHES.setattr(LoadPlanner, "plan", plan)

    @staticmethod
    def flip_a_bit_of_each_state(llm: Any, byte: int, bit: int) -> None:
        """Load states in which a bit of one byte is not as it was saved, nor as it is verified."""
        from kvhaven.engine.loader import Loader

        original = Loader._copy

        def flip(loader: Any, sources: Sequence[int]) -> None:
            for source in sources:
                ctypes.c_ubyte.from_address(source + byte).value ^= 1 << bit

        def copy(loader: Any, job: Any, sources: Sequence[int], groups: Any) -> Any:
            if not job.part:
                return original(loader, job, sources, groups)
            flip(loader, sources)
            try:
                return original(loader, job, sources, groups)
            finally:
                flip(loader, sources)

        PATCHES.setattr(Loader, "_copy", copy)


def schedule_ahead() -> None:
    """Have vLLM schedule asynchronously on a CPU, too, where it turns that off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(_: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


if __name__ == "__main__":
    if json.loads(sys.argv[2]).get("async_scheduling"):
        schedule_ahead()
    engine_process.main(Commands)
