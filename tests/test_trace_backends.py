"""Which device is simulated for a machine, and that a step is captured for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

import oomguard
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.errors import InputError, TraceError
from oomguard.machine.device import Device, device_names, find_device
from oomguard.model.step import build_step
from oomguard.plan.engines import trace_preset
from oomguard.trace import backends, metal
from oomguard.trace.backends import capturing, simulated
from oomguard.trace.engine import trace_built
from oomguard.trace.lower import LOWERED
from oomguard.trace.memory import CPU
from oomguard.trace.policies import Policies
from oomguard.units import GIB

TINY = ModelConfig(name="narrow", n_layers=2, d_model=32, n_heads=2, d_mlp=128, context=32)
STEP = StepConfig(batch=2, seq_len=32)

on_a_cpu = pytest.mark.skipif(mx.default_device() == mx.Device(mx.gpu), reason="MLX computes on a GPU here")


@on_a_cpu
def test_without_a_name_it_is_what_mlx_computes_on_here() -> None:
    assert simulated() == replace(CPU, memory_limit=find_device("cpu").memory_limit_bytes)


@pytest.mark.parametrize("name", ["cpu", "cpu-64gb"])
def test_any_cpu_is_the_cpu_with_the_memory_limit_of_its_machine(name: str) -> None:
    assert simulated(name) == replace(CPU, memory_limit=find_device(name).memory_limit_bytes)


@on_a_cpu
def test_memory_limit_here_is_the_one_mlx_says() -> None:
    """``mx.set_memory_limit`` gives back the limit before; asked in a process where nobody has set one."""
    ask = "import mlx.core as mx; print(mx.set_memory_limit(1))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert find_device("cpu").memory_limit_bytes == int(done.stdout)


@pytest.mark.parametrize(
    ("name", "limit_bytes"),
    [
        ("cpu-64gb", int(0.8 * 64 * GIB)),
        ("cuda-24gb", int(0.95 * 24 * GIB)),
        ("m4-max-64gb", int(0.95 * 64 * GIB)),  # 1.5 working sets are 72 GiB
        ("metal-32gb", int(0.95 * 32 * GIB)),
        ("m1-max-32gb", int(0.95 * 32 * GIB)),
        ("m1-8gb", int(0.95 * 8 * GIB)),
        ("metal", None),
    ],
)
def test_memory_limit_of_a_machine_is_the_allocators_default(name: str, limit_bytes: int | None) -> None:
    found = find_device(name)
    assert found.memory_limit_bytes == limit_bytes
    if found.backend != "cuda":
        assert simulated(name).memory_limit == limit_bytes
        assert simulated(name).largest_buffer == found.largest_buffer_bytes


def test_memory_limit_on_metal_follows_a_working_set_that_was_set_low() -> None:
    """The smaller of 1.5 working sets and 0.95 of the memory; no Mac's default working set is below 2/3 of it."""
    low = Device("a Mac", "metal", memory_bytes=32 * GIB, wired_limit_bytes=10 * GIB)
    assert low.memory_limit_bytes == 15 * GIB
    assert replace(low, wired_limit_bytes=30 * GIB).memory_limit_bytes == int(0.95 * 32 * GIB)


@pytest.mark.parametrize(
    "name", [*(n for n in device_names() if n.startswith("m1-")), "metal-24gb", "cpu-8gb"]
)
def test_every_machine_whose_memory_is_known_is_simulated_with_its_limit(name: str) -> None:
    assert (simulated(name).memory_limit or 0) > 0
    assert (simulated(name).memory_limit or 0) <= (find_device(name).memory_bytes or 0)


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
