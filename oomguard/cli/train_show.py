"""What ``oomguard train`` prints: lines, a progress bar on a terminal, or one JSON object."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from oomguard.cli.options import wants_colour
from oomguard.errors import InputError
from oomguard.units import format_seconds

if TYPE_CHECKING:
    from oomguard.guard import Guard, Notice
    from oomguard.model.run_settings import RunSettings
    from oomguard.model.saving import SavedRun
    from oomguard.model.trainer import TrainResult, Update
    from oomguard.plan.planner import Plan

DONE, MISSED, STOPPED = 0, 1, 130
PIPE_LINES = 20


class Outlet:
    """A stream to people who may go away: what is written then is dropped, and ``lost`` says how it was noticed."""

    def __init__(self, stream: TextIO) -> None:
        self.lost: OSError | None = None
        self._stream = stream

    def write(self, text: str) -> int:
        self._unless_lost(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _unless_lost(self, do: Callable[[], object]) -> None:
        if self.lost is not None:
            return
        try:
            do()
        except OSError as error:
            self.lost = error
            self._drop_what_is_left()

    def _drop_what_is_left(self) -> None:
        """What is still buffered would fail again when the process ends; it goes nowhere instead."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class Show:
    """What a run prints: to stdout, or to stderr where stdout is for one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.notes: list[str] = []
        self._outlet = Outlet((sys.stderr if as_json else sys.stdout) or io.StringIO())
        self._print: Callable[[str], None] = lambda text: click.echo(text, file=self._file)

    @property
    def lost(self) -> OSError | None:
        """How it was noticed that nobody reads the output any more; None while somebody may."""
        return self._outlet.lost

    @property
    def _file(self) -> TextIO:
        return cast(TextIO, self._outlet)

    def nothing_fits(self, plan: Plan, model_option: str) -> int:
        if self.as_json:
            from oomguard.report.as_json import plan_json

            click.echo(json.dumps(plan_json(plan), indent=2))
        else:
            from oomguard.report.plan_text import plan_text

            click.echo(plan_text(plan, wants_colour(), model_option))
        return MISSED

    def opening(self, plan: Plan, saved: SavedRun | None, settings: RunSettings) -> None:
        from oomguard.report.train_text import opening_lines

        for line in opening_lines(plan):
            self._print(line)
        for warning in plan.warnings:
            self.note(warning)
        if saved is not None:
            from oomguard.model.run_settings import changes

            changed = ", ".join(changes(saved.settings, settings)) or "nothing changed"
            self._print(f"resumed {saved.path} at step {saved.step}: {changed}")
        if settings.step.dtype == "float16":
            self.note("small gradients become 0 in float16; bf16 takes the same memory and keeps them")
        from oomguard.measure.blas import missing_blas_hint

        if hint := missing_blas_hint():
            self.note(hint)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._print(f"note: {text}")

    def save_failed(self, error: InputError, instead: Path | None) -> None:
        then = "the run goes on, and is saved later" if instead is None else f"saved as {instead} instead"
        self.note(f"{error}; {then}")

    def notice(self, notice: Notice) -> None:
        self.note(notice.text)

    @contextmanager
    def progress(self, settings: RunSettings, first_step: int) -> Iterator[Callable[[Update], None]]:
        """Shows every update on a terminal, and about twenty lines elsewhere."""
        if self._outlet.isatty():
            with _bar(settings, first_step, self._file) as (on_update, print_above):
                plain, self._print = self._print, print_above
                try:
                    yield on_update
                finally:
                    self._print = plain
        else:
            yield self._lines(settings, first_step)

    def _lines(self, settings: RunSettings, first_step: int) -> Callable[[Update], None]:
        from oomguard.report.train_text import update_line

        every = max(1, (settings.steps - first_step) // PIPE_LINES)
        left = _TimeLeft(settings.steps)

        def on_update(update: Update) -> None:
            seconds = left.after(update)
            if update.step == first_step + 1 or update.step % every == 0 or update.val_loss is not None:
                self._print(update_line(update, settings.steps, settings.step.tokens, seconds))

        return on_update

    def ending(
        self, plan: Plan, guard: Guard, result: TrainResult, saved: str | None, learned: str | None
    ) -> int:
        from oomguard.report.train_text import final_line, train_json

        if result.stopped:
            self.note(f"stopped after step {result.step} of {result.settings.steps}")
        if saved is not None:
            self._print(f"saved {saved}")
        if learned is not None:
            self._print(f"row added to {learned}")
        if self.as_json:
            value = train_json(plan, guard, result, saved=saved, learned=learned, notes=self.notes)
            click.echo(json.dumps(value, indent=2))
        else:
            self._print(final_line(guard, result))
        if result.stopped:
            return STOPPED
        return DONE if guard.within_budget else MISSED


class _TimeLeft:
    """Seconds a run still needs at the pace of its updates; the first one, which compiles, counts least."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._pace = 0.0

    def after(self, update: Update) -> float:
        self._pace = update.seconds if self._pace == 0 else 0.7 * self._pace + 0.3 * update.seconds
        return (self._steps - update.step) * self._pace


@contextmanager
def _bar(
    settings: RunSettings, first_step: int, file: TextIO
) -> Iterator[tuple[Callable[[Update], None], Callable[[str], None]]]:
    """A progress bar; yields what an update is told to, and what prints a line above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(file=file, highlight=False)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}"))
    last_val, left = "", _TimeLeft(settings.steps)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("step 1 compiles", total=settings.steps, completed=first_step)

        def on_update(update: Update) -> None:
            nonlocal last_val
            if update.val_loss is not None:
                last_val = f"  val {update.val_loss:.3f}"
            speed = settings.step.tokens / update.seconds
            text = f"loss {update.loss:.3f}{last_val}  {speed:,.0f} tokens/s"
            if update.step < settings.steps:
                text += f"  {format_seconds(left.after(update))} left"
            progress.update(task, completed=update.step, description=text)

        yield on_update, lambda text: console.print(text, markup=False, soft_wrap=True)
