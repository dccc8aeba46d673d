# SPDX-License-Identifier: Apache-2.0
"""`outage.*`: slowdown of requests while the node service, or its shared tier, is impaired.

Two vLLM engines, one without KVHaven and one attached to a node service with default settings,
alternate on 20 distinct prompts of 2,000 tokens (see `turns`). The value is the total time with
KVHaven as a multiple of the total time without; the limit is 1.10. Each outage begins before its
first prompt, so the value includes the time until it is detected.

- `outage.absent`: no process listens at the socket.
- `outage.slow`: each piece of an answer arrives 10 s late, one after the other.
- `outage.stuck`: the service is stopped (SIGSTOP).
- `outage.recovery`: seconds from the end of the service's last outage until a known prompt comes
  from the cache again, requested every half second; no limit.
- `outage.stalled-s3`: the service's S3 server (moto) is stopped: its kernel accepts connections,
  but no request is answered. `outage.stalled-fs`: its shared directory is a FUSE mount whose server
  (bindfs) is stopped, so every system call there hangs. 40 prompts each. Then `kvhaven status` must
  show the tier as off, and as on after the server continues. `outage.stalled-*.recovery` is the
  time until the tier returns a known prompt.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.rates import empty_folder
from benchmarks.results import BENCH, Result, plain
from benchmarks.servers import credentials
from benchmarks.turns import Baseline, Turns, ask, warm_up
from examples.demo.model import make_model
from examples.demo.processes import (
    Engine,
    NodeService,
    ProcessError,
    engine,
    kvhaven,
    node_service,
)
from examples.demo.text import make_document
from tests import servers
from tests.crash.proxy import Proxy

_ROUNDS = 1
_ALLOWED = 1.10
_DELAY_S = 10.0
_RECOVERY_S = 60.0
_KNOWN_TOKENS = 2000
_STALLED_PROMPTS = 40
_STALLED_SEEDS = {"s3": 14, "fs": 15}


def measure(say: Callable[[str], None]) -> list[Result]:
    """Serve prompts during each kind of outage."""
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
            turns = Turns([Baseline(off, "", "without KVHaven", _ALLOWED)], on, say)
            results = turns.measure("outage.absent", _ROUNDS, seed=11)
            log = BENCH / "outage-service.log"
            with node_service(
                address, log, max_local_cpu_size="1GiB", runtime_dir=runtime
            ) as service:
                known = make_document(_KNOWN_TOKENS, seed=1)
                _seconds_until_hit(on, known)
                proxy.delay_s = _DELAY_S
                results += turns.measure("outage.slow", _ROUNDS, seed=12)
                proxy.delay_s = 0
                say(f"after the slow service: a hit after {_seconds_until_hit(on, known):.1f} s")
                service.pause()
                results += turns.measure("outage.stuck", _ROUNDS, seed=13)
                service.resume()
                results.append(plain("outage.recovery", _seconds_until_hit(on, known), "s", 1))
            for stalled in (_stalled_s3, _stalled_directory):
                try:
                    results += stalled(turns, address)
                except servers.MissingServerError as missing:
                    say(f"skipped: {missing}")
    return results


def _stalled_s3(turns: Turns, address: Path) -> list[Result]:
    """Measure with a stopped S3 server."""
    with servers.moto_process() as (url, server):
        bucket = servers.Bucket(url)
        settings = {"remote_url": f"s3://{bucket.name}", "s3_endpoint_url": url}
        with credentials(bucket):
            return _stalled("s3", turns, address, settings, server)


def _stalled_directory(turns: Turns, address: Path) -> list[Result]:
    """Measure with a stopped server of the shared directory."""
    with empty_folder("stalled") as folder:
        (folder / "store").mkdir()
        with servers.fuse_mount(folder / "store", folder / "mount") as server:
            settings = {"remote_url": f"file://{folder}/mount"}
            return _stalled("fs", turns, address, settings, server)


def _stalled(
    tier: str,
    turns: Turns,
    address: Path,
    settings: Mapping[str, object],
    server: servers.Stoppable,
) -> list[Result]:
    """Serve prompts while the tier's server is stopped."""
    name = f"outage.stalled-{tier}"
    log = BENCH / f"outage-stalled-{tier}.log"
    on, known = turns.with_kvhaven, make_document(_KNOWN_TOKENS, seed=2)
    common = {"max_local_cpu_size": "1GiB", "runtime_dir": address.parent}
    with node_service(address, log, **common, **settings) as service:
        _seconds_until_hit(on, known)
        service.flush()
        _seconds_until_hit(on, known, lambda: service.clear("memory"))
        with server.stopped():
            seed = _STALLED_SEEDS[tier]
            results = turns.measure(name, 1, seed=seed, prompts=_STALLED_PROMPTS)
            turns.say(f"{name}: {_seconds_until(service, tier, online=False)}")
        began = time.monotonic()
        turns.say(f"{name}: {_seconds_until(service, tier, online=True)}")
        _seconds_until_hit(on, known, lambda: service.clear("memory"))
        return [*results, plain(f"{name}.recovery", time.monotonic() - began, "s", 1)]


def _seconds_until(service: NodeService, tier: str, *, online: bool) -> str:
    """Wait until status shows the tier as on, or off; return the result as text."""
    began = time.monotonic()
    while True:
        health = service.status()["tiers"][tier]
        waited = time.monotonic() - began
        if online == (health["online"] and health["writable"]):
            state = "on" if online else f"off ({health['last_error']})"
            return f"status shows the tier {state} after another {waited:.1f} s"
        if waited > _RECOVERY_S:
            raise ProcessError(f"the tier is still {health} after {_RECOVERY_S:.0f} s")
        time.sleep(0.1)


def _seconds_until_hit(
    engine: Engine, prompt: str, forget: Callable[[], None] = lambda: None
) -> float:
    """Call `forget` and send the prompt until it comes from the cache; return the seconds."""
    began = time.monotonic()
    while True:
        forget()
        answer = ask(engine, prompt, 1)
        if answer.sources["computed"] < answer.prompt_tokens:
            return time.monotonic() - began
        if time.monotonic() - began > _RECOVERY_S:
            raise ProcessError(f"no hit within {_RECOVERY_S:.0f} s after the outage")
        time.sleep(0.5)
