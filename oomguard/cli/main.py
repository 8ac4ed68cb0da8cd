"""The command line: one file a command, imported when it runs, so ``plan`` never pays for ``trace``."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from oomguard.errors import InputError, OomguardError, OwnMemoryError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "oomguard"
COMPLETE_VARIABLE = "_OOMGUARD_COMPLETE"

WRONG_INPUT = 2
BUG = 70  # EX_SOFTWARE: never to be mistaken for 1, which means that nothing fits
INTERRUPTED = 130
NOT_READ = 141  # as a shell calls the end by SIGPIPE: nobody reads the answer, so there is none

# Each is ``command`` in the module of its name, ``oomguard.cli.plan`` and so on.
COMMANDS = {
    "plan": "The fastest setting of a training step that fits this machine.",
    "estimate": "What one configuration holds, phase by phase.",
    "trace": "The peak of any MLX step, simulated without running it.",
    "measure": "Run a step or a sweep in subprocesses and keep the peaks.",
    "calibrate": "Measure and fit on this machine; used from then on.",
    "validate": "Predicted beside measured, for every shipped row.",
    "train": "Train the preset GPT with the setting the planner picks.",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command runs, not when the commands are listed or completed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"oomguard.cli.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise InputError(f"no command {args[0]!r}; {_near_commands(args[0])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def _near_commands(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name.lower(), COMMANDS, n=2)
    return f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(COMMANDS)}"


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        mlx = version("mlx")
    except PackageNotFoundError:
        mlx = "not installed"
    click.echo(f"{PROGRAM} {version(PROGRAM)} (mlx {mlx}, python {sys.version.split()[0]})")
    ctx.exit()


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
    Exit status: 0 it fits, 1 nothing fits (or a bound is missed), 2 wrong usage
    or input, 130 stopped by Ctrl-C, 141 the answer went nowhere (a closed
    stdout or pipe).
    oomguard itself ends with status 2 before it holds more than 50% of the memory
    that was free when it began; OOMGUARD_OWN_MEMORY=16GB allows another size.
    Tab completion: eval "$(_OOMGUARD_COMPLETE=bash_source oomguard)", or
    zsh_source or fish_source. NO_COLOR is respected.""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of oomguard, MLX and Python.",
)
@click.pass_context
def cli(ctx: click.Context) -> int | None:
    """Will this MLX training step fit this machine, and if not, what is the
    cheapest change that makes it fit?
    """
    if ctx.invoked_subcommand is not None:
        return None
    click.echo(ctx.get_help())
    return WRONG_INPUT


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    What a command returns is the exit status (nothing is 0). An error made for the user becomes one line on
    stderr and status 2; an error nobody expected keeps its traceback and gets a status of its own.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them costs 20 ms
    can_answer = _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a sign gets a ? for it
        sys.stdout.reconfigure(errors="replace")
    given = list(sys.argv[1:] if args is None else args)
    if not can_answer:
        _say(
            f"{PROGRAM}: stdout is closed, so there is nowhere to answer to; give it a place, such as >/dev/null"
        )
        sys.exit(NOT_READ)
    try:
        status = _run(given)
        sys.stdout.flush()
    except Exception as error:
        status = _explain(error, _command_path(given))
        if isinstance(error, OwnMemoryError):
            os._exit(status)  # what is held goes back at once; giving back millions of arrays takes seconds
    except KeyboardInterrupt:
        _say("\nstopped")
        status = INTERRUPTED
    _settle(sys.stdout)
    _settle(sys.stderr)
    sys.exit(status)


def _open_streams() -> bool:
    """Gives a process that was started without stdin, stdout or stderr the null device in their place.

    Else the next file opened would get the number of the missing one, and what is said would be written into it.

    Returns:
        Whether there was a stdout.
    """
    had_stdout = sys.stdout is not None
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    return had_stdout


def _run(args: list[str]) -> int:
    instruction = os.environ.get(COMPLETE_VARIABLE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    try:
        color = False if os.environ.get("NO_COLOR") else None
        with cli.make_context(PROGRAM, args, color=color) as ctx, _own_memory(args):
            status: Any = cli.invoke(ctx)
    except click.exceptions.Exit as error:
        return error.exit_code
    return status if isinstance(status, int) else 0


def _own_memory(args: list[str]) -> contextlib.AbstractContextManager[None]:
    """Watches what oomguard itself holds; what a training run holds is the run's, and has a guard."""
    from oomguard.machine.own_memory import watched

    return contextlib.nullcontext() if args[:1] == ["train"] else watched()


def _command_path(args: list[str]) -> str:
    return f"{PROGRAM} {args[0]}" if args and args[0] in COMMANDS else PROGRAM


def _explain(error: Exception, command: str = PROGRAM) -> int:
    """Says on stderr what went wrong, in one line where the user can act on it; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        return NOT_READ
    if isinstance(error, click.Abort):
        _say("stopped")
        return INTERRUPTED
    line = _one_line(error, command)
    status = WRONG_INPUT
    if line is None:
        import traceback

        _say("".join(traceback.format_exception(error)).rstrip("\n"))
        line = f"{PROGRAM}: this is a bug in oomguard; please report it with the command and the lines above"
        status = BUG
    _settle(sys.stdout)
    _say(line)
    return status


def _one_line(error: Exception, command: str) -> str | None:
    """The line a user reads, or None for an error that only a programmer can mend."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else command
        text = " ".join(error.format_message().split()).rstrip(".")
        return f"{where}: {_printable(text[:1].lower() + text[1:])} ({where} --help lists the options)"
    if isinstance(error, click.ClickException):
        return f"{PROGRAM}: {_printable(' '.join(error.format_message().split()))}"
    if isinstance(error, OomguardError):
        return f"{PROGRAM}: {_printable(str(error))}"
    if isinstance(error, MemoryError):
        return f"{PROGRAM}: the system has no more memory for oomguard itself; ask for less at a time"
    if isinstance(error, OSError) and error.strerror:
        return f"{PROGRAM}: {error.strerror}" + (
            f": {_printable(str(error.filename))}" if error.filename else ""
        )
    if isinstance(error, ImportError) and not (error.name or PROGRAM).startswith(PROGRAM):
        return f"{PROGRAM}: cannot import {error.name}: {error}"
    return None


def _printable(text: str) -> str:
    """One line, whatever the names in it: a newline or an escape of a terminal is shown, not obeyed."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _say(line: str) -> None:
    """Writes to stderr; where nobody reads that either, the status alone says it."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _settle(stream: TextIO) -> None:
    """Flushes what can still be written; what cannot is dropped, so that the exit itself does not fail."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
