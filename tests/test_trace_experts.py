"""Sorted expert gathers, which MLX cannot export, are traced as MLX builds them."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from oomguard.trace.capture import capture
from oomguard.trace.rawgraph import RENAMED, read_dot

EXPERTS, TOKENS, WIDTH, HIDDEN = 3, 8, 4, 5


def step(rows: mx.array, matrices: mx.array, numbers: mx.array) -> Any:
    def loss(rows: mx.array, matrices: mx.array) -> mx.array:
        products = mx.gather_mm(rows, matrices, rhs_indices=numbers, sorted_indices=True)
        return (products * products).sum()

    value, gradients = mx.value_and_grad(loss, argnums=(0, 1))(rows, matrices)
    return value, *gradients


def arguments() -> tuple[mx.array, mx.array, mx.array]:
    numbers = mx.array([0, 0, 1, 1, 1, 2, 2, 2], mx.uint32)
    given = mx.zeros((TOKENS, 1, WIDTH)), mx.zeros((EXPERTS, WIDTH, HIDDEN)), numbers
    mx.eval(given)
    return given


def test_sorted_gather_is_rebuilt_as_mlx_differentiates_it() -> None:
    captured = capture(step, arguments(), state=[], marked=frozenset())
    captured.graph.check()
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *step(*arguments()))
    labels = (label.partition(" ")[0] for label in read_dot(drawing.getvalue()).primitives)
    expected = Counter(RENAMED.get(name, name) for name in labels)
    assert Counter(node.primitive for node in captured.graph.nodes) == expected
    assert expected["SegmentedMM"] == 1


def test_segmented_product_has_a_gradient_for_each_matrix() -> None:
    graph = capture(step, arguments(), state=[], marked=frozenset()).graph
    product = next(node for node in graph.nodes if node.primitive == "SegmentedMM")
    assert graph.arrays[product.outputs[0]].shape == (EXPERTS, HIDDEN, WIDTH)
    assert [graph.arrays[i].shape for i in product.inputs] == [
        (HIDDEN, TOKENS),
        (TOKENS, WIDTH),
        (EXPERTS, 2),
    ]


def test_no_region_is_left_of_it() -> None:
    graph = capture(step, arguments(), state=[]).graph
    assert graph.regions == []


@pytest.mark.parametrize("sorted_indices", [False, True])
def test_gather_is_put_back_after_the_capture(sorted_indices: bool) -> None:
    before = mx.gather_mm
    capture(step, arguments(), state=[])
    assert mx.gather_mm is before
    rows, matrices, numbers = arguments()
    result = mx.gather_mm(rows, matrices, rhs_indices=numbers, sorted_indices=sorted_indices)
    assert result.shape == (TOKENS, 1, HIDDEN)
