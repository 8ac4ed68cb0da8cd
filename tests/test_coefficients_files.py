"""Coefficients files: whose are used, and what is said of one that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_rows import run

from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.estimate.coefficients import (
    Coefficients,
    data_dir,
    load,
    local_path,
    read_coefficients,
    release_warning,
    shipped,
)
from oomguard.estimate.learn import write_coefficients


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OOMGUARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def local(**changes: Any) -> Coefficients:
    """A calibration of one's own, on disk."""
    own = shipped("cpu").model_copy(update={"profile": "local", "device": "mine", "mlx": "1.2", **changes})
    write_coefficients(own, local_path("cpu"))
    return own


def test_written_coefficients_are_read_back_the_same() -> None:
    own = local()
    assert read_coefficients(local_path("cpu")) == own


def test_own_calibration_is_used_on_its_device_with_its_mlx() -> None:
    own = local()
    assert load("cpu", mlx_version="1.2", device="mine") == own
    assert load("cpu") == own


@pytest.mark.parametrize(
    ("mlx", "device"), [("1.3", "mine"), ("1.2", "another machine")], ids=["another MLX", "another device"]
)
def test_own_calibration_is_passed_over_elsewhere(mlx: str, device: str) -> None:
    local()
    assert load("cpu", mlx_version=mlx, device=device) == shipped("cpu")


def test_own_calibration_of_one_backend_says_nothing_of_another() -> None:
    local()
    assert load("metal", mlx_version="1.2", device="mine") == shipped("metal")
    local_path("metal").write_text(local_path("cpu").read_text())  # a file under the wrong name
    assert load("metal", mlx_version="1.2", device="mine") == shipped("metal")


def test_home_without_a_calibration_uses_the_shipped_profile(home: Path) -> None:
    assert load("cpu") == shipped("cpu")
    assert not home.exists()
    assert load("cuda").backend == "cpu"


def test_data_folder_is_the_platforms_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert data_dir() == tmp_path / "home"
    monkeypatch.delenv("OOMGUARD_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    assert data_dir() == Path.home() / ".local" / "share" / "oomguard"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert data_dir() == tmp_path / "data" / "oomguard"
    monkeypatch.setattr("sys.platform", "darwin")
    assert data_dir() == Path.home() / "Library" / "Application Support" / "oomguard"


def whole() -> dict[str, Any]:
    value = json.loads(shipped("cpu").model_dump_json(by_alias=True))
    assert isinstance(value, dict)
    return value


BROKEN = {
    "cut short": (json.dumps(whole())[:300], "is damaged"),
    "empty": ("", "is damaged"),
    "foreign": ('{"schema": "other/1"}', "is not a coefficients file of schema oomguard.coefficients/1"),
    "a list": ("[]", "is not a coefficients file of schema oomguard.coefficients/1"),
    "a field missing": (
        json.dumps({k: v for k, v in whole().items() if k != "speed"}),
        "speed: missing, and it has no default",
    ),
    "a field more": (
        json.dumps({**whole(), "extra": 1}),
        "extra: there is no such field; the fields are schema, profile, ",
    ),
    "NaN": (json.dumps({**whole(), "median_error": float("nan")}), "is damaged (NaN is no number in JSON)"),
    "no rows": (json.dumps({**whole(), "rows": 0}), "rows: 0 is too small; the least is 1"),
    "a rate of 0": (
        json.dumps({**whole(), "speed": {**whole()["speed"], "bytes_per_second": 0}}),
        "bytes_per_second",
    ),
}


@pytest.mark.parametrize(("text", "said"), BROKEN.values(), ids=list(BROKEN))
def test_broken_file_is_passed_over_with_what_is_wrong_and_how_to_go_on(
    text: str, said: str, home: Path
) -> None:
    home.mkdir()
    local_path("cpu").write_text(text)
    found = load("cpu")
    assert said in found.passed_over
    assert "oomguard calibrate" in found.passed_over
    assert str(local_path("cpu")) in found.passed_over
    assert found.passed_over.endswith("; the shipped coefficients are used")
    assert found.model_copy(update={"passed_over": ""}) == shipped("cpu")
    assert "passed_over" not in found.model_dump_json()
    with pytest.raises(InputError, match="oomguard calibrate"):
        read_coefficients(local_path("cpu"))
    for command in ("plan", "estimate"):
        asked = (command, "--preset", "tiny", "--device", "cpu-16gb")
        status, out, err = run(*asked)
        assert (status, err) == (0, "")
        assert " ".join(said.split()) in " ".join(out.split())
        status, out, err = run(*asked, "--json")
        assert (status, err) == (0, f"warning: {found.passed_over}\n")
        assert found.passed_over in json.loads(out)["warnings"]
    assert local_path("cpu").read_text() == text
    elsewhere = run(
        "plan", "--preset", "tiny", "--device", "m5-pro-48gb", "--json"
    )  # another backend is not asked
    assert (elsewhere[0], elsewhere[2]) == (0, "")


def test_broken_file_changes_no_number_of_a_plan(home: Path) -> None:
    asked = ("plan", "--preset", "huge", "--device", "cpu-16gb", "--memory", "2GB", "--json")
    whole_file = json.loads(run(*asked)[1])
    home.mkdir()
    local_path("cpu").write_text("{")
    damaged = json.loads(run(*asked)[1])
    assert len(damaged.pop("warnings")) == len(whole_file.pop("warnings")) + 1
    assert damaged == whole_file


def test_file_that_is_not_text_is_passed_over(home: Path) -> None:
    home.mkdir()
    local_path("cpu").write_bytes(b"\xff\xfe\x00\x01")
    status, out, _ = run("plan", "--preset", "tiny", "--device", "cpu-16gb")
    assert status == 0
    assert "is not text in UTF-8" in " ".join(out.split())
    local_path("cpu").unlink()
    local_path("cpu").mkdir()
    assert run("plan", "--preset", "tiny", "--device", "cpu-16gb")[0] == 0
    assert "cannot read coefficients" in load("cpu").passed_over


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize("compiled", [True, False])
def test_shipped_bands_enclose_the_estimate_and_are_sane(backend: str, compiled: bool) -> None:
    mode = shipped(backend).mode(compiled)
    for low, high in [(mode.low, mode.high), *mode.bands.values()]:
        assert 0.7 < low <= 1 <= high < 1.35
    assert mode.low <= min((low for low, _ in mode.bands.values()), default=1)
    assert mode.high >= max((high for _, high in mode.bands.values()), default=1)
    assert 0 <= mode.median_error <= 0.03
    assert mode.median_error <= mode.worst_error <= (0.12 if backend == "cpu" else 0.08)


def test_step_without_a_band_of_its_kind_takes_the_widest() -> None:
    mode = shipped("cpu").compiled.model_copy(
        update={"bands": {"plain": (0.9, 1.1)}, "low": 0.8, "high": 1.2}
    )
    assert mode.band(StepConfig(batch=1, seq_len=8)) == (0.9, 1.1)
    assert mode.band(StepConfig(batch=1, seq_len=8, dtype="float16")) == (0.8, 1.2)


def test_write_that_fails_leaves_what_was_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = local()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"cannot write coefficients .*: No space left on device"):
        local(mlx="9.9")
    assert read_coefficients(local_path("cpu")) == own
    assert [path.name for path in home.iterdir()] == ["coefficients-cpu.json"]


def test_an_estimate_for_another_release_says_which_and_what_simulates_it() -> None:
    metal, cpu = shipped("metal"), shipped("cpu")
    for said in (release_warning(metal, "metal", None), release_warning(metal, "metal", "0.32.4")):
        assert said is not None
        assert metal.mlx in said
        assert "0.32.4" in said
        assert "--engine auto" in said
    assert release_warning(metal, "metal", metal.mlx) is None
    assert release_warning(cpu, "cpu", None) is None


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_mac_asked_about_is_told_the_release_of_its_estimate(command: str) -> None:
    asked = (command, "--preset", "tiny", "--device", "m5-pro-48gb")
    warnings = json.loads(run(*asked, "--json")[1])["warnings"]
    assert [w for w in warnings if w.startswith(f"estimated for MLX {shipped('metal').mlx}")]
    assert "estimated for MLX" in " ".join(run(*asked)[1].split())


def test_a_traced_plan_of_a_mac_says_nothing_of_the_estimate_s_release() -> None:
    asked = (
        "plan",
        "--preset",
        "tiny",
        "--device",
        "m5-pro-48gb",
        "--batch",
        "2",
        "--grad-checkpoint",
        "none",
    )
    warnings = json.loads(run(*asked, "--engine", "trace", "--json")[1])["warnings"]
    assert not [w for w in warnings if w.startswith("estimated for MLX")]
