"""Streams that are closed, full or not read: none of them looks like an answer, in any command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.cli.main import COMMANDS, NOT_READ

PROGRAM = f'"{sys.executable}" -m oomguard'
CORPUS = Path(__file__)
STEP = "--preset tiny --ctx 16 --steps 1"
ANSWERS = {
    "plan": "plan --preset tiny --memory 1GB",
    "estimate": "estimate --preset tiny",
    "trace": "trace --preset tiny",
    "measure": f"measure {STEP} --no-sequenced",
    "measure --json": f"measure {STEP} --no-sequenced --json",
    "calibrate": "calibrate --forget",
    "validate": "validate --backend metal",
    "train": f'train {STEP} --memory 1GB --corpus "{CORPUS}" --no-learn',
}


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a line as typed; its status is that of the last command."""
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


def first_of_pipe(line: str) -> subprocess.CompletedProcess[str]:
    """Runs a pipe; the status is that of the first command."""
    return shell(f"{line}; exit ${{PIPESTATUS[0]}}")


def test_every_command_has_an_answer_here() -> None:
    assert {name.split()[0] for name in ANSWERS} == set(COMMANDS)


@pytest.mark.parametrize(
    "line", ["plan", "plan --preset tiny", *ANSWERS.values(), "--help", "--version", "plan --help"]
)
def test_closed_stdout_is_no_answer(line: str) -> None:
    ran = shell(f"{PROGRAM} {line} >&-")
    assert ran.returncode == NOT_READ
    assert ran.stderr.count("\n") == 1
    assert "stdout is closed" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", ANSWERS.values(), ids=list(ANSWERS))
def test_pipe_that_nobody_reads_is_no_answer(line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        ran = subprocess.run(
            ["bash", "-c", f"exec {PROGRAM} {line}"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert ran.returncode == NOT_READ
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_measure_into_a_command_that_reads_nothing_is_no_answer() -> None:
    ran = first_of_pipe(f"{PROGRAM} measure --preset tiny --ctx 16 --steps 1 --no-sequenced | true")
    assert ran.returncode == NOT_READ


@pytest.mark.slow
@pytest.mark.parametrize("line", ANSWERS.values(), ids=list(ANSWERS))
def test_closed_stderr_leaves_the_answer(line: str) -> None:
    ran = shell(f"{PROGRAM} {line} 2>&-")
    assert ran.returncode == 0
    assert ran.stdout


@pytest.mark.parametrize("line", ["plan --nope", "plan --preset nope", "trace nope.py:f"])
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", "2> >(true)", "2>&- >&-"])
def test_mistake_that_cannot_be_said_keeps_its_status(line: str, stream: str) -> None:
    ran = shell(f"{PROGRAM} {line} {stream}")
    assert ran.returncode == (NOT_READ if ">&- >&-" in stream or stream.endswith(" >&-") else 2)
    assert ran.stdout == ""


def test_closed_stdin_changes_nothing() -> None:
    assert shell(f"{PROGRAM} plan --preset tiny --memory 1GB <&-").returncode == 0


def test_file_that_is_written_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ran = shell(f'{PROGRAM} trace --preset tiny --html "{page}" 2>&- <&-')
    assert ran.returncode == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "page: " not in page.read_text()[:200]


def test_full_disk_under_stdout_is_one_line_in_every_form() -> None:
    for line in ("plan --preset tiny", "plan --preset tiny --json", "--help"):
        ran = shell(f"{PROGRAM} {line} >/dev/full")
        assert (ran.returncode, ran.stderr) == (2, "oomguard: No space left on device\n")


def test_status_for_an_answer_nobody_reads_is_documented() -> None:
    shown = " ".join(shell(f"{PROGRAM} --help").stdout.split())
    assert f"{NOT_READ} the answer went nowhere (a closed stdout or pipe)" in shown


@pytest.mark.parametrize(
    "line",
    [
        "validate --coefficients $'a\\nb.json'",
        "trace $'a\\nb.py:f'",
        "plan --config $'\\e[31m.json'",
        "$'a\\nb'",
    ],
)
def test_name_with_a_newline_or_an_escape_is_shown_in_one_line(line: str, tmp_path: Path) -> None:
    ran = shell(f"cd {tmp_path}; {PROGRAM} {line}")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "\x1b" not in ran.stderr


def test_printed_json_is_whole_where_stderr_is_closed() -> None:
    ran = shell(f"{PROGRAM} plan --preset tiny --memory 1GB --json 2>&-")
    assert json.loads(ran.stdout)["schema"] == "oomguard.plan/1"
