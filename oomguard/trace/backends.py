"""The simulated device that stands for a machine: its backend, its chip, its MLX release.

A step is captured where oomguard runs. Where that is the backend to be simulated the graph is the step's own;
where it is not, a CPU's graph is captured and rewritten (``lower``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import mlx.core as mx

from oomguard.errors import TraceError
from oomguard.machine import device as machines
from oomguard.trace import metal
from oomguard.trace.lower import parse_version
from oomguard.trace.memory import CPU, Device

OTHER_ARCHITECTURE = "applegpu_g16s"
"""Of a Pro or Max, where a machine's own is not known."""

Machine = str | machines.Device | Device | None
"""What a step is simulated for: see ``simulated``."""


def simulated(machine: Machine = None) -> Device:
    """The device that is simulated for a machine.

    Args:
        machine: a name as ``--device`` takes it (``"m5-pro-48gb"``), a found ``machine.device.Device``, a simulated
            one (given back as it is), or None for what MLX computes on here.

    Returns:
        The device with MLX's own memory limit and the largest buffer of that machine; without either where its
        size is not known, as of ``"metal"`` away from a Mac.

    Raises:
        InputError: no machine of that name.
        TraceError: a CUDA GPU, whose allocator and queue are not simulated.
    """
    if isinstance(machine, Device):
        return machine
    if not isinstance(machine, machines.Device):
        machine = machines.find_device(machine)
    if machine.backend == "cpu":
        return replace(CPU, memory_limit=machine.memory_limit_bytes)
    if machine.backend == "cuda":
        raise TraceError(
            "CUDA's allocator and queue are not simulated, only those of the cpu and metal backends; name another "
            "device, such as m5-pro-48gb or cpu"
        )
    chip = metal.Chip.named(machine.architecture or OTHER_ARCHITECTURE)
    release = parse_version(machine.mlx or version("mlx"))
    return metal.device(
        chip,
        release,
        memory_limit=machine.memory_limit_bytes,
        largest_buffer=machine.largest_buffer_bytes,
        native=_computes_on_metal(),
    )


@contextmanager
def capturing(device: Device) -> Iterator[None]:
    """What is captured inside is captured for ``device``: on a Mac, a CPU's graph is built on the CPU."""
    before = mx.default_device()
    if device.name == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))
    try:
        yield
    finally:
        mx.set_default_device(before)


def _computes_on_metal() -> bool:
    return mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
