"""What each primitive allocates on the CPU, derived by hand."""

from __future__ import annotations

from typing import Any

import pytest

from oomguard.trace import layout as lay
from oomguard.trace.graph import ITEM_BYTES
from oomguard.trace.layout import Layout, row_major
from oomguard.trace.ops import CPU_RULES, NEW, Effect, Operands, unknown


def run(
    primitive: str,
    inputs: list[Layout | tuple[int, ...]],
    shape: tuple[int, ...],
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    arguments: tuple[Any, ...] = (),
    dead: tuple[int, ...] = (),
    outputs: int = 1,
) -> Effect:
    """The rule's effect; inputs given as shapes are row-major, those numbered in ``dead`` are nobody else's."""
    op = Operands()
    op.inputs = [row_major(i) if isinstance(i, tuple) else i for i in inputs]
    op.dtypes = [dtype] * len(inputs)
    op.items = [ITEM_BYTES[dtype]] * len(inputs)
    op.donatable = [i in dead for i in range(len(inputs))]
    op.buffer_bytes = [given.span * ITEM_BYTES[dtype] for given in op.inputs]
    op.out_shapes = [shape] * outputs
    op.out_items = [ITEM_BYTES[out_dtype or dtype]] * outputs
    op.arguments = arguments
    return CPU_RULES[primitive](op)


def source_and_bytes(effect: Effect) -> tuple[int, int]:
    return effect.outs[0].source, effect.outs[0].nbytes


HEADS = lay.transpose(row_major((2, 8, 4, 16)), (0, 2, 1, 3))
"""(batch, heads, tokens, width) as a model gets it: a view of (batch, tokens, heads, width)."""


def test_unary_writes_into_a_dead_input() -> None:
    assert source_and_bytes(run("Exp", [(4, 8)], (4, 8), dead=(0,))) == (0, 0)
    assert source_and_bytes(run("Exp", [(4, 8)], (4, 8))) == (NEW, 4 * 8 * 4)


def test_unary_of_a_dense_transpose_lies_like_it() -> None:
    effect = run("Exp", [lay.transpose(row_major((4, 8)), (1, 0))], (8, 4))
    assert effect.outs[0].layout.strides == (1, 8)


def test_unary_of_an_array_with_holes_is_row_major() -> None:
    effect = run("Exp", [lay.slice_view(row_major((4, 8)), (1, 1), (4, 2))], (4, 2), dead=(0,))
    assert source_and_bytes(effect) == (NEW, 4 * 2 * 4)
    assert effect.outs[0].layout.row


def test_unary_of_a_broadcast_scalar_makes_one_element() -> None:
    assert source_and_bytes(run("Exp", [lay.broadcast(row_major(()), (64, 64))], (64, 64))) == (NEW, 4)


def test_donation_needs_the_same_item_size() -> None:
    halves = run("AsType", [(4, 8)], (4, 8), out_dtype="bfloat16", dead=(0,))
    assert source_and_bytes(halves) == (NEW, 4 * 8 * 2)
    same = run("AsType", [(4, 8)], (4, 8), out_dtype="int32", dead=(0,))
    assert (same.outs[0].source, same.kernels) == (0, 1)


def test_donation_needs_a_buffer_not_much_larger() -> None:
    wide = lay.slice_view(row_major((2, 8192)), (1, 1), (1, 8192))
    op_bytes = 2 * 8192 * 4
    assert op_bytes > 8192 * 4 + 16384
    effect = run("Exp", [wide], (1, 8192), dead=(0,))
    assert effect.outs[0].source == 0
    op = Operands()
    op.inputs, op.dtypes, op.items = [wide], ["float32"], [4]
    op.donatable, op.buffer_bytes = [True], [op_bytes]
    op.out_shapes, op.out_items, op.arguments = [(1, 8192)], [4], ()
    assert source_and_bytes(CPU_RULES["Exp"](op)) == (NEW, 8192 * 4)


@pytest.mark.parametrize(("dtype", "source"), [("uint8", 0), ("int32", 0), ("float32", NEW)])
def test_rounding_a_whole_number_is_no_work(dtype: str, source: int) -> None:
    effect = run("Floor", [(4,)], (4,), dtype=dtype)
    assert (effect.outs[0].source, effect.kernels) == (source, 0 if source == 0 else 1)


def test_binary_prefers_its_first_input() -> None:
    assert run("Add", [(4, 8), (4, 8)], (4, 8), dead=(0, 1)).outs[0].source == 0
    assert run("Add", [(4, 8), (4, 8)], (4, 8), dead=(1,)).outs[0].source == 1


def test_binary_with_a_broadcast_scalar_lies_like_the_array() -> None:
    scalar = lay.broadcast(row_major(()), (8, 4))
    transposed = lay.transpose(row_major((4, 8)), (1, 0))
    effect = run("Multiply", [scalar, transposed], (8, 4), dead=(1,))
    assert (effect.outs[0].source, effect.outs[0].layout) == (1, transposed)


def test_binary_of_two_layouts_writes_only_into_the_row_major_one() -> None:
    transposed = lay.transpose(row_major((4, 8)), (1, 0))
    assert run("Add", [transposed, (8, 4)], (8, 4), dead=(0,)).outs[0].source == NEW
    assert run("Add", [transposed, (8, 4)], (8, 4), dead=(0, 1)).outs[0].source == 1


def test_comparison_cannot_write_a_bool_into_a_float() -> None:
    effect = run("Less", [(4, 8), (4, 8)], (4, 8), out_dtype="bool", dead=(0, 1))
    assert source_and_bytes(effect) == (NEW, 4 * 8)


def test_second_output_of_divmod_takes_the_other_input() -> None:
    effect = run("DivMod", [(4,), (4,)], (4,), dead=(0, 1), outputs=2)
    assert [out.source for out in effect.outs] == [0, 1]


def test_where_reuses_a_value_not_the_condition() -> None:
    op = Operands()
    op.inputs = [row_major((4, 8))] * 3
    op.dtypes, op.items = ["bool", "float32", "float32"], [1, 4, 4]
    op.donatable, op.buffer_bytes = [True, False, True], [32, 128, 128]
    op.out_shapes, op.out_items, op.arguments = [(4, 8)], [4], ()
    assert CPU_RULES["Select"](op).outs[0].source == 2


def test_reshape_of_moved_heads_copies_and_of_row_major_does_not() -> None:
    assert source_and_bytes(run("Reshape", [HEADS], (2, 4, 128))) == (NEW, 2 * 4 * 128 * 4)
    assert source_and_bytes(run("Reshape", [(2, 8, 64)], (16, 64))) == (0, 0)


def test_matmul_copies_operands_blas_cannot_read() -> None:
    keys = lay.transpose(HEADS, (0, 1, 3, 2))
    effect = run("Matmul", [HEADS, keys], (2, 4, 8, 8))
    assert source_and_bytes(effect) == (NEW, 2 * 4 * 8 * 8 * 4)
    assert effect.temporaries == (2 * 8 * 4 * 16 * 4,) * 2
    assert effect.kernels == 3


def test_matmul_reads_a_transposed_matrix_as_it_lies() -> None:
    effect = run("Matmul", [(16, 64), lay.transpose(row_major((32, 64)), (1, 0))], (16, 32))
    assert (effect.kernels, effect.temporaries) == (1, ())


def test_addmm_copies_a_bias_row_and_takes_over_a_dead_addend() -> None:
    bias = lay.broadcast(row_major((32,)), (16, 32))
    weights = lay.transpose(row_major((32, 64)), (1, 0))
    assert run("AddMM", [(16, 64), weights, bias], (16, 32)).kernels == 2
    effect = run("AddMM", [(16, 64), weights, (16, 32)], (16, 32), dead=(2,))
    assert (effect.outs[0].source, effect.kernels) == (2, 1)


def test_softmax_works_in_place_and_copies_what_has_no_dense_rows() -> None:
    assert run("Softmax", [(4, 8)], (4, 8), dead=(0,)).outs[0].source == 0
    effect = run("Softmax", [lay.transpose(row_major((4, 8)), (1, 0))], (8, 4), dead=(0,))
    assert (source_and_bytes(effect), effect.kernels) == ((NEW, 4 * 8 * 4), 2)


def test_logsumexp_keeps_a_copy_until_its_kernel_ran() -> None:
    effect = run("LogSumExp", [lay.transpose(row_major((4, 8)), (1, 0))], (8, 1))
    assert (source_and_bytes(effect), effect.temporaries) == ((NEW, 32), (128,))


def test_reduction_and_gather_read_any_layout() -> None:
    assert run("Reduce", [HEADS], (2, 4, 8, 1), arguments=(2, (3,))).temporaries == ()
    assert source_and_bytes(run("Gather", [(10, 8), (2, 3)], (2, 3, 1, 8))) == (NEW, 2 * 3 * 8 * 4)


def test_scatter_copies_its_destination_unless_it_is_the_last_use() -> None:
    copied = run("Scatter", [(10, 8), (4,), (4, 1, 8)], (10, 8))
    assert (source_and_bytes(copied), copied.kernels) == ((NEW, 320), 2)
    in_place = run("Scatter", [(10, 8), (4,), (4, 1, 8)], (10, 8), dead=(0,))
    assert (source_and_bytes(in_place), in_place.kernels) == ((0, 0), 1)


def test_full_of_a_scalar_fills_a_new_array() -> None:
    assert source_and_bytes(run("Full", [lay.broadcast(row_major(()), (4, 8))], (4, 8))) == (NEW, 128)


def test_concatenate_runs_one_kernel_for_each_part() -> None:
    assert run("Concatenate", [(2, 8)] * 3, (6, 8), arguments=(0,)).kernels == 3


def test_quantized_matmul_copies_only_what_is_not_row_major() -> None:
    inputs: list[Layout | tuple[int, ...]] = [HEADS, (64, 2), (64, 1), (64, 1)]
    assert run("QuantizedMatmul", inputs, (2, 4, 8, 64)).temporaries == (2 * 8 * 4 * 16 * 4,)
    assert run("QuantizedMatmul", [(8, 16), (64, 2), (64, 1), (64, 1)], (8, 64)).temporaries == ()


def test_convolution_unfolds_padded_float32_patches() -> None:
    # 2 images of 8 x 8 x 3, 16 kernels of 3 x 3, padding 1: the scalar zero, padded input, patches.
    arguments = ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1), 1, False)
    effect = run("Convolution", [(2, 8, 8, 3), (16, 3, 3, 3)], (2, 8, 8, 16), arguments=arguments)
    assert source_and_bytes(effect) == (NEW, 2 * 8 * 8 * 16 * 4)
    assert effect.temporaries == (4, 2 * 10 * 10 * 3 * 4, 2 * 8 * 8 * 3 * 3 * 3 * 4)
    assert effect.kernels == 4


def test_convolution_in_half_precision_works_in_float32() -> None:
    arguments = ((1,), (0,), (0,), (1,), (1,), 1, False)
    effect = run("Convolution", [(1, 8, 4), (6, 3, 4)], (1, 6, 6), dtype="bfloat16", arguments=arguments)
    assert effect.temporaries == (4, 8 * 4 * 4, 6 * 3 * 4 * 4, 6 * 3 * 4 * 4, 6 * 6 * 4)


def test_convolution_with_dilation_unfolds_nothing() -> None:
    arguments = ((1, 1), (0, 0), (0, 0), (2, 2), (1, 1), 1, False)
    effect = run("Convolution", [(2, 8, 8, 3), (16, 3, 3, 3)], (2, 4, 4, 16), arguments=arguments)
    assert (effect.temporaries, effect.kernels) == ((), 1)


def test_fused_kernel_takes_over_dead_inputs_but_no_constant() -> None:
    effect = run("Compiled", [(4, 8), ()], (4, 8), arguments=(("Add",), (1,)), dead=(0, 1))
    assert effect.outs[0].source == 0
    constant = run("Compiled", [(1,), (1,)], (1,), arguments=(("Add",), (0, 1)), dead=(0, 1))
    assert constant.outs[0].source == NEW


def test_fused_kernel_broadcasts_inside_and_writes_row_major() -> None:
    effect = run("Compiled", [(4, 1), (4, 8)], (4, 8), arguments=(("Add",), ()), dead=(1,))
    assert effect.outs[0].source == 1
    transposed = lay.transpose(row_major((8, 4)), (1, 0))
    effect = run("Compiled", [transposed, (4, 1)], (4, 8), arguments=(("Add",), ()), dead=(0,))
    assert (effect.outs[0].source, effect.outs[0].layout.row) == (NEW, True)


def test_fused_kernel_with_two_outputs_makes_both() -> None:
    effect = run("Compiled", [(4, 8), (4, 8)], (4, 8), arguments=(("Add", "Exp"), ()), outputs=2)
    assert [out.nbytes for out in effect.outs] == [128, 128]


def test_dynamic_slice_needs_eight_bytes_for_its_offset() -> None:
    effect = run("DynamicSlice", [(16, 8), (2,)], (4, 8), arguments=((0, 1), (4, 8)))
    assert effect.temporaries == (8,)


def test_unknown_primitive_is_counted_from_above() -> None:
    op = Operands()
    op.inputs, op.dtypes, op.items = [row_major((4, 8)), row_major((2,))], ["float32"] * 2, [4, 4]
    op.donatable, op.buffer_bytes = [True, True], [128, 8]
    op.out_shapes, op.out_items, op.arguments = [(4, 8)], [4], ()
    effect = unknown(op)
    assert source_and_bytes(effect) == (NEW, 128)
    assert effect.temporaries == (128, 8)


@pytest.mark.parametrize("primitive", sorted(CPU_RULES))
def test_rules_never_allocate_more_than_their_outputs_and_copies(primitive: str) -> None:
    shape = (1, 4, 4)
    arguments: dict[str, tuple[Any, ...]] = {
        "Transpose": ((2, 1, 0),),
        "ExpandDims": ((0,),),
        "Squeeze": ((0,),),
        "Slice": ((0, 0, 0), shape, (1, 1, 1)),
        "AsStrided": (shape, (16, 4, 1), 0),
        "Compiled": (("Add",), ()),
        "Convolution": ((1,), (1,), (1,), (1,), (1,), 1, False),
        "Sort": (-1,),
    }
    two = CPU_RULES[primitive] is CPU_RULES["Add"] or primitive in ("DivMod", "Convolution")
    count = 2 if two else 3 if primitive == "Select" else 5
    given: list[Layout | tuple[int, ...]] = [shape] * count
    out = (4, 4) if primitive == "Squeeze" else shape
    outputs = 2 if primitive == "DivMod" else 1
    kwargs: dict[str, Any] = {"arguments": arguments.get(primitive, ()), "dead": (0,), "outputs": outputs}
    effect = run(primitive, given, out, **kwargs)
    again = run(primitive, given, out, **kwargs)
    assert [(o.source, o.nbytes) for o in effect.outs] == [(o.source, o.nbytes) for o in again.outs]
    assert all(o.nbytes <= 16 * 4 for o in effect.outs)
    if primitive != "Convolution":
        assert sum(effect.temporaries) <= count * 16 * 4
