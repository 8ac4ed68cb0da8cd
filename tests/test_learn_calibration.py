"""The calibration of one machine: rows come in, and from the fourth on every plan uses their fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_rows import HEADER, made_up_rows

import oomguard
from oomguard.errors import InputError
from oomguard.estimate.coefficients import load, local_path, local_rows_path, shipped
from oomguard.estimate.learn import LEAST_BAND, MIN_LOCAL_ROWS, comparable, enough, learn
from oomguard.estimate.peak import estimate
from oomguard.machine.device import Device, find_device
from oomguard.rows import Header, Row, read_rows


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMGUARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def learn_all(rows: list[Row], header: Header = HEADER) -> None:
    for row in rows:
        learn(header, row)


def error_of(row: Row, **device: Any) -> float:
    assert row.model is not None
    assert row.step is not None
    assert row.peak_bytes is not None
    coefficients = load("cpu", **device)
    return estimate(row.model, row.step, coefficients, backend="cpu").peak_bytes / row.peak_bytes - 1


def test_rows_are_kept_and_fitted_from_the_fourth_on() -> None:
    rows = made_up_rows(MIN_LOCAL_ROWS + 1, 1.1)
    for number, row in enumerate(rows, start=1):
        learnt = learn(HEADER, row)
        assert learnt.rows == number
        assert (learnt.coefficients is not None) == (number >= MIN_LOCAL_ROWS)
        assert local_path("cpu").exists() == (number >= MIN_LOCAL_ROWS)
    assert read_rows(local_rows_path()) == (HEADER, rows)
    assert learnt.coefficients == load("cpu", mlx_version=HEADER.mlx, device=HEADER.machine)
    assert learnt.coefficients is not None
    assert (learnt.coefficients.profile, learnt.coefficients.rows) == ("local", len(rows))


def test_fit_of_own_rows_is_nearer_to_them_than_the_shipped_profile() -> None:
    rows = made_up_rows(8, 1.1)
    before = [abs(error_of(row)) for row in rows]
    learn_all(rows)
    after = [abs(error_of(row, mlx_version=HEADER.mlx, device=HEADER.machine)) for row in rows]
    assert max(after) < min(before)


def test_fit_of_rows_as_shipped_stays_as_shipped() -> None:
    rows = made_up_rows(6)
    learn_all(rows)
    assert max(abs(error_of(row)) for row in rows) < 0.01


def test_bands_of_few_rows_are_no_narrower_than_shipped() -> None:
    learn_all(made_up_rows(6))
    own, prior = load("cpu"), shipped("cpu")
    for compiled in (True, False):
        mode, kept = own.mode(compiled), prior.mode(compiled)
        assert mode.low <= kept.low
        assert mode.high >= kept.high
        assert set(mode.bands) >= set(kept.bands)
        for kind, (low, high) in mode.bands.items():
            own_and_wide = low <= 1 - LEAST_BAND and high >= 1 + LEAST_BAND
            assert own_and_wide or (low, high) == kept.bands[kind]


def test_last_row_of_a_setting_counts_and_other_machines_do_not() -> None:
    first, second = made_up_rows(1, 1.0)[0], made_up_rows(1, 1.2)[0]
    others = [
        first.model_copy(update=change) for change in ({"mlx": "1"}, {"machine": "b"}, {"backend": "metal"})
    ]
    failed = first.model_copy(update={"status": "failed", "reason": "killed"})
    case = Row(case="mlp", peak_bytes=9, mlx=HEADER.mlx, backend="cpu", machine=HEADER.machine)
    assert comparable([first, *others, case, second, failed], HEADER) == [second]


def test_rows_of_two_ways_of_running_are_not_counted_together() -> None:
    rows = made_up_rows(3) + made_up_rows(3, compiled=False)
    assert not enough(rows)
    assert enough([*rows, *made_up_rows(MIN_LOCAL_ROWS)[3:]])
    learn_all(rows)
    assert not local_path("cpu").exists()


def test_damaged_row_file_is_refused_and_stays_as_it_was(home: Path) -> None:
    home.mkdir()
    local_rows_path().write_text("a poem\n")
    with pytest.raises(InputError, match="line 1: not JSON"):
        learn(HEADER, made_up_rows(1)[0])
    assert local_rows_path().read_text() == "a poem\n"


def here() -> tuple[Device, Header]:
    device = find_device("cpu")
    names = {"machine": device.machine or device.name, "mlx": device.mlx or ""}
    return device, HEADER.model_copy(update=names)


def test_every_plan_here_uses_the_own_fit_and_one_elsewhere_does_not() -> None:
    device, header = here()
    learn_all(made_up_rows(5, 1.1, header), header)
    assert oomguard.plan("tiny", device=device, memory="200MB").calibration.profile == "local"
    assert oomguard.plan("tiny", device="cpu-16gb", memory="200MB").calibration.profile == "cpu"
