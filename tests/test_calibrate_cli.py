"""``oomguard calibrate`` as a person runs it; what it measures is made up, but for one test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from local_rows import made_up_rows, mistake, run, write_rows

import oomguard.measure
from oomguard.calibration.local_sweep import LARGEST_SHARE, LEAST_PEAK_BYTES, local_tasks
from oomguard.cli import calibrate as calibrate_command
from oomguard.estimate.coefficients import load, local_path, local_rows_path, shipped
from oomguard.estimate.learn import MIN_LOCAL_ROWS
from oomguard.estimate.peak import estimate
from oomguard.machine.device import find_device
from oomguard.measure import Progress, Task, collect
from oomguard.measure.process import Outcome
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


def test_calibrate_keeps_what_ships_where_a_fit_of_few_rows_predicts_worse(
    measured: list[Row], home: Path
) -> None:
    """Six rows of a busy machine: peaks as they ship, times a quarter off either way."""
    rows = made_up_rows(6, header=made_up_header())
    off = (1.3, 0.75, 1.25, 0.7, 1.35, 0.8)
    measured += [
        row.model_copy(update={"step_seconds": (row.step_seconds or 0) * share})
        for row, share in zip(rows, off, strict=True)
    ]
    status, out, _ = run("calibrate", "--minutes", "0.5")
    assert status == 0
    assert "peaks of compiled steps: " in out
    assert out.count("; kept as shipped\n") == 2
    assert f"plans use the shipped coefficients; the rows stay in {home}." in out
    assert not local_path("cpu").exists()
    plan = json.loads(run("plan", "--preset", "tiny", "--memory", "200MB", "--json")[1])
    assert plan["calibration"]["profile"] == "cpu"


def test_calibrate_replaces_only_the_speeds_of_a_machine_three_times_as_fast(measured: list[Row]) -> None:
    header = made_up_header()
    rows = made_up_rows(6, header=header)
    measured += [row.model_copy(update={"step_seconds": (row.step_seconds or 0) / 3}) for row in rows]
    status, out, _ = run("calibrate", "--minutes", "0.5")
    assert status == 0
    assert "peaks of compiled steps: " in out
    assert (out.count("; replaced\n"), out.count("; kept as shipped\n")) == (1, 1)
    own, ships = load("cpu", mlx_version=header.mlx, device=header.machine), shipped("cpu")
    assert own.profile == "cpu, speeds local"
    assert (own.compiled, own.eager, own.rows) == (ships.compiled, ships.eager, ships.rows)
    assert set(own.speed.flops_per_second) == set(ships.speed.flops_per_second)
    for row in measured:
        assert row.model is not None
        assert row.step is not None
        assert estimate(row.model, row.step, own).step_seconds == pytest.approx(row.step_seconds, rel=0.01)


def test_calibrate_that_finds_what_ships_better_deletes_an_earlier_fit(measured: list[Row]) -> None:
    measured += made_up_rows(6, 1.1, made_up_header())
    run("calibrate", "--minutes", "2")
    assert local_path("cpu").exists()
    measured[:] = made_up_rows(6, 1.0, made_up_header())  # the last row of a setting counts
    assert "plans use the shipped coefficients" in run("calibrate", "--minutes", "2")[1]
    assert not local_path("cpu").exists()


def test_calibrate_goes_on_after_an_upgrade_of_mlx(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real sweep: rows of another MLX stay in the file, are measured again, and count no more."""
    device = find_device("cpu")
    old = made_up_rows(6, 1.5, made_up_header().model_copy(update={"mlx": "0.1.0"}))
    home.mkdir()
    write_rows(local_rows_path(), old, made_up_header().model_copy(update={"mlx": "0.1.0"}))
    asked: list[Task] = []

    def run_child(task: Task, *_: object) -> Outcome:
        asked.append(task)
        assert task.model is not None
        assert task.step is not None
        found = estimate(task.model, task.step, shipped("cpu"))
        peak = {f"{name}_bytes": int(1.1 * found.peak_bytes) for name in ("peak", "low", "high")}
        rest = {
            "active_bytes": 1,
            "cache_bytes": 1,
            "seconds": found.step_seconds,
            "seconds_spread": 0,
            "steps": 3,
        }
        return Outcome(said={"default": {**peak, **rest}}, reason="")

    monkeypatch.setattr(collect, "run_child", run_child)
    monkeypatch.setattr(
        "oomguard.calibration.local_sweep.local_tasks",
        lambda *_: [Task(model=row.model, step=row.step) for row in old],
    )
    status, out, err = run("calibrate", "--minutes", "0.5")
    assert status == 0, err
    assert len(asked) == 6
    assert out.splitlines()[0] == "Measured 6 new rows."
    assert f"Fitted 6 rows measured here (cpu, MLX {device.mlx})" in out
    assert len(read_rows(local_rows_path())[1]) == 12
    status, out, _ = run("calibrate", "--minutes", "0.5")
    assert (status, len(asked)) == (0, 6)  # and those of this MLX are not measured again
    assert out.splitlines()[0] == "Measured 0 new rows."


def test_no_message_of_calibrate_names_an_option_it_has_not() -> None:
    options = set(re.findall(r"--[a-z][a-z-]+", run("calibrate", "--help")[1]))
    source = Path(calibrate_command.__file__).read_text()
    assert set(re.findall(r"--[a-z][a-z-]+", source)) <= options


def test_calibrate_with_too_few_rows_says_so_and_keeps_them(measured: list[Row]) -> None:
    measured += made_up_rows(MIN_LOCAL_ROWS - 1, header=made_up_header())
    status, out, _ = run("calibrate", "--minutes", "2")
    assert status == 1
    assert "3 rows so far; 4 are needed for a fit. Run it again to go on." in out
    assert len(read_rows(local_rows_path())[1]) == MIN_LOCAL_ROWS - 1
    assert not local_path("cpu").exists()


def test_calibrate_forget_returns_to_the_shipped_profile(measured: list[Row], home: Path) -> None:
    measured += made_up_rows(4, 1.1, header=made_up_header())
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
    assert "is damaged" in run("plan", "--preset", "tiny", "--memory", "200MB")[1]
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
    assert (done.returncode == 0) == (len(rows) >= MIN_LOCAL_ROWS)
    assert local_path("cpu").exists() == ("`oomguard plan` uses it from now on" in done.stdout)


def test_made_up_rows_are_a_row_file(tmp_path: Path) -> None:
    rows = made_up_rows(3)
    assert read_rows(write_rows(tmp_path / "rows.jsonl", rows))[1] == rows
