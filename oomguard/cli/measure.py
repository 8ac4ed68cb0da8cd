"""``oomguard measure``."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from oomguard.cli.options import (
    COUNT,
    MEMORY,
    POLICY,
    POLICY_HELP,
    chosen_model,
    every_parameter_but,
    model_options,
    number,
    refuse_beside,
    step_options,
    whole,
)
from oomguard.config.step import StepConfig
from oomguard.errors import InputError, MeasureError
from oomguard.files.writing import Output
from oomguard.rows import ROW_FILE, Row, is_row_file, printed_rows, read_rows
from oomguard.units import format_bytes, format_seconds

HELP = """Run a training step in a process of its own and keep what it peaked at.

\b
  oomguard measure --preset huge --batch 4 --grad-checkpoint every
  oomguard measure --case NAME                one of --list-cases
  oomguard measure train.py:build_step        a step of your own
  oomguard measure sweep.json --out rows.jsonl
  oomguard measure rows.jsonl                 show rows, also those of --json

Memory is read from step 2 on, the peak reset before each step: the median of --steps steps, and how far
apart they lie. "sequenced" is the same with MLX's memory limit at 0, where nothing runs ahead. A sweep can be
stopped at any moment; the same command goes on where it stopped. A step that dies is a row that says why.

FILE.py:FUNCTION is what oomguard trace takes: a function without arguments that returns (step, arguments),
(step, arguments, state) or (step, arguments, state, evaluate). Or it returns a callable without arguments that runs
one step and evaluates it.
"""


class _Command(click.Command):
    """Ends its help with the format of a sweep file, which only the help should have to import."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from oomguard.measure.sweep_file import FORMAT

        with formatter.section("Sweep files"):
            for paragraph in FORMAT.split("\n\n"):
                formatter.write_paragraph()
                formatter.write_text(paragraph)


@click.command(cls=_Command, help=HELP)
@click.argument("target", required=False)
@model_options
@click.option("--case", metavar="NAME", help="A named step (--list-cases).")
@click.option("--list-cases", is_flag=True, help="The named steps.")
@click.option("--batch", type=COUNT, default="1", show_default=True, help="Sequences of a micro-batch.")
@click.option(
    "--grad-checkpoint",
    type=POLICY,
    default="none",
    show_default=True,
    help=POLICY_HELP,
)
@click.option("--accumulate", type=COUNT, default="1", show_default=True, help="Micro-batches of an update.")
@click.option("--one-graph", is_flag=True, help="Accumulate without evaluating each micro-batch.")
@step_options
@click.option("--steps", type=whole(1, 1000), default="3", show_default=True, help="Measured steps.")
@click.option("--no-sequenced", is_flag=True, help="Leave out the steps with the memory limit at 0.")
@click.option(
    "--timeout",
    type=number(0.1),
    default="900",
    show_default=True,
    help="Seconds a child may take.",
)
@click.option(
    "--memory",
    type=MEMORY,
    help="What a child may hold: 4GB, 512MiB.  [default: what is free when it starts]",
)
@click.option("--force", is_flag=True, help="Run a step even if it cannot fit.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Row file to add to, or a new one.  [default for a sweep: NAME.rows.jsonl]",
)
@click.option("--retry", is_flag=True, help="Measure failed rows of the file again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(target: str | None, list_cases: bool, as_json: bool, **options: Any) -> int:
    if list_cases:
        refuse_beside(every_parameter_but("list_cases", "as_json"), "--list-cases runs nothing")
        return _list_cases(as_json)
    if target is not None and is_row_file(target):
        refuse_beside(every_parameter_but("target", "as_json"), f"{target} holds measured rows, to be shown")
        return _show(read_rows(target)[1], as_json)
    return _run(target, as_json, options)


def _run(target: str | None, as_json: bool, options: dict[str, Any]) -> int:
    from oomguard.measure.blas import missing_blas_hint
    from oomguard.measure.collect import check_task, measure_task
    from oomguard.measure.task import Settings

    settings = Settings(
        steps=options["steps"],
        sequenced=not options["no_sequenced"],
        timeout_seconds=options["timeout"],
        max_memory_bytes=options["memory"],
        force=options["force"],
    )
    tasks, note, out = _what_to_run(target, options)
    if out is not None:
        Output(out, ROW_FILE, "--out", _inputs(target, options)).check()
    hint = missing_blas_hint()
    if hint:
        click.echo(f"note: {hint}", err=True)
    if out is not None:
        return _sweep(tasks, note, out, settings, options["retry"], as_json)
    refuse_beside(("retry",), "without --out there are no failed rows to measure again")
    check_task(tasks[0])
    with _status(tasks[0].label) as tell:
        row = measure_task(tasks[0], settings, tell)
    return _show([row], as_json)


def _what_to_run(target: str | None, options: dict[str, Any]) -> tuple[Sequence[Any], str, Path | None]:
    """The tasks, a note for a new row file, and the row file (None: only print)."""
    from oomguard.measure.sweep_file import read_sweep
    from oomguard.measure.task import Task

    out: Path | None = options["out"]
    if target is not None and _is_function(target):
        refuse_beside(CHOOSES, f"{target} says what to run")
        return [Task(function=target)], "", out
    if target is not None:
        refuse_beside(CHOOSES, f"{target} says what to run")
        sweep = read_sweep(target)
        return sweep.tasks, sweep.note, out or Path(f"{Path(target).stem}.rows.jsonl")
    if options["case"] is not None:
        refuse_beside(CHOOSES - {"case"}, "--case says what to run")
        return [Task(case=options["case"])], "", out
    if options["preset"] is None and options["config"] is None:
        raise InputError(
            "nothing to measure: give --preset, --config, --case, FILE.py:FUNCTION or a sweep file"
        )
    model = chosen_model(options["preset"], options["config"])
    if options["accumulate"] == 1:
        refuse_beside(("one_graph",), "--accumulate 1 is one micro-batch, in one graph as it is")
    step = StepConfig(
        batch=options["batch"],
        seq_len=options["ctx_tokens"] or model.context,
        accumulate=options["accumulate"],
        evaluate_micro_steps=not options["one_graph"],
        checkpoint=options["grad_checkpoint"],
        dtype=options["dtype"],
        optimizer=options["optimizer"],
        clip_norm=options["clip"],
        compiled=options["compiled"],
    )
    return [Task(model=model, step=step)], "", out


def _inputs(target: str | None, options: dict[str, Any]) -> dict[str, Path]:
    """The files that say what is measured, by what each is."""
    inputs = {}
    if target is not None and _is_function(target):
        inputs["the script that is measured"] = Path(target.rpartition(":")[0])
    elif target is not None:
        inputs["the sweep file"] = Path(target)
    if options["config"] is not None:
        inputs["what --config reads"] = options["config"]
    return inputs


def _is_function(target: str) -> bool:
    return ".py:" in target or (target.endswith(".py") and not target.endswith(".jsonl"))


STEP = ("batch", "grad_checkpoint", "accumulate", "one_graph", "ctx_tokens", "optimizer", "dtype", "clip")
CHOOSES = frozenset(("preset", "config", "case", "compiled", *STEP))


def _rows_of(tasks: Sequence[Any], out: Path) -> int:
    """How many of the tasks have a row in the file."""
    stored = {row.key for row in read_rows(out)[1]} if out.exists() and out.stat().st_size else set()
    return sum(task.key in stored for task in tasks)


def _sweep(tasks: Sequence[Any], note: str, out: Path, settings: Any, retry: bool, as_json: bool) -> int:
    from oomguard.measure.collect import sweep

    rows: list[Row] = []
    fresh: Counter[str] = Counter()
    with _progress(len(tasks)) as bar:
        try:
            for step in sweep(
                tasks, out, settings, command=_command_line(), note=note, retry=retry, on_progress=bar.doing
            ):
                rows.append(step.row)
                fresh["kept" if step.kept else step.row.status] += 1
                bar.finished(step)
        except KeyboardInterrupt:
            bar.stop()
            kept = _rows_of(tasks, out)  # one more than were reported, if it came just as a row was stored
            click.echo(
                f"stopped: {kept} of {len(tasks)} rows are in {out}; the same command goes on", err=True
            )
            raise
        except MeasureError:
            bar.stop()
            raise
    click.echo(
        f"{out}: {fresh['ok']} measured, {fresh['failed']} failed, {fresh['kept']} were there already",
        err=True,
    )
    return _show(rows, as_json)


def _command_line() -> str:
    return shlex.join(["oomguard", *sys.argv[1:]])


def _show(rows: Sequence[Row], as_json: bool) -> int:
    """Prints rows; 1 when one of them failed."""
    if as_json:
        click.echo(json.dumps(printed_rows(rows), indent=1))
    else:
        from rich.console import Console

        from oomguard.measure.table import rows_table

        width = None if sys.stdout.isatty() else 160
        console = Console(width=width, highlight=False)
        with console.capture() as shown:  # rich ends the process itself, with 1, where nobody reads any more
            console.print(rows_table(rows, console.width))
        click.echo(shown.get(), nl=False)
    return 1 if any(row.status == "failed" for row in rows) else 0


def _list_cases(as_json: bool) -> int:
    from oomguard.model.cases import CASES

    if as_json:
        click.echo(json.dumps({name: case.about for name, case in CASES.items()}, indent=1))
        return 0
    width = max(map(len, CASES))
    for name, case in CASES.items():
        click.echo(f"{name:{width}}  {case.about}")
    return 0


class _Lines:
    """Progress where nobody looks at a terminal: one line a finished row."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        pass

    def doing(self, task: Any, what: str) -> None:
        pass

    def finished(self, step: Any) -> None:
        if not step.kept:
            click.echo(
                f"[{step.done}/{step.total}] {_result(step.row, step.task)}{_time_left(step)}", err=True
            )


class _Bar(_Lines):
    """A progress bar on stderr with what runs and the time left."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
        )
        self._id = self._progress.add_task("", total=total, left="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def stop(self) -> None:
        self._progress.stop()

    def doing(self, task: Any, what: str) -> None:
        self._progress.update(self._id, description=f"{task.label}: {what}")

    def finished(self, step: Any) -> None:
        self._progress.update(self._id, completed=step.done, left=_time_left(step).strip(", "))
        if not step.kept:
            self._progress.console.print(_result(step.row, step.task), markup=False, highlight=False)


def _progress(total: int) -> _Lines:
    return _Bar(total) if sys.stderr.isatty() else _Lines()


def _result(row: Row, task: Any) -> str:
    if row.status == "failed":
        return f"{task.label}: failed, {row.reason}"
    assert row.peak_bytes is not None
    return f"{task.label}: {format_bytes(row.peak_bytes)}"


def _time_left(step: Any) -> str:
    if step.done == step.total:
        return ""
    return f", {format_seconds(step.seconds_left)} left" if step.seconds_left != float("inf") else ""


class _status:
    """One line on a terminal that says what the child does; nothing elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._live: Any = None

    def __enter__(self) -> Callable[[str], None] | None:
        if not sys.stderr.isatty():
            return None
        from rich.console import Console

        self._live = Console(stderr=True).status(f"{self._label}: starting")
        self._live.start()
        return lambda what: self._live.update(f"{self._label}: {what}")

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
