"""The command line: one lazily imported file a command, so that ``plan`` never pays for what ``trace`` needs."""

from __future__ import annotations

import importlib
import sys

import click

from oomguard.errors import OomguardError

COMMANDS = {
    "plan": "oomguard.cli.plan",
    "estimate": "oomguard.cli.estimate",
    "trace": "oomguard.cli.trace",
    "measure": "oomguard.cli.measure",
    "calibrate": "oomguard.cli.calibrate",
    "validate": "oomguard.cli.validate",
    "train": "oomguard.cli.train",
}
SHORT_HELP = {
    "plan": "The fastest setting of a training step that fits this machine.",
    "estimate": "What one configuration holds, phase by phase.",
    "trace": "The peak of any MLX step, simulated without running it.",
    "measure": "Run one step, or a sweep, in subprocesses; keep what it peaked at.",
    "calibrate": "Measure and fit on this machine; used from then on.",
    "validate": "Predicted beside measured, for every shipped row.",
    "train": "Train the preset GPT with the setting the planner picks.",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is run, not when the group is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=2)
            if near:
                raise click.UsageError(f"no command {args[0]!r}; did you mean {' or '.join(near)}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SHORT_HELP[name]) for name in COMMANDS])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oomguard", prog_name="oomguard")
def cli() -> None:
    """Will this MLX training step fit this machine, and if not, what is the cheapest change that makes it fit?

    \b
    Exit status: 0 it fits, 1 nothing fits (or a bound is missed), 2 wrong usage or input.
    """


def main(args: list[str] | None = None) -> None:
    """Runs the command line; an error made for the user becomes one line on stderr and status 2."""
    try:
        status = cli.main(args=args, standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except OomguardError as error:
        click.echo(f"oomguard: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)
