# SPDX-License-Identifier: Apache-2.0
"""`nohit.overhead`: overhead of KVHaven without hits.

Three vLLM engines alternate on 20 distinct prompts of 2,000 tokens: one with KVHaven and its
default settings (embedded service), one with a connector that does nothing, and one without a
connector. The value is the total time with KVHaven, saves included, as a multiple of the total time
of another engine (see `turns`). The limits are 1.01 of the idle connector (`nohit.overhead`) and
1.03 of vLLM alone (`nohit.overhead.alone`). vLLM has some overhead for any connector, see
docs/performance.md.
"""

import tempfile
from collections.abc import Callable

from benchmarks.results import BENCH, Result
from benchmarks.turns import Baseline, Turns, warm_up
from examples.demo.model import make_model
from examples.demo.processes import engine, kvhaven

_ROUNDS = 5
_IDLE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": "benchmarks.idle_connector",
    "kv_role": "kv_both",
}


def measure(say: Callable[[str], None]) -> list[Result]:
    """Serve each prompt with and without KVHaven."""
    model = make_model(BENCH / "model")
    say("starting three vLLM engines")
    with (
        tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime,
        engine(model, BENCH / "nohit-alone.log") as alone,
        engine(model, BENCH / "nohit-idle.log", kv_transfer_config=_IDLE) as idle,
        engine(
            model, BENCH / "nohit-on.log", kv_transfer_config=kvhaven(runtime_dir=runtime)
        ) as on,
    ):
        warm_up(alone, idle, on)
        baselines = [
            Baseline(idle, "", "with a connector that does nothing", 1.01),
            Baseline(alone, ".alone", "without a connector", 1.03),
        ]
        return Turns(baselines, on, say).measure("nohit.overhead", _ROUNDS, seed=1)
