"""Every size a command or a function takes may be that of a real machine, 8 GB to 512 GB."""

from __future__ import annotations

import importlib
import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

import oomguard
from oomguard.cli.main import COMMANDS, main
from oomguard.cli.options import Reader
from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.measure import Settings, measure
from oomguard.model.cases import build_case
from oomguard.model.run_settings import RunSettings, changes
from oomguard.model.saving import open_run, save_run
from oomguard.model.step import build_step
from oomguard.plan.planner import plan
from oomguard.trace.engine import trace_built
from oomguard.units import parse_bytes

SIZES = [f"{number}GB" for number in (8, 16, 24, 36, 64, 128, 512)]
SHAPE = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_mlp": 32, "context": 16}
MODEL = ModelConfig.model_validate(SHAPE)
STEP = StepConfig(batch=1, seq_len=16, compiled=False)

# What stands beside a size on a command line, and what the command then does in about a second.
BESIDE = {
    "plan": ["--config", "mini.json", "--device", "cpu-1024gb"],
    "trace": ["--config", "mini.json"],
    "measure": ["--config", "mini.json", "--steps", "1", "--no-sequenced", "--no-compile"],
    "train": [
        *("--config", "mini.json", "--corpus", pydoc_data.topics.__file__, "--steps", "1", "--batch", "1"),
        *("--no-learn", "--no-compile", "--val-fraction", "0"),
    ],
}


def size_options() -> Iterator[tuple[str, str]]:
    """Every option of every command that is read as a size."""
    for name in COMMANDS:
        for option in importlib.import_module(f"oomguard.cli.{name}").command.params:
            if isinstance(option.type, Reader) and "SIZE" in str(option.type.get_metavar(option)):
                yield name, option.opts[0]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mini.json").write_text(json.dumps(SHAPE))
    monkeypatch.chdir(tmp_path)


def test_sizes_are_options_of_every_command_that_plans_runs_or_simulates() -> None:
    assert {name for name, _ in size_options()} == set(BESIDE)
    assert {("plan", "--memory"), ("train", "--memory"), ("measure", "--memory")} < set(size_options())


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), list(size_options()))
def test_sizes_of_real_machines_are_taken_by_every_option(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in SIZES:
        with pytest.raises(SystemExit) as ended:
            main([command, *BESIDE[command], option, size])
        said = capsys.readouterr()
        # This machine may have less than the headroom; that is an answer, and names the size.
        too_much = option == "--headroom" and "leaves nothing of" in said.err
        assert ended.value.code == (2 if too_much else 0), (size, said.err)


@pytest.mark.slow
def test_sizes_train_memory_4gb_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *BESIDE["train"], "--memory", "4GB", "--out", "run.safetensors"])
    assert ended.value.code == 0, capsys.readouterr().err
    assert open_run("run.safetensors").settings.memory_bytes == 4 * 10**9
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "run.safetensors", "--steps", "2", "--memory", "512GB", "--no-learn"])
    assert ended.value.code == 0
    assert "memory 3.7 GiB -> 476.8 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_real_machines_are_taken_by_the_python_functions(size: str, tmp_path: Path) -> None:
    size_bytes = parse_bytes(size)
    found = plan(SHAPE, memory=size, device="cpu-1024gb", headroom=size_bytes // 8)
    assert found.request.memory_bytes == size_bytes
    assert found.budget.budget_bytes == size_bytes - size_bytes // 8
    assert oomguard.largest_batch(SHAPE, memory=size_bytes, device="cpu-1024gb") > 0
    with oomguard.Guard(size_bytes, cache_limit_bytes=size_bytes) as guard:
        assert guard.check().peak_bytes >= 0
        assert mx.set_memory_limit(size_bytes) == size_bytes
    built = build_case("dropout", evaluated=False)
    assert trace_built(built, memory_limit=size_bytes).peak_bytes > 0


@pytest.mark.slow
def test_sizes_of_real_machines_limit_a_measured_child() -> None:
    row = measure(MODEL, STEP, Settings(steps=1, sequenced=False, max_memory_bytes=512 * 10**9))
    assert row.status == "ok", row.reason


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_real_machines_are_saved_and_read_again(size: str, tmp_path: Path) -> None:
    size_bytes = parse_bytes(size)
    settings = RunSettings(
        model=MODEL,
        step=STEP,
        corpus="text.txt",
        steps=3,
        learning_rate=1e-3,
        warmup=0,
        memory_bytes=size_bytes,
    )
    save_run(tmp_path / "run.safetensors", build_step(MODEL, STEP), settings, 1, 9)
    saved = open_run(tmp_path / "run.safetensors").settings
    assert saved.memory_bytes == size_bytes
    assert changes(saved, settings) == []
