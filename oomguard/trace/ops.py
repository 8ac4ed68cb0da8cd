"""What each primitive does with buffers on the CPU: one pure function a primitive, and the table of them.

A rule sees how its inputs lie, which of them it may write into, and the shapes to make. It says for each
output whether it lives in an input's buffer or in a new one, what else is allocated until the kernels have
run, and how many kernels are put in the queue. Read in MLX's ``backend/cpu`` and ``backend/common``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from oomguard.trace import layout as lay
from oomguard.trace.graph import Shape
from oomguard.trace.layout import Layout, row_major

NEW = -1
"""The source of an output that gets a buffer of its own."""

DONATION_EXTRA_BYTES = 16384
"""A buffer may be larger than what is written into it by this much."""


class Operands:
    """What a rule may look at. One object is reused for all nodes of a simulation."""

    __slots__ = (
        "arguments",
        "buffer_bytes",
        "donatable",
        "dtypes",
        "inputs",
        "items",
        "out_items",
        "out_shapes",
    )

    inputs: list[Layout]
    items: list[int]
    """Bytes of an element, for each input."""
    donatable: list[bool]
    """Whether this primitive is the last to see the input's buffer."""
    buffer_bytes: list[int]
    """Size of the buffer each input lives in."""
    out_shapes: list[Shape]
    out_items: list[int]
    arguments: tuple[Any, ...]
    dtypes: list[str]

    def may_write(self, i: int, out_bytes: int, out_item: int) -> bool:
        """Whether an output of that size may live in input ``i``'s buffer."""
        return (
            self.donatable[i]
            and self.items[i] == out_item
            and self.buffer_bytes[i] <= out_bytes + DONATION_EXTRA_BYTES
        )

    def nbytes(self, i: int) -> int:
        """Bytes of all elements of input ``i``, were it laid out densely."""
        return self.inputs[i].size * self.items[i]

    def out_bytes(self, o: int = 0) -> int:
        return prod(self.out_shapes[o]) * self.out_items[o]


class Out(NamedTuple):
    """One output: in input ``source``'s buffer, or in a new one (``NEW``) of ``nbytes``."""

    source: int
    nbytes: int
    layout: Layout


class Effect(NamedTuple):
    """What a primitive does: its outputs, the kernels it queues, temporary buffers until those have run."""

    outs: tuple[Out, ...]
    kernels: int
    temporaries: tuple[int, ...] = ()


Rule = Callable[[Operands], Effect]


def _new(op: Operands, o: int = 0) -> Out:
    """A new row-major output."""
    return Out(NEW, op.out_bytes(o), row_major(op.out_shapes[o]))


# -- views -------------------------------------------------------------------------------------------------


def share(op: Operands) -> Effect:
    """Hands its first input on."""
    return Effect((Out(0, 0, op.inputs[0]),), 0)


def depends(op: Operands) -> Effect:
    """Hands on its first inputs, as many as it has outputs."""
    return Effect(tuple(Out(i, 0, op.inputs[i]) for i in range(len(op.out_shapes))), 0)


def custom_transforms(op: Operands) -> Effect:
    """Hands on its last inputs: what the function it wraps returned."""
    first = len(op.inputs) - len(op.out_shapes)
    return Effect(tuple(Out(first + o, 0, op.inputs[first + o]) for o in range(len(op.out_shapes))), 0)


def broadcast(op: Operands) -> Effect:
    shape = op.out_shapes[0]
    if 0 in shape:
        return Effect((_new(op),), 0)
    return Effect((Out(0, 0, lay.broadcast(op.inputs[0], shape)),), 0)


def transpose(op: Operands) -> Effect:
    return Effect((Out(0, 0, lay.transpose(op.inputs[0], op.arguments[0])),), 0)


def expand_dims(op: Operands) -> Effect:
    return Effect((Out(0, 0, lay.expand_dims(op.inputs[0], op.arguments[0], op.out_shapes[0])),), 0)


def squeeze(op: Operands) -> Effect:
    return Effect((Out(0, 0, lay.squeeze(op.inputs[0], op.arguments[0], op.out_shapes[0])),), 0)


def slice_(op: Operands) -> Effect:
    shape = op.out_shapes[0]
    if 0 in shape:
        return Effect((_new(op),), 0)
    return Effect((Out(0, 0, lay.slice_view(op.inputs[0], op.arguments[2], shape)),), 0)


def split(op: Operands) -> Effect:
    return Effect(tuple(Out(0, 0, lay.split_view(op.inputs[0], shape)) for shape in op.out_shapes), 0)


def as_strided(op: Operands) -> Effect:
    return Effect((Out(0, 0, lay.strided(op.inputs[0], op.arguments[0], op.arguments[1])),), 0)


def reshape(op: Operands) -> Effect:
    """A view where the strides allow it, else a copy."""
    view = lay.reshape(op.inputs[0], op.out_shapes[0])
    if view is None:
        return Effect((_new(op),), 1)
    return Effect((Out(0, 0, view),), 0)


def view(op: Operands) -> Effect:
    """The bytes as another dtype: in place, or of a row-major copy."""
    same = lay.view_as(op.inputs[0], op.out_shapes[0], op.items[0], op.out_items[0])
    if same is None:
        return Effect((Out(NEW, op.nbytes(0), row_major(op.out_shapes[0])),), 1)
    return Effect((Out(0, 0, same),), 0)


def contiguous(op: Operands) -> Effect:
    """Hands on what is dense already (in column order too, where allowed), else copies."""
    given = op.inputs[0]
    dense = given.row or (bool(op.arguments and op.arguments[0]) and given.col)
    if dense and op.buffer_bytes[0] <= op.out_bytes() + DONATION_EXTRA_BYTES:
        return Effect((Out(0, 0, given),), 0)
    return Effect((_new(op),), 1)


# -- elementwise -------------------------------------------------------------------------------------------


def _like(op: Operands, i: int, o: int = 0) -> Out:
    """An output laid out like input ``i``, in its buffer where that may be written."""
    given, item = op.inputs[i], op.out_items[o]
    if op.may_write(i, op.out_bytes(o), item):
        return Out(i, 0, given)
    return Out(NEW, given.span * item, given)


def unary(op: Operands) -> Effect:
    out = _like(op, 0) if op.inputs[0].contiguous else _new(op)
    return Effect((out,), 1)


def unary_of_signed(op: Operands) -> Effect:
    """``abs`` and ``sign``: nothing to do for numbers without a sign."""
    return share(op) if op.dtypes[0].startswith(("uint", "bool")) else unary(op)


def unary_of_real(op: Operands) -> Effect:
    """``ceil``, ``floor``, ``round``: nothing to do for whole numbers."""
    return share(op) if op.dtypes[0].startswith(("uint", "int", "bool")) else unary(op)


def binary(op: Operands) -> Effect:
    return Effect((_binary_out(op, 0, ()),), 1)


def div_mod(op: Operands) -> Effect:
    first = _binary_out(op, 0, ())
    second = _binary_out(op, 1, (first.source,))
    return Effect((first, second), 1)


def _binary_out(op: Operands, o: int, taken: tuple[int, ...]) -> Out:
    a, b = op.inputs
    item, nbytes = op.out_items[o], op.out_bytes(o)
    free = [op.may_write(i, nbytes, item) and i not in taken for i in (0, 1)]
    if a.span == 1 and b.span == 1:
        return Out(NEW, item, a)
    if a.span == 1 and b.contiguous:
        return Out(1, 0, b) if free[1] else Out(NEW, b.span * item, b)
    if b.span == 1 and a.contiguous:
        return Out(0, 0, a) if free[0] else Out(NEW, a.span * item, a)
    if (a.row and b.row) or (a.col and b.col):
        if free[0]:
            return Out(0, 0, a)
        return Out(1, 0, b) if free[1] else Out(NEW, a.span * item, a)
    if free[0] and a.row and a.size == prod(op.out_shapes[o]):
        return Out(0, 0, a)
    if free[1] and b.row and b.size == prod(op.out_shapes[o]):
        return Out(1, 0, b)
    return _new(op, o)


def select(op: Operands) -> Effect:
    """``where``: condition and both values; a value's or a condition's buffer is reused where it fits."""
    a, b, c = op.inputs
    item, nbytes = op.out_items[0], op.out_bytes()
    if a.span == b.span == c.span == 1:
        return Effect((Out(NEW, item, b),), 1)
    vectors = (a.row and b.row and c.row) or (a.col and b.col and c.col)
    for i, given in enumerate((a, b, c)):
        if (vectors or given.row) and op.may_write(i, nbytes, item):
            return Effect((Out(i, 0, given),), 1)
    return Effect((Out(NEW, b.span * item, b) if vectors else _new(op),), 1)


def compiled(op: Operands) -> Effect:
    """A fused kernel. Its arguments are (names of what is fused, positions of its constant inputs).

    Axes of size one are broadcast inside, so inputs may be smaller than outputs.
    """
    constants = op.arguments[1]
    shape = op.out_shapes[0]
    outs = (
        _compiled_dense(op, constants) if _compiled_is_dense(op, shape) else _compiled_strided(op, constants)
    )
    return Effect(tuple(outs), 1)


def _compiled_is_dense(op: Operands, shape: Shape) -> bool:
    arrays = [given for given in op.inputs if given.shape]
    same = all(given.shape == shape for given in arrays)
    if not arrays:
        return not shape
    if any(step < 0 for given in arrays for step in given.strides):
        return False
    if len(arrays) == 1:
        return same and arrays[0].contiguous
    return same and (all(given.row for given in arrays) or all(given.col for given in arrays))


def _compiled_dense(op: Operands, constants: tuple[int, ...]) -> list[Out]:
    outs: list[Out] = []
    like: Layout | None = None
    size = prod(op.out_shapes[0])
    for i, given in enumerate(op.inputs):
        if len(outs) == len(op.out_shapes):
            break
        if op.items[i] == op.out_items[len(outs)] and given.shape and op.donatable[i] and i not in constants:
            outs.append(Out(i, 0, given))
        if like is None and given.size == size:
            like = given
    for o in range(len(outs), len(op.out_shapes)):
        given = like or row_major(op.out_shapes[o])
        outs.append(Out(NEW, given.span * op.out_items[o], given))
    return outs


def _compiled_strided(op: Operands, constants: tuple[int, ...]) -> list[Out]:
    outs: list[Out] = []
    for i, given in enumerate(op.inputs):
        o = len(outs)
        if o == len(op.out_shapes):
            break
        if (
            given.row
            and given.size == prod(op.out_shapes[o])
            and op.items[i] == op.out_items[o]
            and op.donatable[i]
            and i not in constants
        ):
            outs.append(Out(i, 0, row_major(op.out_shapes[o])))
    outs += [_new(op, o) for o in range(len(outs), len(op.out_shapes))]
    return outs


# -- copies ------------------------------------------------------------------------------------------------


def _copy(op: Operands, i: int, kind: str) -> tuple[Out, int]:
    """Output 0 as a copy of input ``i`` of the same dtype, and the kernels it takes: none where donated.

    Args:
        kind: ``scalar`` and ``general`` copies are row-major, a ``vector`` copy lies as its source.
    """
    if kind == "vector":
        out = _like(op, i)
        return out, 0 if out.source == i else 1
    return _new(op), 1


def as_type(op: Operands) -> Effect:
    """A conversion may happen in place, but it is always a kernel."""
    out = _like(op, 0) if op.inputs[0].contiguous else _new(op)
    return Effect((out,), 1)


def full(op: Operands) -> Effect:
    given = op.inputs[0]
    kind = "scalar" if given.span == 1 else "vector" if given.contiguous else "general"
    out, kernels = _copy(op, 0, kind)
    return Effect((out,), kernels)


def concatenate(op: Operands) -> Effect:
    return Effect((_new(op),), len(op.inputs))


def pad(op: Operands) -> Effect:
    return Effect((_new(op),), 2)


def _copy_then_write(op: Operands, dense: bool) -> Effect:
    out, kernels = _copy(op, 0, "vector" if dense else "general")
    return Effect((out,), kernels + 1)


def scatter(op: Operands) -> Effect:
    """The destination is copied, or written in place where this is its last use."""
    return _copy_then_write(op, op.inputs[0].row)


def slice_update(op: Operands) -> Effect:
    if 0 in op.out_shapes[0]:
        return Effect((_new(op),), 0)
    if op.inputs[1].size == 0:
        return share(op)
    given = op.inputs[0]
    if given.span == 1:
        return Effect((_new(op),), 2)
    return _copy_then_write(op, given.contiguous and given.size == given.span)


def _offset(op: Operands, i: int) -> tuple[int, ...]:
    """The eight bytes a dynamic slice computes its offset in, unless its indices can hold them."""
    donated = op.donatable[i] and op.inputs[i].span * op.items[i] >= 8
    return () if donated else (8,)


def dynamic_slice(op: Operands) -> Effect:
    if 0 in op.out_shapes[0]:
        return Effect((_new(op),), 0)
    return Effect((_new(op),), 2, _offset(op, 1))


def dynamic_slice_update(op: Operands) -> Effect:
    if 0 in op.out_shapes[0]:
        return Effect((_new(op),), 0)
    outs, kernels, _ = slice_update(op)
    return Effect(outs, kernels + 1, _offset(op, 2))


def sort(op: Operands) -> Effect:
    axis = op.arguments[-1] if op.arguments else -1
    given = op.inputs[0]
    return _copy_then_write(op, given.contiguous and given.strides[axis] != 0)


def hadamard(op: Operands) -> Effect:
    given = op.inputs[0]
    if given.row and op.donatable[0]:
        return Effect((Out(0, 0, given),), 1)
    return _copy_then_write(op, given.row)


def factorize_in_place(op: Operands) -> Effect:
    """Cholesky, inverse: computed in the copy that is the output."""
    return _copy_then_write(op, op.inputs[0].row)


# -- reading kernels that write a new array -----------------------------------------------------------------


def fresh(op: Operands) -> Effect:
    """New row-major outputs from inputs of any layout, one kernel."""
    return Effect(tuple(_new(op, o) for o in range(len(op.out_shapes))), 1)


def fresh_without_kernel(op: Operands) -> Effect:
    return Effect((_new(op),), 0)


def softmax(op: Operands) -> Effect:
    """In place where allowed; an input whose last axis is not dense is copied, and the copy is the output."""
    given = op.inputs[0]
    if given.contiguous and given.strides[-1] == 1:
        if op.donatable[0]:
            return Effect((Out(0, 0, given),), 1)
        return Effect((Out(NEW, given.span * op.items[0], given),), 1)
    return Effect((_new(op),), 2)


def logsumexp(op: Operands) -> Effect:
    given = op.inputs[0]
    if given.row:
        return Effect((_new(op),), 1)
    if not (given.contiguous and given.strides[-1] == 1):
        return Effect((_new(op),), 2, (op.nbytes(0),))
    n = given.shape[-1]
    strides = tuple(step // n for step in given.strides)
    shape = op.out_shapes[0]
    col = strides[0] == 1 and all(
        shape[i] == 1 or strides[i - 1] == shape[i] * strides[i] for i in range(1, len(strides))
    )
    out = Layout(shape, strides, given.contiguous, given.row, col, given.span // n)
    return Effect((Out(NEW, op.nbytes(0) // n, out),), 1)


def scan(op: Operands) -> Effect:
    if op.inputs[0].row:
        return Effect((_new(op),), 1)
    return Effect((_new(op),), 2, (op.nbytes(0),))


# -- products ----------------------------------------------------------------------------------------------


def _matrix_is_dense(given: Layout) -> bool:
    """Whether BLAS can read the last two axes as they lie, transposed or not."""
    rows, columns = given.strides[-2], given.strides[-1]
    return (rows == given.shape[-1] and columns == 1) or (rows == 1 and columns == given.shape[-2])


def _operand_copies(op: Operands) -> tuple[int, ...]:
    return tuple(op.nbytes(i) for i in (0, 1) if not _matrix_is_dense(op.inputs[i]))


def matmul(op: Operands) -> Effect:
    """A new product; an operand that is neither row- nor column-major is copied first."""
    if op.inputs[0].shape[-1] == 0:
        return Effect((_new(op),), 1)
    copies = _operand_copies(op)
    return Effect((_new(op),), 1 + len(copies), copies)


def addmm(op: Operands) -> Effect:
    """The addend is copied into the output, or becomes it, and the product is added there."""
    given = op.inputs[2]
    kind = "scalar" if given.span == 1 else "vector" if given.row else "general"
    out, kernels = _copy(op, 2, kind)
    if 0 in op.out_shapes[0]:
        return Effect((_new(op),), 0)
    copies = _operand_copies(op)
    return Effect((out,), kernels + 1 + len(copies), copies)


def block_masked_mm(op: Operands) -> Effect:
    """Operands are copied wherever they are masked."""
    masked = len(op.inputs) > 3
    copies = tuple(op.nbytes(i) for i in (0, 1) if masked or not _matrix_is_dense(op.inputs[i]))
    return Effect((_new(op),), 1 + len(copies), copies)


def quantized_matmul(op: Operands) -> Effect:
    copies = tuple(op.nbytes(i) for i in range(len(op.inputs)) if not op.inputs[i].row)
    return Effect((_new(op),), 1 + len(copies), copies)


def gather_qmm(op: Operands) -> Effect:
    """Only the last two axes of the operands must be dense; the two index arrays come last."""
    copies = []
    for i in range(len(op.inputs) - 2):
        given = op.inputs[i]
        if not (given.strides[-2] == given.shape[-1] and given.strides[-1] == 1):
            copies.append(op.nbytes(i))
    return Effect((_new(op),), 1 + len(copies), tuple(copies))


def quantize(op: Operands) -> Effect:
    copies = () if op.inputs[0].row else (op.nbytes(0),)
    outs = tuple(_new(op, o) for o in range(len(op.out_shapes)))
    return Effect(outs, 1 + len(copies), copies)


# -- convolution -------------------------------------------------------------------------------------------


def convolution(op: Operands) -> Effect:
    """Padded input, unfolded patches and weights as float32 temporaries, then one product; or plain loops.

    Arguments: strides, padding low, padding high, kernel dilation, input dilation, groups, flip.
    """
    _, low, high, dilation, input_dilation, _, flip = op.arguments
    x, w = op.inputs
    groups = x.shape[-1] // w.shape[-1]
    plain = all(d == 1 for d in (*dilation, *input_dilation))
    grouped_1d = len(x.shape) == 3 and not flip
    if not plain or (groups > 1 and not grouped_1d):
        return Effect((_new(op),), 1)
    padded = prod(n + a + b for n, a, b in zip(x.shape[1:-1], low, high, strict=True))
    temporaries = [4, x.shape[0] * padded * x.shape[-1] * 4]
    patches = prod(op.out_shapes[0][:-1]) * prod(w.shape[1:-1]) * x.shape[-1]
    temporaries.append(patches * 4)
    kernels = 4
    weights = w.size * 4
    if groups > 1 or op.items[1] != 4 or not w.row:
        temporaries.append(weights)
        kernels += 1
    if flip:
        temporaries.append(weights)
        kernels += 2
    if op.out_items[0] != 4:
        temporaries.append(prod(op.out_shapes[0]) * 4)
        kernels += 1
    return Effect((_new(op),), kernels, tuple(temporaries))


# -- linear algebra ----------------------------------------------------------------------------------------


def factorize_copy(op: Operands) -> Effect:
    """QR, SVD, eigenvalues: LAPACK overwrites a copy of the input."""
    outs = tuple(_new(op, o) for o in range(len(op.out_shapes)))
    return Effect(outs, 2, (op.nbytes(0),))


def unknown(op: Operands) -> Effect:
    """From above: new outputs, and a copy of every input until the kernel has run."""
    outs = tuple(_new(op, o) for o in range(len(op.out_shapes)))
    return Effect(outs, 1 + len(op.inputs), tuple(op.nbytes(i) for i in range(len(op.inputs))))


_UNARY = (
    "ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh BitwiseInvert Conjugate Cos Cosh Erf ErfInv Exp Expm1 Imag "
    "Log Log1p LogicalNot Negative Real Sigmoid Sin Sinh Square Sqrt Tan Tanh ConvertFP8"
)
_BINARY = (
    "Add ArcTan2 BitwiseBinary Divide Equal FloorDivide Greater GreaterEqual Less LessEqual LogAddExp "
    "LogicalAnd LogicalOr Maximum Minimum Multiply NotEqual Power Remainder Subtract"
)

CPU_RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY.split(), unary),
    **dict.fromkeys(_BINARY.split(), binary),
    **dict.fromkeys(("Abs", "Sign"), unary_of_signed),
    **dict.fromkeys(("Ceil", "Floor", "Round"), unary_of_real),
    **dict.fromkeys(("Copy", "StopGradient"), share),
    **dict.fromkeys(("Broadcast", "BroadcastAxes"), broadcast),
    **dict.fromkeys(("Reshape", "Flatten", "Unflatten"), reshape),
    **dict.fromkeys(("Reduce", "ArgReduce", "ArgSort", "ArgPartition", "SearchSorted", "Gather"), fresh),
    **dict.fromkeys(("GatherAxis", "RandomBits", "Arange", "FFT"), fresh),
    **dict.fromkeys(("Scatter", "ScatterAxis", "MaskedScatter"), scatter),
    **dict.fromkeys(("Sort", "Partition"), sort),
    **dict.fromkeys(("Matmul", "GatherMM", "SegmentedMM"), matmul),
    **dict.fromkeys(("Cholesky", "Inverse"), factorize_in_place),
    **dict.fromkeys(("QRF", "SVD", "Eig", "Eigh", "LUF"), factorize_copy),
    "AddMM": addmm,
    "AsStrided": as_strided,
    "AsType": as_type,
    "BlockMaskedMM": block_masked_mm,
    "Compiled": compiled,
    "Concatenate": concatenate,
    "Contiguous": contiguous,
    "Convolution": convolution,
    "CustomTransforms": custom_transforms,
    "Depends": depends,
    "DivMod": div_mod,
    "DynamicSlice": dynamic_slice,
    "DynamicSliceUpdate": dynamic_slice_update,
    "ExpandDims": expand_dims,
    "Full": full,
    "GatherQMM": gather_qmm,
    "Hadamard": hadamard,
    "Load": fresh_without_kernel,
    "LogSumExp": logsumexp,
    "NumberOfElements": fresh_without_kernel,
    "Pad": pad,
    "Quantize": quantize,
    "QuantizedMatmul": quantized_matmul,
    "Scan": scan,
    "Select": select,
    "Slice": slice_,
    "SliceUpdate": slice_update,
    "Softmax": softmax,
    "Split": split,
    "Squeeze": squeeze,
    "Transpose": transpose,
    "View": view,
}
