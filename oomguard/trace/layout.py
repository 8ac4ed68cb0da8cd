"""How an array lies in its buffer: strides, how much of the buffer it spans, and MLX's three flags.

The flags decide whether a primitive may write into its input, copies it first, or can hand on a view; the
rules here are those by which MLX sets them (``array::set_data``, ``backend/common``).
"""

from __future__ import annotations

import functools
from math import prod

from oomguard.trace.graph import Shape

Strides = tuple[int, ...]


class Layout:
    """Shape, strides and elements spanned of one array.

    ``contiguous``: the elements spanned are all used, in whatever order. ``row`` and ``col``: they lie in row-
    or column-major order. ``span`` is MLX's ``data_size``: 1 for a broadcast scalar. Compared by identity;
    equal row-major layouts are one object.
    """

    __slots__ = ("col", "contiguous", "row", "shape", "size", "span", "strides")

    def __init__(self, shape: Shape, strides: Strides, contiguous: bool, row: bool, col: bool, span: int):
        self.shape = shape
        self.strides = strides
        self.contiguous = contiguous
        self.row = row
        self.col = col
        self.span = span
        self.size = prod(shape)

    def __repr__(self) -> str:
        flags = "".join(c for c, on in zip("crk", (self.contiguous, self.row, self.col), strict=True) if on)
        return f"Layout({self.shape}, strides={self.strides}, span={self.span}, flags={flags!r})"


@functools.cache
def row_strides(shape: Shape) -> Strides:
    """Strides of a row-major array."""
    strides = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


@functools.lru_cache(maxsize=65536)
def row_major(shape: Shape) -> Layout:
    """The layout of a newly allocated array."""
    size = prod(shape)
    return Layout(shape, row_strides(shape), True, True, _is_vector(shape, size), size)


def _is_vector(shape: Shape, size: int) -> bool:
    return size <= 1 or size == max(shape, default=1)


def contiguity(shape: Shape, strides: Strides) -> tuple[int, bool, bool]:
    """(elements spanned if nothing is skipped, row-major, column-major) of strides."""
    span, row, col = 1, True, True
    forward = backward = 1
    n = len(shape)
    for i in range(n):
        r = n - 1 - i
        col = col and (strides[i] == forward or shape[i] == 1)
        row = row and (strides[r] == backward or shape[r] == 1)
        forward *= shape[i]
        backward *= shape[r]
        if strides[i] > 0:
            span *= shape[i]
    return span, row, col


def broadcast(source: Layout, shape: Shape) -> Layout:
    """A view in which axes of size one are repeated by a stride of zero."""
    missing = len(shape) - len(source.shape)
    strides = (0,) * missing + tuple(
        0 if n == 1 else step for n, step in zip(source.shape, source.strides, strict=True)
    )
    same = prod(shape) <= source.size
    return Layout(shape, strides, source.contiguous, source.row and same, source.col and same, source.span)


def transpose(source: Layout, axes: tuple[int, ...]) -> Layout:
    """A view with the axes in another order."""
    shape = tuple(source.shape[a] for a in axes)
    strides = tuple(source.strides[a] for a in axes)
    row, col = source.row, source.col
    if source.contiguous and source.span == source.size:
        _, row, col = contiguity(shape, strides)
    return Layout(shape, strides, source.contiguous, row, col, source.span)


def expand_dims(source: Layout, axes: tuple[int, ...], shape: Shape) -> Layout:
    """A view with axes of size one added."""
    strides = list(source.strides)
    for axis in axes:
        strides.insert(axis, 1)
    return Layout(shape, tuple(strides), source.contiguous, source.row, source.col, source.span)


def squeeze(source: Layout, axes: tuple[int, ...], shape: Shape) -> Layout:
    """A view with axes of size one taken out."""
    gone = set(axes)
    strides = tuple(step for axis, step in enumerate(source.strides) if axis not in gone)
    return Layout(shape, strides, source.contiguous, source.row, source.col, source.span)


def reshape(source: Layout, shape: Shape) -> Layout | None:
    """A view of another shape over the same buffer, or None where only a copy can give it."""
    if source.size == 0 or source.row:
        col = _is_vector(shape, prod(shape)) if source.row else source.col
        return Layout(shape, row_strides(shape), source.contiguous, source.row, col, source.span)
    if not source.shape:
        return Layout(shape, (0,) * len(shape), source.contiguous, source.row, source.col, source.span)
    strides = _reshaped_strides(source, shape)
    if strides is None:
        return None
    return Layout(shape, strides, source.contiguous, source.row, source.col, source.span)


def _reshaped_strides(source: Layout, shape: Shape) -> Strides | None:
    sizes, steps = collapse(source.shape, source.strides)
    strides: list[int] = []
    j = 0
    for n in shape:
        if j < len(sizes) and n and sizes[j] % n == 0:
            sizes[j] //= n
            strides.append(sizes[j] * steps[j])
            j += sizes[j] == 1
        elif n == 1:
            strides.append(strides[-1])
        else:
            return None
    return tuple(strides)


def collapse(shape: Shape, strides: Strides) -> tuple[list[int], list[int]]:
    """Axes without those of size one, and neighbours that can be walked with one stride made one.

    MLX 0.32.4 leaves out a leading axis of size one as well; the source of 0.32.2 kept it, and copied for a
    few reshapes of transposed arrays.
    """
    cap = 2**31 - 1
    sizes: list[int] = []
    steps: list[int] = []
    for n, step in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if sizes and step * n == steps[-1] and sizes[-1] * n <= cap:
            sizes[-1] *= n
            steps[-1] = step
        else:
            sizes.append(n)
            steps.append(step)
    return (sizes, steps) if sizes or not shape else ([1], [0])


def slice_view(source: Layout, strides: tuple[int, ...], shape: Shape) -> Layout:
    """A view of every ``strides``-th element."""
    steps = tuple(step * by for step, by in zip(source.strides, strides, strict=True))
    low = high = 0
    for step, n in zip(steps, shape, strict=True):
        if step > 0:
            high += step * (n - 1)
        else:
            low += step * (n - 1)
    span = high - low + 1
    dense, row, col = contiguity(shape, steps)
    return Layout(shape, steps, dense == span, row, col, span)


def split_view(source: Layout, shape: Shape) -> Layout:
    """One part of a split; its strides are the whole's."""
    strides = source.strides
    span, row, col = contiguity(shape, strides)
    if span == 1:
        contiguous = True
    elif span == source.span:
        contiguous = source.contiguous
    else:
        contiguous = source.contiguous and (row or col)
    return Layout(shape, strides, contiguous, row, col, span)


def strided(source: Layout, shape: Shape, strides: Strides) -> Layout:
    """``mx.as_strided``."""
    dense, row, col = contiguity(shape, strides)
    high = sum(step * (n - 1) for step, n in zip(strides, shape, strict=True) if step >= 0)
    low = sum(step * (n - 1) for step, n in zip(strides, shape, strict=True) if step < 0)
    backwards = any(step < 0 and n > 1 for step, n in zip(strides, shape, strict=True))
    size = prod(shape)
    span = 0 if size == 0 else high - low + 1
    return Layout(shape, strides, size == 0 or (not backwards and dense == span), row, col, span)


def view_as(source: Layout, shape: Shape, item: int, new_item: int) -> Layout | None:
    """The bytes seen as another dtype, or None where only a copy can give it."""
    if not (
        item == new_item or (new_item < item and source.strides and source.strides[-1] == 1) or source.row
    ):
        return None
    strides = tuple(step * item // new_item for step in source.strides[:-1]) + source.strides[-1:]
    return Layout(shape, strides, source.contiguous, source.row, source.col, source.span * item // new_item)
