"""The fast BLAS on Linux: MLX's CPU wheel links a reference one, five times slower for a training step."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

INSTALL_HINT = (
    "matrix products run on MLX's reference BLAS, about five times slower (same peak); for the fast one: "
    "apt install libopenblas0, or the source's calibration/install-fast-blas.sh"
)
_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/lib64")
_PATTERNS = ("libopenblas.so.0", "*-linux-gnu*/libopenblas.so.0", "*-linux-gnu*/openblas-*/libopenblas.so.0")


@functools.cache
def find_openblas() -> Path | None:
    """The installed ``libopenblas.so.0``, or None (always None off Linux: macOS has Accelerate)."""
    return _first_match(_FOLDERS) if sys.platform.startswith("linux") else None


def _first_match(folders: Iterable[str]) -> Path | None:
    for folder in folders:
        for pattern in _PATTERNS:
            found = sorted(Path(folder).glob(pattern))
            if found:
                return found[0]
    return None


def child_environment(base: Mapping[str, str], openblas: Path | None) -> dict[str, str]:
    """The environment of a child that runs MLX: OpenBLAS first in line, on one thread.

    MLX runs its own threads; OpenBLAS's would only fight with them. What the user set stays.
    """
    environment = dict(base)
    if openblas is None:
        return environment
    loaded = [part for part in environment.get("LD_PRELOAD", "").replace(":", " ").split() if part]
    if not any("openblas" in part for part in loaded):
        loaded.append(str(openblas))
    environment["LD_PRELOAD"] = ":".join(loaded)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environment


def missing_blas_hint() -> str:
    """One line that says how to get the fast BLAS; empty where it is installed or not needed."""
    needed = sys.platform.startswith("linux") and find_openblas() is None
    return INSTALL_HINT if needed else ""


def loaded_blas(backend: str) -> str:
    """What multiplies here: ``openblas 1 thread``, ``accelerate``, ``reference``; empty on a GPU."""
    if backend != "cpu":
        return ""
    if sys.platform == "darwin":
        return "accelerate"
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    if "libopenblas" not in mapped:
        return "reference"
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "all")
    return f"openblas {threads} thread" + ("" if threads == "1" else "s")
