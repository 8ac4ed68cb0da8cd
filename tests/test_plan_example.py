"""The example of a user's own loop runs, and stays within the budget it asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.measure.blas import child_environment, find_openblas

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_loop.py"


@pytest.mark.measured
@pytest.mark.slow
def test_own_loop_stays_within_its_budget(tmp_path: Path) -> None:
    environment = child_environment({**os.environ, "OOMGUARD_HOME": str(tmp_path)}, find_openblas())
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"batch \d+, checkpoint policy every: the predicted peak is [\d.]+ MiB", done.stdout)
    assert re.search(r"predicted [\d.]+ MiB, peak [\d.]+ MiB, .* within the budget of 95\.4 MiB", done.stdout)
    assert "guard:" not in done.stdout
