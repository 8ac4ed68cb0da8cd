"""Row files: whole or refused, whatever was killed, cut, full or written by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.rows import Header, Row, append_row, read_rows, row_key, shipped_row_files, usable

HEADER = Header(
    schema="oomguard.rows/1",
    machine="a machine, Zürich",
    system="Linux 6.1",
    mlx="0.32.4",
    backend="cpu",
    commit="abc",
    date="2026-01-01",
    command="oomguard measure sweep.json",
)


def row(batch: int = 1, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "model": preset("tiny"),
        "step": StepConfig(batch=batch, seq_len=64),
        "peak_bytes": 10**6 * batch,
        "step_seconds": 0.25,
        "steps": 4,
        "mlx": "0.32.4",
        "backend": "cpu",
        "machine": "a machine, Zürich",
    }
    return Row.model_validate({**fields, **changes})


def text_of(tmp_path: Path, *rows: Row) -> str:
    path = tmp_path / "made.jsonl"
    for each in rows:
        append_row(path, HEADER, each)
    return path.read_text()


def test_rows_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = [
        row(1),
        row(2, status="failed", reason="killed: out of memory", peak_bytes=None),
        row(3, model=None, step=None, case="lora-4bit", sequenced_peak_bytes=5),
    ]
    for each in written:
        append_row(path, HEADER, each)
    assert read_rows(path) == (HEADER, written)
    assert usable(written) == [written[0], written[2]]


def test_row_file_begins_with_what_made_it(tmp_path: Path) -> None:
    first = json.loads(text_of(tmp_path, row()).splitlines()[0])
    assert first["schema"] == "oomguard.rows/1"
    assert {"machine", "system", "mlx", "backend", "commit", "date", "command"} <= set(first)


def test_key_tells_what_ran_and_nothing_else() -> None:
    renamed = preset("tiny").model_copy(update={"name": "another"})
    assert row(model=renamed, peak_bytes=7, mlx="0.31.0").key == row().key
    assert len({row(1).key, row(2).key, row(model=preset("small")).key}) == 3
    assert row(model=None, step=None, case="lora").key == row_key("lora", None, None)


@given(data=st.data())
def test_file_cut_anywhere_keeps_its_whole_rows_and_goes_on(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    rows = [row(batch) for batch in (1, 2, 3)]
    whole = text_of(folder, *rows).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path = folder / "cut.jsonl"
    path.write_bytes(whole[:cut])
    lines = whole[:cut].count(b"\n")
    kept = rows[: max(0, lines - 1)]
    if lines:
        assert read_rows(path) == (HEADER, kept)
    else:
        with pytest.raises(InputError, match="its first line must be a header"):
            read_rows(path)
    append_row(path, HEADER, row(9))
    assert read_rows(path) == (HEADER, [*kept, row(9)])


def test_unfinished_line_longer_than_a_read_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text_of(tmp_path, row(1)) + "x" * 200_000)
    append_row(path, HEADER, row(2))
    assert read_rows(path) == (HEADER, [row(1), row(2)])


BAD_LINES = [
    ('{"model": ', "line 3: not JSON"),
    ("[1, 2]", "line 3, row: "),
    ("7", "line 3, row: "),
    ("[" * 100_000, "line 3: not JSON"),
    ('{"steps": ' + "9" * 5000 + "}", "line 3: not JSON"),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=[said[:20] + line[:5] for line, said in BAD_LINES])
def test_line_that_is_no_row_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text_of(tmp_path, row(1)) + line + "\n")
    refused_in_one_line(path, said)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("peak_bytes", math.nan, "NaN is not a measurement"),
        ("step_seconds", math.nan, "NaN is not a measurement"),
        ("step_seconds", math.inf, "Infinity is not a measurement"),
        ("peak_bytes", -math.inf, "-Infinity is not a measurement"),
        ("step_seconds", "NaN", "row: step_seconds: 'NaN' is not a number"),
        ("step_seconds", -1.0, "row: step_seconds: -1.0 is too small; the least is 0"),
        ("peak_bytes", -1, "row: peak_bytes: -1 is too small; the least is 0"),
        ("peak_bytes", 1.5, "row: peak_bytes: "),
        ("peak_bytes", None, "row: a row with status ok needs peak_bytes"),
        ("mlx", None, "row: mlx: None is not a text; write one in quotes"),
        ("backend", "tpu", "row: backend: 'tpu' is unknown; choose 'cpu', 'metal' or 'cuda'"),
        ("status", "fine", "row: status: "),
        ("case", "lora", "row: a row names either a model and a step, or a case"),
        ("model", None, "row: a row names either a model and a step, or a case"),
        ("peak", 5, "row: peak: there is no such field; the fields are model, step, case, "),
    ],
)
def test_row_with_a_wrong_value_is_refused_by_line_and_field(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    header, line = text_of(tmp_path, row(1)).splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{header}\n{json.dumps({**json.loads(line), field: value})}\n")
    refused_in_one_line(path, f"line 2.*{said}")


@pytest.mark.parametrize("field", ["mlx", "backend", "machine", "peak_bytes", "model", "step"])
def test_row_with_a_missing_field_is_refused(field: str, tmp_path: Path) -> None:
    header, line = text_of(tmp_path, row(1)).splitlines()
    fields = {key: value for key, value in json.loads(line).items() if key != field}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{header}\n{json.dumps(fields)}\n")
    refused_in_one_line(path, "line 2, row: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; its first line must be a header"),
        ("\n\n", "is empty; its first line must be a header"),
        ("name,peak\na,1\n", "line 1: not JSON"),
        ('{"schema": "oomguard.rows/2"}\n', "line 1, header: "),
        ("ROW", "line 1, header: "),
    ],
)
def test_file_without_a_header_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text if text != "ROW" else text_of(tmp_path, row(1)).splitlines()[1] + "\n")
    refused_in_one_line(path, said)


def test_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "none.jsonl", "cannot read row file .*: No such file or directory")
    refused_in_one_line(tmp_path, "cannot read row file .*: Is a directory")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\n")
    refused_in_one_line(tmp_path / "binary", "is not text")


def refused_in_one_line(path: Path, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_rows(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_row_of_the_wrong_kind_is_never_made() -> None:
    with pytest.raises(ValidationError, match="finite"):
        row(step_seconds=math.nan)


APPENDER = """
import resource, sys
from oomguard.rows import append_row, read_rows
path, source, begin, end, room = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
header, rows = read_rows(source)
if room >= 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
for row in rows[begin:end]:
    append_row(path, header, row)
"""


def appender(path: Path, source: Path, begin: int, end: int, room: int = -1) -> subprocess.Popen[str]:
    arguments = [str(path), str(source), str(begin), str(end), str(room)]
    return subprocess.Popen([sys.executable, "-c", APPENDER, *arguments], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_append_to_one_file_take_turns(tmp_path: Path) -> None:
    rows = [row(batch, reason="x" * 5000) for batch in range(1, 121)]
    text_of(tmp_path, *rows)
    path = tmp_path / "shared.jsonl"
    running = [appender(path, tmp_path / "made.jsonl", start, start + 40) for start in (0, 40, 80)]
    for process in running:
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
        process.communicate()
    header, found = read_rows(path)
    assert header == HEADER
    assert sorted(found, key=lambda each: each.peak_bytes or 0) == rows


@pytest.mark.parametrize("room", [0, 700, 5000])
def test_disk_that_fills_up_leaves_the_file_as_it_was(room: int, tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: a write then stops in the middle, as on a full one."""
    long = row(2, reason="x" * 100_000)
    text_of(tmp_path, row(1), long)
    path = tmp_path / "rows.jsonl"
    append_row(path, HEADER, row(1))
    before = path.read_bytes()
    process = appender(path, tmp_path / "made.jsonl", 1, 2, len(before) + room)
    assert "OSError" in process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert path.read_bytes() == before
    append_row(path, HEADER, long)
    assert read_rows(path) == (HEADER, [row(1), long])


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file or directory: '.*rows.jsonl'"):
        append_row(tmp_path / "none" / "rows.jsonl", HEADER, row())
    with pytest.raises(OSError, match="Is a directory"):
        append_row(tmp_path, HEADER, row())
    full = Path("/dev/full")
    if full.exists():
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            append_row(full, HEADER, row())


def test_shipped_row_files_are_whole_and_say_what_made_them() -> None:
    files = list(shipped_row_files())
    assert files
    for path in files:
        header, rows = read_rows(path)
        assert rows, path
        assert all([header.machine, header.system, header.mlx, header.command or header.note]), path
        assert path.read_bytes().endswith(b"\n")
