"""The training loop: the planned step on a corpus, beside a guard. Silent; its caller shows and stops it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import mlx.core as mx

from oomguard.errors import InputError, OomguardError
from oomguard.files.writing import Output
from oomguard.guard import Guard
from oomguard.model.checkpoint import random_state
from oomguard.model.corpus import Corpus, Windows
from oomguard.model.run_settings import RunSettings, check_trainable
from oomguard.model.saving import RUN_FILE, SavedRun, restore, save_run
from oomguard.model.schedule import warmup_cosine
from oomguard.model.step import BuiltStep, MicroBatch, Recipe, build_step


@dataclass(frozen=True)
class Update:
    """One finished update. Losses are in nats a byte; memory and time are those of the step alone."""

    step: int
    loss: float
    learning_rate: float
    seconds: float
    peak_bytes: int
    active_bytes: int
    cache_bytes: int
    val_loss: float | None = None


OnSaveFailed = Callable[[InputError, Path | None], object]
"""Told why a run could not be saved, and where it is saved instead; None for later."""


class _Stopped(Exception):
    """The run was asked to stop before the update, or the validation, that runs was over."""


@dataclass
class TrainResult:
    """A run, finished or stopped.

    ``first_step`` is the step it began after: 0, or where a resumed run was saved. ``saved`` is the file its end
    was saved to.
    """

    settings: RunSettings
    first_step: int
    updates: list[Update] = field(default_factory=list)
    val_losses: list[tuple[int, float]] = field(default_factory=list)
    stopped: bool = False
    saved: Path | None = None

    @property
    def step(self) -> int:
        """Updates done since the very first."""
        return self.first_step + len(self.updates)

    @property
    def settled(self) -> list[Update]:
        """The updates from the second on: the first compiles kernels and holds less."""
        return self.updates[1:]

    @property
    def tokens_per_second(self) -> float:
        """Over the settled updates, validation and saving left out; over the first if it is the only one."""
        updates = self.settled or self.updates
        seconds = sum(update.seconds for update in updates)
        return len(updates) * self.settings.step.tokens / seconds if seconds > 0 else 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(update.seconds for update in self.settled or self.updates)


class Trainer:
    """A run that can be advanced, saved and resumed.

    Args:
        settings: the run, its batch and checkpoint policy already decided.
        corpus: opened for the settings' sequence length.
        resumed: the saved run to go on from.

    Raises:
        InputError: settings that cannot be trained with, or a saved run that cannot be read.
    """

    def __init__(self, settings: RunSettings, corpus: Corpus, resumed: SavedRun | None = None) -> None:
        check_trainable(settings)
        self.settings = settings
        self.corpus = corpus
        self.first_step = resumed.step if resumed else 0
        self.built = self._build(evaluated=resumed is None)
        self.optimizer_restored = restore(self.built, resumed) if resumed else False
        self.result = TrainResult(settings, self.first_step)

    def _build(self, evaluated: bool) -> BuiltStep:
        s = self.settings
        recipe = Recipe(
            learning_rate=warmup_cosine(s.learning_rate, s.warmup, s.steps),
            max_norm=s.max_norm,
            weight_decay=s.weight_decay,
        )
        # A step holds one batch, and the corpus has it.
        return build_step(s.model, s.step, seed=s.seed, evaluated=evaluated, recipe=recipe, with_batch=False)

    def train(
        self,
        guard: Guard,
        *,
        on_update: Callable[[Update], object] = lambda update: None,
        should_stop: Callable[[], bool] = lambda: False,
        stop_now: Callable[[], bool] = lambda: False,
        save_to: str | Output | None = None,
        save_every: int = 0,
        on_save_failed: OnSaveFailed | None = None,
    ) -> TrainResult:
        """Runs to the settings' last step, or until it is asked to stop.

        A run stopped inside an update is left, and saved, as it was after the last whole one.

        Args:
            guard: entered already; checked after every step.
            on_update: told of every finished update.
            should_stop: asked before every step.
            stop_now: asked before every micro-batch, of steps and of validation.
            save_to: where the run is saved, at its end and every ``save_every`` steps (0: only at its end).
            on_save_failed: told when a save on the way fails, as on a full disk; the run goes on, and the next
                save may succeed. Told at the end, and where the run is saved instead, when something else took
                its place meanwhile. None: either ends the run with the error.

        Raises:
            OomguardError: the loss is no longer a number; nothing is saved.
            InputError: the run cannot be saved.
        """
        output = Output(Path(save_to), RUN_FILE) if isinstance(save_to, str) else save_to
        for step in range(self.first_step + 1, self.settings.steps + 1):
            update = None if should_stop() else self._update(step, stop_now)
            if update is None:
                self.result.stopped = True
                break
            self.result.updates.append(update)
            if output and save_every and step % save_every == 0 and step < self.settings.steps:
                self._save_on_the_way(output, on_save_failed)
            guard.check()
            on_update(update)
        if output and self.result.updates:
            self.result.saved = self._save_at_the_end(output, on_save_failed)
        return self.result

    def _save_on_the_way(self, output: Output, on_failed: OnSaveFailed | None) -> None:
        try:
            self.save(output)
        except InputError as error:
            if on_failed is None:
                raise
            on_failed(error, None)

    def _save_at_the_end(self, output: Output, on_failed: OnSaveFailed | None) -> Path:
        try:
            output.check_place()
        except InputError as error:
            if on_failed is None:
                raise
            output = output.beside()
            on_failed(error, output.path)
        self.save(output)
        return output.path

    def save(self, path: str | Output) -> None:
        """Saves the run as it is now.

        Raises:
            InputError: the file cannot be written.
        """
        save_run(path, self.built, self.settings, self.result.step, self.corpus.size_bytes)

    def _update(self, step: int, stop_now: Callable[[], bool]) -> Update | None:
        """The next update; None when the run was asked to stop inside it, and is as it was before."""

        def check() -> None:
            if stop_now():
                raise _Stopped

        random = random_state()
        before = random[0]
        try:
            self.built.batch = self._batch(step, check)
            mx.reset_peak_memory()
            start = time.perf_counter()
            loss = scalar(self.built.run(between=check))
        except _Stopped:
            self.built.batch = []
            random[0] = before
            return None
        seconds = time.perf_counter() - start
        peak, active, cache = mx.get_peak_memory(), mx.get_active_memory(), mx.get_cache_memory()
        rate = scalar(self.built.learning_rate)
        if not math.isfinite(loss):
            raise OomguardError(
                f"the loss is {loss} at step {step} (learning rate {rate:.2g}); nothing was saved of it. "
                "A lower --lr, a longer --warmup or --clip may help"
            )
        val_loss = self.validate(stop_now) if self._validates_after(step) else None
        if val_loss is not None:
            self.result.val_losses.append((step, val_loss))
        return Update(step, loss, rate, seconds, peak, active, cache, val_loss)

    def _validates_after(self, step: int) -> bool:
        every = self.settings.val_every
        return step == self.settings.steps or (every > 0 and step % every == 0)

    def validate(self, stop_now: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over the validation batches, None without any or where the run was asked to stop.

        Validation runs the forward of one micro-batch at a time, which at any place holds less than a
        training step does there: so it is inside what was planned.
        """
        self.built.batch = []
        batches = self.corpus.validation_batches(self.settings.step.batch, self.settings.val_batches)
        losses = []
        for batch in batches:
            if stop_now():
                return None
            losses.append(self.built.validation_loss(*_to_mlx(batch)))
        return statistics.fmean(losses) if losses else None

    def _batch(self, step: int, check: Callable[[], None]) -> list[MicroBatch]:
        batch = []
        s = self.settings
        for part in self.corpus.micro_batches(step, s.seed, s.step.batch, s.step.accumulate):
            check()
            batch.append(_to_mlx(part))
        mx.eval(batch)
        return batch


def scalar(array: mx.array) -> float:
    return cast(float, array.item())


def _to_mlx(windows: tuple[Windows, Windows]) -> MicroBatch:
    inputs, targets = windows
    return mx.array(inputs), mx.array(targets)
