# SPDX-License-Identifier: Apache-2.0
"""Native code copies heads as numpy does, and touches nothing else."""

import math
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.devices import native

NO_COMPILER = "there is no C compiler: apt-get install gcc"
SOURCE = Path(native.__file__).with_name("native.c")

Array = npt.NDArray[np.unsignedinteger]
Shape = tuple[int, ...]


@pytest.fixture(scope="module", autouse=True)
def _is_built() -> None:
    if native.function is None and shutil.which("cc") is None:
        pytest.skip(NO_COMPILER)
    assert native.function is not None, "not built, or of another version: make setup"


class Side:
    """An array amid other bytes, its dimensions in some order in memory."""

    def __init__(self, shape: Shape, items: str, order: Sequence[int], gaps: Sequence[int]) -> None:
        self._shape, self._order = shape, order
        lengths = [shape[dimension] + gap for dimension, gap in zip(order, gaps, strict=True)]
        size = math.prod(lengths) * np.dtype(items).itemsize
        content = bytearray(random.Random(size).randbytes(size))
        self.memory: Array = np.frombuffer(content, items).reshape(lengths)

    def array(self, memory: Array | None = None) -> Array:
        whole = self.memory if memory is None else memory
        return whole.transpose(np.argsort(self._order))[tuple(map(slice, self._shape))]


@st.composite
def sides(draw: st.DrawFn, shape: Shape, items: str, last: int) -> Side:
    """One whose dimension `last`, of tokens or of items, is dense."""
    others = [dimension for dimension in range(6) if dimension != last]
    order = [*draw(st.permutations(others)), last]
    return Side(shape, items, order, draw(st.tuples(*[st.integers(0, 2)] * 6)))


@given(data=st.data())
def test_it_copies_what_numpy_copies_and_touches_nothing_else(data: st.DataObject) -> None:
    few, many = st.integers(1, 3), st.integers(1, 20)
    blocks, heads, layers = data.draw(st.tuples(few, few, few), "blocks, heads, layers")
    moves = list(zip(*[data.draw(st.permutations(range(blocks))) for _ in range(2)], strict=True))
    moves = moves[: data.draw(st.integers(0, blocks), "moves")]
    pairs = []
    for _ in range(data.draw(few, "pairs")):
        planes, tokens, count = data.draw(st.tuples(few, many, many))
        shape = (blocks, heads, layers, planes, tokens, count)
        items = data.draw(st.sampled_from(["<u2", "<u4"]), "items")
        lasts = data.draw(st.sampled_from([(4, 5), (5, 4), (5, 5)]), "dense in source, target")
        pairs.append(tuple(data.draw(sides(shape, items, last)) for last in lasts))
    expected = [target.memory.copy() for _, target in pairs]
    for (source, target), memory in zip(pairs, expected, strict=True):
        for one, other in moves:
            target.array(memory)[other] = source.array()[one]
    arrays = [(source.array(), target.array()) for source, target in pairs]
    assert all(native.copies(source, target) for source, target in arrays)
    native.copy_heads(arrays, moves)
    for (_, target), memory in zip(pairs, expected, strict=True):
        assert np.array_equal(target.memory, memory)


def test_what_it_cannot_copy_is_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 1, 1, 1, 8, 8)
    rows, columns = np.zeros(shape, "<u2"), np.zeros(shape, "<u2").swapaxes(4, 5)
    wide = np.zeros((*shape[:5], 16), "<u2")[..., ::2]
    assert native.copies(rows, columns)
    assert native.copies(columns, rows)
    assert native.copies(rows, rows)
    assert not native.copies(columns, columns)
    assert not native.copies(rows, wide)
    assert not native.copies(wide, rows)
    assert not native.copies(rows.astype("<u8"), columns.astype("<u8"))
    monkeypatch.setattr(native, "function", None)
    assert not native.copies(rows, rows)


def test_one_token_may_lie_anyhow() -> None:
    source = np.arange(8, dtype="<u2").reshape(1, 1, 1, 1, 1, 8)
    source = np.lib.stride_tricks.as_strided(source, strides=(*[16] * 4, 2, 2))
    target = np.zeros((1, 1, 1, 1, 8, 4), "<u2").swapaxes(4, 5)[..., :1, :]
    assert native.copies(source, target)
    native.copy_heads([(source, target)], [(0, 0)])
    assert np.array_equal(target, source)


def test_arrays_of_unlike_shape_are_refused() -> None:
    rows = np.zeros((1, 1, 1, 1, 8, 8), "<u2")
    shorter, two_heads = rows[..., :7], np.zeros((1, 2, 1, 1, 8, 8), "<u2")
    for pairs in (
        [(rows, shorter)],
        [(rows, two_heads)],
        [(rows, rows.astype("<u4"))],
        [(rows, rows.copy()), (two_heads, two_heads.copy())],
    ):
        with pytest.raises(ValueError, match="cannot be copied"):
            native.copy_heads(pairs, [(0, 0)])


def test_without_a_library_there_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "none.so").write_text("no library")
    assert native.load(tmp_path / "none.so") is None
    assert native.load(tmp_path / "absent.so") is None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kvhaven_copy_heads_1(", "kvhaven_copy_heads_2("),
        ("_mm_unpackhi_epi16(even", "_mm_unpacklo_epi16(even"),
        ("ab = _mm_unpackhi_epi32", "ab = _mm_unpacklo_epi32"),
        ("turn_items(m, item, 0, rows, columns, m->columns);", ""),
        ("turn_items(m, item, rows, m->rows, 0, m->columns);", ""),
        ("int columns = to[5] == pair->item;", "int columns = 1;"),
        ("(size_t)row);\n    }", "(size_t)row - 1);\n    }"),
        ("at(&pair->target, to, ", "at(&pair->target, from, "),
    ],
)
def test_a_library_that_does_something_else_is_not_used(
    right: str, wrong: str, tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(NO_COMPILER)
    code = SOURCE.read_text()
    assert right in code
    (tmp_path / "native.c").write_text(code.replace(right, wrong, 1))
    built = tmp_path / "native.so"
    command = [compiler, "-O1", "-fPIC", "-shared", "-o", str(built), str(tmp_path / "native.c")]
    subprocess.run(command, check=True)
    assert native.load(built) is None
