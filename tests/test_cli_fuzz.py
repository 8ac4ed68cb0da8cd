"""Random command lines over the click tree: a small part of ``benchmarks/fuzz_commands.py``, always the same lines."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from oomguard.cli.main import COMMANDS, cli

SEED = 2026
LINES = 160


@pytest.fixture(scope="module")
def fuzz(project: Path) -> Iterator[ModuleType]:
    """The benchmark, which lies beside the package and not in it; the processes it starts find it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(project / "benchmarks"))
        yield importlib.import_module("fuzz_commands")


@pytest.mark.slow
def test_random_lines_end_with_an_answer_or_one_line_and_contradict_nothing(fuzz: ModuleType) -> None:
    found = list(fuzz.fuzz(LINES, SEED))
    wrong = [f"oomguard {shlex.join(each.args)}: {'; '.join(each.texts)}" for each in found if each.texts]
    assert wrong == []
    statuses = {(ran.command, ran.status) for each in found for ran in each.runs}
    for command in ("plan", "estimate", "trace", "measure", "train"):
        assert {(command, 0), (command, 2)} <= statuses  # neither all refused nor all let through


def test_random_lines_reach_every_option_of_every_command(fuzz: ModuleType) -> None:
    lines = [fuzz.line(SEED, number) for number in range(2000)]
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        words = {word.partition("=")[0] for line in lines if line[:1] == [name] for word in line}
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert {*parameter.opts, *parameter.secondary_opts} <= words, (name, parameter.name)


def test_a_line_is_the_same_whenever_it_is_drawn(fuzz: ModuleType) -> None:
    assert [fuzz.line(SEED, number) for number in range(50)] == [
        fuzz.line(SEED, number) for number in range(50)
    ]
    assert fuzz.line(SEED, 3) != fuzz.line(SEED + 1, 3)


PLAN: dict[str, Any] = {
    "schema": "oomguard.plan/1",
    "device": {"budget_bytes": 100},
    "choice": None,
    "candidates": [],
}
CANDIDATE: dict[str, Any] = {
    "batch": 4,
    "fits": True,
    "low_bytes": 5,
    "peak_bytes": 9,
    "high_bytes": 12,
    "breakdown": {"weights": 9},
}
FITS = "Fits: batch 4, no recompute"
ONE_LINE = "oomguard: no\n"
TRACEBACK = "Traceback (most recent call last):\n  File\nKeyError: 3\n"


@pytest.mark.parametrize(
    ("args", "status", "out", "err", "said"),
    [
        ("plan", None, "", "", "did not end within 20 s"),
        ("plan", 70, "", TRACEBACK + "oomguard: this is a bug", "a traceback: KeyError: 3"),
        ("plan", 70, "", "", "status 70"),
        ("plan", -9, "", "", "status -9"),
        ("plan", 130, "", "stopped\n", "stopped, and nobody did"),
        ("plan", 2, "", "", "status 2 without a line that says why"),
        ("plan", 2, "", "a\noomguard: b\n", "a mistake in 2 lines: a"),
        ("plan", 2, "an answer", ONE_LINE, "an answer on stdout beside status 2"),
        ("plan", 2, "", "oomguard: x: Input should be 3\n", "a sentence of pydantic's"),
        ("plan --json", 0, "{", "", "--json is not JSON"),
        ("plan --json", 0, json.dumps(PLAN), "", "status 0 beside a choice of None"),
        (
            "plan --json",
            1,
            json.dumps({**PLAN, "choice": {**CANDIDATE, "fits": False}}),
            "",
            "status 1 beside a choice of 4",
        ),
        (
            "plan --json",
            0,
            json.dumps({**PLAN, "choice": {**CANDIDATE, "breakdown": {"weights": 12, "window": -3}}}),
            "",
            "an item of -3 bytes",
        ),
        (
            "plan --json",
            0,
            json.dumps({**PLAN, "choice": {**CANDIDATE, "breakdown": {}}}),
            "",
            "a breakdown that sums to 0 of 9",
        ),
    ],
)
def test_what_is_wrong_with_an_ending_is_seen(
    args: str, status: int | None, out: str, err: str, said: str, fuzz: ModuleType
) -> None:
    ran = fuzz.Ran(args.split(), status, out, err, 0.1, False)
    assert any(text.startswith(said) for text in fuzz.problems(ran)), list(fuzz.problems(ran))


@pytest.mark.parametrize(
    ("text", "status", "value", "said"),
    [
        (FITS, 0, {"choice": None}, f"{FITS!r} beside a choice of None"),
        ("Does not fit: no", 0, {"choice": CANDIDATE}, "'Does not fit: no' beside a choice of 4"),
        ("Fits: batch 3\n  peak 9 B", 0, {"choice": CANDIDATE}, "'Fits: batch 3' beside batch 4"),
        (FITS, 0, {"choice": CANDIDATE}, "the peak 9 B is not in the text"),
        ("", 1, {"choice": CANDIDATE}, "status 1 as text and 0 as JSON"),
    ],
)
def test_contradiction_of_text_and_json_is_seen(
    text: str, status: int, value: dict[str, Any], said: str, fuzz: ModuleType
) -> None:
    one = fuzz.Ran(["plan"], status, text, "", 0.1, False)
    other = fuzz.Ran(["plan", "--json"], 0, json.dumps(value), "", 0.1, False)
    assert list(fuzz.contradictions(one, other)) == [said]
