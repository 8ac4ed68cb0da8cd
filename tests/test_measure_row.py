"""What a row says: the peak from step 2 on, its median and spread, and what made it."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.policy import EVERY_BLOCK
from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.measure import Settings, Task, measure, measure_callable, measure_case, measure_task
from oomguard.measure.blas import find_openblas
from oomguard.measure.provenance import commit, machine, mlx_version
from oomguard.measure.worker import Sample, summary
from oomguard.rows import Row

STEPS = Path(__file__).parent / "measure_steps.py"
MIB = 1 << 20


def run(name: str, settings: Settings = Settings()) -> Row:  # noqa: B008, frozen
    return measure_callable(f"{STEPS}:{name}", settings)


def test_peak_is_what_the_step_allocates_to_the_byte() -> None:
    row = run("four_and_eight")
    assert row.peak_bytes == row.peak_low_bytes == row.peak_high_bytes == 12 * MIB
    assert row.sequenced_peak_bytes == row.sequenced_low_bytes == row.sequenced_high_bytes == 12 * MIB
    assert row.active_bytes == 4 * MIB


def test_peak_leaves_out_step_1_which_has_its_own_column() -> None:
    row = run("large_first")
    assert row.first_peak_bytes == 17 * MIB
    assert row.peak_bytes == 3 * MIB


def test_arrays_a_step_returns_unevaluated_are_evaluated() -> None:
    assert run("lazy").peak_bytes == 2 * MIB


def test_garbage_of_one_step_is_not_in_the_peak_of_the_next() -> None:
    row = run("cyclic")
    assert row.peak_bytes == row.peak_high_bytes == 16 * MIB


@pytest.mark.parametrize(
    ("settings", "steps"), [(Settings(steps=4), 9), (Settings(steps=2, sequenced=False), 3)]
)
def test_steps_are_one_and_then_as_many_as_asked_for_each_column(
    settings: Settings, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "count"
    monkeypatch.setenv("COUNT_FILE", str(file))
    row = run("counted", settings)
    assert row.steps == settings.steps
    assert len(file.read_text().splitlines()) == steps
    assert (row.sequenced_peak_bytes is not None) == settings.sequenced


def test_summary_takes_a_median_that_was_measured_and_keeps_the_extremes() -> None:
    samples = [
        Sample(peak, 10 * peak, 1, seconds) for peak, seconds in ((5, 0.4), (9, 0.1), (7, 0.2), (8, 0.3))
    ]
    column = summary(samples)
    assert (column["peak_bytes"], column["low_bytes"], column["high_bytes"]) == (7, 5, 9)
    assert column["active_bytes"] == 70
    assert column["seconds"] == pytest.approx(0.25)
    assert column["seconds_spread"] == pytest.approx(0.3)
    assert column["steps"] == 4


def test_row_says_what_made_it() -> None:
    row = run("four_and_eight")
    assert row.case == f"{STEPS}:four_and_eight"
    assert row.mlx == mlx_version()
    assert row.backend in ("cpu", "metal", "cuda")
    assert row.machine == machine()
    assert "cores" in row.machine
    assert row.commit == commit()
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(row.date)
    assert age < datetime.timedelta(minutes=5)
    assert row.step_seconds is not None


@pytest.mark.skipif(find_openblas() is None, reason="OpenBLAS is not installed")
def test_children_on_linux_run_on_the_fast_blas() -> None:
    assert run("four_and_eight").blas == "openblas 1 thread"


def test_progress_names_what_the_child_does() -> None:
    heard: list[str] = []
    measure_task(Task(function=f"{STEPS}:four_and_eight"), Settings(steps=2), heard.append)
    assert heard == [
        "building the step",
        "step 1",
        "step 1 of 2",
        "step 2 of 2",
        "sequenced step 1 of 2",
        "sequenced step 2 of 2",
    ]


@pytest.mark.measured
@pytest.mark.parametrize("compiled", [True, False])
def test_gpt_row_orders_its_columns_and_checkpointing_lowers_its_peak(compiled: bool) -> None:
    model = preset("tiny")
    step = StepConfig(batch=8, seq_len=128, compiled=compiled)
    plain = measure(model, step)
    every = measure(model, step.but(checkpoint=EVERY_BLOCK))
    for row in (plain, every):
        assert row.status == "ok"
        assert row.key == Task(model=row.model, step=row.step).key
        assert row.active_bytes is not None
        assert row.peak_bytes is not None
        assert row.sequenced_peak_bytes is not None
        assert model.params * 4 * 3 <= row.active_bytes < row.sequenced_peak_bytes <= row.peak_bytes
        assert row.peak_low_bytes is not None
        assert row.peak_high_bytes is not None
        assert row.peak_low_bytes <= row.peak_bytes <= row.peak_high_bytes < 1.2 * row.peak_low_bytes
    assert every.sequenced_peak_bytes is not None
    assert plain.sequenced_peak_bytes is not None
    assert every.sequenced_peak_bytes < 0.6 * plain.sequenced_peak_bytes


@pytest.mark.measured
def test_gpt_step_measured_twice_gives_one_sequenced_peak() -> None:
    model = ModelConfig(n_layers=2, d_model=64, n_heads=2, d_mlp=256, context=64)
    step = StepConfig(batch=2, seq_len=64, compiled=False)
    first, second = (measure(model, step) for _ in range(2))
    assert first.sequenced_peak_bytes == pytest.approx(second.sequenced_peak_bytes, rel=0.02)


@pytest.mark.measured
def test_named_case_is_measured_under_its_name() -> None:
    row = measure_case("recommender-eager", Settings(steps=2))
    assert row.status == "ok"
    assert row.case == "recommender-eager"


def test_sequence_longer_than_the_context_is_refused_before_a_child_starts() -> None:
    with pytest.raises(InputError, match="longer than tiny's context 128"):
        measure(preset("tiny"), StepConfig(batch=1, seq_len=129))


def test_case_that_does_not_exist_is_refused_with_a_near_name() -> None:
    with pytest.raises(InputError, match="did you mean mlp-gelu"):
        measure_case("mlp-gela")


def test_parent_never_imports_mlx(tmp_path: Path) -> None:
    code = (
        "import sys; from oomguard.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'mlx.core' not in sys.modules and 'mlx' not in sys.modules"
    )
    out = tmp_path / "rows.jsonl"
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps([{"case": "recommender-eager"}]))
    command = [sys.executable, "-c", code, "measure", str(sweep), "--out", str(out), "--steps", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["status"] == "ok"
