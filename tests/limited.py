"""The command line in a process that may take little memory and little time: a runaway fails its test alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from oomguard.units import GIB

MOST_BYTES = 4 * GIB


def run_limited(
    arguments: Sequence[str],
    *,
    seconds: float = 60,
    most_bytes: int = MOST_BYTES,
    cwd: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """``oomguard ARGUMENTS``, within ``most_bytes`` of addresses and so many seconds.

    Raises:
        subprocess.TimeoutExpired: it ran longer.
    """
    return subprocess.run(
        [sys.executable, "-m", "oomguard", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=cwd,
        env={**os.environ, **variables},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes)),
    )
