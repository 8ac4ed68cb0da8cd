"""What a run may use: the smallest of several bounds, less headroom, and which one bound it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from oomguard.errors import InputError
from oomguard.machine.device import CUDA_SHARE, Device
from oomguard.units import GIB, TIB, NoUnitError, format_bytes, parse_bytes

# Beside MLX's arrays a run holds an interpreter, mapped libraries, kernels and command buffers, and the rest
# of the machine grows and shrinks; none of it scales with memory beyond a few GiB.
DEFAULT_HEADROOM = 0.05
MAX_DEFAULT_HEADROOM_BYTES = 4 * GIB

LARGEST_MACHINE_BYTES = 64 * TIB

WORKING_SET = "recommended working set"
WIRED_LIMIT = "wired limit"
FREE_NOW = "memory free now"
CONTAINER = "container limit"
CUDA_LIMIT = "95% of the GPU's memory"
ALL_MEMORY = "the machine's memory"
GIVEN = "the memory given"

_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Headroom:
    """Memory left unused: a share of what binds, or a number of bytes."""

    share: float = 0.0
    size_bytes: int = 0

    def of(self, bound_bytes: int) -> int:
        """The bytes it leaves unused of ``bound_bytes``."""
        return self.size_bytes + int(self.share * bound_bytes)


@dataclass(frozen=True)
class Budget:
    """What a run may use.

    ``candidates`` are the bounds by name, before headroom; ``bound_by`` names the one that binds, and
    ``budget_bytes`` is that one less ``headroom_bytes``. No single tensor may pass ``largest_buffer_bytes``.
    """

    budget_bytes: int
    bound_by: str
    headroom_bytes: int
    candidates: dict[str, int] = field(default_factory=dict)
    largest_buffer_bytes: int | None = None


def parse_memory(value: str | int) -> int:
    """A memory that a run may use, in bytes.

    Raises:
        InputError: not a size, none at all, or more than any machine has.
    """
    size = parse_bytes(value)
    if size <= 0:
        raise InputError(f"a budget of {size} bytes holds nothing; write what the run may use, such as 16GB")
    if size > LARGEST_MACHINE_BYTES:
        raise InputError(
            f"{value!r} is more memory than any machine has ({format_bytes(LARGEST_MACHINE_BYTES)} at most); "
            "write what the run may use, such as 16GB"
        )
    return size


def parse_headroom(value: str | int | Headroom) -> Headroom:
    """``10%``, ``1GiB``, or a number of bytes as an integer.

    Raises:
        InputError: neither a percentage below 100 nor a size.
    """
    if isinstance(value, Headroom):
        return value
    if isinstance(value, str) and (percent := _PERCENT.fullmatch(value)):
        share = float(percent[1]) / 100
        if share >= 1:
            raise InputError(f"headroom {value.strip()} leaves nothing to use; write less, such as 10%")
        return Headroom(share=share)
    try:
        size = parse_bytes(value)
    except NoUnitError as error:
        or_share = f"{error.number}%, " if float(error.number) < 100 else ""
        raise InputError(f"{value!r} has no unit; write it as {or_share}{error.suggestion}") from error
    except InputError as error:
        raise InputError(f"{value!r} is not a headroom; write it as 10% or 1GiB") from error
    if size < 0:
        raise InputError(f"headroom of {size} bytes is below 0; write it as 10% or 1GiB")
    return Headroom(size_bytes=size)


def find_budget(device: Device, memory_bytes: int | None = None, headroom: Headroom | None = None) -> Budget:
    """What a run on that machine may use.

    Args:
        device: the machine.
        memory_bytes: what the user allows, if they said so.
        headroom: what to leave unused of the bound that binds. None: 5% of what the machine has, at most
            4 GiB, and nothing of ``memory_bytes``, which is the user's own word for what may be used.

    Raises:
        InputError: nothing bounds the run (another machine of unknown size), or the headroom takes it all.
    """
    bounds = _bounds(device)
    if memory_bytes is not None:
        bounds[GIVEN] = memory_bytes
    if not bounds:
        named = "m5-pro-48gb" if device.backend == "metal" else f"{device.backend}-24gb"
        raise InputError(
            f"this machine has no {device.backend} backend, so say how much memory there is: "
            f"--memory 32GB, or --device {named}"
        )
    usable = {name: size - _headroom_of(name, size, headroom) for name, size in bounds.items()}
    bound_by = min(usable, key=lambda name: usable[name])
    if usable[bound_by] <= 0 and headroom is not None:
        raise InputError(
            f"headroom {format_bytes(headroom.of(bounds[bound_by]))} leaves nothing of "
            f"{format_bytes(bounds[bound_by])} ({bound_by}); write less, such as 10%"
        )
    return Budget(
        budget_bytes=max(0, usable[bound_by]),
        bound_by=bound_by,
        headroom_bytes=bounds[bound_by] - usable[bound_by],
        candidates=bounds,
        largest_buffer_bytes=device.largest_buffer_bytes,
    )


def _headroom_of(name: str, bound_bytes: int, headroom: Headroom | None) -> int:
    if headroom is not None:
        return headroom.of(bound_bytes)
    if name == GIVEN:
        return 0
    return min(int(DEFAULT_HEADROOM * bound_bytes), MAX_DEFAULT_HEADROOM_BYTES)


def _bounds(device: Device) -> dict[str, int]:
    """Every bound the machine itself sets; what MLX holds already is counted as free."""
    bounds: dict[str, int] = {}
    if device.working_set_bytes is not None:
        bounds[WORKING_SET] = device.working_set_bytes
    if device.wired_limit_bytes is not None:
        bounds[WIRED_LIMIT] = device.wired_limit_bytes
    if device.free_bytes is not None:
        bounds[FREE_NOW] = device.free_bytes + device.held_bytes
    if device.container_bytes is not None:
        bounds[CONTAINER] = device.container_bytes + device.held_bytes
    if device.backend == "cuda" and device.memory_bytes is not None:
        bounds[CUDA_LIMIT] = int(CUDA_SHARE * device.memory_bytes)
    if device.backend == "cpu" and not device.here and device.memory_bytes is not None:
        bounds[ALL_MEMORY] = device.memory_bytes
    return bounds
