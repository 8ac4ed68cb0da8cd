"""An option that would mean nothing is refused with what leaves it nothing to say; none is passed over in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_rows import made_up_rows, mistake, run, write_rows

ROWS = "rows.jsonl"
SWEEP = "sweep.json"
TEXT = "corpus.txt"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / ROWS, made_up_rows(3))
    (tmp_path / SWEEP).write_text(json.dumps([{"preset": "tiny", "batch": 1}]))
    (tmp_path / TEXT).write_text("some text " * 100)
    return tmp_path


SHOWING = (
    "--steps 2",
    "--no-sequenced",
    "--timeout 5",
    "--memory 1GB",
    "--force",
    "--out x.jsonl",
    "--retry",
)
STEP = (
    "--preset tiny",
    "--config x.json",
    "--batch 2",
    "--grad-checkpoint every",
    "--accumulate 2",
    "--one-graph",
    "--ctx 8",
    "--optimizer sgd",
    "--dtype bf16",
    "--clip",
    "--no-clip",
    "--compile",
    "--no-compile",
)
LINES = [
    *(
        (f"measure {ROWS} {option}", f"{ROWS} holds measured rows, to be shown")
        for option in (*SHOWING, *STEP)
    ),
    *((f"measure --list-cases {option}", "--list-cases runs nothing") for option in (*SHOWING, *STEP, ROWS)),
    *((f"measure {SWEEP} {option}", f"{SWEEP} says what to run") for option in STEP),
    *((f"measure own.py:f {option}", "own.py:f says what to run") for option in STEP),
    *((f"measure --case mlp {option}", "--case says what to run") for option in STEP),
    ("measure --preset tiny --retry", "without --out there are no failed rows to measure again"),
    ("measure --case mlp --retry", "without --out there are no failed rows to measure again"),
    ("measure --preset tiny --one-graph", "--accumulate 1 is one micro-batch"),
    ("measure --preset tiny --config x.json", "both name a model"),
    *((f"trace --case mlp {option}", "--case mlp is a step already") for option in STEP[2:5]),
    *((f"trace own.py:f {option}", "own.py:f is a step already") for option in STEP[6:11]),
    ("trace --preset tiny --sequenced --memory-limit 1GB", "--sequenced is --memory-limit 0"),
    ("validate --engine trace --coefficients x.json", "--engine trace simulates and fits nothing"),
    (f"validate --engine trace --backend metal --rows {ROWS}", "--backend metal traces the shipped rows"),
    ("calibrate --forget --minutes 1", "--forget measures nothing"),
    (f"train --preset tiny --corpus {TEXT} --clip-norm 2", "without --clip no gradient is clipped"),
    (f"train --preset tiny --corpus {TEXT} --val-fraction 0 --val-every 2", "leaves nothing to validate on"),
    (
        f"train --preset tiny --corpus {TEXT} --val-fraction 0 --val-batches 2",
        "leaves nothing to validate on",
    ),
    (f"train --preset tiny --corpus {TEXT} --optimizer sgd --weight-decay 0.1", "sgd has no weight decay"),
    (f"train --preset tiny --corpus {TEXT} --optimizer adam --weight-decay 0.1", "adam has no weight decay"),
    (f"train --preset tiny --corpus {TEXT} --save-every 2", "--save-every: where to? Give --out"),
]


@pytest.mark.parametrize(("line", "said"), LINES, ids=[line for line, _ in LINES])
def test_option_that_means_nothing_is_refused(line: str, said: str) -> None:
    assert said in mistake(*line.split())


@pytest.mark.parametrize(
    ("option", "named"), [("--no-compile", "--compile/--no-compile"), ("--retry", "--retry")]
)
def test_refused_option_is_named_as_the_help_names_it(option: str, named: str) -> None:
    assert f"; {named} cannot stand beside it" in mistake("measure", ROWS, option)


def test_option_at_its_default_that_was_not_given_is_no_mistake() -> None:
    assert run("measure", ROWS)[0] == 0
    assert run("measure", "--list-cases", "--json")[0] == 0
    assert run("measure", ROWS, "--json")[0] == 0


def test_traced_rows_of_another_backend_are_no_rows_of_the_cpu() -> None:
    metal = [row.model_copy(update={"backend": "metal"}) for row in made_up_rows(2)]
    write_rows(Path("metal.jsonl"), metal)
    assert "metal.jsonl holds no rows measured on the cpu" in mistake(
        "validate", "--engine", "trace", "--rows", "metal.jsonl"
    )
