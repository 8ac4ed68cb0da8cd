"""Rows that a machine could have measured, a share off from what the shipped profile predicts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from oomguard.cli.main import main
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.estimate.coefficients import shipped
from oomguard.estimate.peak import estimate
from oomguard.rows import Header, Row, append_row

HEADER = Header(
    machine="a machine",
    system="Linux",
    mlx="0.32.4",
    backend="cpu",
    commit="",
    date="2026-01-01",
    command="oomguard calibrate",
)
SETTINGS = [
    (name, batch, policy)
    for name in ("tiny", "small")
    for batch in (4, 8, 16)
    for policy in ("none", "every")
]


def made_up_rows(count: int, share: float = 1.0, header: Header = HEADER, compiled: bool = True) -> list[Row]:
    """Rows whose peaks are ``share`` of what the shipped cpu profile predicts for them."""
    rows = []
    for name, batch, policy in SETTINGS[:count]:
        model = preset(name)
        checkpoint = CheckpointPolicy.parse(policy)
        step = StepConfig(batch=batch, seq_len=model.context, checkpoint=checkpoint, compiled=compiled)
        found = estimate(model, step, shipped("cpu"), backend="cpu")
        rows.append(
            Row(
                model=model,
                step=step,
                peak_bytes=int(share * found.peak_bytes),
                step_seconds=found.step_seconds,
                steps=3,
                mlx=header.mlx,
                backend=header.backend,
                machine=header.machine,
            )
        )
    return rows


def write_rows(path: Path, rows: Sequence[Row], header: Header = HEADER) -> Path:
    for row in rows:
        append_row(path, header, row)
    return path


def run(*args: object) -> tuple[int | str | None, str, str]:
    """Exit status, stdout and stderr of the command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as caught, redirect_stdout(out), redirect_stderr(err):
        main([str(arg) for arg in args])
    return caught.value.code, out.getvalue(), err.getvalue()


def mistake(*args: object) -> str:
    """The one line that a command ends with for wrong input; holds it to its form."""
    status, out, err = run(*args)
    assert (status, out, err.count("\n")) == (2, "", 1), (status, out, err)
    return err
