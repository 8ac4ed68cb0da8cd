"""The rewritten graph of a step is what MLX builds with real ``mx.checkpoint`` calls, node for node."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest

from oomguard.config import CheckpointPolicy, ModelConfig, StepConfig
from oomguard.model.step import build_step
from oomguard.trace.capture import capture
from oomguard.trace.containers import leaves, state_tree
from oomguard.trace.graph import Graph
from oomguard.trace.lower import Target, lower, parse_version
from oomguard.trace.rawgraph import RENAMED, read_dot
from oomguard.trace.remat import apply_policy

MODEL = ModelConfig(name="test", n_layers=4, d_model=32, n_heads=4, d_mlp=64, context=16)
STEP = StepConfig(batch=2, seq_len=16, compiled=False)

Line = tuple[str, tuple[object, ...]]


def real_lines(step: StepConfig) -> list[Line]:
    """What the step builds, read from MLX's own drawing, from the outputs of ``mx.eval`` in their order."""
    built = build_step(MODEL, step)
    given = {f"in{k}": a for k, a in enumerate(leaves([*map(state_tree, built.state), built.batch]))}
    loss, _ = built.plain(built.batch, None, True)
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *leaves([[state_tree(item) for item in built.state], loss]), **given)
    drawn = read_dot(drawing.getvalue())
    makers: dict[str, tuple[int, int]] = {}
    lines: list[Line] = []
    for label, inputs, outputs in zip(drawn.primitives, drawn.inputs, drawn.outputs, strict=True):
        name = label.partition(" ")[0]
        makers |= {output: (len(lines), position) for position, output in enumerate(outputs)}
        read = [makers.get(i, "leaf") for i in inputs]
        if (
            name in ("CustomTransforms", "Depends") and "leaf" in read
        ):  # the random state, which nothing reads
            first = read.index("leaf")
            read.remove("leaf")
            makers |= {o: (len(lines), n - (n >= first)) for n, o in enumerate(outputs)}
        lines.append((RENAMED.get(name, name), tuple(read)))
    return lines


def rewritten_lines(policy: CheckpointPolicy) -> list[Line]:
    built = build_step(MODEL, STEP, evaluated=False)
    captured = capture(
        built.plain,
        (built.batch, None, True),
        state=built.state,
        evaluate=lambda loss, state: (state, loss[0]),
    )
    return lines_of(apply_policy(lower(captured.graph, Target("cpu", parse_version(mx.__version__))), policy))


def lines_of(graph: Graph) -> list[Line]:
    """The graph in the depth-first order of its outputs, each array named by where it is made."""
    makers: dict[int, tuple[int, int]] = {}
    lines: list[Line] = []
    for output in graph.outputs:
        stack = [(output, False)]
        while stack:
            array, done = stack.pop()
            node = graph.arrays[array].producer
            if node is None or array in makers:
                continue
            if not done:
                stack.append((array, True))
                stack.extend((i, False) for i in reversed(node.inputs))
                continue
            makers |= {i: (len(lines), position) for position, i in enumerate(node.outputs)}
            lines.append((node.primitive, tuple(makers.get(i, "leaf") for i in node.inputs)))
    return lines


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "every",
        "stride=2",
        "stride=3",
        "blocks=1",
        "attention",
        "attention,blocks=2",
        "custom_function",
    ],
)
def test_rewritten_step_is_what_mlx_builds(text: str) -> None:
    policy = CheckpointPolicy.parse(text)
    real = real_lines(STEP.but(checkpoint=policy))
    rewritten = rewritten_lines(policy)
    difference = next((n for n, (a, b) in enumerate(zip(real, rewritten, strict=False)) if a != b), None)
    assert difference is None, (difference, real[difference], rewritten[difference])
    assert len(real) == len(rewritten)
