"""The fit finds what made the data, ignores what is odd, and what ships is what it makes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from oomguard.calibration.refit import METAL_LEAST_PEAK_BYTES, refits, to_json
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.estimate.coefficients import Speed, shipped
from oomguard.estimate.fit import (
    ALIVE,
    IN_FLIGHT,
    Fitted,
    Peaks,
    Table,
    Times,
    fit_mode,
    fit_profile,
    fit_scales,
    fit_speed,
    fit_speed_beside,
    tabulate,
)
from oomguard.estimate.inventory import Inventory
from oomguard.estimate.traffic import step_flops, step_traffic_bytes
from oomguard.rows import Header, Row, read_rows, shipped_row_files

HEADER = Header(
    schema="oomguard.rows/1",
    machine="made up",
    system="none",
    mlx="0.0",
    backend="cpu",
    commit="",
    date="",
    command="",
)


def made_up_steps() -> list[tuple[ModelConfig, StepConfig]]:
    steps = []
    for layers in (2, 6, 12):
        for width in (64, 256):
            for batch in (1, 4, 16):
                for policy in ("none", "every"):
                    model = ModelConfig(
                        n_layers=layers, d_model=width, n_heads=4, d_mlp=4 * width, context=256
                    )
                    steps.append(
                        (
                            model,
                            StepConfig(batch=batch, seq_len=256, checkpoint=CheckpointPolicy.parse(policy)),
                        )
                    )
    return steps


def made_up_rows(alive: float, in_flight: float, odd: int = 0) -> list[Row]:
    """Rows a device would give that holds so much of what is counted; some of them measured twice too large."""
    plain = [row_of(model, step, 1) for model, step in made_up_steps()]
    table = tabulate(plain, "cpu")
    graph = table.held + table.alive @ np.full(len(ALIVE), alive)
    default = graph + table.in_flight @ np.full(len(IN_FLIGHT), in_flight)
    rows = []
    for i, (model, step) in enumerate(made_up_steps()):
        wrong = 2 if i < odd else 1
        rows.append(row_of(model, step, wrong * default[i].max(), wrong * graph[i].max()))
    return rows


def row_of(model: ModelConfig, step: StepConfig, peak: float, sequenced: float | None = None) -> Row:
    return Row(
        model=model,
        step=step,
        peak_bytes=int(peak),
        sequenced_peak_bytes=None if sequenced is None else int(sequenced),
        mlx="0.0",
        backend="cpu",
        machine="made up",
        step_seconds=1.0,
    )


@pytest.mark.parametrize(("alive", "in_flight"), [(1.0, 1.0), (1.2, 0.7), (0.95, 1.2)])
def test_fit_finds_the_scales_that_made_the_rows(alive: float, in_flight: float) -> None:
    mode, errors = fit_mode(made_up_rows(alive, in_flight), "cpu", ridge=1e-5)
    assert mode.alive["last"] == pytest.approx(alive, abs=0.02)
    assert mode.in_flight["last"] == pytest.approx(in_flight, abs=0.02)
    assert np.median(np.abs(errors)) < 1e-3


def test_fit_bends_little_for_a_few_odd_rows() -> None:
    mode, _ = fit_mode(made_up_rows(1.0, 1.0, odd=3), "cpu", ridge=1e-5)
    assert mode.alive["last"] == pytest.approx(1.0, abs=0.05)


def test_leave_one_out_error_is_larger_than_the_error_of_the_fit_itself() -> None:
    rows = made_up_rows(1.0, 1.0, odd=2)
    mode, left_out = fit_mode(rows, "cpu")
    table, peaks = tabulate(rows, "cpu"), Peaks.of(rows)
    inside = table.predict(Fitted.of(mode)) / peaks.default - 1
    assert np.abs(left_out).max() >= np.abs(inside).max() - 1e-6


def test_band_covers_every_row_it_was_fitted_on() -> None:
    rows = made_up_rows(1.1, 0.8, odd=2)
    mode, errors = fit_mode(rows, "cpu")
    assert (1 + errors).min() * mode.high >= 1
    assert (1 + errors).max() * mode.low <= 1


def test_scales_stay_at_the_prior_where_no_row_speaks() -> None:
    rows = made_up_rows(1.0, 1.0)
    table, peaks = tabulate(rows, "cpu"), Peaks.of(rows)
    silent = Table(table.held, table.alive * 0, table.in_flight * 0)
    prior = Fitted(np.full(len(ALIVE), 0.9), np.full(len(IN_FLIGHT), 0.4))
    found = fit_scales(silent, peaks, prior, ridge=0.01)
    assert found.alive == pytest.approx(prior.alive, abs=1e-3)
    assert found.in_flight == pytest.approx(prior.in_flight, abs=1e-3)


def test_too_few_rows_are_refused_with_their_number() -> None:
    with pytest.raises(InputError, match="3 usable rows are too few"):
        fit_profile("small", HEADER, made_up_rows(1, 1)[:3])


def test_failed_rows_are_left_out_of_a_fit() -> None:
    failed = Row(
        model=made_up_steps()[0][0],
        step=made_up_steps()[0][1],
        status="failed",
        reason="killed",
        mlx="0.0",
        backend="cpu",
        machine="made up",
    )
    rows = made_up_rows(1, 1)
    assert fit_profile("x", HEADER, [*rows, failed]).coefficients.rows == len(rows)


def test_speed_finds_the_two_rates_that_made_the_times() -> None:
    rows = []
    for model, step in made_up_steps():
        inventory = Inventory(model, step)
        seconds = step_flops(inventory) / 2e11 + step_traffic_bytes(inventory) / 5e10
        rows.append(row_of(model, step, 1).model_copy(update={"step_seconds": seconds}))
    speed = fit_speed(rows, "cpu")
    assert speed.flops_per_second["float32"] == pytest.approx(2e11, rel=0.05)
    assert speed.bytes_per_second == pytest.approx(5e10, rel=0.05)
    assert speed.median_error < 0.01


@pytest.mark.slow
def test_shipped_coefficients_are_the_refit() -> None:
    for name, refit in refits().items():
        path = Path(__file__).resolve().parent.parent / "oomguard" / "data" / "coefficients" / f"{name}.json"
        found, kept = refit.coefficients, shipped(name)
        assert to_json(kept) == path.read_text()
        assert found.model_dump(exclude={"compiled", "eager", "speed"}) == kept.model_dump(
            exclude={"compiled", "eager", "speed"}
        )
        for compiled in (True, False):
            for column in ("alive", "in_flight"):
                again, shipped_scales = (getattr(c.mode(compiled), column) for c in (found, kept))
                assert again == pytest.approx(shipped_scales, abs=2e-3)


def test_shipped_rows_span_what_the_fit_claims() -> None:
    rows = [
        row for path in shipped_row_files() for row in read_rows(path)[1] if row.backend == "cpu" and row.step
    ]
    assert len(rows) >= 120
    steps = [row.step for row in rows if row.step]
    assert {step.compiled for step in steps} == {True, False}
    assert {step.dtype for step in steps} == {"float32", "bfloat16", "float16"}
    assert {step.optimizer for step in steps} >= {"sgd", "adam", "adamw", "lion", "adafactor", "muon"}
    policies = {"none", "every", "stride", "blocks", "attention", "custom_function"}
    assert {step.checkpoint.policy for step in steps} == policies


def test_metal_table_is_the_m5_pros() -> None:
    _, rows = next(
        found for found in map(read_rows, shipped_row_files()) if found[0].machine.startswith("Apple M5 Pro")
    )
    assert len(rows) == 16
    large = [row for row in rows if (row.peak_bytes or 0) >= METAL_LEAST_PEAK_BYTES]
    assert len(large) == 14
    assert math.isclose(sum(row.peak_bytes or 0 for row in rows) / 2**20, 151525)


def drawn(rng: np.random.Generator, noise: float, faster: float) -> tuple[list[Row], list[Row]]:
    """Six rows as a short ``calibrate`` may measure them, and the other shipped ones as they would be there."""
    rows = [row for row in shipped_rows("cpu.jsonl") if row.step and row.step.dtype == "float32"]
    picked = set(rng.choice(len(rows), 6, replace=False).tolist())
    there = [row.model_copy(update={"step_seconds": (row.step_seconds or 0) / faster}) for row in rows]
    busy = [
        row.model_copy(update={"step_seconds": (row.step_seconds or 0) * float(np.exp(noise * rng.normal()))})
        for row in (there[i] for i in picked)
    ]
    return busy, [row for i, row in enumerate(there) if i not in picked]


def shipped_rows(name: str) -> list[Row]:
    path = next(path for path in shipped_row_files() if path.name == name)
    return [row for row in read_rows(path)[1] if row.model and row.step_seconds]


def miss(speed: Speed, rows: list[Row]) -> float:
    times = Times.of(rows, "cpu")
    return float(np.abs(times.misses(times.rates_of(speed))).mean())


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_speed_fitted_beside_the_shipped_one_is_not_worse_on_rows_it_has_not_seen(noise: float) -> None:
    ships, rng = shipped("cpu").speed, np.random.default_rng(7)
    kept, before, after = 0, [], []
    for _ in range(25):
        measured, others = drawn(rng, noise, faster=1)
        speed, part = fit_speed_beside(measured, "cpu", ships)
        kept += not part.better
        assert part.better == (speed != ships)
        before.append(miss(ships, others))
        after.append(miss(speed, others))
    assert kept >= 22
    assert np.mean(after) <= 1.05 * np.mean(before)


def test_speed_of_a_machine_three_times_as_fast_is_seen_in_six_busy_rows() -> None:
    ships, rng = shipped("cpu").speed, np.random.default_rng(7)
    for _ in range(10):
        measured, others = drawn(rng, 0.1, faster=3)
        speed, part = fit_speed_beside(measured, "cpu", ships)
        assert part.better
        assert miss(speed, others) < 0.5 * miss(ships, others)
        assert set(speed.flops_per_second) == set(ships.flops_per_second)
