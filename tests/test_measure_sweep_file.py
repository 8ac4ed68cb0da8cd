"""A sweep file: lists multiplied out, and a mistake that names its entry."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.errors import InputError
from oomguard.measure import expand, read_sweep
from oomguard.model.cases import case_names


def write(folder: Path, value: Any) -> Path:
    file = folder / "sweep.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return file


def test_lists_are_multiplied_out_with_the_last_key_fastest() -> None:
    tasks = list(expand({"preset": "tiny", "batch": [1, 2], "checkpoint": ["none", "every"]}))
    seen = [(task.step.batch, str(task.step.checkpoint)) for task in tasks if task.step]
    assert seen == [(1, "none"), (1, "every"), (2, "none"), (2, "every")]


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True), st.booleans(), st.integers(1, 3))
def test_an_entry_makes_the_product_of_its_lists(batches: list[int], both: bool, presets: int) -> None:
    names = ["tiny", "small", "huge"][:presets]
    compiled = [True, False] if both else [True]
    tasks = list(expand({"preset": names, "batch": batches, "compiled": compiled}))
    assert len({task.key for task in tasks}) == math.prod(map(len, (names, batches, compiled)))


def test_every_setting_of_a_step_can_be_given() -> None:
    entry = {
        "preset": "tiny",
        "batch": 3,
        "ctx": 64,
        "accumulate": 2,
        "evaluate_micro_steps": False,
        "grad_checkpoint": "attention,blocks=2",
        "dtype": "bfloat16",
        "optimizer": "lion",
        "clip_norm": True,
        "compiled": False,
    }
    (task,) = expand(entry)
    step = task.step
    assert step is not None
    assert (step.seq_len, step.accumulate, step.evaluate_micro_steps) == (64, 2, False)
    assert step.checkpoint == CheckpointPolicy.parse("attention,blocks=2")
    assert (step.dtype, step.optimizer, step.clip_norm, step.compiled) == ("bfloat16", "lion", True, False)


def test_preset_is_changed_by_the_fields_beside_it() -> None:
    (task,) = expand({"preset": "tiny", "n_layers": 7, "batch": 1})
    assert task.model == preset("tiny").model_copy(update={"n_layers": 7, "name": "custom"})


def test_shape_of_its_own_needs_no_mlp_width_and_takes_its_context_from_the_sequence() -> None:
    (task,) = expand({"n_layers": 2, "d_model": 64, "n_heads": 2, "seq_len": 32, "batch": 1})
    assert task.model is not None
    assert (task.model.d_mlp, task.model.context) == (256, 32)


def test_config_file_is_found_beside_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "wide.json").write_text(json.dumps(preset("tiny").model_dump(exclude={"name"})))
    (task,) = read_sweep(write(tmp_path, {"config": "wide.json", "batch": 1})).tasks
    assert task.model == preset("tiny").model_copy(update={"name": "wide"})


@pytest.mark.parametrize(
    "text",
    [
        '[{"preset": "tiny", "batch": 1}, {"preset": "tiny", "batch": 2}]',
        '{"preset": "tiny", "batch": [1, 2]}',
        '{"note": "two", "entries": [{"preset": "tiny", "batch": [1, 2]}]}',
        '{"preset": "tiny", "batch": 1}\n\n{"preset": "tiny", "batch": 2}\n',
    ],
)
def test_list_object_and_lines_say_the_same(text: str, tmp_path: Path) -> None:
    sweep = read_sweep(write(tmp_path, text))
    assert [task.step.batch for task in sweep.tasks if task.step] == [1, 2]
    assert sweep.note == ("two" if "note" in text else "")


def test_configuration_that_stands_twice_is_run_once(tmp_path: Path) -> None:
    assert (
        len(
            read_sweep(
                write(tmp_path, [{"preset": "tiny", "batch": [1, 1]}, {"preset": "tiny", "batch": 1}])
            ).tasks
        )
        == 1
    )


def test_case_patterns_pick_cases() -> None:
    assert [task.case for task in expand({"case": ["mlp", "gru*"]})] == ["mlp", "gru", "gru-eager"]
    assert [task.case for task in expand({"case": "*"})] == case_names()


def test_shipped_sweep_of_cases_holds_them_all(project: Path) -> None:
    sweep = read_sweep(project / "calibration" / "sweeps" / "cases.json")
    assert [task.case for task in sweep.tasks] == case_names()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"preset": "tiny", "batches": 1}], "entry 1: unknown key 'batches'; known: accumulate, "),
        (
            [{"preset": "tiny", "batch": 1}, {"preset": "tinny", "batch": 1}],
            "entry 2: unknown preset 'tinny'",
        ),
        ([{"preset": "tiny", "batch": []}], "batch is an empty list"),
        ([{"preset": "tiny"}], "batch: missing, and it has no default"),
        (
            [{"preset": "tiny", "batch": [1, 0]}],
            "batch: 0 is too small; the least is 1 (in preset tiny, batch 0)",
        ),
        ([{"preset": "tiny", "batch": 1, "ctx": 1, "seq_len": 1}], "are the same setting: give one"),
        ([{"preset": "tiny", "config": "x", "batch": 1}], "preset and config both give a shape"),
        (
            [{"preset": "tiny", "n_heads": 3, "batch": 1}],
            "n_heads 3 does not divide d_model 128; 2 or 4 would",
        ),
        ([{"preset": "tiny", "batch": 1, "checkpoint": "some"}], "'some' is not a checkpoint policy"),
        ([{"preset": "tiny", "batch": 1, "dtype": "int8"}], "dtype: unknown dtype 'int8'; choose fp32"),
        ([{"case": "mlp", "batch": 1}], "batch cannot stand beside"),
        ([{"case": "no-such*"}], "no case 'no-such*'"),
        ([["tiny", 1]], "an entry is an object such as"),
        ({"entries": [], "steps": 3}, "only a note may stand, not ['steps']"),
        ([], "holds no entries"),
        ("preset: tiny", "is not JSON"),
        ('{"preset": "tiny", "batch": 1}\n{"preset"\n', "line 2 is not JSON"),
    ],
)
def test_mistake_is_one_line_that_names_its_place(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_sweep(write(tmp_path, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_short_names_of_dtypes_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    sweep = read_sweep(
        write(tmp_path, [{"preset": "tiny", "batch": 1, "dtype": ["bf16", "bfloat16", "fp32"]}])
    )
    assert [task.step.dtype for task in sweep.tasks if task.step] == ["bfloat16", "float32"]


def test_sweep_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read sweep .*gone\.json: No such file"):
        read_sweep(tmp_path / "gone.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_sweep(tmp_path / "binary")
