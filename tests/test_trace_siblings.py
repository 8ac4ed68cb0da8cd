"""Primitives with several outputs that ``mx.compile`` merges: what MLX holds of them, measured, and the commands of a
report in which their trace never ended."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from limited import run_limited

from oomguard.trace.engine import trace

ROWS, WIDTH = 512, 256
Step = Callable[[mx.array, mx.array], Any]


def split_in_a_custom_function(x: mx.array, w: mx.array) -> Any:
    """Three calls of a bare custom function that splits: forward and recompute are equal, and merged."""

    def inner(x: mx.array, w: mx.array) -> mx.array:
        a, b, c = mx.split(mx.sin(x @ w), 3, axis=-1)
        return mx.exp(mx.exp(a) * b * c) * mx.sigmoid(c) + a

    def loss(x: mx.array, w: mx.array) -> mx.array:
        bare = mx.custom_function(inner)

        @bare.vjp
        def again(primals: Any, cotangent: Any, _: Any) -> Any:
            return tuple(mx.vjp(inner, list(primals), [cotangent])[1])

        for _ in range(3):
            x = bare(x, w) @ w[:, :WIDTH].T
        return x.sum()

    return mx.value_and_grad(loss, argnums=(0, 1))(x, w)


def _divided_three_times(x: mx.array, w: mx.array) -> list[tuple[mx.array, mx.array]]:
    y = mx.sin(x @ w)
    return [tuple(mx.divmod(y, 0.3)) for _ in range(3)]  # type: ignore[misc]


def _read_all(pairs: list[tuple[mx.array, mx.array]]) -> mx.array:
    (a, b), (c, d), (_, f) = pairs
    return (mx.exp(a) * b).sum() + (mx.cos(c) * d).sum() + mx.tan(f).sum()


def remainder_of_the_last_returned(x: mx.array, w: mx.array) -> Any:
    pairs = _divided_three_times(x, w)
    return _read_all(pairs), pairs[2][1]


def outputs_of_two_returned(x: mx.array, w: mx.array) -> Any:
    pairs = _divided_three_times(x, w)
    return _read_all(pairs), (pairs[2][1], pairs[1][0])


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (split_in_a_custom_function, remainder_of_the_last_returned, outputs_of_two_returned)
}


def arguments() -> tuple[mx.array, mx.array]:
    return mx.random.normal((ROWS, WIDTH)), mx.random.normal((WIDTH, 3 * WIDTH))


@pytest.mark.measured
@pytest.mark.parametrize("name", STEPS)
def test_step_with_merged_siblings_peaks_as_measured(name: str) -> None:
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
    traced = trace(mx.compile(STEPS[name]), *arguments(), state=[], device="cpu", evaluate=lambda out, _: out)
    assert traced.peak_bytes == pytest.approx(int(done.stdout), rel=1e-3)


@pytest.mark.parametrize(
    "line",
    [
        "trace --case dropout --policies",
        "trace --case lm-phi3-lora --policies",
        "trace --preset mega --batch 2 --device m5-pro-48gb --policies",
    ],
)
def test_policies_are_priced_in_a_few_gib(line: str) -> None:
    if "lm-" in line:
        pytest.importorskip("mlx_lm")
    done = run_limited(line.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "custom_function" in done.stdout


if __name__ == "__main__":
    compiled = mx.compile(STEPS[sys.argv[1]])
    given = arguments()
    mx.eval(given)
    peaks = []
    for _ in range(8):
        mx.synchronize()
        mx.reset_peak_memory()
        mx.eval(compiled(*given))
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    sys.stdout.write(str(statistics.median_low(peaks[3:])))
