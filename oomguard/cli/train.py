"""``oomguard train``: plan, then train within the plan, then say how close the plan was."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomguard.cli.options import (
    BATCH_OR_AUTO,
    COUNT,
    POLICY_HELP,
    POLICY_OR_AUTO,
    budget_options,
    chosen_model,
    model_option_text,
    model_options,
    number,
    refuse_beside,
    step_options,
    whole,
)
from oomguard.cli.stopping import stop_signals
from oomguard.cli.train_show import Show
from oomguard.errors import InputError, OomguardError
from oomguard.files.writing import Output
from oomguard.units import format_bytes

if TYPE_CHECKING:
    from oomguard.guard import Guard
    from oomguard.model.run_settings import RunSettings
    from oomguard.model.saving import SavedRun
    from oomguard.model.trainer import TrainResult
    from oomguard.plan.planner import Plan

DEFAULT_STEPS = 100
WITHOUT_DECAY = ("sgd", "adam")  # as model.step builds them
LEAST_RATE = 1e-12  # of a learning rate or a norm to clip to: 0 would teach nothing

HELP = """Train the preset GPT on a text, with the setting the planner picks, inside the budget.

\b
  oomguard train --preset huge --corpus FILE --steps 20 --memory 2GB
  oomguard train --preset huge --corpus FILE --steps 200 --out run.safetensors
  oomguard train --resume run.safetensors --steps 400 --grad-checkpoint none

The planner is asked before the corpus is read, and the cache limit it assumes is set. Any UTF-8 text will
do: it is read as bytes. --resume keeps every setting of the run it goes on from, but for the options given.
The run's row joins this machine's calibration.

Ctrl-C, a kill, a closed terminal or the end of whatever reads the output stop the run before its next
micro-batch. It is saved as it was after the last whole update. A second Ctrl-C ends at once, without saving.
--out is a new file or an earlier run; nothing else is overwritten, and no link, pipe or device.

Exit status: 0 trained within the budget, 1 nothing fits or the peak passed the budget, 2 wrong usage or
input, 130 stopped, 141 stopped because nobody reads its output.
"""


@click.command("train", help=HELP, short_help="Train the preset GPT with the setting the planner picks.")
@model_options
@click.option("--corpus", type=click.Path(path_type=Path), help="The text to learn from.")
@click.option("--steps", type=COUNT, help=f"Updates of the whole run.  [default: {DEFAULT_STEPS}]")
@click.option(
    "--batch", type=BATCH_OR_AUTO, default="auto", show_default=True, help="Sequences of a micro-batch."
)
@click.option(
    "--grad-checkpoint",
    type=POLICY_OR_AUTO,
    default="auto",
    show_default=True,
    help=POLICY_HELP,
)
@click.option("--accumulate", type=COUNT, help="Micro-batches of an update.")
@click.option(
    "--target-batch", type=COUNT, help="Sequences of an update, however many micro-batches it takes."
)
@step_options
@click.option("--lr", type=number(LEAST_RATE), help="Learning rate after the warm-up.")
@click.option("--warmup", type=whole(0), help="Steps of warm-up.  [default: a tenth, 200 at most]")
@click.option(
    "--clip-norm",
    type=number(LEAST_RATE),
    default="1",
    show_default=True,
    help="The norm that --clip clips to.",
)
@click.option("--weight-decay", type=number(0), default="0.01", show_default=True)
@click.option(
    "--val-every",
    type=whole(0),
    help="Validate every so many steps; 0: only at the end.  [default: a tenth of the run, 10 at least]",
)
@click.option(
    "--val-fraction",
    type=number(0, 0.9),
    default="0.05",
    show_default=True,
    help="Share of the text held out; 0: no validation.",
)
@click.option(
    "--val-batches", type=COUNT, default="4", show_default=True, help="Batches a validation, at most."
)
@budget_options
@click.option("--out", type=click.Path(path_type=Path), help="Save the run here (safetensors).")
@click.option("--save-every", type=whole(0), default="0", help="Save every so many steps, too.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on from a saved run; saved there again.")
@click.option("--seed", type=whole(0), default="0", show_default=True)
@click.option("--no-learn", is_flag=True, help="Leave the run out of this machine's calibration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end; progress goes to stderr.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    from oomguard.machine.own_memory import watched
    from oomguard.model.run_settings import check_trainable

    use_fast_blas()
    request = Request(options, given(ctx))
    with watched():
        plan = request.plan()
    show = Show(as_json)
    if plan.choice is None:
        return show.nothing_fits(plan, request.model_option)
    settings = request.settings(plan)
    check_trainable(settings)
    show.opening(plan, request.saved, settings)
    return train(request, plan, settings, show)


def given(ctx: click.Context) -> set[str]:
    """The parameters that stand on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in ctx.params if ctx.get_parameter_source(name) == source}


def use_fast_blas() -> None:
    """On Linux, starts this command again with OpenBLAS in front of MLX's reference BLAS, if it is installed.

    The loader reads ``LD_PRELOAD`` only when a process starts. Nothing happens where ``train`` is called from
    another program, or where the user has said what to preload.
    """
    from oomguard.measure.blas import child_environment, find_openblas

    openblas = find_openblas()
    is_program = Path(sys.argv[0]).name in ("oomguard", "__main__.py") and sys.argv[1:2] == ["train"]
    if openblas is None or not is_program or os.environ.get("LD_PRELOAD"):
        return
    again = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, again, child_environment(os.environ, openblas))


class Request:
    """What the command line asks for, over what a resumed run brings."""

    def __init__(self, options: dict[str, Any], given: set[str]) -> None:
        self.options = options
        self.given = given
        self.saved = self._open_saved()
        self.model = self._model()
        self.model_option = (
            f"--resume {options['resume']}"
            if self.saved
            else model_option_text(options["preset"], options["config"])
        )
        self.corpus_path = self._corpus_path()
        self._refuse_unused()
        self.out = self._output()
        if self.out is None and options["save_every"]:
            raise InputError("--save-every: where to? Give --out FILE.safetensors")
        self.dead_parts = [] if self.out is None else self.out.check()

    def _open_saved(self) -> SavedRun | None:
        if self.options["resume"] is None:
            return None
        from oomguard.model.saving import open_run

        return open_run(self.options["resume"])

    def _model(self) -> Any:
        preset, config = self.options["preset"], self.options["config"]
        if self.saved is None:
            return chosen_model(preset, config)
        model = self.saved.settings.model
        if preset is None and config is None:
            return model
        wanted = chosen_model(preset, config)
        if wanted.model_dump(exclude={"name"}) != model.model_dump(exclude={"name"}):
            raise InputError(
                f"{self.saved.path} holds a {model.name} of {model.n_layers} blocks of width "
                f"{model.d_model}; it cannot go on as {wanted.name}"
            )
        return model

    def _refuse_unused(self) -> None:
        saved = self.saved.settings if self.saved else None
        if not self.value("clip", saved and saved.step.clip_norm):
            refuse_beside(("clip_norm",), "without --clip no gradient is clipped")
        optimizer = self.value("optimizer", saved and saved.step.optimizer)
        if optimizer in WITHOUT_DECAY:
            refuse_beside(("weight_decay",), f"{optimizer} has no weight decay")
        if self.value("val_fraction", saved and saved.val_fraction) == 0:
            refuse_beside(("val_every", "val_batches"), "--val-fraction 0 leaves nothing to validate on")

    def _corpus_path(self) -> Path:
        path = self.options["corpus"]
        if path is None and self.saved is None:
            raise InputError("what should it learn from? Give --corpus FILE, any UTF-8 text")
        return Path(path if path is not None else self.saved.settings.corpus)  # type: ignore[union-attr]

    def _output(self) -> Output | None:
        """Where the run is saved; that may be the run it goes on from, and nothing else that it reads."""
        from oomguard.model.saving import RUN_FILE

        option = "out" if self.options["out"] is not None else "resume"
        if self.options[option] is None:
            return None
        inputs = {"the corpus": self.corpus_path}
        if self.options["config"] is not None:
            inputs["what --config reads"] = self.options["config"]
        return Output(self.options[option], RUN_FILE, f"--{option}", inputs)

    def value(self, name: str, saved: Any) -> Any:
        """An option: as given, else as the resumed run had it, else its default."""
        return saved if self.saved is not None and name not in self.given else self.options[name]

    def plan(self) -> Plan:
        """Asks the planner for what is left open; a resumed run leaves open only what is given anew."""
        from oomguard.plan.planner import plan

        saved = self.saved.settings if self.saved else None
        step = saved.step if saved else None
        accumulate = self.value("accumulate", step and step.accumulate)
        if "target_batch" in self.given and "accumulate" not in self.given:
            accumulate = None
        return plan(
            self.model,
            memory=self.value("memory", saved and saved.memory_bytes),
            device=_device_here(self.options["device"]),
            headroom=self.options["headroom"],
            batch=self.value("batch", step and step.batch),
            seq_len=self.value("ctx_tokens", step and step.seq_len),
            grad_checkpoint=self.value("grad_checkpoint", step and step.checkpoint),
            optimizer=self.value("optimizer", step and step.optimizer),
            dtype=self.value("dtype", step and step.dtype),
            accumulate=accumulate,
            target_batch=self.options["target_batch"],
            clip_norm=self.value("clip", step and step.clip_norm),
            compiled=self.value("compiled", step and step.compiled),
        )

    def settings(self, plan: Plan) -> RunSettings:
        """The run, with the step the plan chose."""
        from oomguard.model.run_settings import RunSettings
        from oomguard.model.schedule import default_rate, default_warmup

        assert plan.choice is not None
        saved = self.saved.settings if self.saved else None
        step = plan.choice.step
        steps = self.value("steps", saved and saved.steps) or DEFAULT_STEPS
        same_optimizer = saved is not None and saved.step.optimizer == step.optimizer
        rate = self.value("lr", saved.learning_rate if saved and same_optimizer else None)
        warmup = self.value("warmup", saved.warmup if saved and saved.warmup < steps else None)
        val_every = self.value("val_every", saved and saved.val_every)
        if self.saved is not None and self.saved.step >= steps:
            raise InputError(
                f"{self.saved.path} is at step {self.saved.step} of {steps} already; give more with --steps"
            )
        return RunSettings(
            model=self.model,
            step=step,
            corpus=str(self.corpus_path.absolute()),
            steps=steps,
            learning_rate=default_rate(step.optimizer, self.model.d_model) if rate is None else rate,
            warmup=default_warmup(steps) if warmup is None else warmup,
            max_norm=self.value("clip_norm", saved and saved.max_norm),
            weight_decay=self.value("weight_decay", saved and saved.weight_decay),
            seed=self.value("seed", saved and saved.seed),
            val_every=max(10, steps // 10) if val_every is None else val_every,
            val_fraction=self.value("val_fraction", saved and saved.val_fraction),
            val_batches=self.value("val_batches", saved and saved.val_batches),
            memory_bytes=plan.request.memory_bytes,
        )


def _device_here(name: str | None) -> Any:
    """The device to plan for and to train on.

    Raises:
        InputError: ``--device`` names another machine.
    """
    from oomguard.machine.device import find_device

    device = find_device(name)
    if name is not None and not device.here:
        raise InputError(f"train runs on this machine; for {device.name}, ask oomguard plan --device {name}")
    return device


def train(request: Request, plan: Plan, settings: RunSettings, show: Show) -> int:
    """Builds the run under the guard of its plan, trains, saves, learns, and shows how it ended."""
    from oomguard.guard import Guard
    from oomguard.model.corpus import Corpus
    from oomguard.model.saving import check_room
    from oomguard.model.trainer import Trainer

    corpus = Corpus.open(request.corpus_path, settings.step.seq_len, settings.val_fraction)
    if request.saved is not None and request.saved.progress.corpus_bytes != corpus.size_bytes:
        show.note(f"the corpus had {request.saved.progress.corpus_bytes} bytes, now {corpus.size_bytes}")
    for part, size_bytes in request.dead_parts:
        show.note(f"removed {part.name} ({format_bytes(size_bytes)}), left by a save that was killed")
    _use_backend(plan.device.backend)
    with Guard.of(plan, on_notice=show.notice) as guard, stop_signals() as asked_to_stop:
        trainer = Trainer(settings, corpus, request.saved)
        if request.out is not None:
            check_room(request.out, trainer.built)
        if request.saved is not None and not trainer.optimizer_restored:
            show.note(
                f"the state of {settings.step.optimizer} starts anew: the saved one is of another optimizer"
            )

        def should_stop() -> bool:
            # Without readers there is nobody to train for; an update is made first where it can be saved.
            unread = show.lost is not None and (request.out is None or bool(trainer.result.updates))
            return unread or asked_to_stop()

        with show.progress(settings, trainer.first_step) as on_update:
            result = trainer.train(
                guard,
                on_update=on_update,
                should_stop=should_stop,
                stop_now=asked_to_stop,
                save_to=request.out,
                save_every=request.options["save_every"],
                on_save_failed=show.save_failed,
            )
        saved = None if result.saved is None else str(result.saved)
        learned = None if request.options["no_learn"] else _learn(result, guard, show)
        status = show.ending(plan, guard, result, saved, learned)
    if show.lost is not None and not asked_to_stop():
        raise show.lost
    return status


def _use_backend(backend: str) -> None:
    import mlx.core as mx

    if backend == "cpu" and mx.default_device() != mx.Device(mx.cpu):
        mx.set_default_device(mx.Device(mx.cpu))


def _learn(result: TrainResult, guard: Guard, show: Show) -> str | None:
    """Adds the run's row to the local calibration; returns the file, None when there is nothing to learn."""
    from oomguard.model.learning import learn, why_not

    reason = why_not(result, guard)
    if reason:
        show.note(f"not added to the calibration: {reason}")
        return None
    try:
        return str(learn(result, ["oomguard", *sys.argv[1:]]))
    except (OSError, OomguardError) as error:
        show.note(f"not added to the calibration: {error}")
        return None
