"""Fits the estimate to traced peaks beside the measured ones, and prints what that does to its error.

    python -m oomguard.calibration.refit_traced [COUNT]

A trace costs half a second where a measurement costs ten, so it reaches settings no sweep pays for. What ships is
fitted to measured rows alone (``refit.py``); LOG.md says what this showed.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Iterator
from statistics import median

import numpy as np

from oomguard.calibration.design_sweep import policy, shape
from oomguard.calibration.trace_check import trace_row
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import Dtype, StepConfig
from oomguard.estimate.coefficients import Coefficients
from oomguard.estimate.fit import fit_profile
from oomguard.estimate.peak import estimate
from oomguard.rows import Header, Row, read_rows, shipped_rows_path

COUNT = 2000
SEED = 7
HELD_BACK = 4  # every fourth traced row only tests


def traced_rows(header: Header, count: int) -> Iterator[Row]:
    """Rows of random settings with traced peaks in the place of measured ones."""
    rng = random.Random(SEED)
    rows = [_asked(header, rng) for _ in range(count)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for row, (peak, sequenced, _, problem) in zip(
            rows, pool.imap(trace_row, rows, chunksize=8), strict=True
        ):
            if not problem:
                yield row.model_copy(update={"peak_bytes": peak, "sequenced_peak_bytes": sequenced})


def _asked(header: Header, rng: random.Random) -> Row:
    dtype: Dtype = rng.choice(("float32", "float32", "float32", "bfloat16"))
    entry = shape(rng, dtype)
    model = ModelConfig.model_validate({name: value for name, value in entry.items() if name != "batch"})
    step = StepConfig(
        batch=entry["batch"],
        seq_len=model.context,
        checkpoint=CheckpointPolicy.parse(policy(rng, entry)),
        dtype=dtype,
        optimizer=rng.choice(["adamw", "adamw", "sgd", "adam", "lion", "adafactor", "muon"]),
        clip_norm=rng.random() < 0.2,
        accumulate=rng.choice([1, 1, 1, 2]),
        compiled=rng.random() < 0.7,
    )
    return Row(model=model, step=step, peak_bytes=1, mlx=header.mlx, backend="cpu", machine=header.machine)


def errors(coefficients: Coefficients, rows: list[Row]) -> list[float]:
    """Absolute errors of the estimate, as shares of the rows' peaks."""
    found = []
    for row in rows:
        assert row.model is not None
        assert row.step is not None
        found.append(abs(estimate(row.model, row.step, coefficients).peak_bytes / (row.peak_bytes or 1) - 1))
    return found


def main(count: int) -> None:
    header, measured = read_rows(shipped_rows_path("cpu.jsonl"))
    traced = list(traced_rows(header, count))
    tests = traced[::HELD_BACK]
    learnt = [row for i, row in enumerate(traced) if i % HELD_BACK]
    timed = [row.model_copy(update={"step_seconds": None}) for row in learnt]
    print(f"{len(measured)} measured rows; {len(learnt)} traced rows fitted, {len(tests)} held back")
    for name, rows in (("measured rows", measured), ("measured and traced rows", [*measured, *timed])):
        found = fit_profile("cpu", header, rows).coefficients
        for what, on in (("the measured", measured), ("the traced held back", tests)):
            sizes = errors(found, on)
            print(
                f"fitted to {name}: on {what} median {median(sizes):.1%}, "
                f"95% within {np.quantile(sizes, 0.95):.1%}, worst {max(sizes):.1%}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)
