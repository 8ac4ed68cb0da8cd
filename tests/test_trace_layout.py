"""Strides and flags are those that MLX gives its arrays."""

from __future__ import annotations

import random
from math import prod

import mlx.core as mx
import numpy as np
import pytest

from oomguard.trace import layout as lay
from oomguard.trace.layout import Layout, row_major


def test_row_major_matrix_is_dense_in_rows_only() -> None:
    given = row_major((3, 4))
    assert (given.strides, given.span) == ((4, 1), 12)
    assert (given.contiguous, given.row, given.col) == (True, True, False)


def test_vector_and_scalar_are_dense_both_ways() -> None:
    assert (row_major((5,)).row, row_major((5,)).col) == (True, True)
    assert (row_major((1, 5, 1)).row, row_major((1, 5, 1)).col) == (True, True)
    assert row_major(()).span == 1


def test_transposed_matrix_is_column_major() -> None:
    given = lay.transpose(row_major((3, 4)), (1, 0))
    assert (given.shape, given.strides) == ((4, 3), (1, 4))
    assert (given.contiguous, given.row, given.col) == (True, False, True)


def test_heads_moved_before_tokens_are_neither_row_nor_column_major() -> None:
    given = lay.transpose(row_major((2, 8, 4, 16)), (0, 2, 1, 3))
    assert given.strides == (512, 16, 64, 1)
    assert (given.contiguous, given.row, given.col) == (True, False, False)


def test_broadcast_repeats_by_strides_of_zero_and_spans_what_it_repeats() -> None:
    given = lay.broadcast(row_major((1, 4)), (3, 4))
    assert (given.strides, given.span) == ((0, 1), 4)
    assert (given.contiguous, given.row, given.col) == (True, False, False)


def test_slice_of_columns_leaves_holes() -> None:
    given = lay.slice_view(row_major((4, 6)), (1, 1), (4, 2))
    assert (given.strides, given.span) == ((6, 1), 20)
    assert (given.contiguous, given.row) == (False, False)


def test_reshape_of_a_transpose_copies() -> None:
    assert lay.reshape(lay.transpose(row_major((3, 4)), (1, 0)), (12,)) is None


def test_reshape_that_splits_an_axis_of_a_transpose_is_a_view() -> None:
    given = lay.reshape(lay.transpose(row_major((3, 4)), (1, 0)), (2, 2, 3))
    assert given is not None
    assert given.strides == (2, 1, 4)


def test_view_as_a_smaller_dtype_keeps_the_buffer() -> None:
    given = lay.view_as(row_major((2, 3)), (2, 6), 4, 2)
    assert given is not None
    assert given.span == 12
    assert lay.view_as(lay.transpose(row_major((2, 3)), (1, 0)), (3, 1), 2, 4) is None


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_views_lie_as_in_mlx(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(150):
        _follow_a_chain(chance)


def _follow_a_chain(chance: random.Random) -> None:
    shape = _shape(chance, chance.choice([4, 6, 12, 24, 36]))
    array = mx.zeros(shape)
    mx.eval(array)
    known = row_major(shape)
    for _ in range(4):
        after, expected = _view(chance, array, known)
        before = mx.get_active_memory()
        mx.eval(after)
        copied = mx.get_active_memory() > before
        assert copied == (expected is None), (known, after.shape)
        array, known = after, expected or row_major(tuple(after.shape))
        assert _strides(array) == known.strides, known


def _view(chance: random.Random, array: mx.array, known: Layout) -> tuple[mx.array, Layout | None]:
    """One more view of the array, and how it should lie; None where it should be a copy."""
    kind = chance.choice(["transpose", "reshape", "broadcast", "expand"])
    if kind == "transpose":
        axes = chance.sample(range(array.ndim), array.ndim)
        return array.transpose(axes), lay.transpose(known, tuple(axes))
    if kind == "reshape":
        shape = _shape(chance, array.size)
        if shape == tuple(array.shape):
            return mx.broadcast_to(array, shape), known
        return array.reshape(shape), lay.reshape(known, shape)
    if kind == "broadcast":
        shape = tuple(2 if n == 1 else n for n in array.shape)
        if prod(shape) < 400 and shape != tuple(array.shape):
            return mx.broadcast_to(array, shape), lay.broadcast(known, shape)
    axis = chance.randrange(array.ndim + 1)
    after = mx.expand_dims(array, axis)
    return after, lay.expand_dims(known, (axis,), tuple(after.shape))


def _shape(chance: random.Random, size: int) -> tuple[int, ...]:
    axes = [1] * chance.randint(1, 4)
    for prime in (2, 3):
        while size % prime == 0:
            axes[chance.randrange(len(axes))] *= prime
            size //= prime
    return tuple(axes)


def _strides(array: mx.array) -> tuple[int, ...]:
    return tuple(step // 4 for step in np.array(array, copy=False).strides)
