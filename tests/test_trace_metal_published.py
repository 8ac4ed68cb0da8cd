"""Peaks that others measured on Macs, predicted from a step captured here; no number is fitted to any of them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from oomguard.calibration.public import PublicRow, predict, read_public_rows, understood
from oomguard.calibration.swift import ROWS, predictions
from oomguard.rows import read_rows

pytestmark = pytest.mark.slow

EXACT_LENGTHS = {"P12", "P13", "P14", "S1k", "S4k"}


def swift_errors(policy: str) -> list[float]:
    """Relative errors of the rows of the M5 Pro table with 1 GB and more."""
    rows = [
        row
        for row in read_rows(ROWS)[1]
        if row.step and row.step.checkpoint.policy == policy and (row.peak_bytes or 0) >= 10**9
    ]
    return [result.peak_bytes / (row.peak_bytes or 0) - 1 for row, result in predictions(rows)]


def test_m5_pro_table_without_recompute() -> None:
    errors = swift_errors("none")
    assert len(errors) == 7
    assert statistics.median(map(abs, errors)) <= 0.015
    assert max(map(abs, errors)) <= 0.04


def test_m5_pro_table_with_the_bare_custom_function() -> None:
    """What the merging of the second forward with the first leaves of the saving."""
    errors = swift_errors("custom_function")
    assert len(errors) == 7
    assert max(map(abs, errors)) <= 0.08


def published() -> list[PublicRow]:
    return [row for row in map(understood, read_public_rows()) if row is not None]


def test_published_lora_peaks_whose_sequence_length_is_stated() -> None:
    rows = published()
    assert {row.id for row in rows} == EXACT_LENGTHS
    errors = [predict(row).peak_bytes / row.peak_bytes - 1 for row in rows]
    assert statistics.median(map(abs, errors)) <= 0.04
    assert max(map(abs, errors)) <= 0.10
    assert min(errors) >= -0.05


def test_peak_leaves_the_logits_where_the_loss_is_one_primitive() -> None:
    row = next(row for row in published() if row.id == "P12")
    older, newer = predict(row), predict(replace(row, mlx=(0, 32, 4)))
    assert older.moment.scope == "lm_head"
    assert newer.moment.scope.startswith("model.layers")
    assert newer.peak_bytes < older.peak_bytes
