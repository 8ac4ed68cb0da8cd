"""What ``measure --json`` prints is read again, by ``measure`` and by ``validate --rows``, once or several times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_rows import made_up_rows, mistake, run, write_rows

from oomguard.errors import InputError
from oomguard.rows import is_printed, is_row_file, printed_rows, read_rows, shipped_row_files

QUICK = ("--preset", "tiny", "--ctx", "32", "--steps", "1", "--no-sequenced", "--json")


def printed(path: Path, indent: int | None = 1, times: int = 1) -> Path:
    rows = made_up_rows(6)
    path.write_text("".join(json.dumps(printed_rows(rows), indent=indent) + "\n" for _ in range(times)))
    return path


def test_measured_json_is_read_by_measure_and_by_validate(tmp_path: Path) -> None:
    row = tmp_path / "row.json"
    with row.open("w") as file:  # oomguard measure --preset tiny --batch 4 --steps 2 --json > row.json
        done = subprocess.run(
            [sys.executable, "-m", "oomguard", "measure", *QUICK], stdout=file, timeout=120, check=False
        )
    assert done.returncode == 0
    assert run("measure", row, "--json")[1] == row.read_text()
    status, shown, _ = run("measure", row)
    assert (status, len(shown.splitlines())) == (0, 2)
    status, out, err = run("validate", "--rows", row)
    assert status in (0, 1), err  # a bound may be missed on this machine; the row itself is read
    assert "tiny 1 x 32" in out


def test_printed_rows_are_the_rows_of_the_file_they_came_from(tmp_path: Path) -> None:
    for file in shipped_row_files():
        path = tmp_path / f"{file.stem}.json"
        _, rows = read_rows(file)
        path.write_text(json.dumps(printed_rows(rows)))
        header, again = read_rows(path)
        assert again == rows
        assert (header.mlx, header.backend, header.machine) == (rows[0].mlx, rows[0].backend, rows[0].machine)


@pytest.mark.parametrize(("indent", "times"), [(1, 1), (None, 1), (None, 3), (2, 3)])
def test_printed_objects_are_read_one_or_several_on_a_line_or_over_many(
    indent: int | None, times: int, tmp_path: Path
) -> None:
    path = printed(tmp_path / "rows.json", indent, times)
    assert read_rows(path)[1] == made_up_rows(6) * times
    assert run("validate", "--rows", path)[0] == run("validate", "--rows", printed(tmp_path / "one.json"))[0]
    path.write_text(path.read_text().rstrip("\n"))  # an editor's
    assert len(read_rows(path)[1]) == 6 * times
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read_rows(path)[1]) == 6 * times


def test_row_file_is_known_by_its_beginning_however_long_it_is(tmp_path: Path) -> None:
    lines = write_rows(tmp_path / "lines.jsonl", made_up_rows(900))
    assert (is_row_file(lines), is_printed(lines)) == (True, False)
    path = printed(tmp_path / "printed.json")
    assert (is_row_file(path), is_printed(path)) == (True, True)
    for name, text in (("sweep.json", '[{"preset": "tiny"}]'), ("empty", ""), ("nested", "[" * 100_000)):
        (tmp_path / name).write_text(text)
        assert not is_row_file(tmp_path / name)
    assert not is_row_file(tmp_path)
    assert not is_row_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"peak_bytes": ', '"peak_bytes": -'), "row 1: peak_bytes: -"),
        (lambda text: text[:-40], "is not JSON: "),
        (lambda text: text + "[3]\n", "beside what measure --json printed stands [3]"),
        (
            lambda text: text.replace('"rows": ', '"row": '),
            "beside what measure --json printed stands {'schema'",
        ),
        (lambda _: '{"schema": "oomguard.measure/1", "rows": []}', "holds no rows"),
        (lambda _: '{"schema": "oomguard.measure/1", "rows": ["x"]}', "row 1: 'x' is not an object"),
    ],
)
def test_damaged_printed_rows_are_refused_in_one_line(
    change: Callable[[str], str], said: str, tmp_path: Path
) -> None:
    path = printed(tmp_path / "rows.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError) as caught:
        read_rows(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in mistake("validate", "--rows", path)


def test_no_row_is_added_to_printed_rows(tmp_path: Path) -> None:
    path = printed(tmp_path / "rows.json")
    before = path.read_bytes()
    line = mistake("measure", "--preset", "tiny", "--out", path)
    assert "a row file takes rows line by line; name another with --out" in line
    assert path.read_bytes() == before


def test_every_json_object_has_a_schema_of_its_own() -> None:
    from oomguard.estimate.coefficients import SCHEMA as COEFFICIENTS
    from oomguard.model.saving import SCHEMA as SAVED
    from oomguard.report.as_json import ESTIMATE_SCHEMA, PLAN_SCHEMA
    from oomguard.report.trace_json import TRACE_SCHEMA
    from oomguard.report.train_text import TRAIN_SCHEMA
    from oomguard.rows import PRINTED_SCHEMA, SCHEMA

    names = [
        COEFFICIENTS,
        SAVED,
        ESTIMATE_SCHEMA,
        PLAN_SCHEMA,
        TRACE_SCHEMA,
        TRAIN_SCHEMA,
        PRINTED_SCHEMA,
        SCHEMA,
    ]
    assert len(set(names)) == len(names)
    assert TRAIN_SCHEMA == "oomguard.train/1"
