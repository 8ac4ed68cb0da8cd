"""``oomguard validate`` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_rows import HEADER, made_up_rows, mistake, run, write_rows

from oomguard.errors import InputError
from oomguard.estimate.coefficients import shipped
from oomguard.estimate.learn import write_coefficients
from oomguard.estimate.validate import validate
from oomguard.rows import Header, Row

METAL = HEADER.model_copy(update={"backend": "metal"})


def test_validate_of_the_shipped_rows_says_that_all_bounds_hold() -> None:
    status, out, err = run("validate")
    assert (status, err) == (0, "")
    assert out.count("All bounds hold.") == 2
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "above band" not in out


def test_validate_json_has_every_row_and_the_same_figures() -> None:
    status, out, _ = run("validate", "--json", "--backend", "cpu")
    value = json.loads(out)
    assert (status, value["schema"]) == (0, "oomguard.validation/1")
    (profile,) = value["profiles"]
    kept = shipped("cpu")
    assert (profile["backend"], profile["mlx"], profile["problems"]) == ("cpu", kept.mlx, [])
    assert profile["leave_one_out"] == {"median_error": kept.median_error, "worst_error": kept.worst_error}
    errors = sorted(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in profile["rows"])
    assert len(errors) == kept.rows
    assert errors[-1] == pytest.approx(profile["worst_error"])
    assert errors[len(errors) // 2] == pytest.approx(profile["median_error"])
    for row in profile["rows"]:
        assert row["low_bytes"] <= row["predicted_bytes"] <= row["high_bytes"]
        assert row["measured_bytes"] <= row["high_bytes"]


def test_validate_of_rows_as_predicted_is_status_0(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", made_up_rows(6))
    status, out, _ = run("validate", "--rows", rows)
    assert status == 0
    assert "these 6 rows" in out


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1 / 1.05, ["median 5.0% is above the bound 3%"]),
        (1 / 1.2, ["median 20.0% is above the bound 3%", "worst 20.0% is above the bound 12%"]),
        (1.5, ["worst 33.3% is above the bound 12%", "6 rows were measured above their band"]),
    ],
)
def test_validate_past_its_bounds_is_status_1_and_names_them(
    share: float, said: list[str], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", made_up_rows(6, share))
    status, out, err = run("validate", "--rows", rows)
    assert (status, err) == (1, "")
    assert "All bounds hold." not in out
    for each in said:
        assert each in out
    assert ("above band" in out) == (share > 1)


def test_validate_holds_rows_against_coefficients_of_ones_own(tmp_path: Path) -> None:
    kept = shipped("cpu")
    worse = kept.model_copy(update={"profile": "mine", "median_error": 0.04})
    write_coefficients(worse, tmp_path / "mine.json")
    status, out, _ = run("validate", "--backend", "cpu", "--coefficients", tmp_path / "mine.json")
    assert status == 1
    assert "mine: leave-one-out median 4.0% is above the bound 3%" in out


def test_validate_passes_over_failed_rows_and_named_cases(tmp_path: Path) -> None:
    good = made_up_rows(2)
    failed = good[0].model_copy(update={"status": "failed", "reason": "killed", "peak_bytes": 5})
    case = Row(case="mlp", peak_bytes=10**9, mlx="0.32.4", backend="cpu", machine="a machine")
    rows = write_rows(tmp_path / "rows.jsonl", [*good, failed, case])
    value = json.loads(run("validate", "--rows", rows, "--json")[1])
    assert len(value["profiles"][0]["rows"]) == 2


def test_validate_holds_rows_of_two_backends_each_against_its_own(tmp_path: Path) -> None:
    large = [row.model_copy(update={"peak_bytes": 2 * 10**9}) for row in made_up_rows(1, header=METAL)]
    rows = write_rows(tmp_path / "rows.jsonl", [*made_up_rows(2), *large])
    value = json.loads(run("validate", "--rows", rows, "--json")[1])
    assert [(p["backend"], len(p["rows"])) for p in value["profiles"]] == [("cpu", 2), ("metal", 1)]


def test_metal_rows_below_1_gb_are_shown_and_do_not_count(tmp_path: Path) -> None:
    small = made_up_rows(1, header=METAL)
    with pytest.raises(InputError, match="no measured row of 1 GB or more to hold the m5-pro"):
        validate(shipped("metal"), small)
    rows = write_rows(tmp_path / "rows.jsonl", small)
    assert "no measured row of 1 GB or more" in mistake("validate", "--rows", rows)


def header_line(header: Header = HEADER) -> str:
    return header.model_dump_json(by_alias=True) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; its first line must be a header"),
        (header_line(), "holds no measured rows of the preset GPT"),
        (header_line() + '{"case": "x", "peak_bytes": NaN}\n', "line 2: NaN is not a measurement"),
        (
            header_line() + '{"case": "x", "peak_bytes": 5, "backend": "cpu", "machine": "m"}\n',
            "mlx: missing, and it has no default",
        ),
        (header_line() + '{"case"\n', "line 2: not JSON"),
        ('{"schema": "oomguard.plan/1"}\n', "line 1, header: "),
        ("a poem\nof two lines\n", "line 1: not JSON"),
    ],
)
def test_row_file_that_is_none_is_one_line_and_stays_as_it_was(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert said in mistake("validate", "--rows", path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rows", "gone.jsonl"), "cannot read row file gone.jsonl: No such file or directory"),
        (("--rows", "."), "cannot read row file .: Is a directory"),
        (("--coefficients", "gone.json"), "cannot read coefficients gone.json: No such file or directory"),
        (("--backend", "tpu"), "'tpu' is not one of 'cpu', 'metal'"),
        (("extra",), "unexpected extra argument (extra)"),
    ],
)
def test_validate_answers_a_mistake_in_one_line(args: tuple[str, ...], said: str) -> None:
    assert said in mistake("validate", *args)


def test_validate_says_which_backend_has_no_rows(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", made_up_rows(2))
    assert "holds no measured metal rows" in mistake("validate", "--rows", rows, "--backend", "metal")
