"""Where and with what a row was measured. Nothing here imports MLX."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from oomguard.machine.device import local_device
from oomguard.machine.system import Backend, installed_mlx


@functools.cache
def machine() -> str:
    """The processor, its cores and the memory, as a plan names this machine."""
    return local_device().machine or platform.machine()


@functools.cache
def system() -> str:
    """The operating system and Python: ``Linux 6.1 x86_64, Python 3.11.9``."""
    name = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    release = "" if platform.system() == "Darwin" else f" {platform.release().split('-')[0]}"
    return f"{name}{release} {platform.machine()}, Python {platform.python_version()}"


@functools.cache
def commit() -> str:
    """oomguard's git commit, with ``+`` where the checkout was changed; its version outside a checkout."""
    here = Path(__file__).resolve().parent
    sha = _first_line(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"])
    tracked = _first_line(
        ["git", "-C", str(here), "ls-files", "--error-unmatch", str(Path(__file__).resolve())]
    )
    if not sha or not tracked:
        return importlib.metadata.version("oomguard")
    code = ["oomguard", "model", "calibration/*.py", "model/cases"]
    top = _first_line(["git", "-C", str(here), "rev-parse", "--show-toplevel"])
    changed = _first_line(["git", "-C", top, "status", "--porcelain", "--untracked-files=no", "--", *code])
    return sha + ("+" if changed else "")


def _first_line(command: list[str]) -> str:
    """The first line a command prints, or nothing when it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def mlx_version() -> str:
    """The installed MLX, read from its metadata."""
    try:
        return importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def likely_backend() -> Backend:
    """What MLX will run on, for a child that died before it could say."""
    installed = installed_mlx()
    return installed.backend if installed else "cpu"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
