# SPDX-License-Identifier: Apache-2.0
"""Loads that run during the forward: real bytes, on simulated GPUs, timed by a virtual clock."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the connector is vLLM's")

from kvhaven.devices.plan import Chunks, plan_chunks
from kvhaven.devices.streams import StreamDevice
from kvhaven.engine import layered
from kvhaven.engine.copies import parts_of
from kvhaven.engine.jobs import LoadJob, StepPlan
from kvhaven.engine.layered import LAYERS, LayerGroups
from kvhaven.engine.loader import Loader
from kvhaven.errors import LayoutError
from kvhaven.layouts import describe_kv_caches
from tests.devices import opened
from tests.simulation.connector_kit import BYTES, wait_until
from tests.simulation.layer_breakages import layers_without_hooks_are_not_noticed, no_waits
from tests.simulation.node import Node
from tests.unit.connector.rank_kit import Rank, save_job

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch

WORLDS = ("cuda-12.4", "cuda-13.0", "cuda-12.8-unregistered", "rocm-7")
CHUNKS = 2
SOURCE, TARGET = slice(0, 8), slice(8, 16)  # blocks of what is saved, and of what is loaded


class Forwards:
    """A rank, and forwards that read the target blocks of each layer behind its hook."""

    def __init__(self, node: Node, found: Any, layers: int, *, registers: bool = True) -> None:
        self.found = found
        self.rank = Rank(
            node,
            found.device,
            layers=layers,
            registers=registers,
            place=found.tensor,
            layered_load_ms=4.0,
        )
        self._failed = 0
        self.names = list(self.rank.tensors)
        self.read = [found.tensor(torch.zeros(8, 1, 4, 64).bfloat16()) for _ in self.names]
        save = save_job(1, CHUNKS)
        self.rank.step(StepPlan(saves=[save]))
        wait_until(lambda: self.rank.resident == CHUNKS)
        self.places = self.rank.places_of(save)
        self.right = [tensor[SOURCE].cpu() for tensor in self.rank.tensors.values()]

    def job(self, **more: Any) -> LoadJob:
        blocks = (tuple(tuple(range(at, at + 4)) for at in (8, 12)),)
        own: dict[str, Any] = {"asynchronous": False, "layered": True, "blocks": blocks}
        own |= {"places": self.places, "shard_offsets": (0,)}
        return self.rank.load(CHUNKS, **own | more)

    def forget(self) -> None:
        """Overwrite what was loaded, and what was read."""
        for tensor in (*self.read, *(tensor[TARGET] for tensor in self.rank.tensors.values())):
            tensor.fill_(7.0)
        self.found.simulation.drain()

    def run(
        self,
        loads: Sequence[LoadJob] = (),
        *,
        hooks: bool = True,
        eager: bool = False,
        order: int = 1,
        silent: Sequence[str] = (),
    ) -> None:
        """Do what the runner does in a step; `eager`: the device computes each layer early."""
        worker, plan = self.rank.worker, StepPlan(loads=list(loads))
        worker.fence(plan)
        worker.begin(plan)
        worker.start_loads(layer_hooks=hooks)
        for name, read in list(zip(self.names, self.read, strict=True))[::order]:
            if hooks and name not in silent:
                worker.wait_for_layer(name)
            read.copy_(self.rank.tensors[name][TARGET])
            if eager:
                self.found.simulation.module.current_stream().synchronize()
        worker.save()

    def is_right(self) -> bool:
        """Return whether the last forward read in each layer what was saved."""
        self.found.simulation.drain()
        reads = zip(self.read, self.right, strict=True)
        return all(torch.equal(_bits(read.cpu()), _bits(right)) for read, right in reads)

    def failed(self) -> set[int]:
        """Return the blocks that the engine must compute; the scheduler side hears of each load."""
        assert self.rank.worker.finished_loads() == set()
        blocks, report = self.rank.worker.failed_blocks(), self.rank.worker.report()
        failed = report.failed_loads if report is not None else {}
        assert bool(blocks) == (failed.get(0, 0) > self._failed)
        self._failed = failed.get(0, self._failed)
        return blocks


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


@contextlib.contextmanager
def forwards(
    node: Node, world: str = "cuda-13.0", layers: int = 12, seed: int = 0
) -> Iterator[Forwards]:
    """Give a rank whose layers have called their hooks once."""
    node.clear()
    with opened(world, seed) as found:
        made = Forwards(node, found, layers)
        try:
            made.run()
            made.forget()
            yield made
        finally:
            made.rank.worker.close()


def layered_copies(patch: Patch) -> list[int]:
    """Return a list that gets the number of copies of each load."""
    copies: list[int] = []
    original = Loader.start

    def start(loads: Loader, job: LoadJob, **more: Any) -> None:
        before = len(loads._running)
        original(loads, job, **more)
        begun = loads._running[before:]
        copies.extend(len(parts_of(load.copy)) if load.unread else 0 for load in begun)

    patch.setattr(Loader, "start", start)
    return copies


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [16, 30, 80])
@pytest.mark.parametrize("world", ["cuda-12.4", "cuda-13.0", "rocm-7"])
def test_the_forward_ends_as_soon_as_a_pipeline_of_groups_could(
    world: str, layers: int, node: Node
) -> None:
    """At most 1.1 times its bound: copies and compute at once, but the first copy before, or the
    last compute after."""
    kernel_s = 100e-6
    with forwards(node, world, layers) as one:
        size, group = CHUNKS * 4 * BYTES * layers, LAYERS / layers
        last = (layers % LAYERS or LAYERS) * kernel_s
        for ratio in (0.1, 0.5, 1.0, 2.0, 10.0):
            compute_s = layers * kernel_s
            copy_s = ratio * compute_s
            times = []
            for job in (one.job(), one.job(layered=False)):
                one.forget()
                times.append(
                    one.found.simulation.time(
                        lambda job=job: one.run([job]), kernel_s=kernel_s, bytes_s=size / copy_s
                    )
                )
                assert one.is_right()
            bound = max(copy_s * group + compute_s, copy_s + last)
            assert bound * 0.999 < times[0] <= bound * 1.1, "not within the bound"
            assert times[1] == pytest.approx(copy_s + compute_s)
            print(  # noqa: T201 - the figures
                f"{world}, {layers} layers, copy/compute {ratio}: {times[0] / bound:.3f} of the "
                f"bound, {times[0] / max(copy_s, compute_s):.3f} of the longer one; whole first "
                f"{times[1] / bound:.3f} of the bound"
            )


def test_the_bound_shows_a_forward_that_waits_for_all_groups_first(
    node: Node, monkeypatch: Patch
) -> None:
    original = Loader.wait_for_layer

    def wait(loads: Loader, layer: str) -> None:
        original(loads, "any")
        original(loads, layer)

    monkeypatch.setattr(Loader, "wait_for_layer", wait)
    with pytest.raises(AssertionError, match="bound"):
        test_the_forward_ends_as_soon_as_a_pipeline_of_groups_could("cuda-13.0", 16, node)


# --- right, or a failure ----------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("world", WORLDS)
def test_each_layer_reads_what_was_saved(world: str, order: int, node: Node) -> None:
    with forwards(node, world) as one, Patch.context() as patch:
        copies = layered_copies(patch)
        for eager in (False, True):
            one.run([one.job()], order=order, eager=eager)
            assert one.is_right()
            assert one.failed() == set()
            one.forget()
        assert copies == [3, 3]


def waits_for_the_group_before(patch: Patch) -> None:
    original = LayerGroups.__init__

    def init(groups: LayerGroups, layout: Any) -> None:
        original(groups, layout)
        groups.of_layer = {name: max(0, at - 1) for name, at in groups.of_layer.items()}

    patch.setattr(LayerGroups, "__init__", init)


def events_before_the_copies(patch: Patch) -> None:
    original = StreamDevice._submit_part

    def submit(device: StreamDevice, lane: Any, job: Any, *more: Any) -> None:
        early = device._record(lane, job)
        original(device, lane, job, *more)
        job.event = job.event if lane.to_host else early

    patch.setattr(StreamDevice, "_submit_part", submit)


def groups_in_another_order(patch: Patch) -> None:
    original = LayerGroups.__init__

    def init(groups: LayerGroups, layout: Any) -> None:
        original(groups, layout)
        befores = [group.before for group in groups.groups]
        groups.groups = [
            group._replace(before=before)
            for group, before in zip(groups.groups, reversed(befores), strict=True)
        ]

    patch.setattr(LayerGroups, "__init__", init)


def copies_do_not_wait_for_the_last_use(patch: Patch) -> None:
    patch.setattr(StreamDevice, "_wait_for", lambda *_: None)


def unknown_layers_wait_for_nothing(patch: Patch) -> None:
    original = Loader.wait_for_layer

    def wait(loads: Loader, layer: str) -> None:
        if layer != "shared":
            original(loads, layer)

    patch.setattr(Loader, "wait_for_layer", wait)


@pytest.mark.parametrize(
    "breakage", [no_waits, waits_for_the_group_before, events_before_the_copies]
)
def test_a_missing_wait_shows_poison(breakage: Callable[[Patch], None], node: Node) -> None:
    with Patch.context() as patch:
        breakage(patch)
        for seed in range(6):
            with forwards(node, seed=seed) as one:
                for _ in range(3):
                    one.run([one.job()], eager=True)
                    if not one.is_right():
                        return
                    one.forget()
    pytest.fail("nothing showed it")


def test_groups_from_other_places_show(node: Node, monkeypatch: Patch) -> None:
    groups_in_another_order(monkeypatch)
    with forwards(node) as one:
        one.run([one.job()])
        assert not one.is_right()


def test_a_layer_without_a_hook_fails_the_load_and_the_next_is_whole(
    node: Node, monkeypatch: Patch
) -> None:
    copies = layered_copies(monkeypatch)
    with forwards(node) as one:
        one.run([one.job()], eager=True, silent=["layer5"])
        assert one.failed() == set(range(8, 16))
        one.forget()
        one.run([one.job()], eager=True, silent=["layer5"])
        assert one.is_right()
        assert one.failed() == set()
        assert copies == [3, 0]


def test_it_would_not_show_otherwise(node: Node, monkeypatch: Patch) -> None:
    """Without that failure the engine would go on with what it has read."""
    layers_without_hooks_are_not_noticed(monkeypatch)
    for seed in range(6):
        with forwards(node, seed=seed) as one:
            one.run([one.job()], eager=True, silent=one.names)
            assert one.failed() == set()
            if not one.is_right():
                return
    pytest.fail("nothing showed it")


def test_no_load_is_layered_before_all_layers_have_called_their_hooks(
    node: Node, monkeypatch: Patch
) -> None:
    copies = layered_copies(monkeypatch)
    with forwards(node) as one:
        one.rank.worker.move(one.rank.layout)  # as after a sleep: all is new
        for silent in (["layer3"], (), ()):
            one.run([one.job()], silent=silent, eager=True)
            assert one.is_right()
            assert one.failed() == set()
            one.forget()
    assert copies == [0, 0, 3]


@pytest.mark.parametrize("more", [{"hooks": False}, {"job": {"layered": False}}])
def test_a_graph_without_hooks_and_a_load_that_must_be_whole(
    node: Node, monkeypatch: Patch, more: dict[str, Any]
) -> None:
    copies = layered_copies(monkeypatch)
    with forwards(node) as one:
        one.run([one.job(**more.pop("job", {}))], eager=True, **more)
        assert one.is_right()
        assert one.failed() == set()
    assert copies == [0]


def test_a_layer_that_shares_the_kv_of_another_waits_for_all(node: Node) -> None:
    with forwards(node) as one:
        worker, plan = one.rank.worker, StepPlan(loads=[one.job()])
        worker.begin(plan)
        worker.start_loads(layer_hooks=True)
        worker.wait_for_layer("shared")
        for name, read in zip(one.names, one.read, strict=True):
            read.copy_(one.rank.tensors[name][TARGET])
        one.found.simulation.module.current_stream().synchronize()
        assert one.is_right()
        worker.save()
        assert one.failed() == set(range(8, 16))  # its own layers' hooks are missing


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("world", ["cuda-13.0", "rocm-7", "cuda-12.8-unregistered"])
def test_a_copy_that_fails_midway_fails_the_load(world: str, nth: int, node: Node) -> None:
    with forwards(node, world) as one:
        make = one.found.device._make
        copy = make.copy
        calls: list[None] = []

        def failing_copy(*args: Any, **options: Any) -> None:
            calls.append(None)
            if len(calls) == nth:
                raise RuntimeError("the copy engine failed")
            copy(*args, **options)

        make.copy = failing_copy
        one.run([one.job()], eager=True)
        assert one.failed() == set(range(8, 16))
        one.forget()
        one.run([one.job()], eager=True)
        assert one.is_right()
        assert one.failed() == set()


@pytest.mark.parametrize("call", ["wait", "record", "event"])
def test_a_driver_that_refuses_an_event_does_not_show(call: str, node: Node) -> None:
    """The host waits for the copy, or the load fails."""
    for nth in range(1, 8):
        with forwards(node) as one:
            with one.found.simulation.failing(call, nth):
                one.run([one.job()], eager=True)
            blocks = one.failed()
            assert one.is_right() or blocks == set(range(8, 16))


def test_a_service_that_is_killed_midway(fresh_node: Node) -> None:
    """The arena stays mapped."""
    with forwards(fresh_node) as one:
        wait, hooks = one.rank.worker.wait_for_layer, []

        def killing_wait(layer: str) -> None:
            hooks.append(layer)
            if len(hooks) == 5:
                fresh_node.kill()
            wait(layer)

        one.rank.worker.wait_for_layer = killing_wait  # type: ignore[method-assign]
        one.run([one.job()], eager=True)
        assert one.is_right()
        assert one.failed() == set()


def test_a_forward_that_raised_midway_leaves_nothing_behind(node: Node) -> None:
    with forwards(node) as one:
        worker, plan = one.rank.worker, StepPlan(loads=[one.job()])
        worker.begin(plan)
        worker.start_loads(layer_hooks=True)
        worker.wait_for_layer("layer")
        worker.forward_failed()
        one.run([one.job()], eager=True)
        assert one.is_right()
        assert one.failed() == set()


def test_synchronous_loads_come_before_asynchronous_ones(node: Node, monkeypatch: Patch) -> None:
    """Copies run in the order of their calls, and the forward waits for these."""
    copies = layered_copies(monkeypatch)
    with forwards(node) as one:
        late = replace(one.job(), asynchronous=True, layered=False, blocks=(((0, 1, 2, 3),),))
        one.run([replace(late, places=one.places[:1], request_id="late"), one.job()])
        assert one.is_right()
    assert copies == [3, 0]


def test_a_synchronous_load_that_was_not_started_before_the_forward_fails(node: Node) -> None:
    with forwards(node) as one:
        one.rank.worker.begin(StepPlan(loads=[one.job()]))
        one.rank.worker.save()
        assert one.failed() == set(range(8, 16))


# --- the groups' places ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["BHNC", "2BNHD", "heads"])
@pytest.mark.parametrize("layers", [1, 3, 4, 5, 9])
def test_the_groups_are_the_whole(layers: int, form: str, monkeypatch: Patch) -> None:
    """They have the same moves between host and device, and each layer is in one group."""
    monkeypatch.setattr(layered, "LAYERS", 2)
    shape = {"BHNC": (6, 2, 4, 16), "2BNHD": (2, 6, 4, 2, 8), "heads": (6, 2, 4, 16)}[form]
    tensors = {f"layers.{i}": torch.zeros(shape, dtype=torch.bfloat16) for i in range(layers)}
    if form == "heads":  # heads lie outside of the blocks
        tensors = {
            name: torch.zeros((2, 6, 4, 16), dtype=torch.bfloat16).transpose(0, 1)
            for name in tensors
        }
    layout = describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (2 * 4 * 16 * 2, 4)),
        num_blocks=6,
        kernel_tag="",
        form="BHNC" if form == "heads" else form,
    )
    groups = LayerGroups(layout)
    assert list(groups.of_layer) == list(tensors)
    assert len(groups.groups) == -(-layers // 2)
    blocks, hosts = [[0, 3, -1], [5, 2, 4]], [1 << 20, 1 << 24]

    def moves(one: Any, places: Sequence[int]) -> set[tuple[int, ...]]:
        found = plan_chunks(one, Chunks.of(blocks, places))
        return set(zip(*(part.astype(np.int64).tolist() for part in found), strict=True))

    total: set[tuple[int, ...]] = set()
    for group in groups.groups:
        total |= moves(group.layout, [host + 3 * group.before for host in hosts])
    assert total == moves(layout, hosts)


def test_layers_that_are_not_in_order_are_refused() -> None:
    """Their groups' places in the payload would not be consecutive."""
    tensors = {f"layers.{i}": torch.zeros((6, 2, 4, 16)) for i in range(2 * LAYERS)}
    layout = describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (2 * 4 * 16 * 4, 4)),
        num_blocks=6,
        kernel_tag="",
        form="BHNC",
    )
    mixed = replace(layout, layers=layout.layers[::-1], tensors=layout.tensors[::-1])
    with pytest.raises(LayoutError, match="layered_load_ms"):
        LayerGroups(mixed)
