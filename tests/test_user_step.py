"""What a user's FILE.py:FUNCTION returns is traced and run through one door, and the two agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_trace_cli import run

from oomguard.cli.main import main
from oomguard.measure.blas import child_environment, find_openblas

OWN = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

mx.random.seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())])
optimizer = optim.Adam(1e-3)
optimizer.init(model.trainable_parameters())
x = mx.random.normal((512, 256))

def step(x):
    loss, gradients = nn.value_and_grad(model, lambda m, x: (m(x) - x).square().mean())(model, x)
    optimizer.update(model, gradients)
    return loss

compiled = mx.compile(step, inputs=[model.state, optimizer.state], outputs=[model.state, optimizer.state])
"""
RETURNS = {
    "step and arguments": "return step, (x,)",
    "keyword arguments": "return step, {'x': x}",
    "a compiled step": "return compiled, (x,)",
    "the state": "return step, (x,), [model, optimizer]",
    "the order of evaluation": "return step, (x,), [model, optimizer], lambda loss, state: (state, loss)",
    "the loss alone evaluated": "return step, (x,), [model, optimizer], lambda loss, state: loss",
}


def written(folder: Path, returns: str) -> str:
    path = folder / "own.py"
    path.write_text(f"{OWN}\ndef build():\n    {returns}\n")
    return f"{path}:build"


def as_measured(target: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "oomguard", "measure", target, "--steps", "6", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(os.environ, find_openblas()),
    )
    return dict(json.loads(done.stdout)["rows"][0])


@pytest.mark.measured
@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS.values(), ids=list(RETURNS))
def test_function_is_traced_as_it_is_measured(
    returns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = written(tmp_path, returns)
    found = as_measured(target)
    status, out, _ = run(capsys, "trace", target, "--device", "cpu", "--json")
    traced = json.loads(out)
    assert status == 0
    # Where a task ends differs between the two processes, and with it what is in flight.
    assert traced["low_bytes"] <= 1.02 * found["peak_high_bytes"]
    assert traced["high_bytes"] >= 0.98 * found["peak_low_bytes"]
    assert traced["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.04)


def test_the_order_given_to_eval_is_the_one_that_is_traced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = []
    for order in ("(loss, state)", "loss"):
        target = written(tmp_path, f"return step, (x,), [model, optimizer], lambda loss, state: {order}")
        found = json.loads(run(capsys, "trace", target, "--device", "cpu", "--json")[1])
        peaks.append((found["peak_bytes"], len(found["warnings"])))
    assert peaks[0][1] == 0
    assert peaks[1][1] == 1  # the update is evaluated by nobody, and that is said
    assert peaks[1][0] != peaks[0][0]


BAD = {
    "nothing": ("return None", "returned nothing; return (step, arguments)"),
    "a number": ("return 3", "returned int; return (step, arguments)"),
    "an evaluation that is none": (
        "return step, (x,), [model], 3",
        "what is handed to mx.eval is int; return a function of what the step returned and of the state",
    ),
    "most of a built step": (
        "import types; return types.SimpleNamespace(graphs=1, function=2, state=[], model=3, run=4)",
        "returned types.SimpleNamespace, which has no batch; return (step, arguments)",
    ),
    "a step that is none": ("return 3, (x,)", "returned int where the step should be"),
}


@pytest.mark.parametrize("command", ["trace", "measure"])
@pytest.mark.parametrize(("returns", "said"), BAD.values(), ids=list(BAD))
def test_what_is_no_step_is_refused_alike_by_both(
    command: str, returns: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, written(tmp_path, returns)])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert said in " ".join(err.split())
    assert err.count("\n") == 1
