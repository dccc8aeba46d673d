# SPDX-License-Identifier: Apache-2.0
"""`nohit.overhead`: what KVHaven costs when nothing hits.

Two vLLM engines, one without KVHaven and one with it and its default settings (embedded service),
take turns at 20 distinct prompts of 2,000 tokens. The value is the total time with KVHaven, saves
included, as a multiple of the total time without (see `turns`); 1.03 is allowed.
"""

import tempfile
from collections.abc import Callable

from benchmarks.results import BENCH, Result
from benchmarks.turns import Turns, warm_up
from examples.demo.model import make_model
from examples.demo.processes import engine, kvhaven

_ROUNDS = 5
_ALLOWED = 1.03


def measure(say: Callable[[str], None]) -> list[Result]:
    """Serve every prompt with and without KVHaven."""
    model = make_model(BENCH / "model")
    say("starting two vLLM engines")
    with (
        tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime,
        engine(model, BENCH / "nohit-off.log") as off,
        engine(
            model, BENCH / "nohit-on.log", kv_transfer_config=kvhaven(runtime_dir=runtime)
        ) as on,
    ):
        warm_up(off, on)
        return [Turns(off, on, say).measure("nohit.overhead", _ROUNDS, _ALLOWED, seed=1)]
