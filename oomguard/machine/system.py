"""Questions to the operating system: memory, containers, chips, and which MLX is installed.

Nothing here imports MLX, and every answer is None where the system has none. What is asked of another
program is asked with a time limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oomguard.units import GIB, KIB, MIB

Backend = Literal["cpu", "metal", "cuda"]

PROBE_SECONDS = 2.0
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"


@dataclass(frozen=True)
class InstalledMLX:
    """The MLX this interpreter would import."""

    version: str
    backend: Backend


@dataclass(frozen=True)
class Memory:
    """Physical memory of the machine, and what of it could be had now without swapping."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class CudaGPU:
    """The first NVIDIA GPU."""

    name: str
    total_bytes: int
    free_bytes: int


def installed_mlx(paths: Iterable[str] | None = None, platform: str = sys.platform) -> InstalledMLX | None:
    """Which MLX is installed, by the names of its ``dist-info`` folders.

    The wheel of the backend (``mlx-metal``, ``mlx-cuda-12``, ``mlx-cpu``) lies beside ``mlx`` itself.
    ``importlib.metadata`` answers the same, and its import costs more than a whole plan.
    """
    version, wheels = None, set()
    for folder in sys.path if paths is None else paths:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208, a Path for each name costs milliseconds
        except OSError:
            continue
        for name in names:
            if name.startswith("mlx") and name.endswith(".dist-info"):
                package, _, of_package = name.removesuffix(".dist-info").partition("-")
                wheels.add(package)
                if package == "mlx" and version is None:
                    version = of_package
    if version is None:
        return None
    if any(wheel.startswith("mlx_cuda") for wheel in wheels):
        return InstalledMLX(version, "cuda")
    return InstalledMLX(version, "metal" if platform == "darwin" else "cpu")


def memory() -> Memory:
    """Physical memory and what is free of it, file caches that can be dropped counted as free."""
    if sys.platform == "linux":
        values = _meminfo(Path("/proc/meminfo"))
        if "MemTotal" in values and "MemAvailable" in values:  # psutil reads the same, and costs 20 ms
            return Memory(values["MemTotal"], values["MemAvailable"])
    import psutil

    now = psutil.virtual_memory()
    return Memory(total_bytes=int(now.total), free_bytes=int(now.available))


def label(processor: str, memory: Memory) -> str:
    """What measured rows call a machine: ``Apple M5 Pro, 18 cores, 48 GiB``."""
    return f"{processor}, {os.cpu_count() or 1} cores, {memory.total_bytes / GIB:.0f} GiB"


def _meminfo(file: Path) -> dict[str, int]:
    """The values of a ``meminfo`` in bytes; the file counts in KiB."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {f[0].rstrip(":"): int(f[1]) * KIB for f in fields if len(f) == 3 and f[1].isdigit()}


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor as Linux names it, or the kind of machine."""
    try:
        with cpuinfo.open() as file:
            for line in file.read(4096).splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return os.uname().machine


def container_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What the control groups of this process leave it: the least of limit - used, over the whole path.

    File caches do not count as used: the kernel drops them before it ends a process. Half of the active
    ones do, they are the mapped libraries that a running program needs. None outside any limit.

    Args:
        root: where the control groups are mounted; version 2, version 1 or both.
        membership: the file that says in which groups this process is.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            left += _left_along(root, path, ("memory.max", "memory.high"), "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes",)
            left += _left_along(root / "memory", path, names, "memory.usage_in_bytes", "total_")
    return min(left, default=None)


def _left_along(root: Path, path: str, limits: tuple[str, ...], usage: str, prefix: str) -> list[int]:
    """Limit - used of every group from ``path`` up to the root; inside a container only the root is there."""
    left = []
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        if group.is_relative_to(root):
            limit = min((n for name in limits if (n := _number(group / name)) is not None), default=NO_LIMIT)
            used = _number(group / usage)
            if limit < NO_LIMIT and used is not None:
                left.append(max(0, limit - max(0, used - _droppable(group / "memory.stat", prefix))))
    return left


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _droppable(stat: Path, prefix: str) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    inactive, active = values.get(f"{prefix}inactive_file", "0"), values.get(f"{prefix}active_file", "0")
    return int(inactive) + int(active) // 2


def run_probe(command: list[str], seconds: float = PROBE_SECONDS) -> str | None:
    """What a program prints, or None when it is missing, fails, or does not answer in time.

    A driver that hangs can keep a killed process from ending, so nothing here waits for the end.
    """
    import subprocess

    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError:
        return None
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        return None
    except UnicodeDecodeError:
        return None
    return printed


def sysctl(*names: str) -> dict[str, str]:
    """Kernel values of macOS by name; names it does not know are left out."""
    lines = (run_probe(["/usr/sbin/sysctl", *names]) or "").splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, colon, value in pairs if colon and name.strip() in names}


def cuda_gpu() -> CudaGPU | None:
    """The first GPU that ``nvidia-smi`` names; None without a driver or an answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    lines = (run_probe(query) or "").strip().splitlines()
    fields = [field.strip() for field in lines[0].split(",")] if lines else []
    if len(fields) != 3 or not (fields[1].isdigit() and fields[2].isdigit()):
        return None
    return CudaGPU(fields[0], int(fields[1]) * MIB, int(fields[2]) * MIB)
