"""The machine a plan is for: this one, as this process finds it, or one named from the table.

MLX is asked only where this process has imported it already; the command line never pays for the import.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import sys
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from oomguard.errors import InputError
from oomguard.files.writing import Format, Output, marked
from oomguard.machine import system as machine
from oomguard.machine.system import Backend
from oomguard.units import GIB, MIB

BACKENDS: tuple[Backend, ...] = ("metal", "cpu", "cuda")

# What MLX's allocators set their memory limit to (``allocator.cpp`` of each backend): of the GPU's memory on CUDA;
# of the machine's on a CPU, whatever a container leaves of it; on Metal the smaller of two.
CUDA_SHARE = 0.95
CPU_LIMIT_SHARE = 0.8
METAL_WORKING_SETS = 1.5
METAL_LIMIT_SHARE = 0.95

_GENERIC = re.compile(r"(?P<backend>metal|cpu|cuda)-(?P<gib>\d{1,5})gb")
_CHIP = re.compile(r"(?P<chip>m\d[a-z-]*?)-(?P<gib>\d{1,5})gb")


@dataclass(frozen=True)
class Device:
    """One machine and backend.

    ``*_bytes`` are None where the machine has no such figure, or where it is another machine and only a look
    at it would tell. ``held_bytes`` is what MLX already holds in this process: a run can use it again.
    ``machine`` is what measured rows call this machine; None for another one.
    """

    name: str
    backend: Backend
    mlx: str | None = None
    here: bool = False
    machine: str | None = None
    architecture: str = ""
    memory_bytes: int | None = None
    working_set_bytes: int | None = None
    wired_limit_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    free_bytes: int | None = None
    container_bytes: int | None = None
    held_bytes: int = 0

    @property
    def memory_limit_bytes(self) -> int | None:
        """MLX's own memory limit, where ``mx.set_memory_limit`` was not called; None where no size is known.

        MLX of a Mac has one allocator, Metal's, also for what is computed on the CPU.
        """
        if self.memory_bytes is None:
            return None
        if self.backend == "cuda":
            return int(CUDA_SHARE * self.memory_bytes)
        if self.backend == "cpu" and not (self.here and _apple_silicon()):
            return int(CPU_LIMIT_SHARE * self.memory_bytes)
        working_set = self.working_set_bytes or self.wired_limit_bytes
        if working_set is None:
            working_set = working_set_bytes(self.memory_bytes, _macos())
        return int(min(METAL_WORKING_SETS * working_set, METAL_LIMIT_SHARE * self.memory_bytes))


def find_device(name: str | None = None) -> Device:
    """The machine that ``--device`` names.

    Args:
        name: None for this machine with the backend its MLX would use; ``metal``, ``cpu`` or ``cuda`` for one
            backend of this machine; a Mac of the table (``m5-pro-48gb``); or any machine by its backend and
            memory (``metal-36gb``, ``cpu-64gb``, ``cuda-24gb``).

    Returns:
        The device. Of another machine, only what its kind implies is known: no free memory, no container.

    Raises:
        InputError: no such name; the text gives the near ones.
    """
    if name is None:
        return local_device()
    wanted = str(name).strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in BACKENDS:
        return _backend_here(wanted)
    if generic := _GENERIC.fullmatch(wanted):
        return _generic_device(generic["backend"], int(generic["gib"]))  # type: ignore[arg-type]
    if mac := _CHIP.fullmatch(wanted):
        return _mac(wanted, mac["chip"], int(mac["gib"]))
    raise InputError(f"unknown device {name!r}; {_near(wanted)}")


def device_names() -> list[str]:
    """Every Mac of the table, smallest chip first."""
    chips = table()["chips"]
    return [f"{chip}-{gib}gb" for chip, facts in chips.items() for gib in facts["memory_gib"]]


@functools.cache
def table() -> Any:
    """``data/devices.json``: chips, their memory sizes, and what Metal recommends, with sources."""
    return json.loads(resources.files("oomguard").joinpath("data/devices.json").read_text())


def working_set_bytes(memory_bytes: int, macos: int) -> int:
    """The recommended working set of a Mac at its default wired limit.

    Args:
        memory_bytes: its unified memory.
        macos: its major release; macOS 26 recommends more of the same memory than earlier ones.

    Returns:
        What public logs print for that size, or 2/3 (up to 32 GiB) or 3/4 of the memory.
    """
    gib = memory_bytes / GIB
    for known in table()["working_sets"]:
        if known["memory_gib"] == gib and macos >= known["since_macos"]:
            return int(known["working_set_bytes"])
    rules = table()["working_set_fraction"]
    rule = next((rule for rule in rules if gib <= rule["up_to_gib"]), rules[-1])
    return int(memory_bytes * rule["numerator"] // rule["denominator"])


def largest_buffer_bytes(default_working_set_bytes: int) -> int:
    """The largest buffer Metal hands out: 3/4 of the default working set, less a page."""
    return default_working_set_bytes * 3 // 4 - 4096


def _near(wanted: str) -> str:
    import difflib

    names = [*device_names(), *BACKENDS]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "write metal, cpu or cuda, a Mac such as m5-pro-48gb, or a backend and a memory such as cpu-64gb"


def _backend_here(backend: str) -> Device:
    """One backend of this machine; where it is missing, a device of that kind and of unknown size."""
    here = local_device()
    if here.backend == backend:
        return here
    if backend == "cpu":
        return _local_cpu(here.mlx)
    return Device(name=f"any {backend} machine", backend=backend)  # type: ignore[arg-type]


def _generic_device(backend: Backend, gib: int) -> Device:
    if gib == 0:
        raise InputError(f"{backend}-0gb has no memory; write its size, such as {backend}-64gb")
    memory = gib * GIB
    name = f"a {backend} machine with {gib} GiB"
    if backend != "metal":
        return Device(name=name, backend=backend, memory_bytes=memory)
    working_set = working_set_bytes(memory, macos=0)
    return Device(
        name=name,
        backend=backend,
        memory_bytes=memory,
        working_set_bytes=working_set,
        largest_buffer_bytes=largest_buffer_bytes(working_set),
    )


def _mac(wanted: str, chip: str, gib: int) -> Device:
    facts = table()["chips"].get(chip)
    if facts is None:
        raise InputError(f"unknown device {wanted!r}; {_near(wanted)}")
    if gib not in facts["memory_gib"]:
        sizes = " or ".join(f"{chip}-{size}gb" for size in facts["memory_gib"])
        raise InputError(f"{facts['name']} is not sold with {gib} GB; choose {sizes}, or write metal-{gib}gb")
    memory = gib * GIB
    working_set = working_set_bytes(memory, facts["macos"])
    return Device(
        name=f"{facts['name']}, {gib} GiB",
        backend="metal",
        architecture=facts["architecture"],
        memory_bytes=memory,
        working_set_bytes=working_set,
        largest_buffer_bytes=largest_buffer_bytes(working_set),
    )


def local_device() -> Device:
    """This machine, with the backend its MLX computes on by default."""
    installed = machine.installed_mlx()
    version = installed.version if installed else None
    live = _imported_mlx()
    backend = installed.backend if installed else ("metal" if _apple_silicon() else "cpu")
    if live is not None and live.backend is not None:
        backend = live.backend
    if backend == "metal":
        device = _local_metal(version)
    elif backend == "cuda":
        device = _local_cuda(version)
    else:
        device = _local_cpu(version)
    if live is None:
        return device
    known = {name: value for name, value in asdict(live).items() if value is not None and name != "backend"}
    return replace(device, **known)


def _apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _local_cpu(version: str | None) -> Device:
    memory = machine.memory()
    mac = sys.platform == "darwin"
    brand = machine.sysctl("machdep.cpu.brand_string") if mac else {}
    name = machine.label(brand.get("machdep.cpu.brand_string") or machine.processor_name(), memory)
    return Device(
        name=name,
        backend="cpu",
        mlx=version,
        here=True,
        machine=name,
        memory_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        container_bytes=machine.container_bytes(),
    )


def _local_cuda(version: str | None) -> Device:
    gpu = machine.cuda_gpu()
    host = _local_cpu(version)
    if gpu is None:  # no driver answers: only what the machine itself has is known
        return replace(host, backend="cuda", name=f"CUDA GPU of {host.name}")
    return Device(
        name=gpu.name,
        backend="cuda",
        mlx=version,
        here=True,
        machine=host.machine,
        memory_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
    )


def _local_metal(version: str | None) -> Device:
    memory = machine.memory()
    facts = machine.sysctl("machdep.cpu.brand_string", "iogpu.wired_limit_mb")
    name = facts.get("machdep.cpu.brand_string", "Apple GPU")
    wired = facts.get("iogpu.wired_limit_mb", "0")
    wired_limit = int(wired) * MIB if wired.isdigit() else 0
    probed = recall_probe(name, memory.total_bytes)
    default = working_set_bytes(memory.total_bytes, _macos())
    return Device(
        name=machine.label(name, memory),
        backend="metal",
        mlx=version,
        here=True,
        machine=machine.label(name, memory),
        architecture=probed.architecture if probed else "",
        memory_bytes=memory.total_bytes,
        # a wired limit that was set takes the place of the recommendation, higher or lower
        working_set_bytes=None if wired_limit else (probed.working_set_bytes if probed else default),
        wired_limit_bytes=wired_limit or None,
        largest_buffer_bytes=probed.largest_buffer_bytes if probed else largest_buffer_bytes(default),
        free_bytes=memory.free_bytes,
    )


def _macos() -> int:
    major = platform.mac_ver()[0].partition(".")[0]
    return int(major) if major.isdigit() else 0


@dataclass(frozen=True)
class LiveMLX:
    """What the MLX of this process says of its device; None where it does not say."""

    backend: Backend | None = None
    held_bytes: int | None = None
    name: str | None = None
    architecture: str | None = None
    memory_bytes: int | None = None
    working_set_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    free_bytes: int | None = None


def _imported_mlx() -> LiveMLX | None:
    """The facts of ``mlx.core`` if this process has imported it; never imports it."""
    mx = sys.modules.get("mlx.core")
    if mx is None or not hasattr(mx, "default_device"):
        return None
    held = int(mx.get_active_memory() + mx.get_cache_memory())
    if mx.default_device() != mx.Device(mx.gpu):
        return LiveMLX(backend="cpu", held_bytes=held)
    facts = mx.device_info()
    if not mx.metal.is_available():
        return LiveMLX(
            backend="cuda",
            held_bytes=held,
            name=facts.get("device_name"),
            memory_bytes=facts.get("total_memory"),
            free_bytes=facts.get("free_memory"),
        )
    return LiveMLX(
        backend="metal",
        held_bytes=held,
        architecture=facts.get("architecture"),
        memory_bytes=facts.get("memory_size"),
        working_set_bytes=facts.get("max_recommended_working_set_size"),
        largest_buffer_bytes=facts.get("max_buffer_length"),
    )


@dataclass(frozen=True)
class Probe:
    """What Metal said of this Mac when MLX last ran beside oomguard here."""

    name: str
    memory_bytes: int
    macos: int
    working_set_bytes: int
    largest_buffer_bytes: int
    architecture: str


PROBE_FILE = Format("cannot write probe", marked('"working_set_bytes"', "probe"))


def probe_path() -> Path:
    """Where the last probe of this Mac is kept: beside the local calibration."""
    from oomguard.estimate.coefficients import local_rows_path

    return local_rows_path().parent / "device.json"


def remember_probe() -> None:
    """Keeps what Metal says of this Mac, so that the command line knows it without importing MLX.

    Does nothing off a Mac, before MLX is imported, under a changed wired limit, or where nothing can be
    written: the probe only sharpens a rule that is there anyway.
    """
    live = _imported_mlx()
    if live is None or live.backend != "metal" or not live.working_set_bytes:
        return
    facts = machine.sysctl("machdep.cpu.brand_string", "iogpu.wired_limit_mb")
    if facts.get("iogpu.wired_limit_mb", "0") != "0":
        return
    probe = Probe(
        name=facts.get("machdep.cpu.brand_string", "Apple GPU"),
        memory_bytes=live.memory_bytes or 0,
        macos=_macos(),
        working_set_bytes=live.working_set_bytes,
        largest_buffer_bytes=live.largest_buffer_bytes or largest_buffer_bytes(live.working_set_bytes),
        architecture=live.architecture or "",
    )
    path = probe_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Output(path, PROBE_FILE).write_text(json.dumps(asdict(probe)))
    except (OSError, InputError):
        return


def recall_probe(name: str, memory_bytes: int) -> Probe | None:
    """The kept probe, if it is of this chip, this memory and this release of macOS."""
    try:
        probe = Probe(**json.loads(probe_path().read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    same = (probe.name, probe.memory_bytes, probe.macos) == (name, memory_bytes, _macos())
    return probe if same else None
