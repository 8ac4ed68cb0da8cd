"""Metal's rules, each against a number derived by hand from the kernels it launches."""

from __future__ import annotations

import pytest

from oomguard.trace import layout as lay
from oomguard.trace import metal
from oomguard.trace.graph import Shape
from oomguard.trace.layout import Layout, row_major
from oomguard.trace.metal import Chip, CommandBuffers, partial_products, round_to_pages, rules
from oomguard.trace.ops import NEW, Effect, Operands

M1_MAX = Chip(13, "s")
M4 = Chip(16, "g")
M5_PRO = Chip(17, "s")
OLD, NOW = (0, 25, 1), (0, 32, 1)


def operands(
    *inputs: Layout,
    outs: tuple[Shape, ...],
    free: tuple[int, ...] = (),
    item: int = 4,
    arguments: tuple[object, ...] = (),
) -> Operands:
    """Inputs of one dtype; those in ``free`` are dead."""
    op = Operands()
    op.inputs = list(inputs)
    op.items = [item] * len(inputs)
    op.donatable = [i in free for i in range(len(inputs))]
    op.buffer_bytes = [given.span * item for given in inputs]
    op.out_shapes = list(outs)
    op.out_items = [item] * len(outs)
    op.arguments = arguments
    return op


def run(name: str, op: Operands, chip: Chip = M1_MAX, mlx: tuple[int, int, int] = NOW) -> Effect:
    return rules(chip, mlx)[name](op)


def transposed(shape: Shape) -> Layout:
    """(batch, heads, tokens, dim) as it lies after (batch, tokens, heads, dim) was transposed."""
    batch, heads, tokens, dim = shape
    return lay.transpose(row_major((batch, tokens, heads, dim)), (0, 2, 1, 3))


# -- chips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "chip", "kernels", "elements"),
    [
        ("applegpu_g13g", Chip(13, "g"), 40, 40),
        ("applegpu_g16s", Chip(16, "s"), 50, 50),
        ("applegpu_g14d", Chip(14, "d"), 50, 50),
        ("applegpu_g17p", Chip(17, "p"), 20, 40),
        ("unheard of", Chip(0, "f"), 40, 40),
    ],
)
def test_command_buffer_size_follows_the_architecture_name(
    name: str, chip: Chip, kernels: int, elements: int
) -> None:
    assert Chip.named(name) == chip
    assert chip.kernels_per_command_buffer == kernels
    assert chip.mi_elements_per_command_buffer == elements


def test_requests_above_a_page_take_whole_pages() -> None:
    assert [round_to_pages(n) for n in (0, 1, 16384, 16385, 32768)] == [0, 1, 16384, 32768, 32768]


@pytest.mark.parametrize("reduce_type", range(5))
def test_scan_looks_along_its_axis_whatever_it_sums(reduce_type: int) -> None:
    """Not dense along axis 0 (a broadcast row): a copy, which is scanned; along axis 1 it is scanned as it lies."""
    rows = Layout((4, 8), (0, 1), True, False, False, 8)
    outs = ((4, 8),)
    down = run("Scan", operands(rows, outs=outs, arguments=(reduce_type, 0, False, True)))
    along = run("Scan", operands(row_major((4, 8)), outs=outs, arguments=(reduce_type, 1, False, True)))
    assert (down.kernels, along.kernels) == (2, 1)


# -- the queue ---------------------------------------------------------------------------------------------


def test_command_buffer_closes_after_more_than_its_kernels() -> None:
    queue = CommandBuffers(3, 40)
    for _ in range(3):
        queue.submit(1, [7], [])
    assert queue.tasks == 0
    queue.submit(1, [7], [])
    assert queue.tasks == 1


def test_command_buffer_counts_each_buffer_once_in_whole_mi_elements() -> None:
    queue = CommandBuffers(1000, 2)
    queue.submit(1, [], [(1, 1 << 20), (2, 1 << 20)])
    queue.submit(1, [], [(1, 1 << 20), (2, 1 << 20)])
    assert queue.tasks == 0
    queue.submit(1, [], [(3, (1 << 20) - 1)])
    assert queue.tasks == 0
    queue.submit(1, [], [(4, 1)])
    assert queue.tasks == 1


def test_views_join_no_elements() -> None:
    queue = CommandBuffers(1000, 1)
    queue.submit(0, [], [(1, 1 << 30)])
    assert queue.tasks == 0


def test_waiting_commits_what_is_encoded_and_completes_in_order() -> None:
    queue = CommandBuffers(1, 40)
    queue.submit(2, [1], [])
    queue.submit(2, [2], [])
    queue.submit(1, [3], [])
    assert queue.tasks == 2
    assert queue.finish_entry() == [1]
    assert queue.tasks == 1
    assert queue.finish_entry() == [2]
    assert queue.tasks == 0
    assert queue.finish_entry() == [3]


def test_drain_releases_everything() -> None:
    queue = CommandBuffers(1, 40)
    queue.submit(2, [1], [])
    queue.submit(1, [2], [])
    assert queue.drain() == [1, 2]
    assert queue.tasks == 0


# -- norms -------------------------------------------------------------------------------------------------

X = row_major((6, 8))
W = row_major((8,))
SCALAR = row_major(())


def test_layer_norm_overwrites_a_dead_input() -> None:
    assert run("LayerNorm", operands(X, W, W, outs=((6, 8),), free=(0,))).outs[0].source == 0
    assert run("LayerNorm", operands(X, W, W, outs=((6, 8),))).outs[0].source == NEW


def test_layer_norm_of_a_transposed_input_copies_it_into_the_output() -> None:
    columns = lay.transpose(row_major((8, 6)), (1, 0))
    effect = run("LayerNorm", operands(columns, W, W, outs=((6, 8),)))
    assert effect.outs[0].nbytes == 6 * 8 * 4
    assert effect.temporaries == ()
    assert effect.kernels == 2


def test_layer_norm_vjp_with_both_dead_makes_only_parameter_gradients() -> None:
    op = operands(X, W, W, X, outs=((6, 8), (8,), (8,)), free=(0, 3))
    effect = run("LayerNormVJP", op)
    assert [out.source for out in effect.outs] == [0, NEW, NEW]
    assert effect.temporaries == ()


def test_layer_norm_vjp_with_only_the_cotangent_dead_needs_the_rows_gradients() -> None:
    op = operands(X, W, W, X, outs=((6, 8), (8,), (8,)), free=(3,))
    effect = run("LayerNormVJP", op)
    assert effect.outs[0].source == 3
    assert effect.temporaries == (6 * 8 * 4,)


def test_layer_norm_vjp_with_neither_dead_makes_dx_and_the_rows_gradients() -> None:
    effect = run("LayerNormVJP", operands(X, W, W, X, outs=((6, 8), (8,), (8,))))
    assert effect.outs[0].nbytes == 6 * 8 * 4
    assert effect.temporaries == (6 * 8 * 4,)


def test_layer_norm_vjp_without_weight_needs_no_rows_gradients() -> None:
    effect = run("LayerNormVJP", operands(X, SCALAR, SCALAR, X, outs=((6, 8), (), ())))
    assert effect.temporaries == ()
    assert effect.kernels == 1


def test_layer_norm_vjp_sums_many_rows_in_two_passes() -> None:
    x = row_major((512, 64))
    effect = run(
        "LayerNormVJP",
        operands(x, row_major((64,)), row_major((64,)), x, outs=((512, 64), (64,), (64,)), free=(0, 3)),
    )
    assert effect.temporaries == (32 * 64 * 4,) * 2
    assert effect.kernels == 1 + 2 + 2


def test_rms_norm_vjp_never_writes_into_its_input() -> None:
    effect = run("RMSNormVJP", operands(X, W, X, outs=((6, 8), (8,)), free=(0, 2)))
    assert effect.outs[0].source == NEW
    assert effect.temporaries == ()


def test_rms_norm_vjp_keeps_rows_gradients_apart_from_a_living_cotangent() -> None:
    effect = run("RMSNormVJP", operands(X, W, X, outs=((6, 8), (8,)), free=(0,)))
    assert effect.temporaries == (6 * 8 * 4,)


def test_rms_norm_vjp_groups_rows_since_0_32_2() -> None:
    x = row_major((2048, 64))
    op = operands(x, row_major((64,)), x, outs=((2048, 64), (64,)), free=(0, 2))
    assert run("RMSNormVJP", op, mlx=(0, 32, 1)).temporaries == (32 * 64 * 4,)
    assert run("RMSNormVJP", op, mlx=(0, 32, 2)).temporaries == (512 * 64 * 4, 32 * 64 * 4)


# -- RoPE --------------------------------------------------------------------------------------------------

HEADS = (2, 4, 8, 16)


def test_rope_rotates_in_place_only_a_dense_dead_input() -> None:
    assert run("RoPE", operands(row_major(HEADS), SCALAR, outs=(HEADS,), free=(0,))).outs[0].source == 0
    assert run("RoPE", operands(transposed(HEADS), SCALAR, outs=(HEADS,), free=(0,))).outs[0].source == NEW


def test_rope_reads_transposed_heads_since_0_30() -> None:
    op = operands(transposed(HEADS), SCALAR, outs=(HEADS,))
    assert run("RoPE", op, mlx=(0, 29, 1)).kernels == 2
    assert run("RoPE", op, mlx=(0, 30, 0)).kernels == 1


# -- products ----------------------------------------------------------------------------------------------


def test_matmul_reads_a_transposed_operand_and_copies_a_strided_one() -> None:
    a, b = row_major((64, 64)), lay.transpose(row_major((64, 64)), (1, 0))
    assert run("Matmul", operands(a, b, outs=((64, 64),)), mlx=(0, 31, 0), chip=M4).temporaries == ()
    every_other = Layout((64, 64), (256, 2), False, False, False, 64 * 256)
    effect = run("Matmul", operands(every_other, b, outs=((64, 64),)), mlx=(0, 31, 0), chip=M4)
    assert effect.temporaries == (64 * 64 * 4,)
    assert effect.kernels == 2


def test_matmul_of_a_slice_of_rows_copies_nothing() -> None:
    rows = Layout((64, 64), (256, 1), False, False, False, 63 * 256 + 64)
    assert run("Matmul", operands(rows, row_major((64, 64)), outs=((64, 64),)), chip=M4).temporaries == ()


def test_addmm_always_makes_a_new_output() -> None:
    op = operands(row_major((64, 64)), row_major((64, 64)), row_major((64, 64)), outs=((64, 64),), free=(2,))
    assert run("AddMM", op, chip=M4).outs[0].source == NEW


@pytest.mark.parametrize(
    ("chip", "mlx", "sizes", "partials"),
    [
        (M4, OLD, (64, 64, 512), 8),
        (M4, OLD, (128, 128, 4096), 0),
        (M4, NOW, (256, 1024, 2048), 2),
        (M4, NOW, (512, 1024, 2048), 0),
        (M1_MAX, NOW, (512, 1024, 2048), 2),
        (M1_MAX, NOW, (64, 64, 4096), 32),
        (M1_MAX, NOW, (2048, 64, 1024), 0),
        (M5_PRO, NOW, (512, 512, 8192), 2),
        (M5_PRO, NOW, (4096, 4096, 4096), 0),
    ],
)
def test_product_splits_as_the_release_and_chip_decide(
    chip: Chip, mlx: tuple[int, int, int], sizes: tuple[int, int, int], partials: int
) -> None:
    assert partial_products(chip, mlx, *sizes) == partials


def test_split_product_holds_its_partial_products() -> None:
    op = operands(row_major((64, 4096)), row_major((4096, 64)), outs=((64, 64),), item=2)
    effect = run("Matmul", op)
    assert effect.temporaries == (32 * 64 * 64 * 4,)
    assert effect.kernels == 2


def test_quantized_product_of_few_rows_splits_since_0_31_1() -> None:
    x, w = row_major((1, 64, 4096)), row_major((1024, 512))
    op = operands(x, w, outs=((1, 64, 1024),), item=2, arguments=(64, 4, "affine", True))
    assert run("QuantizedMatmul", op, mlx=(0, 31, 0)).temporaries == ()
    assert run("QuantizedMatmul", op, mlx=(0, 31, 1)).temporaries == (8 * 64 * 1024 * 2,)


# -- reductions --------------------------------------------------------------------------------------------


def test_long_columns_are_summed_in_32_parts() -> None:
    effect = run("Reduce", operands(row_major((2048, 256)), outs=((1, 256),), arguments=(2, (0,))))
    assert effect.temporaries == (32 * 256 * 4,)
    assert effect.kernels == 2


def test_rows_are_summed_without_temporaries() -> None:
    effect = run("Reduce", operands(row_major((2048, 256)), outs=((2048, 1),), arguments=(2, (1,))))
    assert effect.temporaries == ()
    assert effect.kernels == 1


def test_wide_columns_need_no_parts() -> None:
    effect = run("Reduce", operands(row_major((2048, 32768)), outs=((1, 32768),), arguments=(2, (0,))))
    assert effect.temporaries == ()


def test_sum_of_everything_takes_two_kernels() -> None:
    effect = run("Reduce", operands(row_major((2048, 256)), outs=((1, 1),), arguments=(2, (0, 1))))
    assert effect.kernels == 2
    assert effect.temporaries == (128 * 4,)


def test_reduction_over_a_broadcast_axis_copies_first() -> None:
    repeated = lay.broadcast(row_major((1, 64, 64)), (512, 64, 64))
    effect = run("Reduce", operands(repeated, outs=((1, 64, 64),), arguments=(2, (0,))))
    assert effect.temporaries[0] == 512 * 64 * 64 * 4


# -- attention ---------------------------------------------------------------------------------------------


def test_fused_attention_leaves_heads_beside_each_other() -> None:
    effect = run("ScaledDotProductAttention", operands(*[transposed(HEADS)] * 3, outs=(HEADS, (2, 4, 8, 1))))
    assert effect.temporaries == ()
    assert effect.outs[0].layout.strides == (8 * 4 * 16, 16, 4 * 16, 1)


def test_fused_attention_backward_holds_three_blocks_of_scores() -> None:
    shape = (1, 2, 2048, 64)
    dense = row_major(shape)
    op = operands(*[dense] * 4, row_major((1, 2, 2048, 1)), dense, outs=(shape,) * 3, item=2)
    effect = metal.attention_vjp(op)
    block = 1024
    assert effect.temporaries == (
        2 * (3 * block * block + 3 * block * 64) * 2,
        2 * 2048 * 3 * 64 * 4,
        2 * 2048 * 4,
    )
