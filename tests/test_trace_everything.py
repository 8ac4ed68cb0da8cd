"""A seeded part of the benchmark that traces every case and preset under every policy, backend and release."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


@pytest.mark.slow
def test_sampled_subjects_are_traced_under_every_policy(project: Path) -> None:
    pytest.importorskip("mlx_lm")
    script = project / "benchmarks" / "trace_everything.py"
    done = subprocess.run(
        [sys.executable, str(script), "--sample", "14", "--seed", "7"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "14 subjects; 0 rows failed" in done.stdout


def test_written_table_has_every_backend_of_its_subjects_and_no_failure(project: Path) -> None:
    everything = runpy.run_path(str(project / "benchmarks" / "trace_everything.py"))
    written = (project / "benchmarks" / "trace_everything.txt").read_text(encoding="utf-8")
    assert f"  {everything['FAILED']}: " not in written
    rows = [line.split()[0] for line in written.splitlines()[4:] if not line.startswith("#")]
    assert set(Counter(rows).values()) == {len(everything["TARGETS"])}
    assert set(rows) == set(everything["SUBJECTS"])
