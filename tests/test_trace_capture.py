"""A step is captured as it is built, without running or allocating, and leaves no mark on the user's objects."""

from __future__ import annotations

import copy
import functools
import io
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from oomguard.errors import TraceError
from oomguard.trace.capture import Capture, capture
from oomguard.trace.containers import leaves, random_keys
from oomguard.trace.graph import Graph
from oomguard.trace.rawgraph import RENAMED, read_dot

Step = Callable[..., Any]
NOTHING_MARKED: frozenset[str] = frozenset()


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(nn.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 3):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = [Block(width) for _ in range(blocks)]
        self.head = nn.Linear(width, 11)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens), tokens, reduction="mean")


def training(model: nn.Module, optimizer: optim.Optimizer, loss: Step = loss_of) -> Step:
    loss_and_gradients = nn.value_and_grad(model, loss)

    def step(tokens: mx.array) -> Any:
        value, gradients = loss_and_gradients(model, tokens)
        optimizer.update(model, gradients)
        return value

    return step


def tokens() -> mx.array:
    return mx.zeros((2, 5), mx.int32)


def exact(step: Step, *arguments: Any, **options: Any) -> Capture:
    return capture(step, arguments, marked=NOTHING_MARKED, **options)


def primitives(graph: Graph) -> Counter[str]:
    return Counter(node.primitive for node in graph.nodes)


def drawn_primitives(arrays: list[mx.array]) -> Counter[str]:
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *arrays)
    names = (label.partition(" ")[0] for label in read_dot(drawing.getvalue()).primitives)
    return Counter(RENAMED.get(name, name) for name in names)


# -- the graph ---------------------------------------------------------------------------------------------


def test_capture_is_the_graph_that_mlx_builds() -> None:
    model, optimizer = Net(), optim.AdamW(1e-3)
    optimizer.init(model.trainable_parameters())
    step = training(model, optimizer)
    mx.eval(model, optimizer.state)
    batch = tokens()
    mx.eval(batch)
    captured = exact(step, batch, state=[model, optimizer])
    loss = step(batch)
    captured.graph.check()
    assert primitives(captured.graph) == drawn_primitives([loss, *leaves([model, optimizer.state])])


def test_capture_allocates_nothing_and_leaves_parameters_unevaluated() -> None:
    model = Net(width=512, blocks=4)
    optimizer = optim.Adam(1e-3)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    captured = exact(training(model, optimizer), tokens(), state=[model, optimizer])
    assert mx.get_peak_memory() - before < 100_000
    parameters = [a for a in captured.graph.arrays if a.kind == "parameter"]
    assert sum(a.nbytes for a in parameters) > 16 << 20


def test_state_is_given_back_to_the_object() -> None:
    model, optimizer = Net(), optim.AdamW(1e-3)
    arrays = dict(tree_flatten(model.parameters()))
    modules = {name: id(module) for name, module in model.named_modules()}
    state, attributes = copy.copy(optimizer.state), dict(vars(optimizer))
    key = random_keys()[0]
    exact(training(model, optimizer), tokens(), state=[model, optimizer])
    after = dict(tree_flatten(model.parameters()))
    assert list(after) == list(arrays)
    assert all(after[name] is array for name, array in arrays.items())
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert (optimizer.state, dict(vars(optimizer))) == (state, attributes)
    assert random_keys()[0] is key


def test_step_still_trains_after_a_capture() -> None:
    def losses(trace_first: bool) -> list[float]:
        mx.random.seed(3)
        model, optimizer = Net(), optim.AdamW(1e-2)
        step = training(model, optimizer)
        if trace_first:
            exact(step, tokens(), state=[model, optimizer])
        found = []
        for _ in range(3):
            loss = step(tokens())
            mx.eval(loss, model.parameters(), optimizer.state)
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_patched_functions_are_put_back() -> None:
    before = [mx.checkpoint, mx.custom_function, mx.contiguous, mx.fast.layer_norm, Block.__call__]
    model, optimizer = Net(), optim.SGD(0.1)
    exact(training(model, optimizer), tokens(), state=[model, optimizer])
    assert before == [mx.checkpoint, mx.custom_function, mx.contiguous, mx.fast.layer_norm, Block.__call__]
    assert optim.Optimizer.apply_gradients.__module__ == "mlx.optimizers.optimizers"


def test_state_is_restored_when_the_step_raises() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    weight = model.head.weight

    def step(batch: mx.array) -> mx.array:
        model.head.weight = model.head.weight + 1
        raise RuntimeError("broken")

    with pytest.raises(TraceError, match=r"raised RuntimeError at test_trace_capture.py:\d+ .*broken"):
        exact(step, tokens(), state=[model, optimizer])
    assert model.head.weight is weight


# -- styles of steps ---------------------------------------------------------------------------------------


def test_optimizer_without_state_is_captured_as_in_the_second_step() -> None:
    model, optimizer = Net(), optim.Adam(1e-3)
    captured = exact(training(model, optimizer), tokens(), state=[model, optimizer])
    initialized = optim.Adam(1e-3)
    initialized.init(model.trainable_parameters())
    expected = exact(training(model, initialized), tokens(), state=[model, initialized])
    assert primitives(captured.graph) == primitives(expected.graph)
    names = {a.name for a in captured.graph.arrays if a.kind == "optimizer"}
    assert "blocks.0.up.weight.m" in names
    assert "m" not in str(optimizer.state.get("head"))


def test_first_step_creates_the_optimizer_s_state() -> None:
    model, optimizer = Net(), optim.Adam(1e-3)
    captured = exact(training(model, optimizer), tokens(), state=[model, optimizer], first_step=True)
    kinds = Counter(a.kind for a in captured.graph.arrays if a.producer is None)
    assert kinds["optimizer"] == 2
    assert primitives(captured.graph)["Full"] > 2 * kinds["parameter"] - 5


def test_compiled_step_brings_its_state_along() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    optimizer.init(model.trainable_parameters())
    plain = training(model, optimizer)
    state = [model.state, optimizer.state]
    compiled = mx.compile(plain, inputs=state, outputs=state)
    captured = exact(compiled, tokens())
    assert captured.compiled
    assert not exact(plain, tokens(), state=state).compiled
    assert primitives(captured.graph) == primitives(exact(plain, tokens(), state=state).graph)
    # The compiled function's outputs: the loss, and every array of the state.
    assert len(captured.graph.function_outputs) == 1 + len(list(leaves(state)))


def test_step_compiled_for_another_batch_is_traced_for_the_one_given() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    compiled = mx.compile(training(model, optimizer), inputs=state, outputs=state)
    mx.eval(compiled(mx.zeros((7, 3), mx.int32)), state)
    found = exact(compiled, tokens())
    fresh = exact(mx.compile(training(model, optimizer), inputs=state, outputs=state), tokens())
    assert [a.shape for a in found.graph.arrays] == [a.shape for a in fresh.graph.arrays]
    assert (2, 5) in {a.shape for a in found.graph.arrays if a.kind == "batch"}


def test_state_is_found_in_the_closure_where_none_is_given() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    step = training(model, optimizer)
    found = exact(step, tokens())
    assert primitives(found.graph) == primitives(exact(step, tokens(), state=[model, optimizer]).graph)


def test_step_that_calls_a_compiled_step_has_it_as_a_region() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    state = [model.state, optimizer.state]
    compiled = mx.compile(training(model, optimizer), inputs=state, outputs=state)
    captured = exact(lambda batch: compiled(batch), tokens(), state=state)
    assert not captured.compiled
    assert captured.warnings == []
    (region,) = [r for r in captured.graph.regions if r.kind == "compile"]
    assert set(captured.graph.outputs) <= set(region.outputs)


def test_step_may_be_a_partial_or_a_bound_method() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = Net(), optim.SGD(0.1)
            self.step = training(self.model, self.optimizer)

        def train(self, batch: mx.array) -> Any:
            return self.step(batch)

    trainer = Trainer()
    expected = primitives(exact(trainer.step, tokens()).graph)
    assert primitives(exact(trainer.train, tokens()).graph) == expected
    assert primitives(exact(functools.partial(trainer.train, tokens())).graph)["Gather"] == 1


def test_batch_may_be_nested_and_hold_constants() -> None:
    def step(batch: dict[str, Any], scale: float, *, rows: list[mx.array]) -> Any:
        return (batch["x"] * scale + rows[0] + rows[1]).sum()

    captured = capture(step, ({"x": mx.zeros((4,)), "n": 3}, 2.0), {"rows": [mx.zeros((4,))] * 2}, state=[])
    names = [a.name for a in captured.graph.arrays if a.kind == "batch"]
    assert names == ["batch", "rows", "rows"]
    assert primitives(captured.graph)["Add"] == 2


def test_random_state_is_an_input_even_where_it_is_not_named() -> None:
    def step(x: mx.array) -> mx.array:
        return (x * mx.random.bernoulli(0.5, x.shape)).sum()

    graph = exact(step, mx.zeros((4,)), state=[]).graph
    used = {i for node in graph.nodes for i in node.inputs}
    assert [a.name for a in graph.arrays if a.kind == "state" and a.id in used] == ["random state"]


def test_array_of_the_closure_is_an_input_that_stays() -> None:
    mask = mx.zeros((4,)) + 1

    def step(x: mx.array) -> mx.array:
        return (x * mask).sum()

    graph = exact(step, mx.zeros((4,)), state=[]).graph
    assert primitives(graph) == {"Multiply": 1, "Reduce": 1, "Squeeze": 1}
    closure = next(a for a in graph.arrays if a.name == "closure")
    assert closure.id in graph.evaluations[0].held


def test_old_parameters_are_released_and_the_batch_is_not() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    model.embed.freeze()
    graph = exact(training(model, optimizer), tokens(), state=[model, optimizer]).graph
    held = {graph.arrays[i].name for i in graph.evaluations[0].held if graph.arrays[i].producer is None}
    assert "embed.weight" in held
    assert "head.weight" not in held
    assert "tokens" in held


def test_consumed_argument_is_not_held() -> None:
    def step(x: mx.array, gradients: mx.array) -> mx.array:
        return x + gradients

    graph = exact(step, mx.zeros((4,)), mx.zeros((4,)), state=[], consumed=(1,)).graph
    held = {graph.arrays[i].name for i in graph.evaluations[0].held}
    assert "x" in held
    assert "gradients" not in held


def test_evaluation_order_is_the_callers() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    step = training(model, optimizer)
    first = exact(step, tokens(), state=[model, optimizer]).graph
    last = exact(step, tokens(), state=[model, optimizer], evaluate=lambda loss, state: (state, loss)).graph
    assert first.outputs[0] == first.function_outputs[0]
    assert last.outputs[-1] == last.function_outputs[0]
    assert sorted(first.outputs) == sorted(last.outputs)


# -- names -------------------------------------------------------------------------------------------------


def test_nodes_know_phase_block_and_module() -> None:
    model, optimizer = Net(), optim.AdamW(1e-3)
    graph = exact(training(model, optimizer), tokens(), state=[model, optimizer]).graph
    first = next(n for n in graph.nodes if n.scope == "blocks.1.up" and n.primitive == "AddMM")
    assert (first.phase, first.block) == ("forward", 1)
    assert {n.phase for n in graph.nodes if n.primitive == "Sqrt" and n.block < 0} == {"update"}
    backward = [n for n in graph.nodes if n.phase == "backward" and n.primitive == "Matmul"]
    assert {n.block for n in backward} >= {0, 1, 2}
    assert not [n for n in graph.nodes if n.phase == "update" and n.block >= 0]


def test_outputs_of_modules_and_gradients_are_named() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    graph = exact(training(model, optimizer), tokens(), state=[model, optimizer]).graph
    names = {a.name for a in graph.arrays if a.producer is not None}
    assert {"blocks.2.up", "blocks.0", "head", "blocks.1.down.weight gradient"} <= names


def test_regions_are_the_layers_and_the_calls_of_mx_fast() -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    captured = capture(training(model, optimizer), (tokens(),), state=[model, optimizer])
    kinds = Counter(region.kind for region in captured.graph.regions)
    assert kinds == {"block": 3, "fast.layer_norm": 3}
    block = next(r for r in captured.graph.regions if r.kind == "block")
    assert len(block.cotangents) == len(block.outputs) == 1
    assert None not in block.gradients


# -- checkpoints -------------------------------------------------------------------------------------------


def checkpointed_inside(model: Net) -> Step:
    def loss(_: nn.Module, batch: mx.array) -> mx.array:
        x = model.embed(batch)
        for block in model.blocks:
            x = mx.checkpoint(lambda p, h, b=block: b.update(p)(h))(block.trainable_parameters(), x)
        return model.head(x).sum()

    return loss


def checkpointed_before(model: Net) -> Step:
    wrapped = [nn.utils.checkpoint(block) for block in model.blocks]

    def loss(_: nn.Module, batch: mx.array) -> mx.array:
        x = model.embed(batch)
        for block in wrapped:
            x = block(x)
        return model.head(x).sum()

    return loss


@pytest.mark.parametrize("style", [checkpointed_inside, checkpointed_before])
def test_checkpointed_calls_are_found_and_drawn_as_they_are(style: Callable[[Net], Step]) -> None:
    model, optimizer = Net(), optim.SGD(0.1)
    step = training(model, optimizer, style(model))
    captured = exact(step, tokens(), state=[model, optimizer])
    assert captured.graph.recomputes
    assert "checkpoint" not in {r.kind for r in captured.graph.regions}
    calls = [node for node in captured.graph.nodes if node.primitive == "CustomTransforms"]
    # Six parameters of the block, its input, and its result.
    assert [len(node.inputs) for node in calls] == [8, 8, 8]
    again = [node for node in captured.graph.nodes if node.primitive == "Depends"]
    assert [(node.phase, len(node.outputs)) for node in again] == [("recompute", 7)] * 3
    plain = exact(step, tokens(), state=[model, optimizer], plain=True).graph
    assert not plain.recomputes
    assert "CustomTransforms" not in primitives(plain)


def test_custom_function_with_its_own_vjp_is_traced_as_it_is() -> None:
    def step(x: mx.array) -> Any:
        def double_it(y: mx.array) -> mx.array:
            return y * 2

        double: Any = mx.custom_function(double_it)

        @double.vjp
        def double_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            return cotangents * 2

        return mx.grad(lambda y: double(y).sum())(x)

    captured = exact(step, mx.zeros((4,)), state=[])
    assert captured.warnings == []
    assert (
        primitives(captured.graph)["CustomTransforms"] == 0
    )  # only its gradient is asked for, which reads no result
    plain = exact(step, mx.zeros((4,)), state=[], plain=True)
    assert any("double_it" in warning and "VJP" in warning for warning in plain.warnings)


def test_function_that_is_another_one_when_it_is_run_again_is_counted_by_rule_and_warned_about() -> None:
    calls = 0

    def step(x: mx.array) -> Any:
        def moody(y: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            return mx.exp(y) if calls % 2 else mx.sin(y)

        return mx.value_and_grad(lambda y: mx.checkpoint(moody)(y).sum())(x)

    captured = exact(step, mx.zeros((4,)), state=[])
    (warning,) = captured.warnings
    assert "counted by rule" in warning
    assert captured.graph.recomputes


# -- what cannot be captured -------------------------------------------------------------------------------


def item_inside(x: mx.array) -> mx.array:
    return x * x.sum().item()


def eval_inside(x: mx.array) -> mx.array:
    mx.eval(x)
    return x + 1


def depends_on_values(x: mx.array) -> mx.array:
    return x if x.sum() > 0 else -x


def to_numpy(x: mx.array) -> mx.array:
    return mx.array(np.array(x))


@pytest.mark.parametrize("step", [item_inside, eval_inside, depends_on_values, to_numpy])
def test_step_that_reads_a_value_is_refused_with_the_line(step: Step) -> None:
    with pytest.raises(
        TraceError, match=r"reads a value while it is built at test_trace_capture.py:\d+ \(`.*`\)"
    ):
        exact(step, mx.zeros((4,)), state=[])


def test_step_without_arrays_is_refused() -> None:
    with pytest.raises(TraceError, match="takes no arrays"):
        capture(lambda: mx.zeros((4,)), (), state=[])


@pytest.mark.parametrize("result", [None, 3.0, [], "done"])
def test_step_that_gives_nothing_is_refused(result: Any) -> None:
    with pytest.raises(TraceError, match="returns no arrays and changes no state"):
        exact(lambda x: result, mx.zeros((4,)), state=[])


def test_custom_kernel_is_refused() -> None:
    def step(x: mx.array) -> Any:
        kernel: Any = mx.fast.metal_kernel("k", ["inp"], ["out"], "out[0] = inp[0];")
        return kernel(
            inputs=[x],
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )[0]

    with pytest.raises(TraceError, match="Metal kernel"):
        exact(step, mx.zeros((4,)), state=[])


def test_array_of_the_state_used_behind_its_back_is_refused() -> None:
    model = Net()
    holder = types.MappingProxyType({"weight": model.head.weight})  # nothing looks into one

    def step(x: mx.array) -> Any:
        return (holder["weight"] * model.head.weight).sum() + x.sum()

    with pytest.raises(TraceError, match=r"state=\[\.\.\.\]"):
        exact(step, mx.zeros((4,)), state=[model])


def test_blocks_are_those_of_the_model_that_is_trained_and_not_of_a_deeper_frozen_one() -> None:
    student, teacher = Net(), nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)])
    teacher.freeze()
    optimizer = optim.SGD(0.1)

    def step(batch: mx.array) -> mx.array:
        target = teacher(student.embed(batch)).sum()
        loss, grads = nn.value_and_grad(student, lambda m, b: (m(b).sum() - target) ** 2)(student, batch)
        optimizer.update(student, grads)
        return loss

    graph = capture(step, (tokens(),), state=[student, optimizer, teacher]).graph
    blocks = [region for region in graph.regions if region.kind == "block"]
    assert [block.name for block in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(None not in block.gradients for block in blocks)
