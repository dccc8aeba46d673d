# SPDX-License-Identifier: Apache-2.0
"""Gaudi's ways: recorded work that mark_step starts, graphs that shapes make, no pinning."""

import importlib
import re
import sys
from collections.abc import Callable

import pytest
import torch

from tests.simulators import simulated
from tests.simulators.plays import (
    SEEDS,
    Play,
    host,
    is_all,
    is_poison,
    on,
    outcomes,
    store_after_compute,
)
from tests.simulators.simulation import Mode, Simulation


def mark_step() -> None:
    importlib.import_module("habana_frameworks.torch.core").mark_step()


def test_recorded_work_does_not_start_before_mark_step() -> None:
    for seed in SEEDS:
        with simulated("hpu", seed=seed, mode="lazy") as sim:
            target, side = host(sim), sim.module.Stream()
            block = torch.ones(64, device="hpu")
            target.copy_(block, non_blocking=True)
            event = sim.module.current_stream().record_event()
            side.wait_event(event)
            event.synchronize()
            sim.module.current_stream().synchronize()
            side.synchronize()
            sim.module.synchronize()
            assert not sim.tick(100)
            assert event.query(), "what is only recorded is no work of the stream yet"
            assert sim.recorded == sim.pending == 2
            assert is_poison(target)

            mark_step()
            assert sim.recorded == 0
            assert sim.pending == 2
            assert is_poison(target), "it starts work, and waits for none"
            sim.module.synchronize()
            assert is_all(target, 1)


def test_the_background_thread_starts_nothing_either() -> None:
    with simulated("hpu", mode="lazy") as sim:
        sim.run_background()
        block = torch.ones(64, device="hpu")
        sim.module.synchronize()
        assert sim.recorded == 1
        mark_step()
        sim.module.synchronize()
        assert sim.pending == 0
        del block


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_other_modes_need_no_mark_step(mode: Mode) -> None:
    with simulated("hpu", mode=mode) as sim:
        target = host(sim)
        target.copy_(torch.ones(64, device="hpu"), non_blocking=True)
        assert sim.recorded == 0
        sim.module.synchronize()
        assert is_all(target, 1)
        mark_step()


def test_results_that_the_host_needs_start_what_is_recorded() -> None:
    with simulated("hpu", mode="lazy") as sim:
        block = torch.ones(64, device="hpu")
        assert block.sum().item() == 64
        assert sim.recorded <= 1, "the sum was freed after it"
        block.add_(1)
        assert is_all(block.cpu(), 2)
        assert bool((block == 2).all())


def test_a_blocking_copy_from_the_host_takes_its_bytes_and_starts_nothing() -> None:
    with simulated("hpu", mode="lazy") as sim:
        source = host(sim, 7)
        block = source.to("hpu")
        source.fill_(9)
        sim.module.synchronize()
        assert sim.recorded == 1
        assert is_all(block.cpu(), 7)


def marked(sim: Simulation, waits: bool) -> bool:
    """An event stands for what was started before it was recorded."""
    target, ended = host(sim), sim.module.Event()
    target.copy_(torch.ones(64, device="hpu"), non_blocking=True)
    if waits:
        mark_step()
    ended.record()
    mark_step()
    ended.synchronize()
    return is_all(target, 1)


def marked_side_work(sim: Simulation, waits: bool) -> bool:
    """What one stream recorded is not before the copy of another unless it was started."""
    side, target, block = sim.module.Stream(), host(sim), on(sim, 1)
    block.fill_(7)
    if waits:
        mark_step()
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    mark_step()
    side.synchronize()
    return is_all(target, 7)


def marked_memory_of_another_stream(sim: Simulation, waits: bool) -> bool:
    """As `memory_of_another_stream`, all of it recorded before anything starts."""
    side, target, block = sim.module.Stream(), host(sim), on(sim, 1)
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    if waits:
        block.record_stream(side)
    del block
    mark_step()
    sim.module.synchronize()
    return is_all(target, 1)


@pytest.mark.parametrize("play", [marked, marked_side_work, marked_memory_of_another_stream])
def test_a_missing_mark_step_shows_and_with_it_all_is_right(play: Play) -> None:
    assert all(outcomes(play, "hpu", waits=True, mode="lazy"))
    assert not all(outcomes(play, "hpu", waits=False, mode="lazy"))


def test_waits_alone_are_not_enough_in_lazy_mode() -> None:
    assert not any(outcomes(store_after_compute, "hpu", waits=True, mode="lazy"))


def test_memory_freed_in_lazy_mode_is_freed_in_its_place() -> None:
    with simulated("hpu", mode="lazy"):
        block = torch.ones(64, device="hpu")
        result = block + 1
        del block
        mark_step()
        assert is_all(result.cpu(), 2)


# --- graph shapes -----------------------------------------------------------------------------


def test_values_of_an_index_make_no_new_shape_but_its_length_does() -> None:
    with simulated("hpu") as sim:
        block = torch.zeros(16, 4, device="hpu")
        indices = [torch.tensor(ids, device="hpu") for ids in ([0, 1], [7, 3], [9, 9], [1, 2, 3])]
        sim.forget_shapes()
        for index in indices:
            torch.index_select(block, 0, index)
        assert sim.graph_shapes == {
            "aten::index_select Float[16,4] 0 Long[2]": 3,
            "aten::index_select Float[16,4] 0 Long[3]": 1,
        }


def test_numbers_make_no_new_shape_but_dimensions_do() -> None:
    with simulated("hpu") as sim:
        block = torch.zeros(4, 4, device="hpu")
        sim.forget_shapes()
        for value in range(5):
            block.fill_(value)
            block.add_(value)
        block.sum(0)
        block.sum(1)
        assert len(sim.graph_shapes) == 4


@pytest.mark.parametrize(("mode", "count"), [("lazy", 4), ("eager", 1), ("compile", 1)])
def test_the_offset_of_a_view_is_part_of_a_lazy_graph(mode: Mode, count: int) -> None:
    with simulated("hpu", mode=mode) as sim:
        block = torch.zeros(16, 4, device="hpu")
        source = torch.ones(2, 4)
        sim.forget_shapes()
        for start in (0, 2, 4, 6, 4):
            block.narrow(0, start, 2).copy_(source, non_blocking=True)
        assert len(sim.graph_shapes) == count
        assert sim.graph_shapes.total() == 5
        assert all(shape.startswith("copy_from_host Float[2,4]") for shape in sim.graph_shapes)


def test_copies_and_strides_are_told_apart() -> None:
    with simulated("hpu") as sim:
        block = torch.zeros(4, 4, device="hpu")
        sim.forget_shapes()
        block.copy_(torch.ones(4, 4))
        block.clone()
        block.cpu()
        block[:, :2].cpu()
        assert {shape.split()[0] for shape in sim.graph_shapes} == {
            "copy_from_host", "copy_on_device", "copy_to_host",
        }  # fmt: skip
        assert "copy_to_host Float[4,2](4,1)" in sim.graph_shapes


def test_shapes_beyond_a_limit_are_errors() -> None:
    with simulated("hpu") as sim:
        block = torch.zeros(16, device="hpu")
        sim.limit_shapes(2)
        for length in (1, 2, 2, 1):
            block[:length].fill_(1)
        with pytest.raises(
            RuntimeError, match=r"graph shape 3 of 2 allowed: aten::fill_ Float\[3\]"
        ):
            block[:3].fill_(1)
        sim.limit_shapes(None)
        block[:4].fill_(1)


def test_a_lazy_graph_is_all_that_was_recorded_before_a_mark_step() -> None:
    with simulated("hpu", mode="lazy") as sim:
        block = torch.zeros(16, device="hpu")
        mark_step()
        sim.forget_shapes()
        for repeat in (1, 2, 1, 3, 2):
            for _ in range(repeat):
                block.add_(1)
            mark_step()
        assert len(sim.graph_shapes) == 1
        assert sim.graphs == 3


# --- Intel's package --------------------------------------------------------------------------


def test_the_package_is_there_while_the_simulation_is_on() -> None:
    for mode in ("lazy", "eager"):
        with simulated("hpu", mode="lazy" if mode == "lazy" else "eager") as sim:
            names = ("", ".core", ".hpu", ".utils.internal")
            htorch, htcore, hthpu, internal = (
                importlib.import_module(f"habana_frameworks.torch{name}") for name in names
            )
            assert torch.get_device_module("hpu") is sim.module
            assert htorch.core is htcore
            assert htorch.utils.internal is internal
            assert internal.is_lazy() is (mode == "lazy")
            assert hthpu.Stream is htorch.hpu.Stream is sim.module.Stream
            assert htorch.hpu.is_available()
            assert htorch.hpu.device_count() == 1
    assert not hasattr(torch, "hpu")
    assert not [name for name in sys.modules if re.match(r"habana_frameworks|torch\.hpu", name)]


def test_a_real_package_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(sys)("habana_frameworks")
    monkeypatch.setitem(sys.modules, "habana_frameworks", real)
    with simulated("hpu"):
        assert sys.modules["habana_frameworks"] is not real
    assert sys.modules["habana_frameworks"] is real


def test_host_memory_cannot_be_pinned() -> None:
    with simulated("hpu"):
        pins: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: torch.zeros(4).pin_memory(),
            lambda: torch.empty(4, pin_memory=True),
            lambda: torch.zeros(4, device="cpu", pin_memory=True),
        )
        for pin in pins:
            with pytest.raises(RuntimeError, match="host memory cannot be pinned for HPU"):
                pin()
        assert not torch.zeros(4).is_pinned()
