"""What a machine allows whatever is free: MLX's memory limit, at which it waits, and Metal's largest buffer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from test_trace_cli import run, run_json
from test_trace_report_page import browse, needs_browser
from trace_fakes import small_report, small_result

import oomguard
from oomguard.config.model import ModelConfig
from oomguard.config.policy import NO_CHECKPOINT
from oomguard.config.step import StepConfig
from oomguard.machine.device import find_device
from oomguard.plan.engines import PresetTracer
from oomguard.report.trace_html import page_data, trace_html
from oomguard.report.trace_json import trace_json
from oomguard.report.trace_report import LabelledTrace
from oomguard.report.trace_text import trace_text
from oomguard.trace.backends import simulated
from oomguard.trace.policies import Policies
from oomguard.trace.result import TraceResult
from oomguard.units import GIB, MIB

LARGEST_BUFFER = """
import mlx.core as mx

def build():
    def step(a, b):
        return (a @ b).sum()
    n = 100_000
    return step, (mx.zeros((n, 8), mx.float32), mx.zeros((8, n), mx.float32)), []
"""
ON_A_MAC = ["--device", "m4-max-64gb"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "largest_buffer.py"
    path.write_text(LARGEST_BUFFER)
    return f"{path}:build"


def words(text: str) -> str:
    return " ".join(text.split())


# -- the largest buffer --------------------------------------------------------------------------------------


def test_a_buffer_over_the_largest_does_not_fit_whatever_the_budget(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, "trace", target, *ON_A_MAC, "--budget", "auto", "--html", str(page))
    assert status == 1
    said = words(out)
    assert "Peak 37.3 GiB, 8.3 GiB below the budget" in said
    assert "does not fit: one buffer takes 37.3 GiB (the Matmul output, 100000 x 100000 float32)" in said
    assert "hands out 36.0 GiB at most" in said
    assert said.count("one buffer takes") == 1
    assert "set_memory_limit(0) the peak is" not in said
    assert "one buffer takes 37.3 GiB" in words(page.read_text())


def test_json_of_a_buffer_over_the_largest_says_so(capsys: pytest.CaptureFixture[str], target: str) -> None:
    status, out, _ = run(capsys, "trace", target, *ON_A_MAC, "--budget", "auto", "--json")
    found = json.loads(out)
    assert (status, found["fits"], found["buffer_fits"]) == (1, False, False)
    assert found["peak_bytes"] < found["budget_bytes"]
    assert found["largest_buffer_bytes"] > found["largest_allowed_bytes"]
    assert found["largest_allowed_bytes"] == find_device("m4-max-64gb").largest_buffer_bytes
    assert any("one buffer takes" in warning for warning in found["warnings"])


@pytest.mark.parametrize("budget", ["44GB", "900GB"])
def test_a_budget_that_is_given_holds_the_largest_buffer_too(
    capsys: pytest.CaptureFixture[str], target: str, budget: str
) -> None:
    assert run(capsys, "trace", target, *ON_A_MAC, "--budget", budget)[0] == 1


def test_without_a_budget_the_largest_buffer_is_a_warning(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    status, out, _ = run(capsys, "trace", target, *ON_A_MAC)
    assert status == 0
    assert "warning: one buffer takes 37.3 GiB" in words(out)
    found = run_json(capsys, "trace", target, *ON_A_MAC)
    assert (found["fits"], found["buffer_fits"]) == (None, False)


@pytest.mark.parametrize("device", ["m4-max-128gb", "cpu-512gb", "metal"])
def test_a_machine_that_hands_the_buffer_out_or_has_no_bound_says_nothing(
    capsys: pytest.CaptureFixture[str], target: str, device: str
) -> None:
    status, out, _ = run(capsys, "trace", target, "--device", device, "--budget", "80GB")
    assert status == 0
    assert "one buffer" not in out


def test_python_warns_of_a_buffer_over_the_largest() -> None:
    a, b = mx.zeros((100_000, 8)), mx.zeros((8, 100_000))
    found = oomguard.trace(lambda a, b: (a @ b).sum(), a, b, state=[], device="m4-max-64gb")
    assert found.buffer_fits is False
    assert any("one buffer takes 37.3 GiB" in warning for warning in found.warnings)


class Wide(nn.Module):
    """Blocks whose activations are one wide array each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)) for _ in range(3)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def wide_policies(largest_buffer: int | None) -> Policies:
    model, optimizer = Wide(), optim.SGD(0.1)
    optimizer.init(model.trainable_parameters())
    gradients_of = nn.value_and_grad(model, lambda x: model(x).square().mean())

    def step(x: mx.array) -> mx.array:
        loss, gradients = gradients_of(x)
        optimizer.update(model, gradients)
        return loss

    device = replace(simulated("metal-16gb"), largest_buffer=largest_buffer)
    return Policies.of_step(step, (mx.zeros((4096, 8)),), state=[model, optimizer], device=device)


def test_no_policy_fits_whose_buffer_is_over_the_largest() -> None:
    """The wide array is there under every policy, so none fits, however much the budget has."""
    free = wide_policies(None).price(NO_CHECKPOINT)
    assert free.largest_buffer_bytes == 4096 * 256 * 4
    assert free.fits(10 * GIB)
    bound = wide_policies(free.largest_buffer_bytes - 1)
    assert not any(price.fits(10 * GIB) for price in bound.table())
    assert not bound.cheapest(10 * GIB).fits(10 * GIB)
    assert wide_policies(free.largest_buffer_bytes).price(NO_CHECKPOINT).fits(10 * GIB)


def test_a_plan_confirmed_by_the_trace_holds_the_largest_buffer() -> None:
    model = ModelConfig(name="narrow", n_layers=2, d_model=32, n_heads=2, d_mlp=128, context=32)
    step = StepConfig(batch=2, seq_len=32)
    small = replace(find_device("metal-16gb"), largest_buffer_bytes=4096)
    assert PresetTracer(find_device("metal-16gb")).least_recompute(model, step, GIB) == NO_CHECKPOINT
    assert PresetTracer(small).least_recompute(model, step, GIB) is None
    found = oomguard.plan(model, seq_len=32, memory="1GiB", device=small, engine="trace", batch=2)
    assert found.choice is None


def too_large(**changes: Any) -> TraceResult:
    return small_result(
        largest_buffer_bytes=20 * MIB,
        largest_allowed_bytes=16 * MIB,
        warnings=["one buffer takes 20.0 MiB, and the device hands out 16.0 MiB at most"],
        **changes,
    )


def test_compared_policy_whose_buffer_is_too_large_is_no_way_out() -> None:
    asked = LabelledTrace("none", "no recompute", small_result())
    other = LabelledTrace("every", "every block recomputed", too_large(peak_bytes=30 * MIB))
    said = words(trace_text(small_report(asked=asked, compared=other, budget_bytes=40 * MIB)))
    assert "Fits with every block" not in said
    assert "warning, every: one buffer takes" in said


def test_page_is_told_of_a_buffer_that_is_too_large() -> None:
    report = small_report(asked=LabelledTrace("none", "no recompute", too_large()), budget_bytes=64 * MIB)
    (shown,) = page_data(report)["runs"]
    assert (shown["tooLarge"], shown["allowed"]) == (True, 16 * MIB)
    assert "one buffer takes 20.0 MiB" in trace_html(report)
    assert trace_json(report)["fits"] is False
    assert page_data(small_report())["runs"][0]["tooLarge"] is False


@needs_browser
def test_browser_shows_a_buffer_that_is_too_large_and_the_limit_that_held_the_peak_down(
    tmp_path: Path,
) -> None:
    result = too_large(memory_limit_bytes=46 * MIB, waited_at_limit=True)
    page = trace_html(
        small_report(asked=LabelledTrace("none", "no recompute", result), budget_bytes=64 * MIB)
    )
    shown = browse(tmp_path, page)
    assert shown.console == []
    assert "one buffer of 20.0 MiB, 16.0 MiB at most" in shown.texts("over")
    assert "held down by the memory limit of 46.0 MiB" in " ".join(shown.texts("facts"))
    assert "held down" not in browse(tmp_path, trace_html(small_report())).dom.split("<script", 1)[0]


# -- the memory limit ----------------------------------------------------------------------------------------


def wide_step(x: mx.array) -> mx.array:
    """Hundreds of kernels over a large array: what is queued holds much more than the graph."""
    for _ in range(200):
        x = mx.sin(x) * x
    return x.sum()


LIMITED = """
import mlx.core as mx

def build():
    def step(x):
        for _ in range(200):
            x = mx.sin(x) * x
        return x.sum()
    return step, (mx.zeros((350_000_000,)),), []
"""


def traced(**how: Any) -> TraceResult:
    return oomguard.trace(wide_step, mx.zeros((350_000_000,)), state=[], **how)


def test_a_named_machine_is_simulated_with_its_own_memory_limit() -> None:
    limit = int(0.95 * 8 * GIB)
    found, given = traced(device="m1-8gb"), traced(device="m1-8gb", memory_limit=limit)
    assert found.memory_limit_bytes == limit
    assert found.peak_bytes == given.peak_bytes
    assert found.waited_at_limit
    free = traced(device="m1-8gb", memory_limit=1 << 50)
    assert not free.waited_at_limit
    assert free.memory_limit_bytes == 1 << 50
    assert free.peak_bytes > found.peak_bytes


def test_a_named_cpu_is_simulated_with_its_own_memory_limit() -> None:
    found = traced(device="cpu-8gb")
    assert found.memory_limit_bytes == int(0.8 * 8 * GIB)
    assert found.peak_bytes == traced(device="cpu-8gb", memory_limit=int(0.8 * 8 * GIB)).peak_bytes
    assert found.peak_bytes < traced(device="cpu-512gb").peak_bytes


def test_a_machine_with_more_memory_peaks_no_lower() -> None:
    peaks = [traced(device=f"metal-{gib}gb").peak_bytes for gib in (8, 16, 24, 36, 64, 128)]
    assert peaks == sorted(peaks)
    assert peaks[-1] == traced(device="metal").peak_bytes


def test_policies_are_priced_under_the_machines_memory_limit() -> None:
    x = mx.zeros((350_000_000,))
    found = Policies.of_step(wide_step, (x,), state=[], device="m1-8gb").price(NO_CHECKPOINT)
    assert found.peak_bytes == traced(device="m1-8gb").peak_bytes


def test_the_assumed_limit_is_said_where_it_held_the_peak_down(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "limited.py"
    path.write_text(LIMITED)
    target = f"{path}:build"
    _, out, _ = run(capsys, "trace", target, "--device", "m1-8gb")
    assert "memory limit 7.6 GiB, MLX's own on this machine" in words(out)
    found = run_json(capsys, "trace", target, "--device", "m1-8gb")
    assert found["memory_limit_bytes"] is None
    assert found["simulated_memory_limit_bytes"] == int(0.95 * 8 * GIB)
    assert found["waited_at_limit"] is True
    _, out, _ = run(capsys, "trace", target, "--device", "m1-8gb", "--memory-limit", "6GiB")
    assert "memory limit 6.0 GiB, as given" in words(out)
    _, out, _ = run(capsys, "trace", target, "--device", "m4-max-128gb")
    assert "MLX's own on this machine" not in out


def test_what_is_assumed_is_said_where_no_memory_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("trace", "--preset", "tiny", "--ctx", "32")
    assumed = "its memory not known, MLX's memory limit taken to be out of reach"
    _, out, _ = run(capsys, *tiny, "--device", "metal")
    if find_device("metal").here:
        pytest.skip("this machine has Metal, and so a size")
    assert assumed in words(out)
    assert run_json(capsys, *tiny, "--device", "metal")["simulated_memory_limit_bytes"] is None
    for known in (("--device", "metal-16gb"), ("--device", "metal", "--memory-limit", "8GB"), ()):
        assert assumed not in words(run(capsys, *tiny, *known)[1])
