# SPDX-License-Identifier: Apache-2.0
"""`outage.*`: what vLLM's users feel while the node service is not there, slow, or stuck.

Two vLLM engines, one without KVHaven and one attached to a node service by its default settings,
take turns at 20 distinct prompts of 2,000 tokens (see `turns`). The value is the total time with
KVHaven as a multiple of the total time without; 1.10 is allowed. Each trouble begins before its
first prompt, so the waiting that finds it out is in the figure.

- `outage.absent`: nobody listens.
- `outage.slow`: every piece of an answer comes 10 s late, one after the other.
- `outage.stuck`: the service is stopped (SIGSTOP).
- `outage.recovery`: seconds from the end of the last trouble until a known prompt comes from
  the cache again, asked every half second; no limit.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import BENCH, Result, plain
from benchmarks.turns import Turns, ask, warm_up
from examples.demo.model import make_model
from examples.demo.processes import Engine, ProcessError, engine, kvhaven, node_service
from examples.demo.text import make_document
from tests.crash.proxy import Proxy

_ROUNDS = 1
_ALLOWED = 1.10
_DELAY_S = 10.0
_RECOVERY_S = 60.0
_KNOWN_TOKENS = 2000


def measure(say: Callable[[str], None]) -> list[Result]:
    """Serve prompts beside a service in each kind of trouble."""
    model = make_model(BENCH / "model")
    with tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime:
        address = Path(runtime) / "service.sock"
        say("starting two vLLM engines")
        with (
            Proxy(Path(runtime) / "proxy.sock", str(address)) as proxy,
            engine(model, BENCH / "outage-off.log") as off,
            engine(
                model,
                BENCH / "outage-on.log",
                kv_transfer_config=kvhaven(service_address=proxy.address),
            ) as on,
        ):
            warm_up(off, on)
            turns = Turns(off, on, say)
            results = [turns.measure("outage.absent", _ROUNDS, _ALLOWED, seed=11)]
            log = BENCH / "outage-service.log"
            with node_service(
                address, log, max_local_cpu_size="1GiB", runtime_dir=runtime
            ) as service:
                known = make_document(_KNOWN_TOKENS, seed=1)
                _seconds_until_hit(on, known)
                proxy.delay_s = _DELAY_S
                results.append(turns.measure("outage.slow", _ROUNDS, _ALLOWED, seed=12))
                proxy.delay_s = 0
                say(f"slow no more: a hit after {_seconds_until_hit(on, known):.1f} s")
                service.pause()
                results.append(turns.measure("outage.stuck", _ROUNDS, _ALLOWED, seed=13))
                service.resume()
                results.append(plain("outage.recovery", _seconds_until_hit(on, known), "s", 1))
    return results


def _seconds_until_hit(engine: Engine, prompt: str) -> float:
    """Ask for a prompt until it comes from the cache."""
    began = time.monotonic()
    while not ask(engine, prompt, 1).sources["memory"]:
        if time.monotonic() - began > _RECOVERY_S:
            raise ProcessError(f"no hit {_RECOVERY_S:.0f} s after the service was well again")
        time.sleep(0.5)
    return time.monotonic() - began
