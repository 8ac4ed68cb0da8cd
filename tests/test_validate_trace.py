"""``oomguard validate --engine trace``: simulated peaks beside all that was measured, nothing fitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomguard.calibration.trace_check import BOUNDS, trace_row
from oomguard.measure.table import row_label
from oomguard.rows import read_rows, shipped_row_files

pytestmark = pytest.mark.slow

RACE = "calibration/LOG.md, 2026-11-30, item 6: a race in MLX's evaluator that no rule decides"
MISSED = pytest.param("sequenced, compiled", marks=pytest.mark.xfail(reason=RACE, strict=True))


@pytest.fixture(scope="module")
def sections() -> dict[str, Any]:
    """What the command says of every shipped row, by section."""
    command = [sys.executable, "-m", "oomguard", "validate", "--engine", "trace", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "oomguard.trace-validation/1"
    return {section["name"]: section for section in found["sections"]}


def test_there_is_a_section_for_every_bound(sections: dict[str, Any]) -> None:
    assert set(sections) == set(BOUNDS)
    assert sum(len(sections[name]["rows"]) for name in ("sequenced, eager", "sequenced, compiled")) >= 150


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "sequenced, compiled"] + [MISSED])
def test_every_bound_holds(sections: dict[str, Any], name: str) -> None:
    assert sections[name]["problems"] == []
    assert [bound["bound"] for bound in sections[name]["bounds"]] == [bound.most for bound in BOUNDS[name]]


def test_compiled_steps_with_the_memory_limit_at_nothing_miss_by_the_race_alone(
    sections: dict[str, Any],
) -> None:
    section = sections["sequenced, compiled"]
    found = {bound["name"]: bound["found"] for bound in section["bounds"]}
    assert found["median"] <= 0.01
    far = [row for row in section["rows"] if abs(row["error"]) > 0.03]
    assert len(far) <= 0.01 * len(section["rows"])
    measured = {row_label(row): row for path in shipped_row_files() for row in read_rows(path)[1]}
    for row in far:
        steps = measured[row["label"]]
        assert steps.sequenced_low_bytes is not None
        assert steps.sequenced_high_bytes is not None
        assert 0.999 * steps.sequenced_low_bytes <= row["traced_bytes"] <= 1.001 * steps.sequenced_high_bytes


def test_a_row_whose_step_cannot_be_built_is_a_problem_and_no_end() -> None:
    row = next(row for path in shipped_row_files() for row in read_rows(path)[1] if row.case)
    peak, _, _, problem = trace_row(row.model_copy(update={"case": "no such case"}))
    assert peak == 0
    assert "no such case" in problem


def test_rows_of_ones_own_are_traced_and_a_miss_is_status_1(tmp_path: Path) -> None:
    shipped = next(path for path in shipped_row_files() if path.name == "cpu-cases.jsonl")
    header, *rows = shipped.read_text().splitlines()
    chosen = [json.loads(row) for row in rows if json.loads(row)["case"] in ("mlp", "mlp-eager")]
    own = tmp_path / "own.jsonl"

    def validate() -> subprocess.CompletedProcess[str]:
        own.write_text("\n".join([header, *map(json.dumps, chosen)]) + "\n")
        command = [sys.executable, "-m", "oomguard", "validate", "--engine", "trace", "--rows", str(own)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = validate()
    assert good.returncode == 0, good.stdout
    assert good.stdout.count("mlp") == 4  # default and sequenced
    assert max(map(len, good.stdout.splitlines())) <= 80
    chosen[0]["peak_bytes"] *= 2
    bad = validate()
    assert bad.returncode == 1
    assert "is above the bound" in bad.stdout
