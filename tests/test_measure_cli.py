"""``oomguard measure`` as a person runs it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.measure.table import rows_table
from oomguard.model.cases import case_names
from oomguard.rows import Row, read_rows, shipped_row_files

STEPS = Path(__file__).parent / "measure_steps.py"
QUICK = ("--steps", "1", "--no-sequenced")


def measure(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oomguard", "measure", *args],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


def test_one_configuration_prints_a_table_with_its_peak() -> None:
    done = measure(f"{STEPS}:four_and_eight", *QUICK)
    assert done.returncode == 0, done.stderr
    header, line = done.stdout.splitlines()
    assert header.split() == [
        "what",
        "peak",
        "spread",
        "sequenced",
        "step",
        "1",
        "active",
        "cache",
        "a",
        "step",
    ]
    assert line.startswith(f"{STEPS}:four_and_eight")
    assert "12.0 MiB" in line


def test_json_is_one_object_with_the_rows() -> None:
    done = measure(f"{STEPS}:four_and_eight", *QUICK, "--json")
    value = json.loads(done.stdout)
    assert value["schema"] == "oomguard.measure/1"
    (row,) = value["rows"]
    assert row["peak_bytes"] == 12 << 20
    assert row["status"] == "ok"
    assert Row.model_validate(row).steps == 1


def test_failed_row_is_status_1_and_prints_its_reason_whole() -> None:
    done = measure(f"{STEPS}:segmentation_fault")
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "failed" in text
    assert "segmentation fault (signal 11)" in text
    assert "(while running step 2 of 3)" in text


def test_sweep_says_a_line_a_row_with_the_time_left(tmp_path: Path) -> None:
    sweep = tmp_path / "some.json"
    sweep.write_text(
        json.dumps(
            {"n_layers": 1, "d_model": 32, "n_heads": 2, "seq_len": 16, "batch": [1, 2], "compiled": False}
        )
    )
    done = measure(str(sweep), *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stderr.splitlines()
    assert first.startswith("[1/2] custom 1 x 16, eager: ")
    assert first.endswith("left")
    assert second.startswith("[2/2] custom 2 x 16, eager: ")
    assert "left" not in second
    assert last == "some.rows.jsonl: 2 measured, 0 failed, 0 were there already"
    header, rows = read_rows(tmp_path / "some.rows.jsonl")
    assert header.command == f"oomguard measure {sweep} --steps 1 --no-sequenced"
    assert len(rows) == 2


def test_row_file_is_shown_and_not_measured(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert measure(f"{STEPS}:four_and_eight", *QUICK, "--out", str(out)).returncode == 0
    before = out.read_bytes()
    shown = measure(str(out))
    assert shown.returncode == 0
    assert "12.0 MiB" in shown.stdout
    assert json.loads(measure(str(out), "--json").stdout)["rows"][0]["peak_bytes"] == 12 << 20
    assert out.read_bytes() == before


@pytest.mark.parametrize("file", list(shipped_row_files()), ids=lambda file: file.name)
def test_shipped_rows_can_be_shown(file: Path) -> None:
    done = measure(str(file), "--json")
    assert len(json.loads(done.stdout)["rows"]) == len(read_rows(file)[1])


def test_options_of_a_step_reach_it() -> None:
    options = "--preset tiny --batch 2 --ctx 32 --grad-checkpoint blocks=1 --dtype bf16 --optimizer lion"
    flags = "--accumulate 2 --one-graph --clip --no-compile --steps 1 --no-sequenced --json"
    done = measure(*options.split(), *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    row = Row.model_validate(json.loads(done.stdout)["rows"][0])
    assert row.step is not None
    assert row.step.model_dump(exclude={"checkpoint"}) == {
        "batch": 2,
        "seq_len": 32,
        "accumulate": 2,
        "evaluate_micro_steps": False,
        "dtype": "bfloat16",
        "optimizer": "lion",
        "clip_norm": True,
        "compiled": False,
    }
    assert str(row.step.checkpoint) == "blocks=1"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("", "nothing to measure: give --preset, --config, --case, FILE.py:FUNCTION or a sweep file"),
        ("--preset tinny", "unknown preset 'tinny'; did you mean tiny"),
        ("--preset tiny --batch 0", "--batch: 0 is too few; the least is 1"),
        ("--preset tiny --ctx 129", "sequence length 129 is longer than tiny's context 128"),
        ("--preset tiny --config x.json", "give one"),
        ("--preset tiny --grad-checkpoint sometimes", "'sometimes' is not a checkpoint policy"),
        ("--preset tiny --dtype int4", "--dtype: unknown dtype 'int4'; choose fp32, bf16 or fp16"),
        ("--preset tiny --optimizer adamm", "--optimizer: unknown optimizer 'adamm'; did you mean adam"),
        ("--preset tiny --accumulate 1.5", "--accumulate: '1.5' is not a whole number"),
        ("--preset tiny --memory lots", "'lots' is not a size"),
        ("--preset tiny --memory 0", "--memory: a budget of 0 bytes holds nothing"),
        ("--preset tiny --steps 0", "--steps: 0 is too few; the least is 1"),
        ("--config gone.json", "cannot read config gone.json: No such file"),
        ("--case mlp-gela", "unknown case 'mlp-gela'; did you mean mlp-gelu"),
        ("--case mlp --batch 2", "--batch cannot stand beside it"),
        ("gone.json", "cannot read sweep gone.json: No such file"),
        ("train.py:build --no-compile", "--compile/--no-compile cannot stand beside it"),
        ("gone.py:build", "no file gone.py"),
        ("gone.py", "write FILE.py:FUNCTION"),
        ("gone.json --preset tiny", "--preset cannot stand beside it"),
    ],
)
def test_mistake_is_one_line_and_status_2(args: str, said: str, tmp_path: Path) -> None:
    done = measure(*args.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_function_that_is_none_is_status_2() -> None:
    done = measure(f"{STEPS}:returns_a_number")
    assert done.returncode == 2
    assert "returned int; return (step, arguments)" in done.stderr


def test_cases_are_listed_with_what_is_in_them() -> None:
    lines = measure("--list-cases").stdout.splitlines()
    assert [line.split()[0] for line in lines] == case_names()
    assert all(len(line.split()) > 1 for line in lines)
    assert list(json.loads(measure("--list-cases", "--json").stdout)) == case_names()


def test_help_explains_sweep_files_within_80_columns() -> None:
    text = measure("--help").stdout
    assert "multiplied out" in text
    assert max(map(len, text.splitlines())) <= 80


def test_narrow_table_fits_80_columns_and_names_failures_below() -> None:
    from rich.console import Console

    rows = [row for file in shipped_row_files() for row in read_rows(file)[1]][:5]
    broken = rows[0].model_copy(update={"status": "failed", "reason": "killed [signal 9]"})
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(rows_table([*rows, broken], 80))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["what", "peak", "sequenced", "active", "a", "step"]
    assert "killed [signal 9]" in " ".join(lines[-2:])
