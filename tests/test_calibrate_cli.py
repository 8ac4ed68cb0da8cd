"""``oomguard calibrate`` as a person runs it; what it measures is made up, but for one test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from local_rows import made_up_rows, mistake, run, write_rows

import oomguard.measure
from oomguard.calibration.local_sweep import LARGEST_SHARE, LEAST_PEAK_BYTES, local_tasks
from oomguard.coefficients import local_path, local_rows_path, shipped
from oomguard.device import find_device
from oomguard.estimate import estimate
from oomguard.learn import MIN_LOCAL_ROWS
from oomguard.measure import Progress, Task
from oomguard.rows import Header, Row, append_row, read_rows


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMGUARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made_up_header() -> Header:
    device = find_device("cpu")
    return Header(
        machine=device.machine or device.name,
        system="Linux",
        mlx=device.mlx or "",
        backend="cpu",
        commit="",
        date="2026-01-01",
        command="oomguard calibrate",
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """What the sweep measures in place of running anything: the rows that are put in here."""
    rows: list[Row] = []

    def sweep(tasks: Sequence[Task], out: Path, *_: object, **__: object) -> Iterator[Progress]:
        for number, row in enumerate(rows, start=1):
            append_row(out, made_up_header(), row)
            yield Progress(
                row=row, task=tasks[number - 1], done=number, total=len(rows), kept=False, seconds_left=1.0
            )

    monkeypatch.setattr(oomguard.measure, "sweep", sweep)
    return rows


def test_calibrate_fits_what_it_measured_and_plans_use_it(measured: list[Row], home: Path) -> None:
    measured += made_up_rows(6, 1.1, made_up_header())
    status, out, err = run("calibrate", "--minutes", "2")
    assert status == 0
    assert out.splitlines()[0] == "Measured 6 new rows."
    assert "Fitted 6 rows measured here (cpu, MLX " in out
    assert f"Kept in {home}; `oomguard plan` uses it from now on." in out
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert [line.partition("/")[0] for line in lines] == [f"[{n}" for n in range(1, 7)]
    plan = json.loads(run("plan", "--preset", "tiny", "--memory", "200MB", "--json")[1])
    assert (plan["calibration"]["profile"], plan["calibration"]["rows"]) == ("local", 6)
    elsewhere = json.loads(run("plan", "--preset", "tiny", "--device", "cpu-16gb", "--json")[1])
    assert elsewhere["calibration"]["profile"] == "cpu"


def test_calibrate_with_too_few_rows_says_so_and_keeps_them(measured: list[Row]) -> None:
    measured += made_up_rows(MIN_LOCAL_ROWS - 1, header=made_up_header())
    status, out, _ = run("calibrate", "--minutes", "2")
    assert status == 1
    assert "3 rows so far; 4 are needed for a fit. Run it again to go on." in out
    assert len(read_rows(local_rows_path())[1]) == MIN_LOCAL_ROWS - 1
    assert not local_path("cpu").exists()


def test_calibrate_forget_returns_to_the_shipped_profile(measured: list[Row], home: Path) -> None:
    measured += made_up_rows(4, header=made_up_header())
    run("calibrate", "--minutes", "2")
    (home / "notes.txt").write_text("mine")
    status, out, _ = run("calibrate", "--forget")
    assert (status, out) == (0, f"Deleted 2 files in {home}.\n")
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    plan = json.loads(run("plan", "--preset", "tiny", "--memory", "200MB", "--json")[1])
    assert plan["calibration"]["profile"] == "cpu"
    assert run("calibrate", "--forget")[:2] == (0, "There is no local calibration.\n")


def test_calibrate_forgets_a_damaged_calibration_too(home: Path) -> None:
    home.mkdir()
    local_path("cpu").write_text("{")
    assert "is damaged" in mistake("plan", "--preset", "tiny")
    assert run("calibrate", "--forget")[0] == 0
    assert run("plan", "--preset", "tiny", "--memory", "200MB")[0] == 0


def test_calibrate_refuses_a_damaged_row_file_and_leaves_it(home: Path) -> None:
    home.mkdir()
    local_rows_path().write_text("a poem\n")
    assert "line 1: not JSON" in mistake("calibrate", "--minutes", "2")
    assert local_rows_path().read_text() == "a poem\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--minutes", "0"), "--minutes: 0 is too small; the least is 0.5"),
        (("--minutes", "-3"), "--minutes: -3 is too small; the least is 0.5"),
        (("--minutes", "nan"), "--minutes: 'nan' is not a number; write one such as 0.5"),
        (("--minutes", "soon"), "--minutes: 'soon' is not a number"),
        (("--minutes", "1e9"), "--minutes: 1e+09 is too large; the most is 1440"),
        (("--minutes",), "oomguard calibrate: option '--minutes' requires an argument"),
        (("extra",), "unexpected extra argument (extra)"),
    ],
)
def test_calibrate_answers_a_mistake_in_one_line(args: tuple[str, ...], said: str, home: Path) -> None:
    assert said in mistake("calibrate", *args)
    assert not home.exists()


@pytest.mark.parametrize("minutes", [0.7, 2, 5, 60])
def test_sweep_stays_within_memory_and_spans_policies(minutes: float) -> None:
    device, coefficients = find_device("cpu-16gb"), shipped("cpu")
    tasks = local_tasks(device, coefficients, minutes * 60)
    assert len(tasks) >= MIN_LOCAL_ROWS
    policies = set()
    for task in tasks:
        assert task.model is not None
        assert task.step is not None
        found = estimate(task.model, task.step, coefficients, backend="cpu")
        assert found.peak_bytes >= LEAST_PEAK_BYTES
        assert found.high_bytes <= LARGEST_SHARE * 16 * 2**30
        policies.add(task.step.checkpoint.policy)
    assert policies >= {"none", "every", "blocks", "attention"}
    assert len({task.key for task in tasks}) == len(tasks)


@pytest.mark.slow
@pytest.mark.measured
def test_calibrate_measures_and_fits_on_this_machine(home: Path) -> None:
    command = [sys.executable, "-m", "oomguard", "calibrate", "--minutes", "0.7"]
    variables = {**os.environ, "OOMGUARD_HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables)
    assert done.returncode in (0, 1), done.stderr  # 1: so slow a machine that too few rows were done in time
    rows = read_rows(local_rows_path())[1]
    assert rows
    assert all(row.status == "ok" and row.steps == 3 for row in rows)
    assert f"Measured {len(rows)} new rows." in done.stdout
    assert (done.returncode == 0) == local_path("cpu").exists() == (len(rows) >= MIN_LOCAL_ROWS)


def test_made_up_rows_are_a_row_file(tmp_path: Path) -> None:
    rows = made_up_rows(3)
    assert read_rows(write_rows(tmp_path / "rows.jsonl", rows))[1] == rows
