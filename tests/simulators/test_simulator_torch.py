# SPDX-License-Identifier: Apache-2.0
"""What torch can do with the simulated devices, and what is refused."""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.simulators import build, native, simulated
from tests.simulators.ops import LATER, WAITING
from tests.simulators.plays import host, is_all, is_poison
from tests.simulators.simulation import Kind

KINDS: tuple[Kind, ...] = ("hpu", "xpu", "cuda")

PROGRAMS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "zeros": lambda on: torch.zeros(2, 3, dtype=torch.bfloat16, device=on),
    "arange": lambda on: torch.arange(3, 9, 2, device=on),
    "tensor": lambda on: torch.tensor([1, 2, 3], device=on),
    "to": lambda on: torch.arange(4).to(on).to(torch.uint8),
    "bytes": lambda on: kv(on).view(torch.uint8).view(torch.int16).view(torch.bfloat16),
    "fp8": lambda on: kv(on).view(torch.float8_e4m3fn).view(torch.uint8),
    "narrow": lambda on: kv(on).narrow(0, 3, 2),
    "as_strided": lambda on: kv(on).as_strided((2, 4), (8, 1), 16),
    "permute": lambda on: kv(on).permute(1, 0, 2).contiguous(),
    "reshape": lambda on: kv(on).permute(1, 0, 2).reshape(-1),
    "unbind": lambda on: kv(on).unbind(1)[1],
    "split": lambda on: torch.split(kv(on), 3)[1],
    "unfold": lambda on: kv(on).unfold(0, 2, 2),
    "get": lambda on: kv(on)[[5, 1]],
    "get by tensor": lambda on: kv(on)[torch.tensor([5, 1], device=on), 1],
    "get by mask": lambda on: kv(on)[kv(on) > 40],
    "put": lambda on: changed(kv(on), lambda t: t.__setitem__([5, 1], kv(on)[[0, 2]])),
    "put a number": lambda on: changed(kv(on), lambda t: t.__setitem__([5, 1], 3)),
    "put a slice": lambda on: changed(kv(on), lambda t: t.__setitem__(slice(2, 4), t[4:6])),
    "put by mask": lambda on: changed(kv(on), lambda t: t.__setitem__(t > 40, 0)),
    "index_select": lambda on: kv(on).index_select(0, torch.tensor([4, 0], device=on)),
    "index_select out": lambda on: torch.index_select(
        kv(on), 0, torch.tensor([4, 0], device=on), out=torch.empty_like(kv(on)[:2])
    ),
    "index_select out of no size": lambda on: torch.index_select(
        kv(on), 0, torch.tensor([4, 0], device=on), out=kv(on).new_empty(0)
    ),
    "index_copy_": lambda on: kv(on).index_copy_(0, torch.tensor([4, 0], device=on), kv(on)[2:4]),
    "copies": lambda on: changed(kv(on), lambda t: t[1].copy_(torch.full((2, 4), 5.0))),
    "broadcast": lambda on: changed(kv(on), lambda t: t.copy_(t[3, 1].clone())),
    "arithmetic": lambda on: ((kv(on).float() * 3 + 1 - kv(on)) / 2).remainder(7),
    "bits": lambda on: kv(on).view(torch.uint8) ^ 255,
    "compare": lambda on: (kv(on) == kv(on)).all() & (kv(on) < 7).any(),
    "sum": lambda on: kv(on).float().sum((0, 2)),
    "matmul": lambda on: kv(on).float()[:, 0] @ kv(on).float()[:, 1].T,
    "softmax": lambda on: kv(on).float().softmax(-1),
    "cat": lambda on: torch.cat([kv(on), kv(on).flip(0)]),
    "stack": lambda on: torch.stack([kv(on), kv(on)]),
    "where": lambda on: torch.where(kv(on) > 9, kv(on), 0),
    "max": lambda on: kv(on).max(0).values,
    "argmax": lambda on: kv(on).argmax(-1),
    "gather": lambda on: kv(on).gather(2, torch.zeros(6, 2, 1, dtype=torch.int64, device=on)),
    "embedding": lambda on: torch.nn.functional.embedding(
        torch.tensor([2, 0], device=on), kv(on)[:, 0]
    ),
    "clone": lambda on: kv(on).clone(),
    "number of the host": lambda on: kv(on) + torch.tensor(2.0),
    "inference": torch.inference_mode()(lambda on: kv(on) + 1),
}


def kv(on: torch.device) -> torch.Tensor:
    return torch.arange(48, dtype=torch.float32).view(6, 2, 4).to(torch.bfloat16).to(on)


def changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    change(tensor)
    return tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_what_they_give_on_a_cpu(kind: Kind, name: str) -> None:
    right = PROGRAMS[name](torch.device("cpu"))
    for mode in ("eager", "lazy") if kind == "hpu" else ("eager",):
        with simulated(kind, seed=2, mode="lazy" if mode == "lazy" else "eager"):
            found = PROGRAMS[name](torch.device(kind))
            assert found.device == torch.device(kind, 0)
            assert found.shape == right.shape
            assert found.dtype == right.dtype
            assert torch.equal(found.cpu(), right)
            repr(found)


def test_the_names_of_operators_are_torchs() -> None:
    for name in (*LATER, *WAITING):
        assert hasattr(torch.ops.aten, name), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_listed_is_refused_by_name(kind: Kind) -> None:
    with simulated(kind):
        block = torch.ones(4, device=kind)
        message = rf"aten::{{}} does not exist on the simulated {kind}"
        with pytest.raises(NotImplementedError, match=message.format("sort")):
            block.sort()
        with pytest.raises(NotImplementedError, match=message.format("erf")):
            torch.erf(block)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_unlike_devices_do_not_mix(kind: Kind) -> None:
    with simulated("hpu", devices=2), simulated("xpu", devices=2), simulated("cuda", devices=2):
        here = torch.ones(4, device=kind)
        for other in ("cpu", f"{kind}:1", "xpu" if kind == "hpu" else "hpu"):
            there = torch.ones(4, device=other)
            with pytest.raises(RuntimeError, match=r"same device|on device"):
                here + there
            with pytest.raises(RuntimeError, match=r"same device|on device"):
                torch.index_select(here, 0, torch.zeros(1, dtype=torch.int64, device=other))
            if other != "cpu":
                with pytest.raises(RuntimeError, match="copy from"):
                    here.copy_(there)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_have_streams_and_memory_of_their_own(kind: Kind) -> None:
    with simulated(kind, devices=2, memory_bytes=1000) as sim:
        module = sim.module
        assert module.device_count() == 2
        first = torch.zeros(100, dtype=torch.uint8, device=kind)
        module.set_device(1)
        assert module.current_device() == 1
        second = torch.zeros(200, dtype=torch.uint8, device=kind)
        assert (first.device.index, second.device.index) == (0, 1)
        assert module.mem_get_info(0) == (900, 1000)
        assert module.mem_get_info() == (800, 1000)
        with module.device(0):
            assert module.Stream().device_index == 0
        assert module.current_stream().device_index == 1
        with pytest.raises(torch.OutOfMemoryError, match=r"900 bytes asked for, 200 of 1000"):
            torch.empty(900, dtype=torch.uint8, device=kind)
        del second
        assert module.memory_allocated() == 0
        assert module.max_memory_allocated() == 200
        with pytest.raises(RuntimeError, match=f"there is no {kind} device 2 of 2"):
            module.set_device(2)
        module.synchronize() if kind == "hpu" else module.synchronize(1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_cannot_touch_device_memory(kind: Kind) -> None:
    """As with real ones; the kernel says so kindly where a read would end the process."""
    with simulated(kind):
        block = torch.ones(4, device=kind)
        libc = ctypes.CDLL(None, use_errno=True)
        into, out_of = os.pipe()
        try:
            assert libc.write(out_of, ctypes.c_void_p(block.data_ptr()), 4) == -1
            assert ctypes.get_errno() == errno.EFAULT
        finally:
            os.close(into)
            os.close(out_of)


@pytest.mark.parametrize("kind", KINDS)
def test_new_memory_shows_poison(kind: Kind) -> None:
    with simulated(kind):
        assert is_poison(torch.empty(16, device=kind).cpu())


@pytest.mark.parametrize("kind", KINDS)
def test_what_late_work_fails_with_is_told_to_who_waits(kind: Kind) -> None:
    with simulated(kind) as sim:
        block = torch.ones(4, device=kind)
        index = torch.empty(2, dtype=torch.int64, device=kind)
        torch.index_select(block, 0, index)
        with pytest.raises(
            RuntimeError, match=rf"work on the simulated {kind} failed: aten::index"
        ):
            sim.module.synchronize()
        sim.module.synchronize()
    with pytest.raises(RuntimeError, match="out of range"), simulated(kind):  # noqa: PT012
        block = torch.ones(4, device=kind)
        torch.index_select(block, 0, torch.empty(2, dtype=torch.int64, device=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_wait_are_listed_with_who_made_them(kind: Kind) -> None:
    def forward(block: torch.Tensor) -> None:
        block.add_(1)
        block.cpu()

    with simulated(kind, unpinned_waits=False) as sim:
        block = torch.ones(4, device=kind)
        block.copy_(torch.ones(4), non_blocking=True)
        event = sim.module.current_stream().record_event()
        event.query()
        assert sim.synchronizations == []
        forward(block)
        event.synchronize()
        block.sum().item()
        sim.module.synchronize()
        block[[1]] = 3
        here = "test_simulator_torch.py"
        test = "test_calls_that_wait_are_listed_with_who_made_them"
        assert sim.synchronizations == [
            ("copy to the host", f"{here}:forward", "MainThread"),
            ("event.synchronize", f"{here}:{test}", "MainThread"),
            ("aten::_local_scalar_dense", f"{here}:{test}", "MainThread"),
            ("synchronize", f"{here}:{test}", "MainThread"),
            ("copy from the host", f"{here}:{test}", "MainThread"),
        ]
        thread = threading.Thread(target=event.synchronize, name="helper")
        thread.start()
        thread.join()
        assert sim.synchronizations[-1].thread == "helper"
        sim.reset(7)
        assert sim.synchronizations == []
        assert sim.pending == 0
        assert sim.graph_shapes == {}


# --- pinned host memory -----------------------------------------------------------------------

PINNING: tuple[Kind, ...] = ("xpu", "cuda")


@pytest.mark.parametrize("kind", PINNING)
def test_copies_of_unpinned_memory_wait(kind: Kind) -> None:
    with simulated(kind) as sim:
        target, block = torch.zeros(64), torch.ones(64, device=kind)
        target.copy_(block, non_blocking=True)
        assert is_all(target, 1)
        assert [seen.what for seen in sim.synchronizations] == ["copy to the host"]
        target.fill_(7)
        block.copy_(target, non_blocking=True)
        target.fill_(9)
        assert is_all(block.cpu(), 7)

        pinned = host(sim)
        assert pinned.is_pinned()
        assert not target.is_pinned()
        sim.synchronizations.clear()
        pinned.copy_(block, non_blocking=True)
        pinned[3:5].copy_(block[:2], non_blocking=True)
        assert is_poison(pinned)
        assert torch.ones(4, device=kind).to("cpu", non_blocking=True).is_pinned()
        assert sim.synchronizations == []
    with simulated(kind, unpinned_waits=False):
        target.copy_(torch.ones(64, device=kind), non_blocking=True)
        assert is_poison(target)


@pytest.mark.parametrize("kind", PINNING)
def test_memory_can_be_registered(kind: Kind) -> None:
    with simulated(kind) as sim:
        arena = torch.zeros(1024, dtype=torch.uint8)
        sim.pin(arena.data_ptr(), 1024)
        arena[100:164].copy_(torch.ones(64, dtype=torch.uint8, device=kind), non_blocking=True)
        assert is_poison(arena[100:164])
        sim.drain()
        assert is_all(arena[100:164], 1)
        assert arena.is_pinned()
        sim.unpin(arena.data_ptr())
        assert not arena.is_pinned()


# --- on and off -------------------------------------------------------------------------------


def test_cuda_is_as_before_afterwards() -> None:
    before = dict(vars(torch.cuda)), torch.version.cuda, torch.version.hip
    for kind, version in (("cuda", "12.8"), ("rocm", None)):
        with simulated(kind) as sim:  # type: ignore[arg-type]  # one of its words
            assert torch.cuda.is_available()
            assert torch.version.cuda == version
            assert (torch.version.hip is None) == (kind == "cuda")
            assert sim.torch_type == "cuda"
            assert torch.ones(4, device="cuda").device == torch.device("cuda:0")
            torch.manual_seed(1)
    assert (dict(vars(torch.cuda)), torch.version.cuda, torch.version.hip) == before
    assert not torch.cuda.is_available()


def test_xpu_is_as_before_afterwards() -> None:
    before = dict(vars(torch.xpu))
    with simulated("xpu") as sim:
        assert torch.xpu.is_available()
        assert torch.xpu.current_stream() == sim.module.current_stream()
        with torch.xpu.stream(sim.module.Stream()), torch.xpu.device(0):
            block = torch.ones(4, device="xpu")
        torch.manual_seed(1)
        assert not hasattr(torch.xpu, "default_stream")
        with pytest.raises(TypeError, match="enable_timing only"):
            sim.module.Event(blocking=True)
    assert {
        name: value for name, value in vars(torch.xpu).items() if before.get(name) is not value
    } == {}
    assert not torch.xpu.is_available()
    with pytest.raises(RuntimeError, match="there is no xpu: its simulator is off"):
        block.cpu()
    del block


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_on_once(kind: Kind) -> None:
    with simulated(kind):
        old = torch.Stream(torch.device(kind))
        with (
            pytest.raises(RuntimeError, match=f"the simulated {kind} is on already"),
            simulated(kind),
        ):
            pass
        assert torch.ones(3, device=kind).sum().item() == 3
    with simulated(kind) as sim, pytest.raises(RuntimeError, match="of an earlier simulation"):
        sim.module.set_stream(old)


def test_without_a_compiler_tests_are_skipped_and_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "_load", build.library)
    with pytest.raises(pytest.skip.Exception, match=r"apt-get install g\+\+"), simulated("hpu"):
        pass


def test_two_that_need_the_extension_build_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Path] = []

    def slowly(compiler: str, target: Path) -> None:
        threading.Event().wait(0.2)
        target.touch()
        built.append(target)

    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "_build", slowly)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.library())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert found == built * 2
