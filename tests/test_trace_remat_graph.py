"""What a checkpoint policy does to a graph, on a hand-made step of three blocks.

A block is ``y = x + gelu-like(x @ w)``: it saves the product and reads ``w`` and ``x`` in its backward.
"""

from __future__ import annotations

from collections import Counter

import pytest

from oomguard.config.policy import CheckpointPolicy, Segment
from oomguard.errors import TraceError
from oomguard.trace.graph import Graph, Node, Region
from oomguard.trace.remat import apply_policy, block_calls, recompute, recompute_regions, saved_ratio

N_BLOCKS = 3
ROWS, WIDTH = 8, 4


class Step:
    """A graph under construction, with what the tests ask for."""

    def __init__(self, *, calls: int = 1, closure: bool = False):
        self.graph = Graph()
        self.weights = [self.graph.parameter((WIDTH, WIDTH), name=f"blocks.{n}.w") for n in range(N_BLOCKS)]
        self.saved: list[int] = []
        total: list[list[int]] = [[] for _ in range(N_BLOCKS)]
        losses = []
        for _ in range(calls):
            x = self.graph.input((ROWS, WIDTH), name="batch")
            shift = self.graph.op("Exp", [self.graph.input((ROWS, WIDTH))]) if closure else None
            losses.append(self._call(x, shift, total))
        updates = [self._update(w, gradients) for w, gradients in zip(self.weights, total, strict=True)]
        self.graph.evaluate([*losses, *updates])
        self.graph.check()

    def _call(self, x: int, shift: int | None, total: list[list[int]]) -> int:
        entered, products = [], []
        for n, w in enumerate(self.weights):
            entered.append(x)
            product = self.graph.op("Matmul", [x, w], block=n)
            products.append(product)
            self.saved.append(product)
            wide = self.graph.op("Tanh", [product], block=n)
            if shift is not None:
                wide = self.graph.op("Multiply", [wide, shift], block=n)
            x = self.graph.op("Add", [x, wide], block=n)
        last = x
        loss = self.graph.op("Reduce", [last], shape=())
        cotangent = self.graph.op(
            "Broadcast", [self.graph.constant(1.0)], shape=(ROWS, WIDTH), phase="backward"
        )
        regions = []
        for n in reversed(range(N_BLOCKS)):
            w, product = self.weights[n], products[n]
            inner = cotangent
            if shift is not None:
                inner = self._back("Multiply", [inner, shift], n)
            inner = self._back("Multiply", [inner, product], n)
            dw = self._back(
                "Matmul", [self._back("Transpose", [entered[n]], n), inner], n, shape=(WIDTH, WIDTH)
            )
            into = self._back("Matmul", [inner, self._back("Transpose", [w], n)], n)
            dx = self._back("Add", [cotangent, into], n)
            following = entered[n + 1] if n + 1 < N_BLOCKS else last
            regions.append(
                Region("block", f"blocks.{n}", [w, entered[n]], [following], n, {}, [cotangent], [dw, dx])
            )
            total[n].append(dw)
            cotangent = dx
        self.graph.regions.extend(reversed(regions))
        return loss

    def _back(
        self, primitive: str, inputs: list[int], block: int, shape: tuple[int, ...] | None = None
    ) -> int:
        return self.graph.op(primitive, inputs, shape=shape, phase="backward", block=block)

    def _update(self, weight: int, gradients: list[int]) -> int:
        gradient = gradients[0]
        for other in gradients[1:]:
            gradient = self.graph.op("Add", [gradient, other], phase="backward")
        return self.graph.op("Subtract", [weight, gradient], phase="update")


def nodes(graph: Graph, primitive: str) -> list[Node]:
    return [node for node in graph.nodes if node.primitive == primitive]


def read_by_backward(graph: Graph, phase: str) -> set[int]:
    """Arrays of a phase, made by a primitive that computes, that the backward reads."""
    handed_on = {"CustomTransforms", "Depends", "Copy", "StopGradient"}
    return {
        i
        for node in graph.nodes
        if node.phase == "backward"
        for i in node.inputs
        if (p := graph.arrays[i].producer) is not None and p.phase == phase and p.primitive not in handed_on
    }


def policy(text: str) -> CheckpointPolicy:
    return CheckpointPolicy.parse(text)


def test_none_leaves_the_graph_as_it_was() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("none"))
    assert result.describe() == step.graph.describe()


def test_the_captured_graph_is_not_changed() -> None:
    step = Step()
    before = step.graph.describe()
    apply_policy(step.graph, policy("every"))
    assert step.graph.describe() == before


@pytest.mark.parametrize("text", ["every", "stride=2", "stride=3", "blocks=3", "custom_function"])
def test_backward_reads_nothing_made_in_a_recomputed_block(text: str) -> None:
    result = apply_policy(Step().graph, policy(text))
    result.check()
    assert not read_by_backward(result, "forward")
    assert read_by_backward(result, "recompute")


def test_saved_blocks_keep_what_they_saved() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("blocks=1"))
    result.check()
    assert set(step.saved[1:]) < read_by_backward(result, "forward")
    assert step.saved[0] not in read_by_backward(result, "forward")


def test_depends_takes_parameters_then_inputs_then_results() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("every"))
    custom, depends = nodes(result, "CustomTransforms"), nodes(result, "Depends")
    assert [node.block for node in custom] == [0, 1, 2]
    for n, node in enumerate(sorted(depends, key=lambda node: node.block)):
        weight, entered, handed_on = node.inputs
        assert weight == step.weights[n]
        assert handed_on == custom[n].outputs[0]
        if n > 0:
            assert entered == custom[n - 1].outputs[0]
        assert [result.arrays[i].shape for i in node.outputs] == [(WIDTH, WIDTH), (ROWS, WIDTH)]


def test_block_backward_reads_parameters_through_depends_and_update_reads_them_directly() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("every"))
    readers = result.consumers()
    for weight in step.weights:
        phases = Counter(
            node.phase for node, _ in readers[weight] if node.primitive not in ("CustomTransforms",)
        )
        assert phases == {"forward": 1, "recompute": 1, "update": 1}


def test_recompute_and_backward_read_only_what_depends_hands_on() -> None:
    result = apply_policy(Step().graph, policy("every"))
    depends = {i for node in nodes(result, "Depends") for i in node.outputs}
    copies = {node.outputs[0] for node in nodes(result, "Copy") if node.inputs[0] in depends}
    for node in result.nodes:
        if node.primitive == "Matmul" and node.phase == "recompute":
            assert copies.issuperset(node.inputs)
        if node.primitive == "Transpose":
            assert node.inputs[0] in copies


def test_custom_function_recompute_reads_arguments_without_depends() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("custom_function"))
    assert not nodes(result, "Depends")
    assert len(nodes(result, "CustomTransforms")) == N_BLOCKS
    again = [node for node in nodes(result, "Matmul") if node.phase == "recompute"]
    assert len(again) == N_BLOCKS
    for node in again:
        assert {result.arrays[i].producer.primitive for i in node.inputs} == {"Copy"}  # type: ignore[union-attr]


def test_segment_keeps_only_its_first_input() -> None:
    step = Step()
    result = apply_policy(step.graph, policy("stride=3"))
    (depends,) = nodes(result, "Depends")
    kept = [result.arrays[i] for i in depends.inputs[:-1]]
    assert [a.kind for a in kept] == ["parameter"] * 3 + ["batch"]
    assert len([node for node in nodes(result, "Tanh") if node.phase == "recompute"]) == N_BLOCKS - 1


def test_what_the_backward_does_not_need_is_not_recomputed() -> None:
    result = apply_policy(Step().graph, policy("every"))
    assert not [node for node in nodes(result, "Tanh") if node.phase == "recompute"]
    assert len([node for node in nodes(result, "Matmul") if node.phase == "recompute"]) == N_BLOCKS


def test_array_from_a_closure_is_not_recomputed() -> None:
    step = Step(closure=True)
    result = apply_policy(step.graph, policy("every"))
    result.check()
    assert len(nodes(result, "Exp")) == 1


def test_every_micro_batch_is_recomputed() -> None:
    step = Step(calls=2)
    assert [len(calls) for calls in block_calls(step.graph)] == [2, 2, 2]
    result = apply_policy(step.graph, policy("every"))
    result.check()
    assert len(nodes(result, "Depends")) == 2 * N_BLOCKS
    assert not read_by_backward(result, "forward")


def test_loss_reads_what_the_last_block_hands_on() -> None:
    result = apply_policy(Step().graph, policy("every"))
    (loss,) = nodes(result, "Reduce")
    assert result.arrays[loss.inputs[0]].producer.primitive == "CustomTransforms"  # type: ignore[union-attr]


def test_a_part_of_a_block_is_recomputed_alone() -> None:
    step = Step()
    product, cotangent = step.saved[1], step.graph.regions[1].cotangents[0]
    inner = next(n for n, p in step.graph.consumers()[product] if n.phase == "backward")
    core = Region("attention", "core", step.graph.arrays[product].producer.inputs[:1], [product], 1)  # type: ignore[union-attr]
    core.cotangents, core.gradients = [cotangent], [inner.outputs[0]]
    step.graph.regions.append(core)
    result = recompute(step.graph, [Segment(1, 2, "attention")])
    result.check()
    assert len(nodes(result, "CustomTransforms")) == 1
    assert step.saved[0] in read_by_backward(result, "forward")


def test_nested_regions_are_both_recomputed() -> None:
    step = Step()
    outer_first, outer_last = step.graph.regions[0], step.graph.regions[-1]
    inputs = [i for region in step.graph.regions for i in region.inputs[:1]]
    gradients = [region.gradients[0] for region in step.graph.regions]
    whole = Region(
        "checkpoint",
        "whole",
        [*inputs, outer_first.inputs[1]],
        outer_last.outputs[:],
        -1,
        {},
        outer_last.cotangents[:],
        [*gradients, outer_first.gradients[1]],
    )
    step.graph.regions.insert(0, whole)
    result = recompute_regions(step.graph, [whole, step.graph.regions[2]])
    result.check()
    assert len(nodes(result, "Depends")) == 2
    assert len([n for n in nodes(result, "Matmul") if n.phase == "recompute"]) == N_BLOCKS + 1
    assert not read_by_backward(result, "forward")


def test_saved_ratio_counts_bytes_saved_over_bytes_handed_on() -> None:
    assert saved_ratio(Step().graph) == 1.0
    assert saved_ratio(Graph()) == 1.0


def test_auto_stride_follows_the_graph() -> None:
    result = apply_policy(Step().graph, policy("stride=auto"))
    assert len(nodes(result, "Depends")) == 2  # sqrt(3 x 1) rounds to 2


def test_more_blocks_than_the_step_has_is_refused() -> None:
    with pytest.raises(TraceError, match="the step has 3"):
        recompute(Step().graph, [Segment(0, 4)])


def test_blocks_without_attention_are_refused() -> None:
    with pytest.raises(TraceError, match="scaled_dot_product_attention"):
        apply_policy(Step().graph, policy("attention"))


def test_step_without_blocks_is_refused() -> None:
    with pytest.raises(TraceError, match="the captured step has none"):
        apply_policy(Graph(), policy("every"))
