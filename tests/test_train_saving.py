"""A saved run is whole or not there, carries its settings, and is told from anything else."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import OPTIMIZERS, StepConfig
from oomguard.errors import InputError
from oomguard.model.run_settings import RunSettings, changes
from oomguard.model.saving import check_can_save, open_run, restore, save_run
from oomguard.model.step import BuiltStep, build_step

MODEL = ModelConfig(name="mini", n_layers=2, d_model=16, n_heads=2, d_mlp=32, context=16)
STEP = StepConfig(batch=2, seq_len=12, compiled=False)
SETTINGS = RunSettings(model=MODEL, step=STEP, corpus="text.txt", steps=30, learning_rate=1e-3, warmup=2)


def state_of(built: BuiltStep) -> dict[str, mx.array]:
    parts = {"model": built.model.parameters(), "optimizer": built.state[1], "random": [mx.random.state[0]]}
    return dict(tree_flatten(parts))


def a_run(step: StepConfig = STEP, updates: int = 2) -> BuiltStep:
    built = build_step(MODEL, step, seed=3)
    for _ in range(updates):
        built.run()
    return built


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "run.safetensors"
    save_run(path, a_run(), SETTINGS, 20, 1234)
    return path


def test_saved_run_carries_its_settings_without_its_tensors_being_read(saved: Path) -> None:
    run = open_run(saved)
    assert run.settings == SETTINGS
    assert (run.step, run.progress.corpus_bytes) == (20, 1234)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_run_restores_every_array_to_the_bit(optimizer: str, dtype: str, tmp_path: Path) -> None:
    step = STEP.but(optimizer=optimizer, dtype=dtype)
    built = a_run(step)
    before = {name: mx.array(x) for name, x in state_of(built).items()}
    path = tmp_path / "run.safetensors"
    save_run(path, built, SETTINGS.model_copy(update={"step": step}), 2, 9)
    fresh = build_step(MODEL, step, seed=99, evaluated=False)
    assert restore(fresh, open_run(path))
    after = state_of(fresh)
    assert after.keys() == before.keys()
    for name, array in before.items():
        assert after[name].dtype == array.dtype, name
        assert mx.array_equal(after[name], array), name


def test_saved_run_restored_goes_on_in_the_containers_the_step_was_compiled_with(saved: Path) -> None:
    fresh = build_step(MODEL, STEP.but(compiled=True), seed=99, evaluated=False)
    restore(fresh, open_run(saved))
    straight = a_run()
    batch = straight.batch
    assert [fresh.run(batch).item() for _ in range(3)] == pytest.approx(
        [straight.run(batch).item() for _ in range(3)], rel=1e-6
    )
    assert fresh.state[1]["step"].item() == 5


def test_saved_run_of_another_optimizer_keeps_the_weights_and_says_so(saved: Path) -> None:
    fresh = build_step(MODEL, STEP.but(optimizer="lion"), seed=99, evaluated=False)
    assert not restore(fresh, open_run(saved))
    weights = mx.load(str(saved))
    for name, parameter in tree_flatten(fresh.model.parameters()):
        assert mx.array_equal(parameter, weights[f"model.{name}"])
    assert fresh.state[1]["step"].item() == 0


def test_saved_run_is_cast_to_a_changed_dtype(saved: Path) -> None:
    fresh = build_step(MODEL, STEP.but(dtype="bfloat16"), evaluated=False)
    assert restore(fresh, open_run(saved))
    assert {p.dtype for _, p in tree_flatten(fresh.model.parameters())} == {mx.bfloat16}
    assert {x.dtype for _, x in tree_flatten(fresh.state[1]) if x.ndim} == {mx.bfloat16}
    assert fresh.state[1]["step"].dtype == mx.uint64


def test_saved_run_cut_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in (0, 3, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"run\.safetensors is (cut short|empty)"):
            open_run(saved)
    saved.write_bytes(whole)
    assert open_run(saved).step == 20


def header_of(metadata: object) -> bytes:
    text = json.dumps({"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"Once upon a time, in a file far away.", "is not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "is not a safetensors file"),
        (struct.pack("<Q", 4) + b"[1] ", "is not a safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": 1} ', "is not a safetensors file"),
        (header_of({}), "not a run that oomguard train saved"),
        (header_of({"format": "pt"}), "not a run that oomguard train saved"),
        (header_of(["oomguard"]), "not a run that oomguard train saved"),
        (header_of({"oomguard": "not json"}), "its settings are damaged"),
        (header_of({"oomguard": "[]"}), "saved by another version"),
        (header_of({"oomguard": '{"schema": "oomguard.train/2"}'}), "saved by another version"),
        (header_of({"oomguard": '{"schema": "oomguard.train/1", "step": -1}'}), "settings are damaged: step"),
    ],
)
def test_saved_run_is_told_from_foreign_files(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        open_run(path)


def test_saved_run_without_a_tensor_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    built, path = a_run(), tmp_path / "run.safetensors"
    save_run(path, built, SETTINGS, 2, 9)
    wider = build_step(MODEL.model_copy(update={"d_mlp": 64}), STEP, evaluated=False)
    with pytest.raises(InputError, match=r"model\.blocks\.0\.mlp\.\w+\.\w+ has shape"):
        restore(wider, open_run(path))
    deeper = build_step(MODEL.model_copy(update={"n_layers": 3}), STEP, evaluated=False)
    with pytest.raises(InputError, match=r"holds no model\.blocks\.2"):
        restore(deeper, open_run(path))


def test_saved_run_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*none\.safetensors: No such file"):
        open_run(tmp_path / "none.safetensors")


@pytest.mark.parametrize("failing", ["write", "sync", "move"])
def test_saving_that_fails_leaves_the_old_file_and_nothing_else(
    failing: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    if failing == "write":
        monkeypatch.setattr(mx, "save_safetensors", full)
    elif failing == "sync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"cannot save .*run\.safetensors: No space left"):
        save_run(saved, a_run(updates=1), SETTINGS, 21, 1234)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["run.safetensors"]


def test_saving_is_whole_on_disk_before_it_takes_the_name(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (happened.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (happened.append("move"), replace(self, to))[1])
    save_run(saved, a_run(updates=1), SETTINGS, 21, 1234)
    assert happened == ["sync", "move", "sync"]
    assert open_run(saved).step == 21


def test_saving_is_checked_before_the_run(tmp_path: Path) -> None:
    check_can_save(tmp_path / "run.safetensors")
    with pytest.raises(InputError, match="it is a folder"):
        check_can_save(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        check_can_save(tmp_path / "no" / "run.safetensors")


def test_changes_are_said_in_the_words_of_the_command_line() -> None:
    step = STEP.but(checkpoint=CheckpointPolicy.parse("every"), batch=4)
    after = SETTINGS.model_copy(update={"step": step, "learning_rate": 1e-4, "memory_bytes": 3 << 30})
    assert changes(SETTINGS, SETTINGS) == []
    assert changes(SETTINGS, after) == [
        "batch 2 -> 4",
        "grad-checkpoint none -> every",
        "lr 0.001 -> 0.0001",
        "memory not limited -> 3.0 GiB",
    ]
    assert changes(after, SETTINGS)[1] == "grad-checkpoint every -> none"
