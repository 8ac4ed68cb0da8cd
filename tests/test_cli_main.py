"""The command line itself: exit statuses, one clear line for a mistake, help that fits a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from oomguard.cli import main as command_line
from oomguard.cli.main import COMMANDS, main
from oomguard.errors import InputError, MeasureError

Raises = Callable[[], object]


def oomguard(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "oomguard", *args], capture_output=True, text=True, timeout=120, **options
    )


def outcome(*args: str) -> int | str | None:
    """The exit status of the command line, run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    return caught.value.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Puts a function in the place of the command ``plan``."""

    def put(run: Callable[[], object]) -> None:
        made = click.Command("plan", callback=run)
        monkeypatch.setattr(command_line.LazyGroup, "get_command", lambda *_: made)

    return put


def raises(error: BaseException) -> Callable[[], object]:
    def run() -> object:
        raise error

    return run


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_listed_has_help_in_80_columns(name: str, option: str) -> None:
    shown = oomguard(name, option)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: oomguard {name} ")
    assert "Traceback" not in shown.stdout
    assert [line for line in shown.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_option_in_one_line(name: str) -> None:
    one_line(oomguard(name, "--no-such-option"), rf"^oomguard {name}: no such option '?--no-such-option")


def test_help_lists_every_command_each_on_one_line() -> None:
    shown = oomguard("--help").stdout
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE)
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    for mentioned in ("Exit status: 0", "_OOMGUARD_COMPLETE", "NO_COLOR"):
        assert mentioned in shown


def test_alone_it_shows_the_help_and_says_by_its_status_that_nothing_was_asked() -> None:
    alone = oomguard()
    assert (alone.returncode, alone.stderr) == (2, "")
    assert alone.stdout == oomguard("--help").stdout


def test_version_names_what_a_report_needs() -> None:
    shown = oomguard("--version")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.fullmatch(r"oomguard \S+ \(mlx \S+, python \S+\)\n", shown.stdout)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("pln",), "^oomguard: no command 'pln'; did you mean plan\\?$"),
        (("Validat",), "^oomguard: no command 'Validat'; did you mean validate"),
        (("xyz",), "^oomguard: no command 'xyz'; the commands are plan, estimate, trace, measure, "),
        (("--colour",), r"^oomguard: no such option '?--colour'? \(oomguard --help lists the options\)$"),
        (("--version=3",), "^oomguard: option '--version' does not take a value"),
    ],
)
def test_mistake_on_the_command_line_is_one_line_and_status_2(args: tuple[str, ...], said: str) -> None:
    one_line(oomguard(*args), said)


def one_line(ran: subprocess.CompletedProcess[str], said: str) -> None:
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1
    assert re.search(said, ran.stderr), ran.stderr


@pytest.mark.parametrize(
    ("returned", "status"), [(None, 0), (0, 0), (1, 1), (2, 2), ("a text", 0), (object(), 0)]
)
def test_what_a_command_returns_is_the_exit_status(
    returned: object, status: int, command: Callable[[Raises], None]
) -> None:
    command(lambda: returned)
    assert outcome("plan") == status


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("batch 0 is no batch"), 2, "oomguard: batch 0 is no batch\n"),
        (MeasureError("the child was killed"), 2, "oomguard: the child was killed\n"),
        (
            click.UsageError("Missing option '--preset'. Choose from:\n\ttiny,\n\tsmall."),
            2,
            "oomguard plan: missing option '--preset'. Choose from: tiny, small"
            " (oomguard plan --help lists the options)\n",
        ),
        (click.FileError("a.txt", "is a folder"), 2, "oomguard: Could not open file 'a.txt': is a folder\n"),
        (PermissionError(13, "Permission denied", "a.txt"), 2, "oomguard: Permission denied: a.txt\n"),
        (OSError(28, "No space left on device"), 2, "oomguard: No space left on device\n"),
        (
            ImportError("libmlx.so: not found", name="mlx.core"),
            2,
            "oomguard: cannot import mlx.core: libmlx.so: not found\n",
        ),
        (click.Abort(), 130, "stopped\n"),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
        (click.exceptions.Exit(1), 1, ""),
        (SystemExit(1), 1, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_error_becomes_a_line_and_a_status(
    error: BaseException,
    status: int,
    said: str,
    command: Callable[[Raises], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raises(error))
    assert outcome("plan") == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), AssertionError(), ImportError("x", name="oomguard.plan"), OSError("odd")]
)
def test_bug_keeps_its_traceback_and_is_never_taken_for_an_answer(
    error: Exception, command: Callable[[Raises], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raises(error))
    assert outcome("plan") == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "this is a bug in oomguard" in shown.splitlines()[-1]


def test_output_to_a_closed_pipe_ends_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "oomguard", "--help"], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_to_a_full_disk_is_one_line_and_status_2() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "oomguard", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr) == (2, "oomguard: No space left on device\n")


SLOW = """
import sys, time, click
from oomguard.cli import main as command_line
def wait():
    print("started", flush=True)
    time.sleep(60)
command_line.LazyGroup.get_command = lambda *_: click.Command("plan", callback=wait)
command_line.main(["plan"])
"""


def test_ctrl_c_stops_with_one_word_and_status_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said.strip()) == (130, "stopped")


COLOURED = """
import click
from oomguard.cli import main as command_line
show = lambda: click.secho("fits", fg="green")
command_line.LazyGroup.get_command = lambda *_: click.Command("plan", callback=show)
command_line.main(["plan"])
"""


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_respected_on_a_terminal(no_color: str, coloured: bool) -> None:
    assert (b"\x1b[" in on_terminal(COLOURED, {"NO_COLOR": no_color})) is coloured


def on_terminal(code: str, variables: dict[str, str]) -> bytes:
    """What a program prints when its output is a terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", **variables}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    printed = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not piece:
            break
        printed += piece
    os.close(ours)
    assert process.wait(30) == 0, printed
    return printed


def test_sign_that_a_terminal_cannot_show_is_no_error() -> None:
    code = COLOURED.replace('click.secho("fits", fg="green")', 'print("≤ 3 GiB ✓")')
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (ran.returncode, ran.stdout) == (0, "? 3 GiB ?\n")


def test_completion_lists_commands_without_importing_them() -> None:
    env = {"_OOMGUARD_COMPLETE": "bash_complete", "COMP_WORDS": "oomguard pl", "COMP_CWORD": "1"}
    completed = oomguard(env={**os.environ, **env})
    assert (completed.returncode, completed.stdout) == (0, "plain,plan\n")
    code = (
        "import sys; from oomguard.cli.main import cli; import click;"
        "cli.shell_complete(click.Context(cli), ''); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert "oomguard.cli.main" in loaded
    assert not [name for name in loaded if name in {f"oomguard.cli.{each}" for each in COMMANDS}]


def test_completion_of_a_shell_names_the_program() -> None:
    for shell in ("bash_source", "zsh_source", "fish_source"):
        script = oomguard(env={**os.environ, "_OOMGUARD_COMPLETE": shell})
        assert script.returncode == 0, script.stderr
        assert "oomguard" in script.stdout


def test_help_costs_no_heavy_import() -> None:
    code = (
        "import sys\ntry:\n from oomguard.cli.main import main; main(['--help'])\n"
        "except SystemExit: print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert "click" in loaded
    assert not {"mlx", "numpy", "scipy", "rich", "pydantic", "psutil"} & set(loaded)
