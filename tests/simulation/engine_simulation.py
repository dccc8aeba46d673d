# SPDX-License-Identifier: Apache-2.0
"""Random schedules: requests come, are preempted, aborted and resumed, and all bytes are right."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvhaven.integrations.vllm import loaded_model
from tests.simulation.engine_model import VOCABULARY, Model
from tests.simulation.engine_world import CHUNK, MODEL_LENGTH, PATIENT, Engine, Setup
from tests.simulation.node import Node
from tests.simulators.simulation import Simulation as Simulated

_DRAIN_S = 30.0


def random_setup(
    choice: random.Random, node: Node, second: Node | None = None, *, patient: bool = True
) -> Setup:
    """Return an engine of any kind; with `second`, one in four has a MultiConnector.

    `patient`: its deadlines are not those of the defaults, but long.
    """
    multi = second is not None and choice.random() < 0.25
    tails = choice.random() < 0.6
    return Setup(
        asynchronous_scheduling=choice.random() < 0.7,
        load_mode=choice.choice(("async", "sync")),
        world=choice.choice((1, 1, 2)),
        blocks=choice.choice((48, 64, 100)),
        prefix_caching=choice.random() < 0.7,
        save_decode=choice.random() < 0.5,
        tails=tails,
        format=choice.choice(("paged", "portable")),
        budget=choice.choice((16, 48, 100)),
        policy=choice.choice(("fcfs", "priority")),
        long_prefill=choice.choice((0, 8, 16)),
        service_address=node.address,
        second_address=second.address if second is not None and multi else "",
        settings=PATIENT if patient else (),
    )


class Simulation:
    """One engine on one or two nodes, driven by a seed.

    `faults`: the service is killed, started again and stopped for a while at random moments.
    `failing_loads`: asynchronous loads fail at random, and the engine computes instead.
    `simulated`: the engine's device is a simulated accelerator.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        nodes: Sequence[Node],
        setup: Setup,
        monkeypatch: pytest.MonkeyPatch,
        *,
        faults: bool = False,
        failing_loads: bool = False,
        simulated: Simulated | None = None,
    ) -> None:
        self.choice = random.Random(seed)
        self.node = nodes[0]
        self.nodes = nodes
        self.faults = faults
        self.failing_loads = failing_loads
        self.model = Model()
        self.engine = Engine(folder, setup, self.model, self.choice, monkeypatch, simulated)
        self.engine.wait_ready()
        self._documents = [
            [self.choice.randrange(VOCABULARY) for _ in range(self.choice.randint(30, 140))]
            for _ in range(4)
        ]
        self._asked: list[list[int]] = []
        self._names = 0
        self._aborted: set[str] = set()
        self.engine.before_update = self._abort_one
        self._expected: dict[str, list[int]] = {}
        self._dead_until = 0.0
        self._stopped_until = 0.0

    def run(self, steps: int) -> dict[str, float]:
        """Run random steps, then drain, check everything, and return what was counted."""
        try:
            for _ in range(steps):
                self._act()
                self._step()
            self._heal()
            self.drain()
            self.check()
        except BaseException:
            for device in self.engine.devices:
                device.abandon()
            raise
        finally:
            self._heal()
            self.engine.close()
        counters = dict(self.engine.counters)
        counters["fences"] = sum(device.fences for device in self.engine.devices)
        counters["misled"] = len(self.engine.uncomputed.ever_misled)
        counters["preemptions"] = sum(r.num_preemptions for r in self.engine.requests.values())
        return counters

    def ask(self, prompt: list[int], length: int, salt: str | None = None) -> str:
        """Add a request and remember what must come of it."""
        self._names += 1
        name = f"r{self._names}"
        self._expected[name] = self.model.continuation(salt, prompt, length)
        self.engine.add(name, prompt, length, salt=salt, priority=self.choice.randint(0, 2))
        return name

    def drain(self) -> None:
        """Run until every request has ended and every copy too."""
        end = time.monotonic() + _DRAIN_S
        while self.engine.busy:
            self._step()
            assert time.monotonic() < end, f"stuck: {self._unfinished()}"
        for device in self.engine.devices:
            device.synchronize()

    def check(self) -> None:
        """Compare all outputs, and see that nothing is left in the service."""
        for name, expected in self._expected.items():
            if name in self.engine.uncomputed.ever_misled:
                continue  # vLLM's fault; KV that we saved of it is compared when it is loaded
            got = self.engine.outputs[name]
            failed = self._status(name) == "FINISHED_ERROR"
            assert not failed or self.engine.counters["failed_loads"], f"{name} failed"
            if failed or name in self._aborted:
                assert got == expected[: len(got)], f"{name} went wrong before its end"
            else:
                assert got == expected, f"{name}: {got} instead of {expected}"
        for node in self.nodes:
            check_no_leaks(node)

    # --- what may happen --------------------------------------------------------------------

    def _act(self) -> None:
        choice = self.choice
        live = self._live()
        if len(live) < 10 and choice.random() < 0.3:
            for _ in range(choice.choice((1, 1, 2, 3))):
                self.ask(self._prompt(), choice.randint(1, 20), choice.choice((None, None, "t")))
        self._abort_one()
        if choice.random() < 0.02:
            self._reset()
        if choice.random() < 0.01:
            self.engine.move()
        if self.failing_loads and choice.random() < 0.1:
            device = choice.choice(self.engine.devices)
            device.fail_loads = 1
            device.spare_loads = choice.choice((0, 1))  # of several parts, the second one's fails
        if self.faults:
            self._break_something()

    def _abort_one(self) -> None:
        """Abort a request now and then: between steps, or between a step's compute and its end."""
        live, choice = self._live(), self.choice
        if live and choice.random() < 0.015:
            loading = [n for n in live if self._status(n) == "WAITING_FOR_REMOTE_KVS"]
            victim = choice.choice(loading if loading and choice.random() < 0.7 else live)
            self._aborted.add(victim)
            self.engine.abort(victim)

    def _live(self) -> list[str]:
        return [n for n, r in self.engine.requests.items() if not r.is_finished()]

    def _step(self) -> None:
        if self.choice.random() < 0.5:
            self.engine.tick()
        self.engine.step()

    def _prompt(self) -> list[int]:
        """Return a prompt that shares a prefix with others, often up to a chunk's border.

        With tails, some repeat a prompt of a short time ago, and many end with two tokens behind a
        chunk's border, as others with another beginning do.
        """
        choice = self.choice
        if self.engine.setup.tails and self._asked and choice.random() < 0.4:
            return list(choice.choice(self._asked[-6:]))
        document = choice.choice(self._documents)
        cut = choice.randint(1, len(document))
        if choice.random() < 0.4:
            cut = max(CHUNK, cut // CHUNK * CHUNK)
        tail = choice.choice((0, 2, 2, 2, 12) if self.engine.setup.tails else (0, 0, 1, 3, 12))
        prompt = document[:cut] + [choice.randrange(VOCABULARY) for _ in range(tail)]
        self._asked.append(prompt[: MODEL_LENGTH - 30])
        return list(self._asked[-1])

    def _reset(self) -> None:
        """Reset the caches, or only the engine's own while its weights are updated in place.

        (Loads that fail by that must be asynchronous: see `Setup.load_mode` and `failing_loads`.)
        """
        scheduler, choice = self.engine.scheduler, self.choice
        running, connector = choice.random() < 0.5, choice.random() < 0.5
        setup = self.engine.setup
        update = choice.random() < 0.3 and setup.load_mode == "async" and not setup.second_address
        if running:
            while self.engine.in_flight:
                self.engine.take()
            # vLLM raises when a load is under way or its blocks are held.
            live = {request.request_id for request in scheduler.running}
            blocks = scheduler.kv_cache_manager.get_block_ids
            held = any(any(blocks(name)) for name in scheduler.requests.keys() - live)
            running = not held
        if scheduler.reset_prefix_cache(running, connector) and (connector or update):
            # What a weight update does; everything the engine holds was dropped.
            self.model.weights += 1
            if update:
                loaded_model.LOADED.weights_changed()
            for name, request in self.engine.requests.items():
                if not request.is_finished() and name not in self._aborted:
                    self._expect_anew(name)

    def _expect_anew(self, name: str) -> None:
        request = self.engine.requests[name]
        output = list(request.output_token_ids)
        tokens = list(request.prompt_token_ids) + output
        rest = self.model.continuation(request.cache_salt, tokens, request.max_tokens - len(output))
        self._expected[name] = output + rest

    def _break_something(self) -> None:
        now = time.monotonic()
        if self._dead_until:
            if now > self._dead_until:
                self.node.start()
                self._dead_until = 0.0
        elif self._stopped_until:
            if now > self._stopped_until:
                self.node.resume()
                self._stopped_until = 0.0
        elif self.choice.random() < 0.004:
            self.node.kill()
            self._dead_until = now + self.choice.uniform(0, 0.3)
        elif self.choice.random() < 0.008:
            self.node.stop()
            self._stopped_until = now + self.choice.uniform(0, 0.3)

    def _heal(self) -> None:
        if self._stopped_until:
            self.node.resume()
        if self._dead_until:
            self.node.start()
        self._dead_until = self._stopped_until = 0.0

    def _status(self, name: str) -> str:
        return str(self.engine.requests[name].status.name)

    def _unfinished(self) -> str:
        scheduler = self.engine.scheduler
        blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        states = [
            f"{name}: {self._status(name)}, {request.num_computed_tokens} of {request.num_tokens}"
            for name, request in self.engine.requests.items()
            if not request.is_finished()
        ]
        return f"{blocks} free blocks, {len(scheduler.running)} running; {'; '.join(states)}"


def check_no_leaks(node: Node) -> None:
    """Wait until nobody holds anything in the service; cleared, it holds nothing at all.

    (A chunk that only some ranks wrote stays reserved without a writer: it can be completed,
    evicted and cleared.)
    """
    end = time.monotonic() + 10
    while True:
        node.clear()
        figures = node.status().catalog
        held = {
            "leases": figures.leases,
            "leased": figures.leased_bytes,
            "reserved": figures.reserved_bytes,
            "doomed": figures.retired_bytes,
            "quarantined": figures.quarantined_bytes,
            "used": figures.used_bytes,
        }
        if not any(held.values()):
            return
        assert time.monotonic() < end, f"left in the service: {held}"
        time.sleep(0.02)
