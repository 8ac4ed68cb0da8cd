"""Metal in the simulator: pages, command buffers, and what a primitive does there and not on the CPU.

**Command buffers** (``backend/metal/device.cpp``, ``eval.cpp``). Kernels are encoded into one until, after a
primitive, it holds more than a number of kernels, or the arrays it touches have more than a number of Mi
elements; each buffer counts once, by the elements of the view it was first seen through. Then it is
committed, which makes it a task. Whatever its kernels read stays until it has completed, and so do
temporaries. While more than ten tasks are open the evaluator waits; the command buffer at hand is committed
first.

**Pages** (``allocator.cpp``). A request above a page is rounded up to whole pages of 16 KiB. Freed buffers
are kept, up to the memory limit, and handed out again if not much too large.

**Primitives.** Elementwise ones, views, gathers, scatters and softmax share their rules with the CPU; the
table below is the rest. ``x`` is what leaves with the command buffer:

==================  =========================================  ==========================================
primitive           CPU                                        Metal
==================  =========================================  ==========================================
Matmul              copies an operand unless it is dense in    copies only an operand without a stride of
                    either order                               1 in its last two axes; split-K: x float32
                                                               partial products
AddMM               writes into the addend's buffer            always a new output; split-K as Matmul
Reduce              nothing                                    x a copy where no kernel fits the strides;
                                                               x 32 (or 128) partial results of a long
                                                               column
LayerNorm, RMSNorm  decomposed                                 in place where the input is dead
LayerNormVJP        decomposed                                 dx in x's buffer, else in the cotangent's;
                                                               x a gradient of w for every row, in the
                                                               cotangent's buffer where that is free
RMSNormVJP          decomposed                                 dx always new; the rest as LayerNormVJP;
                                                               after 0.32.1 at most 512 rows
RoPE                decomposed                                 in place if row-major and dead; else new
QuantizedMatmul     copies unless row-major                    copies unless the last two axes are dense;
                                                               split-K for few rows (0.31.1)
==================  =========================================  ==========================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from oomguard.trace.fuse import Fusion
from oomguard.trace.graph import Graph
from oomguard.trace.layout import Layout, row_major
from oomguard.trace.lower import LOWERED, Target, Version, lower
from oomguard.trace.memory import Device
from oomguard.trace.ops import CPU_RULES, NEW, Effect, Operands, Out, Rule, fresh

PAGE_BYTES = 16384
OUT_OF_REACH = 1 << 62

KERNELS_PER_COMMAND_BUFFER = {"p": 20, "g": 40, "s": 50, "d": 50}
MI_ELEMENTS_PER_COMMAND_BUFFER = {"p": 40, "g": 40, "s": 50, "d": 50}
OTHER_KERNELS = OTHER_MI_ELEMENTS = 40


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as its architecture name says: ``applegpu_g16s`` is generation 16, size ``s``.

    Sizes: p in phones, g in base chips, s in Pro and Max, d in Ultra.
    """

    generation: int
    size: str

    @classmethod
    def named(cls, architecture: str) -> Chip:
        """From ``mx.device_info()["architecture"]``."""
        digits = architecture[-3:-1]
        return cls(int(digits) if digits.isdigit() else 0, architecture[-1:])

    @property
    def kernels_per_command_buffer(self) -> int:
        return KERNELS_PER_COMMAND_BUFFER.get(self.size, OTHER_KERNELS)

    @property
    def mi_elements_per_command_buffer(self) -> int:
        return MI_ELEMENTS_PER_COMMAND_BUFFER.get(self.size, OTHER_MI_ELEMENTS)

    @property
    def has_tensor_cores(self) -> bool:
        """Neural accelerators in the GPU (M5 and later), which have matrix kernels of their own."""
        return self.generation >= (18 if self.size == "p" else 17)


def device(
    chip: Chip,
    mlx: Version,
    *,
    memory_limit: int | None = None,
    largest_buffer: int | None = None,
    fused_attention: bool | None = None,
    fused_cross_entropy: bool | None = None,
    native: bool = False,
) -> Device:
    """The simulator's view of a chip under an MLX release.

    Args:
        chip: decides the command buffer's size and which matrix kernels split.
        mlx: decides which rules hold.
        memory_limit: MLX's own on the machine, in bytes, which is also the cache's; None for out of reach.
        largest_buffer: the most bytes that Metal hands out in one buffer; None for no bound.
        fused_attention, fused_cross_entropy: as for ``Target``; by default as the release has them.
        native: steps are captured on a Mac, whose graph is Metal's already.
    """
    target = Target("metal", mlx, fused_attention, fused_cross_entropy)
    return Device(
        "metal",
        rules(chip, mlx),
        partial(CommandBuffers, chip.kernels_per_command_buffer, chip.mi_elements_per_command_buffer),
        round_to_pages,
        OUT_OF_REACH if memory_limit is None else memory_limit,
        PAGE_BYTES,
        Graph.copy if native else partial(lower, target=target),
        Fusion.of(mlx),
        frozenset() if native else LOWERED,
        memory_limit,
        largest_buffer,
    )


def round_to_pages(nbytes: int) -> int:
    """Bytes a request takes."""
    return nbytes if nbytes <= PAGE_BYTES else -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class CommandBuffers:
    """Metal's queue: command buffers that complete in the order they were committed."""

    __slots__ = ("closed", "elements", "kernels", "max_elements", "max_kernels", "open", "seen", "tasks")

    def __init__(self, max_kernels: int, max_mi_elements: int):
        self.max_kernels = max_kernels
        self.max_elements = (max_mi_elements + 1) << 20
        self.kernels = 0
        self.elements = 0
        self.tasks = 0
        self.seen: set[int] = set()
        self.open: list[int] = []
        self.closed: deque[tuple[bool, list[int]]] = deque()

    def submit(self, kernels: int, held: list[int], touched: list[tuple[int, int]]) -> None:
        """A primitive's kernels, the buffers that stay until they ran, and (buffer, elements) they touch."""
        self.open += held
        if kernels:
            self.kernels += kernels
            for buffer, elements in touched:
                if buffer not in self.seen:
                    self.seen.add(buffer)
                    self.elements += elements
        if self.kernels > self.max_kernels or self.elements >= self.max_elements:
            self._commit(task=True)

    def _commit(self, *, task: bool) -> None:
        self.closed.append((task, self.open))
        self.tasks += task
        self.open = []
        self.seen.clear()
        self.kernels = self.elements = 0

    def idle(self) -> None:
        """Nothing runs before it is waited for."""

    def finish_entry(self) -> list[int]:
        """Runs the oldest command buffer; returns what it released.

        The evaluator only asks when it waits, and before that it commits what is encoded, which is no task.
        """
        if self.open or self.kernels:
            self._commit(task=False)
        task, held = self.closed.popleft()
        self.tasks -= task
        return held

    def drain(self) -> list[int]:
        """Runs everything."""
        held = [b for _, entry in self.closed for b in entry] + self.open
        self.closed.clear()
        self.open = []
        self.seen.clear()
        self.kernels = self.elements = self.tasks = 0
        return held


# -- rules -------------------------------------------------------------------------------------------------


def _new(op: Operands, o: int = 0) -> Out:
    return Out(NEW, op.out_bytes(o), row_major(op.out_shapes[o]))


def norm(op: Operands) -> Effect:
    """Layer and RMS norm, forward: in place, new, or in the copy of an input whose rows are not dense."""
    x = op.inputs[0]
    dense = x.contiguous and x.strides[-1] == 1
    if dense and len(x.shape) > 1:
        dense = x.strides[-2] in (0, x.shape[-1]) or x.shape[-2] == 1
    if not dense:
        return Effect((_new(op),), 2)
    if op.donatable[0]:
        return Effect((Out(0, 0, x),), 1)
    return Effect((Out(NEW, x.span * op.items[0], x),), 1)


def layer_norm_vjp(op: Operands) -> Effect:
    """x, w, b, cotangent to dx, dw, db; dw and db are summed over rows in further kernels."""
    x, w, b, g = op.inputs
    x_free = op.donatable[0] or not x.row
    g_free = op.donatable[3] or not g.row
    dx, temporaries, kernels = _norm_vjp_dx(op, 3, x_free, g_free)
    if w.shape:
        if not (g_free and x_free):
            temporaries.append(x.size * op.out_items[1])
        sums, summed = _column_sum(x.size // x.shape[-1], x.shape[-1], op.out_items[1])
        kernels += summed
        temporaries += sums
    if b.shape:
        sums, summed = _column_sum(x.size // x.shape[-1], x.shape[-1], op.out_items[2])
        kernels += summed
        temporaries += sums
    return Effect((dx, _new(op, 1), _new(op, 2)), kernels, tuple(temporaries))


def rms_norm_vjp(op: Operands, *, grouped: bool) -> Effect:
    """x, w, cotangent to dx, dw. MLX asks its own handle on x and the cotangent whether it is the last one.

    That is never so, except of a copy it has just made: so dx is new. Until 0.32.1 the cotangent may hold
    the rows' gradients of w; since then they are grouped into at most 512 rows, which always are new.
    """
    x, w, g = op.inputs
    dx, temporaries, kernels = _norm_vjp_dx(op, 2, not x.row, not g.row)
    if w.shape:
        width = x.shape[-1]
        rows = x.size // width
        in_cotangent = not grouped and (op.donatable[2] or not g.row) and not (x.row and not g.row)
        if grouped and width <= RMS_LOOPED_LIMIT:
            rows = -(-rows // -(-rows // RMS_GROUPS))
        if not in_cotangent:
            temporaries.append(rows * width * op.out_items[1])
        sums, summed = _column_sum(rows, width, op.out_items[1])
        kernels += summed
        temporaries += sums
    return Effect((dx, _new(op, 1)), kernels, tuple(temporaries))


RMS_LOOPED_LIMIT = 4096
RMS_GROUPS = 512


def _norm_vjp_dx(op: Operands, cotangent: int, x_free: bool, g_free: bool) -> tuple[Out, list[int], int]:
    """Where dx goes: x's buffer (or its copy), else the cotangent's, else a new one."""
    x, g = op.inputs[0], op.inputs[cotangent]
    kernels = 1 + (not x.row) + (not g.row)
    temporaries = []
    if x_free:
        dx = Out(0, 0, x) if x.row else _new(op)
        if not g.row:
            temporaries.append(op.nbytes(cotangent))
    elif g_free:
        dx = Out(cotangent, 0, g) if g.row else _new(op)
    else:
        dx = _new(op)
    return dx, temporaries, kernels


def rope(op: Operands, *, reads_heads: bool) -> Effect:
    """Rotates in place where the input is row-major and dead, else into a new array.

    Args:
        reads_heads: whether (batch, heads, tokens, dim) may lie as (batch, tokens, heads, dim); before
            0.30.0 that is copied, and the copy rotated.
    """
    x = op.inputs[0]
    rotated = op.arguments[0] if op.arguments and isinstance(op.arguments[0], int) else x.shape[-1]
    if rotated < x.shape[-1]:
        if x.row and op.may_write(0, op.out_bytes(), op.out_items[0]):
            return Effect((Out(0, 0, x),), 1)
        return Effect((_new(op),), 2)
    if x.row:
        return Effect((Out(0, 0, x) if op.donatable[0] else _new(op),), 1)
    if len(x.shape) == 3 or all(n == 1 for n in x.shape[:-3]):
        return Effect((_new(op),), 1)
    *_, heads, tokens, dim = x.shape
    as_written = (tokens * heads * dim, dim, heads * dim)
    if reads_heads and len(x.shape) == 4 and x.strides[:3] == as_written:
        return Effect((_new(op),), 1)
    return Effect((_new(op),), 2)


def attention(op: Operands) -> Effect:
    """The fused kernel: operands whose last axis is not dense are copied; the heads lie beside each other."""
    copies = tuple(op.nbytes(i) for i in range(min(4, len(op.inputs))) if op.inputs[i].strides[-1] != 1)
    shape = op.out_shapes[0]
    _, heads, tokens, dim = shape
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    out = Out(NEW, op.out_bytes(), Layout(shape, strides, True, False, False, prod(shape)))
    statistics = tuple(_new(op, o) for o in range(1, len(op.out_shapes)))
    return Effect((out, *statistics), 1 + len(copies), copies)


def attention_vjp(op: Operands) -> Effect:
    """q, k, v, output, logsumexp, cotangent to dq, dk, dv, a block of scores at a time.

    Read in the released library of 0.32.4: its source is not in the snapshot. Operands that are not row-major
    are copied; x three blocks of scores and the gradients of one block in the operands' dtype, x the three
    gradients in float32, and a number for each row.
    """
    q, k, v = op.inputs[:3]
    batch, heads, rows, dim = q.shape
    groups, columns, value_dim = k.shape[1], k.shape[2], v.shape[3]
    item, tall, wide = op.items[0], min(ATTENTION_BLOCK, rows), min(ATTENTION_BLOCK, columns)
    copies = [op.nbytes(i) for i, given in enumerate(op.inputs) if not given.row]
    blocks = batch * heads * (3 * tall * wide + tall * dim + wide * (dim + value_dim)) * item
    totals = batch * (heads * rows * dim + groups * columns * (dim + value_dim)) * 4
    tiles = -(-rows // tall) * -(-columns // wide)
    kernels = len(copies) + 4 + 10 * tiles
    outs = tuple(_new(op, o) for o in range(3))
    return Effect(outs, kernels, (*copies, blocks, totals, batch * heads * rows * 4))


ATTENTION_BLOCK = 1024
"""``MLX_SDPA_VJP_BLOCK``'s default: rows and columns of scores the backward makes at a time."""


def cross_entropy_vjp(op: Operands) -> Effect:
    """logits, targets, loss, cotangent to dlogits: in the logits' buffer where that is dead."""
    copies = tuple(op.nbytes(i) for i, given in enumerate(op.inputs) if not given.row)
    in_place = op.donatable[0] and op.inputs[0].row
    return Effect((Out(0, 0, op.inputs[0]) if in_place else _new(op),), 1 + len(copies), copies)


def reduce(op: Operands) -> Effect:
    """New; a copy where no kernel fits the strides, partial results where columns are long."""
    x = op.inputs[0]
    axes = op.arguments[1] if len(op.arguments) > 1 else tuple(range(len(x.shape)))
    out = Out(NEW, max(4, op.out_bytes()), row_major(op.out_shapes[0]))
    if x.size == 0 or x.size == prod(op.out_shapes[0]):
        return Effect((out,), 1)
    temporaries: list[int] = []
    kernels = 0
    plan = _reduction(x, axes)
    if plan is None:
        temporaries.append(op.nbytes(0))
        kernels = 1
        plan = _reduction(row_major(x.shape), axes) or (1, 1)
    rows, stride = plan
    if stride == 0:
        if x.size > 4096:
            temporaries.append((128 if op.nbytes(0) <= 1 << 26 else 4096) * op.out_items[0])
            kernels += 1
        return Effect((out,), kernels + 1, tuple(temporaries))
    if stride == 1:
        return Effect((out,), kernels + 1, tuple(temporaries))
    sums, summed = _column_sum(rows, prod(op.out_shapes[0]), op.out_items[0], stride)
    return Effect((out,), kernels + summed, (*temporaries, *sums))


def _column_sum(rows: int, outputs: int, item: int, stride: int | None = None) -> tuple[list[int], int]:
    """Partial results (bytes) and kernels of a sum over ``rows`` rows that lie ``stride`` elements apart."""
    stride = outputs if stride is None else stride
    if rows < 32:
        return [], 1
    if stride < 32 and rows >= 1024:
        return [(128 if rows >= 32768 else 32) * outputs * item], 2
    if rows > 256 and outputs // 32 < 1024:
        return [32 * outputs * item], 2
    return [], 1


def _reduction(x: Layout, axes: tuple[int, ...]) -> tuple[int, int] | None:
    """(elements reduced into one, smallest stride reduced over); a stride of 0 is all of it, None is a copy.

    ``get_reduction_plan`` of ``backend/common/reduce.cpp``, of which only this matters to memory.
    """
    reduced = [(x.shape[a], x.strides[a]) for a in axes if x.shape[a] > 1]
    count = prod(n for n, _ in reduced)
    if x.size == x.span and len(axes) == len(x.shape) and x.contiguous:
        return count, 0
    if not reduced:
        return 1, 1
    if x.row:
        return count, reduced[-1][1]
    reduced.sort(key=lambda pair: (-pair[1] if pair[1] else 1, 0))
    smallest = min((step for _, step in reduced if step), default=0)
    last = reduced[-1][1]
    if last == 1 or smallest == 1:
        return count, 1
    if last <= 0:
        return None
    size, expanded = 1, False
    for i in reversed(range(len(x.shape))):
        if i == axes[-1] or (x.strides[i] == 0 and x.shape[i] == 1):
            continue
        if x.strides[i] == 0:
            expanded = True
            break
        if x.strides[i] != size and x.shape[i] != 1:
            break
        size *= x.shape[i]
    if size > last or (size == last and not expanded):
        return count, last
    return None


def _operand_copies(op: Operands) -> list[int]:
    """Bytes of copies of matrix operands: those without a stride of 1, and vectors that are not dense."""
    copies = []
    rows, columns = op.inputs[0].shape[-2], op.inputs[1].shape[-1]
    for i, vector in ((0, rows == 1), (1, columns == 1)):
        given = op.inputs[i]
        down, across = given.strides[-2], given.strides[-1]
        by_row = across == 1 and (not vector or down == given.shape[-1])
        by_column = down == 1 and (not vector or across == given.shape[-2])
        if not (by_row or by_column):
            copies.append(op.nbytes(i))
    return copies


def matmul(op: Operands, *, partials: Callable[[int, int, int], int]) -> Effect:
    """A product, or with three operands one that is added to the last: always a new array.

    Args:
        partials: of rows, columns and inner size, into how many partial products one matrix is split.
    """
    a, b = op.inputs[:2]
    if a.size == 0 or b.size == 0:
        return Effect((_new(op),), 1)
    temporaries = _operand_copies(op)
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = prod(op.out_shapes[0][:-2])
    if batch > 1 and a.row and not any(b.strides[:-2]):
        rows, batch = rows * batch, 1
    split = partials(rows, columns, inner) if batch == 1 and min(rows, columns) > 1 else 0
    kernels = 1 + len(temporaries) + (split > 0)
    if split:
        temporaries.append(split * rows * columns * 4)
    return Effect((_new(op),), kernels, tuple(temporaries))


def partial_products(chip: Chip, mlx: Version, rows: int, columns: int, inner: int) -> int:
    """Into how many partial products Metal splits a matrix product of these sizes; 0 for none."""
    if mlx < (0, 31, 0):
        tiles, depth = (rows // 16) * (columns // 16), inner // 16
        if tiles > 32 or depth < 8:
            return 0
        return 2 if depth < 16 else 4 if depth < 32 else 8 if depth < 64 else 16
    tiles, depth = -(-rows // 16) * -(-columns // 16), inner // 16
    longest = max(rows, columns)
    if chip.has_tensor_cores:
        if not (inner >= 3 * longest or (longest <= 1024 and inner > 2 * longest)):
            return 0
        part = 4096 if inner > 4096 else 2048 if inner > 2048 else 1024 if inner > 1024 else inner // 2
        return -(-inner // part) if part else 0
    if tiles > (2048 if chip.size in ("s", "d") else 1024) or depth < 8 or inner < longest:
        return 0
    quotient = depth // (-(-rows // 32) * -(-columns // 32))
    power = 1 << (quotient - 1).bit_length() if quotient > 0 else 0
    return min(max(2, power), 32)


def quantized_matmul(op: Operands, *, splits: bool) -> Effect:
    """Operands are copied unless their last two axes are dense; few rows are split along the inner size.

    Arguments: group size, bits, mode, whether the weights are transposed; older releases have no mode.
    """
    temporaries = []
    for i, given in enumerate(op.inputs):
        dense = given.strides[-1] == 1 and (len(given.shape) < 2 or given.strides[-2] == given.shape[-1])
        if not dense:
            temporaries.append(op.nbytes(i))
    kernels = 1 + len(temporaries)
    x, w = op.inputs[:2]
    transposed = bool(op.arguments[-1]) if op.arguments else True
    if splits and transposed and len(w.shape) == 2 and x.row:
        group = op.arguments[0] if op.arguments else 64
        inner, columns = x.shape[-1], op.out_shapes[0][-1]
        rows = x.size // inner
        split = _quantized_split(rows, columns, inner, group)
        if split > 1:
            temporaries.append(split * op.out_bytes())
            kernels += 1
    return Effect((_new(op),), kernels, tuple(temporaries))


def _quantized_split(rows: int, columns: int, inner: int, group: int) -> int:
    if rows < 12:  # vector kernels
        return 1
    tiles = -(-columns // 32) * -(-rows // 32)
    split = min(max(1, 512 // tiles), inner // group)
    while split > 1 and inner % (split * group):
        split -= 1
    return split


def scan(op: Operands) -> Effect:
    """In place or like the input; one that is not dense along the axis is copied, and the copy scanned."""
    x = op.inputs[0]
    axis = op.arguments[1]
    if x.contiguous and x.strides[axis] != 0:
        if op.donatable[0] and op.items[0] == op.out_items[0]:
            return Effect((Out(0, 0, x),), 1)
        return Effect((Out(NEW, x.span * op.out_items[0], x),), 1)
    return Effect((_new(op),), 2)


def rules(chip: Chip, mlx: Version) -> dict[str, Rule]:
    """The rule of every primitive on a chip under a release."""
    product = partial(matmul, partials=partial(partial_products, chip, mlx))
    return {
        **CPU_RULES,
        "AddMM": product,
        "CrossEntropy": fresh,
        "CrossEntropyVJP": cross_entropy_vjp,
        "LayerNorm": norm,
        "LayerNormVJP": layer_norm_vjp,
        "Matmul": product,
        "QuantizedMatmul": partial(quantized_matmul, splits=mlx >= (0, 31, 1)),
        "RMSNorm": norm,
        "RMSNormVJP": partial(rms_norm_vjp, grouped=mlx > (0, 32, 1)),
        "Reduce": reduce,
        "RoPE": partial(rope, reads_heads=mlx >= (0, 30, 0)),
        "Scan": scan,
        "ScaledDotProductAttention": attention,
        "ScaledDotProductAttentionVJP": attention_vjp,
    }
