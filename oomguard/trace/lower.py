"""Turns a step captured on the CPU into the graph a GPU backend builds for it.

``mx.fast`` has functions that are one primitive on a GPU and a handful of elementwise primitives and
reductions on the CPU. Which tensors are saved differs with it, so a graph captured without a GPU is
rewritten: the nodes of each ``mx.fast`` region become the primitive, the nodes of its backward the
primitive's own VJP. What each takes and gives is in MLX's ``fast.cpp``:

=============  ===========================  ==========================================================
layer norm     LayerNorm(x, w, b)           LayerNormVJP(x, w, b, cotangent) -> dx, dw, db
RMS norm       RMSNorm(x, w)                RMSNormVJP(x, w, cotangent) -> dx, dw
RoPE           RoPE(x, offset[, freqs])     RoPE(cotangent, offset[, freqs]), turned the other way
cross entropy  CrossEntropy(x, targets)     CrossEntropyVJP(x, targets, loss, cotangent) -> dx
attention      ScaledDotProductAttention    ...VJP(q, k, v, o, logsumexp, cotangent) -> dq, dk, dv
               (q, k, v) -> o[, logsumexp]
=============  ===========================  ==========================================================

A missing weight or bias is a scalar constant. The VJP of a norm makes all its gradients, also those nobody
asked for (frozen weights of a LoRA run): they take memory for as long as the primitive runs.

Cross entropy, also that of ``nn.losses``, is one primitive since 0.32.4, in float32 whatever the logits are: the
backward reads the logits alone, and no array of their size is made beside their gradient.

Attention stays as captured, decomposed, wherever MLX decomposes it on the target too; see
``fuses_attention``. A graph captured on the target itself needs none of this.

For the CPU there is one thing to undo. The marks that delimit a region also group what its primitives add to
the gradient of an input: ``residual + (a + b)``. Without them MLX adds in the order it differentiates,
``(residual + a) + b``, and another sum is alive meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oomguard.errors import TraceError
from oomguard.trace.graph import Graph, Node, Region

Backend = Literal["cpu", "metal", "cuda"]
Version = tuple[int, int, int]

ATTENTION = "fast.scaled_dot_product_attention"
CROSS_ENTROPY = "nn.cross_entropy"
"""``nn.losses.cross_entropy`` of class indices; a region only where it is marked."""

CROSS_ENTROPY_PRIMITIVE: Version = (0, 32, 4)
METAL_ATTENTION_BACKWARD: Version = (0, 32, 4)


@dataclass(frozen=True, slots=True)
class Target:
    """The backend and the MLX release whose graph is wanted.

    MLX-Swift has releases of its own: 0.25.1 to 0.25.6 hold MLX 0.25.1.

    Attributes:
        fused_attention: whether attention has a fused backward on Metal; None for as the release has it. A step that
            brings a kernel of its own has it under any release.
        fused_cross_entropy: the same of cross entropy on a GPU.
    """

    backend: Backend
    mlx: Version
    fused_attention: bool | None = None
    fused_cross_entropy: bool | None = None

    @property
    def fuses_attention_backward(self) -> bool:
        return self._has(self.fused_attention, METAL_ATTENTION_BACKWARD)

    @property
    def fuses_cross_entropy(self) -> bool:
        return self._has(self.fused_cross_entropy, CROSS_ENTROPY_PRIMITIVE)

    def _has(self, said: bool | None, since: Version) -> bool:
        return self.mlx >= since if said is None else said


def parse_version(text: str) -> Version:
    """``0.32.4`` or ``0.32.4.dev1+abc`` as three numbers; missing ones are 0."""
    parts = [int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:3]]
    major, minor, patch = (*parts, 0, 0, 0)[:3]
    return major, minor, patch


def lower(graph: Graph, target: Target) -> Graph:
    """The graph of the same step on ``target``.

    Args:
        graph: captured on the CPU with ``LOWERED`` marked, no policy applied; unchanged.
        target: what runs it; for ``cpu`` too, see above.

    Returns:
        A new graph in topological order, with the captured regions.

    Raises:
        TraceError: the step has a backward, and none of its regions was marked when it was captured.
    """
    if target.backend == "cpu":
        return for_cpu(graph)
    _check_marks(graph)
    result = graph.copy()
    training = any(i is not None for region in graph.regions for i in region.gradients)
    lowering = _Lowering(result)
    for region in result.regions:
        if region.kind == ATTENTION:
            if fuses_attention(result, region, target, training):
                lowering.attention(region, training=training)
        elif region.kind in _CROSS_ENTROPY:
            if target.fuses_cross_entropy:
                lowering.cross_entropy(region)
        elif region.kind in _RULES:
            _RULES[region.kind](lowering, region)
    lowering.finish()
    return result


def _check_marks(graph: Graph) -> None:
    found = [region for region in graph.regions if region.kind in LOWERED]
    differentiated = any(i is not None for region in found for i in region.gradients)
    if found and not differentiated and any(node.phase == "backward" for node in graph.nodes):
        raise TraceError(
            f"the step was captured for the CPU: capture with {', '.join(sorted(LOWERED))} marked"
        )


def for_cpu(graph: Graph) -> Graph:
    """``lower`` to the CPU."""
    result = graph.copy()
    grouped = [
        region
        for region in reversed(result.regions)
        if region.kind.startswith("fast.") and any(i is not None for i in region.gradients)
    ]
    if grouped:
        readers = result.consumers()
        for region in grouped:
            _ungroup(result, region, readers)
        result.sort("giving the backward of mx.fast calls to the CPU")
    return result


def fuses_attention(graph: Graph, region: Region, target: Target, training: bool) -> bool:
    """Whether ``mx.fast.scaled_dot_product_attention`` is one primitive on the target.

    Metal, ``ScaledDotProductAttention::use_fallback``: inside a gradient transform every release before
    0.32.4 decomposes it, forward and backward. Since then there is a fused backward, for a causal mask and
    for none; with an array mask, or at most 8 queries, it is decomposed still. Outside of one, the kernels
    for ``_METAL_HEAD_DIMS`` are used.

    CUDA: cuDNN has forward and backward in 16-bit types; the backward wants a multiple of 128 tokens.
    """
    q, k, v = (graph.arrays[i] for i in region.inputs[:3])
    masked = len(region.inputs) > 3
    same_dim = q.shape[-1] == v.shape[-1]
    tokens, dim = q.shape[2], q.shape[-1]
    if target.backend == "cuda":
        half = q.dtype in ("float16", "bfloat16")
        return half and dim % 8 == 0 and dim <= 128 and (not training or tokens % 128 == 0)
    if tokens <= 8:
        return not training and same_dim and dim in (64, 96, 128, 256)
    if not training:
        return same_dim and dim in _METAL_HEAD_DIMS and tokens <= k.shape[2]
    fits = same_dim and dim in (*_METAL_HEAD_DIMS, 192, 256) and tokens <= k.shape[2]
    return target.fuses_attention_backward and fits and not masked


_METAL_HEAD_DIMS = (64, 72, 80, 96, 128)


def _ungroup(graph: Graph, region: Region, readers: list[list[tuple[Node, int]]]) -> None:
    """Adds what a region gives to the gradient of each input one by one to what other readers give."""
    inside = {id(node) for node in graph.region_nodes(region)}
    for i, gradient in zip(region.inputs, region.gradients, strict=True):
        if gradient is None or len(readers[gradient]) != 1:
            continue
        reads = [node for node, _ in readers[i] if node.phase == "forward"]
        within = sum(id(node) in inside for node in reads)
        outer, position = readers[gradient][0]
        if within < 2 or within == len(reads) or outer.primitive != "Add" or position != 1:
            continue
        terms, sums = _terms(graph, gradient, within)
        if len(terms) == within:
            total = outer.inputs[0]
            for node, term in zip([*sums, outer], terms, strict=True):
                node.inputs = [total, term]
                total = node.outputs[0]


def _terms(graph: Graph, total: int, count: int) -> tuple[list[int], list[Node]]:
    """The terms of a sum that adds to the right ``count - 1`` times, and its nodes, innermost first."""
    terms: list[int] = []
    sums: list[Node] = []
    while len(sums) < count - 1:
        node = graph.arrays[total].producer
        if node is None or node.primitive != "Add":
            break
        total, term = node.inputs
        terms.insert(0, term)
        sums.insert(0, node)
    return [total, *terms], sums


class _Lowering:
    """The graph while its regions are replaced."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.replaced: dict[int, int] = {}

    def layer_norm(self, region: Region) -> None:
        self._norm(region, "LayerNorm", missing=(1.0, 0.0))

    def rms_norm(self, region: Region) -> None:
        self._norm(region, "RMSNorm", missing=(1.0,))

    def _norm(self, region: Region, primitive: str, missing: tuple[float, ...]) -> None:
        output = self.graph.arrays[region.outputs[0]]
        given = [self._cast(i, output.dtype) for i in region.inputs[: 1 + len(missing)]]
        scalars = missing[len(given) - 1 :]
        operands = [*given, *(self.graph.constant(value, (), output.dtype) for value in scalars)]
        self._forward(region, primitive, operands)
        self._backward(region, f"{primitive}VJP", [*operands, *self._cotangents(region)], operands)

    def rope(self, region: Region) -> None:
        """The offset is an argument of the call, or a number that MLX makes an array of."""
        x, *rest = region.inputs
        if not rest:
            rest = [self.graph.constant(0, (), "int32")]
        self._forward(region, "RoPE", [x, *rest], ("forward",))
        self._backward(region, "RoPE", [*self._cotangents(region), *rest], [x], ("backward",))

    def cross_entropy(self, region: Region) -> None:
        """Loss and cotangent are float32, the targets int32."""
        logits, targets = region.inputs
        given = [logits, self._cast(targets, "int32")]
        old = self.graph.arrays[region.outputs[0]]
        (loss,) = self._forward(region, "CrossEntropy", given, dtype="float32")
        self.replaced[old.id] = self._cast(loss, old.dtype)
        cotangents = [self._cast(i, "float32", backward=True) for i in self._cotangents(region)]
        self._backward(region, "CrossEntropyVJP", [*given, loss, *cotangents], [logits])

    def attention(self, region: Region, *, training: bool) -> None:
        """With its backward, the forward also gives each row's logsumexp in float32."""
        q = self.graph.arrays[region.inputs[0]]
        if not training:
            self._forward(region, "ScaledDotProductAttention", region.inputs)
            return
        statistics = ((*q.shape[:3], 1), "float32")
        outputs = self._forward(region, "ScaledDotProductAttention", region.inputs, extra=[statistics])
        given = [*region.inputs, *outputs, *self._cotangents(region)]
        self._backward(region, "ScaledDotProductAttentionVJP", given, region.inputs[:3])

    def _cotangents(self, region: Region) -> list[int]:
        return [i for i in region.cotangents if i is not None]

    def _cast(self, i: int, dtype: str, *, backward: bool = False) -> int:
        if self.graph.arrays[i].dtype == dtype:
            return i
        phase: Literal["forward", "backward"] = "backward" if backward else "forward"
        return self.graph.op("AsType", [i], dtype=dtype, arguments=(dtype,), phase=phase)

    def _forward(
        self,
        region: Region,
        primitive: str,
        inputs: list[int],
        arguments: tuple[str, ...] = (),
        extra: list[tuple[tuple[int, ...], str]] | None = None,
        dtype: str | None = None,
    ) -> list[int]:
        old = self.graph.arrays[region.outputs[0]]
        node = old.producer
        outputs = self.graph.multi_op(
            primitive,
            inputs,
            [(old.shape, dtype or old.dtype), *(extra or [])],
            arguments,
            phase="forward",
            block=node.block if node else region.block,
            scope=node.scope if node else "",
        )
        self.graph.arrays[outputs[0]].name = old.name
        self.replaced[old.id] = outputs[0]
        return outputs

    def _backward(
        self,
        region: Region,
        primitive: str,
        inputs: list[int],
        operands: list[int],
        arguments: tuple[str, ...] = (),
    ) -> None:
        """A VJP that gives the gradient of each operand, in the operand's shape and dtype."""
        if all(i is None for i in region.gradients) or all(i is None for i in region.cotangents):
            return
        wanted = [self.graph.arrays[i] for i in operands]
        node = next(self.graph.arrays[i].producer for i in region.gradients if i is not None)
        made = self.graph.multi_op(
            primitive,
            inputs,
            [(array.shape, array.dtype) for array in wanted],
            arguments,
            phase="backward",
            block=node.block if node else region.block,
            scope=node.scope if node else "",
        )
        for gradient, new in zip(region.gradients, made, strict=False):
            if gradient is not None:
                old = self.graph.arrays[gradient]
                self.graph.arrays[new].name = old.name
                self.replaced[gradient] = self._cast(new, old.dtype, backward=True)

    def finish(self) -> None:
        rewrite = "making one GPU primitive of each mx.fast call"
        self.graph.replace_all(self.replaced, rewrite)
        self.graph.remove_dead()
        self.graph.sort(rewrite)


_RULES: dict[str, Callable[[_Lowering, Region], None]] = {
    "fast.layer_norm": _Lowering.layer_norm,
    "fast.rms_norm": _Lowering.rms_norm,
    "fast.rope": _Lowering.rope,
}

_CROSS_ENTROPY = ("fast.cross_entropy", CROSS_ENTROPY)

LOWERED = frozenset((*_RULES, *_CROSS_ENTROPY, ATTENTION))
"""Kinds of regions whose backward a GPU target needs to know."""
