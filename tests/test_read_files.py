"""Files that a person names are read in one way: a byte order mark is no mistake, nesting without end is one."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from local_rows import made_up_rows, mistake, run, write_rows

from oomguard.config.model import ModelConfig
from oomguard.errors import InputError
from oomguard.estimate.coefficients import read_coefficients, shipped
from oomguard.files.reading import DEEPEST, LARGEST_FILE_BYTES, json_values, parse_json, read_text
from oomguard.measure.sweep_file import read_sweep
from oomguard.model.saving import open_run
from oomguard.rows import read_rows

BOM = b"\xef\xbb\xbf"
SHAPE = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_mlp": 128, "context": 64}


def rows_text(folder: Path) -> str:
    return write_rows(folder / "made.jsonl", made_up_rows(3)).read_text()


def coefficients_text(_folder: Path) -> str:
    return shipped("cpu").model_dump_json(by_alias=True)


READERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], str]]] = {
    "config": (ModelConfig.from_file, lambda _: json.dumps(SHAPE)),
    "sweep": (read_sweep, lambda _: json.dumps([{"preset": "tiny", "batch": [1, 2]}])),
    "sweep of lines": (
        read_sweep,
        lambda _: '{"preset": "tiny", "batch": 1}\n{"preset": "tiny", "batch": 2}\n',
    ),
    "row file": (read_rows, rows_text),
    "coefficients": (read_coefficients, coefficients_text),
}
DEEP = {
    "lists": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "closed lists": "[" * 500 + "]" * 500,
    "closed objects": '{"a":' * 60 + "1" + "}" * 60,
    "in a field": json.dumps({**SHAPE, "schema": "oomguard.rows/1"})[:-1]
    + ', "x": '
    + "[" * 5000
    + "]" * 5000
    + "}",
}


@pytest.mark.parametrize("name", READERS)
def test_byte_order_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    read, text = READERS[name]
    path = tmp_path / "same.json"
    path.write_text(text(tmp_path))
    plain = read(path)
    path.write_bytes(BOM + path.read_bytes())
    assert read(path) == plain


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("deep", DEEP.values(), ids=list(DEEP))
def test_nesting_without_end_is_refused_in_one_line(name: str, deep: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text(deep + "\n")
    with pytest.raises(InputError) as caught:
        READERS[name][0](path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "plan --config {}",
        "estimate --config {}",
        "trace --config {}",
        "measure {}",
        "measure --config {}",
        "validate --rows {}",
        "validate --coefficients {}",
        "train --corpus x --config {}",
    ],
)
@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 900 + "]" * 900], ids=["open", "closed"])
def test_command_refuses_nested_json_in_one_line(line: str, deep: str, tmp_path: Path) -> None:
    path = tmp_path / "nested.json"
    path.write_text(deep)
    assert str(path) in mistake(*line.format(path).split())


def test_saved_run_with_nested_settings_is_refused_in_one_line(tmp_path: Path) -> None:
    for header in ("[" * 5000, json.dumps({"__metadata__": {"oomguard": "[" * 5000}})):
        text = header.encode()
        path = tmp_path / "run.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(InputError):
            open_run(path)


def test_config_with_a_byte_order_mark_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(BOM + json.dumps(SHAPE).encode())
    assert run("plan", "--config", path, "--memory", "1GB", "--device", "cpu-16gb")[0] == 0


def test_json_has_no_nan_and_says_where_it_breaks() -> None:
    for text, said in (
        ("[NaN]", "NaN is no number in JSON"),
        ("[-Infinity]", "-Infinity is no number in JSON"),
        ("[1,", "line 1 column 4"),
        ("", "line 1 column 1"),
        ("9" * 5000, "4300 digits"),
        ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "deep"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            parse_json(text)
        assert "\n" not in str(caught.value)
    assert parse_json("[" * DEEPEST + "]" * DEEPEST) is not None


def test_json_values_follow_one_another_on_lines_or_over_many() -> None:
    assert json_values('{"a": 1}\n{\n "a": 2\n}[3]') == [{"a": 1}, {"a": 2}, [3]]
    assert json_values(" \n ") == []
    with pytest.raises(ValueError, match="column"):
        json_values('{"a": 1} x')


def test_file_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("oomguard.files.reading.LARGEST_FILE_BYTES", 1000)
    assert LARGEST_FILE_BYTES > 1 << 20
    endless = tmp_path / "large"
    endless.write_bytes(b" " * 1001)
    for path in [endless, *([Path("/dev/zero")] if sys.platform != "win32" else [])]:
        with pytest.raises(InputError, match="is larger than 1000 B"):
            read_text(path, "config")
    endless.write_bytes(b" " * 1000)
    assert len(read_text(endless, "config")) == 1000


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "utf16.json"
    path.write_bytes(json.dumps(SHAPE).encode("utf-16"))
    with pytest.raises(InputError, match=r"config .*utf16\.json is not text in UTF-8"):
        ModelConfig.from_file(path)
