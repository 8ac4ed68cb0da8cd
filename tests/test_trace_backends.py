"""Which device is simulated for a machine, and that a step is captured for it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

import oomguard
from oomguard.config import ModelConfig, StepConfig
from oomguard.device import find_device
from oomguard.engines import trace_preset
from oomguard.errors import InputError, TraceError
from oomguard.model.step import build_step
from oomguard.trace import backends, metal
from oomguard.trace.backends import capturing, simulated
from oomguard.trace.engine import trace_built
from oomguard.trace.lower import LOWERED
from oomguard.trace.memory import CPU
from oomguard.trace.policies import Policies

TINY = ModelConfig(name="narrow", n_layers=2, d_model=32, n_heads=2, d_mlp=128, context=32)
STEP = StepConfig(batch=2, seq_len=32)

on_a_cpu = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="MLX computes on a GPU here")


@on_a_cpu
def test_without_a_name_it_is_what_mlx_computes_on_here() -> None:
    assert simulated() is CPU


@pytest.mark.parametrize("name", ["cpu", "cpu-64gb"])
def test_any_cpu_is_the_cpu(name: str) -> None:
    assert simulated(name) is CPU


def test_a_simulated_device_is_given_back() -> None:
    device = metal.device(metal.Chip(16, "s"), (0, 31, 1))
    assert simulated(device) is device


def test_a_mac_by_name_has_its_chips_command_buffers() -> None:
    pro, base = simulated("m5-pro-48gb").queue(), simulated("m4-16gb").queue()
    assert isinstance(pro, metal.CommandBuffers)
    assert isinstance(base, metal.CommandBuffers)
    assert (pro.max_kernels, base.max_kernels) == (50, 40)


@on_a_cpu
def test_metal_elsewhere_is_lowered_from_a_graph_of_the_cpu() -> None:
    assert simulated("metal-36gb").marked == LOWERED
    assert simulated(find_device("metal")).name == "metal"


def test_where_mlx_computes_on_metal_the_graph_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_computes_on_metal", lambda: True)
    assert simulated("metal-36gb").marked == frozenset()


def test_cuda_is_refused_with_what_would_work() -> None:
    with pytest.raises(TraceError, match="m5-pro-48gb or cpu"):
        simulated("cuda-24gb")


def test_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean"):
        oomguard.trace(lambda x: x, mx.zeros(3), device="m5-prp-48gb")


def test_a_step_for_the_cpu_is_captured_on_the_cpu_and_the_default_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = [mx.Device(mx.gpu)]
    monkeypatch.setattr(mx, "default_device", lambda: devices[-1])
    monkeypatch.setattr(mx, "set_default_device", devices.append)
    with capturing(CPU):
        assert devices[-1] == mx.Device(mx.cpu)
    assert devices[-1] == mx.Device(mx.gpu)
    with pytest.raises(KeyError), capturing(CPU):
        raise KeyError
    assert devices[-1] == mx.Device(mx.gpu)


@pytest.mark.parametrize(
    "peak",
    [
        lambda: trace_built(build_step(TINY, STEP, evaluated=False), device="m5-pro-48gb").peak_bytes,
        lambda: trace_preset(TINY, STEP, find_device("m5-pro-48gb")).peak_bytes,
        lambda: (
            Policies.of_built(build_step(TINY, STEP, evaluated=False), device="m5-pro-48gb")
            .table()[0]
            .peak_bytes
        ),
    ],
)
def test_a_name_means_the_same_everywhere(peak: Callable[[], int]) -> None:
    built = build_step(TINY, STEP, evaluated=False)
    found = oomguard.trace(
        built.function,
        built.batch,
        None,
        True,
        state=built.state,
        evaluate=lambda returned, state: (state, returned),
        device="m5-pro-48gb",
    )
    assert found.backend == "metal"
    assert peak() == found.peak_bytes
