"""The training loop: exact when resumed, bounded by its plan, and a run teaches one row."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.errors import InputError, OomguardError
from oomguard.guard import Guard
from oomguard.model.corpus import Corpus
from oomguard.model.learning import learn, why_not
from oomguard.model.run_settings import RunSettings, check_trainable
from oomguard.model.saving import open_run
from oomguard.model.trainer import Trainer, TrainResult
from oomguard.rows import read_rows

DOCUMENTATION = Path(pydoc_data.topics.__file__)  # the language reference, as Python ships it
MODEL = ModelConfig(name="mini", n_layers=2, d_model=32, n_heads=2, d_mlp=64, context=32)
STEP = StepConfig(batch=4, seq_len=32, compiled=False)
BUDGET = 1 << 30


def settings(**changes: Any) -> RunSettings:
    values = {"steps": 8, "learning_rate": 3e-3, "warmup": 2, "val_every": 4, "val_batches": 2, **changes}
    return RunSettings(model=MODEL, corpus=str(DOCUMENTATION), **{"step": STEP, **values})


@contextmanager
def guarded(budget: int = BUDGET) -> Iterator[Guard]:
    with Guard(budget, on_notice=lambda notice: None) as guard:
        yield guard


def run(wanted: RunSettings, resume: Path | None = None, **how: Any) -> tuple[Trainer, TrainResult]:
    corpus = Corpus.open(wanted.corpus, wanted.step.seq_len, wanted.val_fraction)
    with guarded() as guard:
        trainer = Trainer(wanted, corpus, open_run(resume) if resume else None)
        return trainer, trainer.train(guard, **how)


def losses(result: TrainResult) -> list[float]:
    return [update.loss for update in result.updates]


def stop_after(updates: int) -> Callable[[], bool]:
    asked = iter(range(updates + 1))
    return lambda: next(asked) == updates


def test_run_lowers_the_loss_on_documentation_and_on_what_is_held_out() -> None:
    _, result = run(settings(steps=80, learning_rate=5e-3, warmup=8, val_every=40))
    first, last = losses(result)[0], sum(losses(result)[-10:]) / 10
    assert first == pytest.approx(5.5, abs=0.5)  # ln 256 is a blind guess; the tied head guesses repeats
    assert last < 3.3
    assert [step for step, _ in result.val_losses] == [40, 80]
    assert result.val_losses[-1][1] < 3.3


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_run_stopped_and_resumed_is_the_run_that_was_not_stopped(
    compiled: bool, dropout: float, tmp_path: Path
) -> None:
    model = MODEL.model_copy(update={"dropout": dropout})
    wanted = settings(step=STEP.but(compiled=compiled, accumulate=2)).model_copy(update={"model": model})
    _, straight = run(wanted)
    path = tmp_path / "run.safetensors"
    _, first = run(wanted, save_to=str(path), should_stop=stop_after(3))
    assert (first.stopped, first.step) == (True, 3)
    _, rest = run(wanted, resume=path, save_to=str(path))
    assert losses(first) + losses(rest) == losses(straight)
    assert rest.val_losses == straight.val_losses
    assert open_run(path).step == 8


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_run_stopped_inside_an_update_is_saved_as_after_the_last_whole_one(
    compiled: bool, tmp_path: Path
) -> None:
    model = MODEL.model_copy(update={"dropout": 0.2})
    step = STEP.but(compiled=compiled, batch=2, accumulate=4)
    wanted = settings(step=step, val_fraction=0.0).model_copy(update={"model": model})
    _, straight = run(wanted)
    asked = iter(range(1000))
    path = tmp_path / "run.safetensors"
    # An update asks 4 times as its micro-batches are drawn and 3 times between them: here in the fourth one.
    _, first = run(wanted, save_to=str(path), stop_now=lambda: next(asked) == 3 * 7 + 4 + 1)
    assert (first.stopped, first.step) == (True, 3)
    assert open_run(path).step == 3
    _, rest = run(wanted, resume=path)
    assert losses(first) + losses(rest) == losses(straight)


def test_run_stopped_inside_its_validation_keeps_the_update() -> None:
    drawn = []

    def stop_now() -> bool:
        drawn.append(1)
        return len(drawn) > 1  # the first is the micro-batch of the update

    _, result = run(settings(steps=1, warmup=0, val_batches=2), stop_now=stop_now)
    assert (result.step, result.val_losses) == (1, [])


@pytest.mark.parametrize(
    ("before", "after"), [("every", "none"), ("none", "attention"), ("none", "stride=2")]
)
def test_run_resumed_with_another_policy_goes_on_as_before(before: str, after: str, tmp_path: Path) -> None:
    def with_policy(policy: str) -> RunSettings:
        return settings(step=STEP.but(checkpoint=CheckpointPolicy.parse(policy)))

    _, straight = run(with_policy(before))
    path = tmp_path / "run.safetensors"
    run(with_policy(before), save_to=str(path), should_stop=stop_after(4))
    _, rest = run(with_policy(after), resume=path)
    assert losses(rest) == pytest.approx(losses(straight)[4:], rel=1e-5)


def test_run_says_every_update_with_what_it_held() -> None:
    told = []
    _, result = run(settings(), on_update=told.append)
    assert told == result.updates
    assert [update.step for update in told] == list(range(1, 9))
    assert [update.val_loss is not None for update in told] == [False, False, False, True] * 2
    for update in told:
        assert update.peak_bytes >= update.active_bytes > 0
    assert told[1].learning_rate == pytest.approx(3e-3)
    assert result.tokens_per_second == pytest.approx(
        7 * STEP.tokens / sum(update.seconds for update in told[1:])
    )


def test_run_without_val_every_validates_at_its_end() -> None:
    _, result = run(settings(val_every=0))
    assert [step for step, _ in result.val_losses] == [8]


def test_run_without_validation_has_no_validation_loss() -> None:
    _, result = run(settings(val_fraction=0.0))
    assert result.val_losses == []


def test_run_saves_on_the_way_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    seen = []
    run(
        settings(),
        save_to=str(path),
        save_every=3,
        on_update=lambda update: seen.append(open_run(path).step if path.exists() else None),
    )
    assert seen == [None, None, 3, 3, 3, 6, 6, 6]
    assert open_run(path).step == 8


def test_run_whose_loss_is_no_number_ends_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    path.write_bytes(b"an earlier run")
    wanted = settings(steps=50, learning_rate=1e6, warmup=0, step=STEP.but(optimizer="sgd", dtype="float16"))
    with pytest.raises(OomguardError, match=r"the loss is nan at step \d+ .*; nothing was saved"):
        run(wanted, save_to=str(path))
    assert path.read_bytes() == b"an earlier run"


def test_run_stopped_before_its_first_step_saves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    _, result = run(settings(), save_to=str(path), should_stop=lambda: True)
    assert result.stopped
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.measured
@pytest.mark.parametrize("policy", ["none", "every", "attention"])
def test_run_validation_holds_less_than_the_planned_step(policy: str) -> None:
    for vocab_size, accumulate in ((256, 1), (4096, 2)):
        model = MODEL.model_copy(update={"vocab_size": vocab_size, "n_layers": 4})
        step = STEP.but(batch=16, accumulate=accumulate, checkpoint=CheckpointPolicy.parse(policy))
        wanted = settings(steps=3, val_every=1, step=step).model_copy(update={"model": model})
        trainer, result = run(wanted)
        mx.reset_peak_memory()
        trainer.validate()
        assert mx.get_peak_memory() < min(update.peak_bytes for update in result.settled)


def test_run_holds_one_batch_and_its_state() -> None:
    trainer, _ = run(settings())
    assert trainer.built.batch == []  # validation came last


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"vocab_size": 100}}, "vocabulary of 100, and text has 256 byte values"),
        ({"step": STEP.but(optimizer="muon", dtype="float16")}, "muon divides by the norm"),
        ({"warmup": 8}, "a warm-up of 8 steps leaves nothing of a run of 8; --warmup 0 would"),
    ],
)
def test_run_that_cannot_work_is_refused(change: dict[str, Any], said: str) -> None:
    wanted = settings(**{name: value for name, value in change.items() if name != "model"})
    model = MODEL.model_copy(update=change.get("model", {}))
    with pytest.raises(InputError, match=said):
        check_trainable(wanted.model_copy(update={"model": model}))


def test_run_teaches_one_row_that_says_what_ran(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMGUARD_HOME", str(own_home / "learnt"))
    wanted = settings()
    corpus = Corpus.open(wanted.corpus, 32, 0.05)
    with guarded() as guard:
        result = Trainer(wanted, corpus).train(guard)
        assert why_not(result, guard) == ""
        path = learn(result, ["oomguard", "train"])
        learn(result, ["oomguard", "train"])
    header, rows = read_rows(path)
    assert header.command == "oomguard train"
    assert len(rows) == 2
    row = rows[0]
    assert (row.model, row.step, row.status, row.steps) == (MODEL, STEP, "ok", 7)
    peaks = sorted(update.peak_bytes for update in result.updates[1:])
    assert (row.peak_low_bytes, row.peak_bytes, row.peak_high_bytes) == (peaks[0], peaks[3], peaks[-1])
    assert row.first_peak_bytes == result.updates[0].peak_bytes
    assert row.backend in ("cpu", "metal", "cuda")


def test_run_held_down_by_the_memory_limit_or_too_short_teaches_nothing() -> None:
    wanted = settings(steps=2, warmup=0)
    corpus = Corpus.open(wanted.corpus, 32, 0.05)
    with guarded(budget=1 << 20) as guard:
        result = Trainer(wanted, corpus).train(guard)
        assert why_not(result, guard) == "the memory limit held its peak down"
    with guarded() as guard:
        result = Trainer(settings(steps=1, warmup=0), corpus).train(guard)
        assert why_not(result, guard) == "one step is too few to measure"
