"""Peaks that others measured on Macs, predicted from a step captured here; no number is fitted to any of them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from oomguard.calibration.public import (
    PublicRow,
    predict,
    predicted_bytes,
    read_public_rows,
    understood,
)
from oomguard.calibration.public_rows import MORE_ROWS, Published, understood_all
from oomguard.calibration.swift import ROWS, predictions
from oomguard.calibration.trace_check import LONG
from oomguard.rows import read_rows
from oomguard.units import GIB

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


def more() -> dict[str, Published]:
    return {row.id: row for row in understood_all(read_public_rows(MORE_ROWS))}


@pytest.mark.parametrize(
    "name",
    sorted(set(more()) - LONG - {"N01"}),  # N01 has a test of its own
)
def test_published_peaks_of_operations_and_runs_from_scratch_are_within_one_percent(name: str) -> None:
    row = more()[name]
    assert predicted_bytes(row, predict(row)) == pytest.approx(row.peak_bytes, rel=0.01)


def test_every_published_row_that_ships_is_understood() -> None:
    assert len(more()) == len(read_public_rows(MORE_ROWS)) == 19


def test_attention_fused_without_the_loss_is_neither_release() -> None:
    """N01 has a fused attention of its own beside the loss of its release: two fields, and not one release."""
    row = more()["N01"]
    assert isinstance(row, PublicRow)
    assert (row.mlx, row.fused_attention, row.fused_cross_entropy) == ((0, 32, 0), True, None)
    assert predict(row).peak_bytes == pytest.approx(row.peak_bytes, rel=0.001)
    both = predict(replace(row, fused_cross_entropy=True)).peak_bytes
    assert both / row.peak_bytes - 1 == pytest.approx(-0.16, abs=0.02)
    assert predict(replace(row, fused_attention=None)).peak_bytes > 1.5 * row.peak_bytes


def test_a_memory_limit_of_the_machine_holds_a_published_step_down() -> None:
    """Attention of 8,192 tokens, forward and backward: about 32.4 GiB on a Mac whose limit is 30.4 GiB."""
    op = {
        "id": "limit", "kind": "op", "model": "attention op stock, fwd+bwd", "reported": 32.4,
        "note": "math_attention, 32/8 heads x128, bf16 in, fp32 inside", "unit": "GiB above inputs",
        "batch": 1, "actual_T": 8192, "machine": "M1 Max 32GB", "version": "mlx 0.32.0",
    }  # fmt: skip
    (own,), (set_higher,) = understood_all([op]), understood_all([{**op, "memory_limit": "128GiB"}])
    assert own.memory_limit == int(0.95 * 32 * GIB)
    result = predict(own)
    assert result.waited_at_limit
    assert predicted_bytes(own, result) == pytest.approx(32.88 * GIB, rel=0.001)
    assert predicted_bytes(own, result) == pytest.approx(own.peak_bytes, rel=0.02)
    assert predicted_bytes(set_higher, predict(set_higher)) == pytest.approx(41.06 * GIB, rel=0.001)
