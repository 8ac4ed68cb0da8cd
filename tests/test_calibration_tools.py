"""The tools that make what ships: they write where they are told, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.calibration import count_moments, design_sweep, refit
from oomguard.rows import read_rows, shipped_row_files, shipped_rows_path

WRITING = {"refit": refit, "design_sweep": design_sweep, "count_moments": count_moments}


def tool(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"oomguard.calibration.{name}", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("--help",), ("no/such/folder/x",), ("",)])
def test_tool_that_writes_must_be_told_where(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = tool(name, *arguments, cwd=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert f"python -m oomguard.calibration.{name} " in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_designed_sweep_is_the_shipped_one(tmp_path: Path, project: Path) -> None:
    assert tool("design_sweep", "sweep.jsonl", cwd=tmp_path).returncode == 0
    shipped = project / "calibration" / "sweeps" / "cpu.jsonl"
    assert (tmp_path / "sweep.jsonl").read_bytes() == shipped.read_bytes()


def test_refit_writes_every_profile_into_the_folder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from oomguard.estimate.coefficients import read_coefficients, shipped
    from oomguard.estimate.fit import Refit

    kept = {name: shipped(name) for name in ("cpu", "metal")}
    monkeypatch.setattr(refit, "refits", lambda: {name: Refit(found, (), ()) for name, found in kept.items()})
    refit.main([str(tmp_path / "coefficients")])
    for name, found in kept.items():
        assert read_coefficients(tmp_path / "coefficients" / f"{name}.json") == found
    assert len(capsys.readouterr().out.splitlines()) == len(kept)


def test_shipped_rows_are_found_through_the_package() -> None:
    assert shipped_rows_path("cpu.jsonl") in list(shipped_row_files())
    assert len(read_rows(shipped_rows_path("metal-m5pro.jsonl"))[1]) == 16
