"""What a CPU capture becomes on a GPU: single primitives with their VJPs, saved tensors with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

import oomguard
from oomguard.config.policy import CheckpointPolicy
from oomguard.errors import TraceError
from oomguard.trace import metal
from oomguard.trace.capture import capture
from oomguard.trace.graph import Graph, Node
from oomguard.trace.lower import LOWERED, Backend, Target, lower, parse_version
from oomguard.trace.remat import apply_policy
from oomguard.units import GIB

METAL = Target("metal", (0, 31, 2))
NEWEST = Target("metal", (0, 32, 4))
CPU = Target("cpu", (0, 32, 4))


class Norms(nn.Module):
    """Two layers of a linear map and the norm under test, added to what comes in."""

    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.layers = [Layer(norm) for _ in range(2)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        self.norm = norm()
        self.linear = nn.Linear(64, 64, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.linear(self.norm(x))


class Attention(nn.Module):
    """One layer of attention over four heads of 64, with RoPE."""

    def __init__(self, mask: str | None):
        super().__init__()
        self.layers = [AttentionLayer(mask)]

    def __call__(self, x: mx.array) -> mx.array:
        return self.layers[0](x)


class AttentionLayer(nn.Module):
    def __init__(self, mask: str | None):
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 256, bias=False)
        self.out = nn.Linear(256, 64, bias=False)
        self.rope = nn.RoPE(64)
        self.mask = mask

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = (t.reshape(2, 16, 4, 64).transpose(0, 2, 1, 3) for t in mx.split(self.qkv(x), 3, axis=-1))
        mask = mx.tril(mx.ones((16, 16), dtype=mx.bool_)) if self.mask == "array" else self.mask
        y = mx.fast.scaled_dot_product_attention(self.rope(q), self.rope(k), v, scale=0.125, mask=mask)
        return self.out(y.transpose(0, 2, 1, 3).reshape(2, 16, 256))


def captured(model: nn.Module, dtype: mx.Dtype = mx.float32, frozen: bool = False) -> Graph:
    """One SGD step of a model, captured."""
    model.set_dtype(dtype)
    if frozen:
        for layer in model.layers:
            layer.norm.freeze()
    optimizer = optim.SGD(0.1)
    optimizer.init(model.trainable_parameters())
    gradients_of = nn.value_and_grad(model, lambda x: model(x).square().mean())

    def step(x: mx.array) -> mx.array:
        loss, gradients = gradients_of(x)
        optimizer.update(model, gradients)
        return loss

    return capture(step, (mx.zeros((2, 16, 64), dtype),), state=[model, optimizer]).graph


def nodes(graph: Graph, primitive: str) -> list[Node]:
    return [node for node in graph.nodes if node.primitive == primitive]


def count(graph: Graph) -> Counter[str]:
    return Counter(node.primitive for node in graph.nodes)


def saved(graph: Graph) -> set[int]:
    """Arrays a forward primitive that computes made and the backward reads, views of them looked through."""
    views = ("Transpose", "Reshape", "Broadcast", "ExpandDims", "Squeeze", "Flatten", "Unflatten", "Copy")
    found = set()
    for node in graph.nodes:
        if node.phase == "backward":
            for i in node.inputs:
                while (p := graph.arrays[i].producer) is not None and p.primitive in views:
                    i = p.inputs[0]
                if p is not None and p.phase == "forward" and graph.arrays[i].size > 64:
                    found.add(i)
    return found


def test_layer_norm_and_its_backward_become_one_primitive_each() -> None:
    graph = captured(Norms(lambda: nn.LayerNorm(64)))
    lowered = lower(graph, METAL)
    lowered.check()
    assert count(lowered)["LayerNorm"] == count(lowered)["LayerNormVJP"] == 2
    assert "Sqrt" not in count(lowered)
    for forward, backward in zip(
        nodes(lowered, "LayerNorm"), reversed(nodes(lowered, "LayerNormVJP")), strict=True
    ):
        x, w, b = forward.inputs
        assert backward.inputs[:3] == [x, w, b]
        assert [lowered.arrays[i].shape for i in backward.outputs] == [(2, 16, 64), (64,), (64,)]
        assert (forward.phase, backward.phase) == ("forward", "backward")


def test_layer_norm_on_metal_saves_its_input_only() -> None:
    graph = captured(Norms(lambda: nn.LayerNorm(64)))
    on_cpu, on_metal = saved(lower(graph, CPU)), saved(lower(graph, METAL))
    assert len(on_metal) < len(on_cpu)
    assert {p.primitive for i in on_metal if (p := graph_of(lower(graph, METAL), i))} <= {"LayerNorm", "Add"}


def graph_of(graph: Graph, i: int) -> Node | None:
    return graph.arrays[i].producer


def test_norms_gradients_reach_the_optimizer() -> None:
    lowered = lower(captured(Norms(lambda: nn.LayerNorm(64))), METAL)
    read = {i for node in lowered.nodes for i in node.inputs}
    for backward in nodes(lowered, "LayerNormVJP"):
        assert set(backward.outputs[1:]) <= read


def test_rms_norm_takes_no_bias() -> None:
    lowered = lower(captured(Norms(lambda: nn.RMSNorm(64))), METAL)
    lowered.check()
    assert [len(node.inputs) for node in nodes(lowered, "RMSNorm")] == [2, 2]
    assert [len(node.outputs) for node in nodes(lowered, "RMSNormVJP")] == [2, 2]


def test_norm_without_weights_is_given_scalars() -> None:
    lowered = lower(captured(Norms(lambda: nn.LayerNorm(64, affine=False))), METAL)
    lowered.check()
    for node in nodes(lowered, "LayerNorm"):
        assert [lowered.arrays[i].value for i in node.inputs[1:]] == [1.0, 0.0]


def test_frozen_norm_still_makes_a_gradient_of_its_weight() -> None:
    lowered = lower(captured(Norms(lambda: nn.RMSNorm(64)), frozen=True), METAL)
    lowered.check()
    read = {i for node in lowered.nodes for i in node.inputs}
    for backward in nodes(lowered, "RMSNormVJP"):
        assert lowered.arrays[backward.outputs[1]].shape == (64,)
        assert backward.outputs[1] not in read


def test_half_precision_norm_stays_in_half_precision() -> None:
    lowered = lower(captured(Norms(lambda: nn.RMSNorm(64)), mx.bfloat16), METAL)
    assert {lowered.arrays[i].dtype for n in nodes(lowered, "RMSNormVJP") for i in n.outputs} == {"bfloat16"}


def test_rope_is_turned_back_in_the_backward() -> None:
    lowered = lower(captured(Attention("causal")), METAL)
    lowered.check()
    assert Counter(node.arguments for node in nodes(lowered, "RoPE")) == {("forward",): 2, ("backward",): 2}
    assert not {"Cos", "Sin"} & set(count(lowered))


@pytest.mark.parametrize("mask", ["causal", None])
def test_attention_in_training_is_fused_on_metal_since_0_32_4(mask: str | None) -> None:
    graph = captured(Attention(mask))
    assert "ScaledDotProductAttention" not in count(lower(graph, METAL))
    assert "Softmax" in count(lower(graph, METAL))
    lowered = lower(graph, NEWEST)
    lowered.check()
    (forward,) = nodes(lowered, "ScaledDotProductAttention")
    (backward,) = nodes(lowered, "ScaledDotProductAttentionVJP")
    assert backward.inputs[:5] == [*forward.inputs, *forward.outputs]
    assert [lowered.arrays[i].shape for i in forward.outputs] == [(2, 4, 16, 64), (2, 4, 16, 1)]
    assert "Softmax" not in count(lowered)


def test_attention_with_an_array_mask_is_decomposed_everywhere_on_metal() -> None:
    graph = captured(Attention("array"))
    for target in (METAL, NEWEST):
        assert "Softmax" in count(lower(graph, target))


def test_cuda_fuses_attention_in_half_precision_and_whole_tiles_only() -> None:
    assert "Softmax" in count(lower(captured(Attention("causal")), Target("cuda", (0, 32, 1))))
    half = captured(Attention("causal"), mx.bfloat16)
    assert "Softmax" in count(lower(half, Target("cuda", (0, 32, 1))))  # 16 tokens are no multiple of 128


def test_the_captured_graph_is_not_changed() -> None:
    graph = captured(Norms(lambda: nn.LayerNorm(64)))
    before = graph.describe(10**6)
    lower(graph, METAL)
    assert graph.describe(10**6) == before


@pytest.mark.parametrize("text", ["every", "stride=2", "blocks=1"])
def test_lowered_blocks_are_recomputed_lowered(text: str) -> None:
    lowered = lower(captured(Norms(lambda: nn.LayerNorm(64))), METAL)
    result = apply_policy(lowered, CheckpointPolicy.parse(text))
    result.check()
    again = [node for node in nodes(result, "LayerNorm") if node.phase == "recompute"]
    assert len(again) == (1 if text == "blocks=1" else 2)


def test_attention_policy_recomputes_a_fused_core() -> None:
    result = apply_policy(lower(captured(Attention("causal")), NEWEST), CheckpointPolicy.parse("attention"))
    result.check()
    assert [n.phase for n in nodes(result, "ScaledDotProductAttention")] == ["forward", "recompute"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.4", (0, 32, 4)),
        ("0.32", (0, 32, 0)),
        ("0.33.0.dev20260801+abc", (0, 33, 0)),
        ("1.2.3rc1", (1, 2, 31)),
    ],
)
def test_version_is_read_from_the_front(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version if "rc" not in text else parse_version(text)[:2] == version[:2]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_gpu_needs_no_more_nodes_than_the_cpu(backend: Backend) -> None:
    graph = captured(Norms(lambda: nn.LayerNorm(64)))
    assert len(lower(graph, Target(backend, (0, 31, 2))).nodes) < len(lower(graph, CPU).nodes)


def losses(loss: Callable[[mx.array, mx.array], mx.array], dtype: mx.Dtype = mx.float32) -> Graph:
    """Loss and gradient of 96 rows of 4096 logits."""
    gradients_of = mx.value_and_grad(lambda logits, targets: loss(logits * 2, targets))
    arguments = (mx.zeros((96, 4096), dtype), mx.zeros((96,), mx.uint32))
    return capture(gradients_of, arguments, state=[], marked=LOWERED).graph


def mean_loss(logits: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, targets, reduction="mean")


def weighted_loss(logits: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, targets, weights=mx.ones(targets.shape), reduction="sum")


def smoothed_loss(logits: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, targets, label_smoothing=0.1, reduction="mean")


def probable_loss(logits: mx.array, targets: mx.array) -> mx.array:
    return nn.losses.cross_entropy(logits, mx.softmax(logits), reduction="mean")


@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_lower_makes_cross_entropy_one_primitive_that_saves_only_the_logits(
    loss: Callable[[mx.array, mx.array], mx.array], dtype: mx.Dtype
) -> None:
    graph = losses(loss, dtype)
    lowered = lower(graph, NEWEST)
    lowered.check()
    (forward,), (backward,) = nodes(lowered, "CrossEntropy"), nodes(lowered, "CrossEntropyVJP")
    logits, targets, loss_rows, cotangent = (lowered.arrays[i] for i in backward.inputs)
    assert [logits.id, targets.id] == forward.inputs
    assert targets.dtype == "int32"
    assert loss_rows.id == forward.outputs[0]
    assert loss_rows.dtype == cotangent.dtype == "float32"
    assert lowered.arrays[backward.outputs[0]].dtype == logits.dtype
    wide = [
        a for n in lowered.nodes for a in map(lowered.arrays.__getitem__, n.outputs) if a.size == 96 * 4096
    ]
    assert {a.producer.primitive for a in wide if a.producer} <= {
        "Broadcast",
        "Copy",
        "Multiply",
        "CrossEntropyVJP",
    }


@pytest.mark.parametrize("loss", [smoothed_loss, probable_loss])
def test_lower_leaves_a_loss_that_the_primitive_does_not_compute(
    loss: Callable[[mx.array, mx.array], mx.array],
) -> None:
    assert not nodes(lower(losses(loss), NEWEST), "CrossEntropy")


def test_lower_leaves_cross_entropy_to_releases_without_the_primitive() -> None:
    graph = losses(mean_loss)
    for target in (METAL, Target("metal", (0, 32, 3)), CPU):
        assert not nodes(lower(graph, target), "CrossEntropy")


def test_marking_cross_entropy_does_not_change_its_graph() -> None:
    plain = capture(
        mx.value_and_grad(lambda x, t: mean_loss(x * 2, t)),
        (mx.zeros((96, 4096)), mx.zeros((96,), mx.uint32)),
        state=[],
        marked=frozenset(),
    ).graph
    assert count(plain) == count(losses(mean_loss))


def test_cross_entropy_is_mlx_s_own_again_after_a_capture() -> None:
    before = nn.losses.cross_entropy
    losses(mean_loss)
    assert nn.losses.cross_entropy is before
    assert float(mean_loss(mx.zeros((2, 4)), mx.array([0, 3]))) == pytest.approx(1.386294, abs=1e-5)


def test_lower_refuses_a_training_step_captured_without_marks() -> None:
    model = Norms(lambda: nn.LayerNorm(64))
    gradients_of = nn.value_and_grad(model, lambda x: model(x).square().mean())
    graph = capture(gradients_of, (mx.zeros((2, 16, 64)),), state=[model], marked=frozenset()).graph
    with pytest.raises(TraceError, match=r"capture with .*fast\.layer_norm.* marked"):
        lower(graph, METAL)


def _heads(x: mx.array) -> mx.array:
    return x.reshape(2, 16, 4, 64).transpose(0, 2, 1, 3)


REGIONS: dict[str, tuple[Callable[..., mx.array], tuple[mx.array, ...], str, str]] = {
    "attention": (
        lambda q, k, v: mx.fast.scaled_dot_product_attention(_heads(q), _heads(k), _heads(v), scale=0.125),
        tuple(mx.zeros((2, 16, 256)) for _ in range(3)),
        "ScaledDotProductAttention",
        "ScaledDotProductAttentionVJP",
    ),
    "layer norm": (
        lambda x, w, b: mx.fast.layer_norm(x, w, b, 1e-5),
        (mx.zeros((2, 16, 64)), mx.zeros((64,)), mx.zeros((64,))),
        "LayerNorm",
        "LayerNormVJP",
    ),
    "RMS norm": (
        lambda x, w: mx.fast.rms_norm(x, w, 1e-5),
        (mx.zeros((2, 16, 64)), mx.zeros((64,))),
        "RMSNorm",
        "RMSNormVJP",
    ),
    "RoPE": (
        lambda x: mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=0),
        (mx.zeros((2, 4, 16, 64)),),
        "RoPE",
        "RoPE",
    ),
    "cross entropy": (
        lambda x, t: nn.losses.cross_entropy(x, t),
        (mx.zeros((96, 4096)), mx.zeros((96,), mx.int32)),
        "CrossEntropy",
        "CrossEntropyVJP",
    ),
}
"""Every kind of region that a GPU has a primitive for: the call, what goes in, its primitive and its VJP's."""

READ_BY_THEIR_VJP = {"attention", "cross entropy"}


@pytest.mark.parametrize("name", REGIONS)
def test_gradient_alone_is_lowered_as_beside_its_value(name: str) -> None:
    """``mx.grad`` evaluates no value: what comes out of the call is read by its backward, or by nobody."""
    function, arguments, primitive, vjp = REGIONS[name]
    inexact = [k for k, a in enumerate(arguments) if mx.issubdtype(a.dtype, mx.inexact)]

    def lowered(transform: Callable[..., Any]) -> Graph:
        step = transform(lambda *given: function(*given).sum(), argnums=inexact)
        graph = capture(lambda *given: step(*given), arguments, state=[], marked=LOWERED).graph
        result = lower(graph, NEWEST)
        result.check()
        return result

    alone, beside = lowered(mx.grad), lowered(mx.value_and_grad)
    for graph in (alone, beside):
        assert not {"Softmax", "LogSumExp", "Sqrt", "Cos", "Sin", "Exp"} & set(count(graph))
        assert len([n for n in nodes(graph, vjp) if n.phase == "backward" or vjp != primitive]) == 1
        assert [graph.arrays[i].shape for i in graph.outputs[-len(inexact) :]] == [
            arguments[k].shape for k in inexact
        ]
    forward = [n for n in nodes(alone, primitive) if n.arguments != ("backward",)]
    assert len(forward) == (name in READ_BY_THEIR_VJP)
    if forward:
        assert set(forward[0].outputs) <= set(nodes(alone, vjp)[0].inputs)


@pytest.mark.parametrize("transform", [mx.grad, mx.value_and_grad])
@pytest.mark.parametrize(
    ("tokens", "published_gib"), [(1024, 0.270), (2048, 0.329), (4096, 0.446), (8192, 0.682)]
)
def test_attention_peaks_as_published_with_and_without_its_value(
    transform: Callable[..., Any], tokens: int, published_gib: float
) -> None:
    """Forward and backward above the inputs, causal, bf16, 32 heads on 8; MLX 0.32.4 on an M1 Max of 32 GB."""
    q, k, v = (mx.zeros((1, heads, tokens, 128), mx.bfloat16) for heads in (32, 8, 8))

    def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=128**-0.5, mask="causal").sum()

    step = transform(loss, argnums=(0, 1, 2))
    device = metal.device(metal.Chip(13, "s"), (0, 32, 4))
    found = oomguard.trace(lambda *given: step(*given), q, k, v, state=[], device=device)
    assert found.warnings == []
    above = found.peak_bytes - sum(array.nbytes for array in (q, k, v))
    assert above / GIB == pytest.approx(published_gib, abs=0.0006)


def test_every_kind_of_region_is_tried_for_its_gradient_alone() -> None:
    """A kind that is added must be tried as well; ``mx.fast.cross_entropy`` and that of ``nn.losses`` are one."""
    assert len(REGIONS) == len(LOWERED - {"fast.cross_entropy"})
