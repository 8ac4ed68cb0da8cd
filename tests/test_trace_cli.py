"""``oomguard trace`` as a person runs it: presets, named cases, a step of one's own."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from oomguard.cli.main import main
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.presets import preset
from oomguard.config.step import StepConfig
from oomguard.trace.result import TraceResult

TINY = ["trace", "--preset", "tiny", "--batch", "2", "--ctx", "32"]

OWN = """
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x

model, optimizer, x = Net(), optim.SGD(0.1), mx.zeros((128, 64))
optimizer.init(model.trainable_parameters())
gradients = nn.value_and_grad(model, lambda x: model(x).square().mean())

def update(x):
    loss, found = gradients(x)
    optimizer.update(model, found)
    return loss
"""


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    status, out, _ = run(capsys, *args, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def traced(policy: str = "none", limit: int | None = None, **changes: object) -> TraceResult:
    from oomguard.model.step import build_step
    from oomguard.trace.engine import trace_built

    step = StepConfig(batch=2, seq_len=32, checkpoint=CheckpointPolicy.parse(policy)).but(**changes)
    return trace_built(build_step(preset("tiny"), step, evaluated=False), memory_limit=limit)


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file of the user's own, with a name no other test has imported."""
    return tmp_path / f"own_{abs(hash(request.node.name))}.py"


def own_target(own: Path, build: str, before: str = OWN) -> str:
    own.write_text(f"{before}\n{build}\n", encoding="utf-8")
    return f"{own}:build"


def test_command_line_and_engine_give_the_same_peak(capsys: pytest.CaptureFixture[str]) -> None:
    found, result = run_json(capsys, *TINY), traced()
    assert found["peak_bytes"] == result.peak_bytes
    assert found["sequenced_peak_bytes"] == result.sequenced_peak_bytes
    assert found["primitives"] == result.primitives
    assert found["moment"]["primitive"] == result.moment.primitive
    assert found["title"].startswith("tiny: ")


def test_every_setting_reaches_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--grad-checkpoint", "blocks=2", "--dtype", "bf16", "--optimizer", "lion", "--clip"]
    found = run_json(capsys, *TINY, *settings, "--accumulate", "2", "--no-compile")
    changes = {"dtype": "bfloat16", "optimizer": "lion", "clip_norm": True, "accumulate": 2}
    assert found["peak_bytes"] == traced("blocks=2", compiled=False, **changes).peak_bytes
    assert (found["checkpoint"], found["compiled"]) == ("blocks=2", False)
    assert "batch 2 x 2 accumulated, 2 of 4 blocks recomputed" in found["settings"]


def test_sequenced_is_a_memory_limit_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *TINY, "--sequenced")
    assert found == run_json(capsys, *TINY, "--memory-limit", "0")
    assert found["memory_limit_bytes"] == 0
    assert found["peak_bytes"] == traced(limit=0).peak_bytes < traced().peak_bytes


def test_status_is_1_only_over_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    peak = traced().most_bytes
    assert run(capsys, *TINY, "--budget", f"{peak}B")[0] == 0
    status, out, err = run(capsys, *TINY, "--budget", f"{peak - 1}B")
    assert (status, err) == (1, "")
    assert "1 B over the budget" in out


def test_compare_puts_the_other_policy_beside(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, *TINY, "--compare", "every")
    every = traced("every")
    assert found["compared"]["peak_bytes"] == every.peak_bytes < found["peak_bytes"]
    assert found["compared"]["checkpoint"] == "every"
    _, out, _ = run(capsys, *TINY, "--compare", "every")
    assert re.search(r"peak +[\d.]+ MiB +[\d.]+ MiB +-\d+%", out)


def test_a_graph_rewritten_is_the_step_built_with_that_policy(
    capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    build = (
        "from oomguard.config.step import StepConfig\n"
        "from oomguard.model.step import build_step\n"
        "from oomguard.config.presets import preset\n"
        "def build():\n"
        "    return build_step(preset('tiny'), StepConfig(batch=2, seq_len=32), evaluated=False)"
    )
    found = run_json(capsys, "trace", own_target(own, build, ""), "--compare", "every")
    assert found["peak_bytes"] == traced().peak_bytes
    assert found["compared"]["peak_bytes"] == traced("every").peak_bytes


@pytest.mark.parametrize(
    "build",
    [
        "def build(): return update, (x,), [model, optimizer]",
        "def build(): return update, [x]",
        "def build(): return update, {'x': x}, (model, optimizer)",
        "def build(): return lambda: update(x)",
        "def build(optional=3): return update, (x,)",
    ],
)
def test_a_step_of_ones_own_is_traced(capsys: pytest.CaptureFixture[str], own: Path, build: str) -> None:
    found = run_json(capsys, "trace", own_target(own, build))
    weights = next(group for group in found["holders"] if group["what"] == "parameter")
    assert weights["name"] == "layers.*.layers.*.weight"
    assert (weights["count"], weights["bytes_each"]) == (8, 64 * 256 * 4)
    assert found["compiled"] is False


def test_compile_can_be_asked_of_a_step_of_ones_own(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    target = own_target(own, "def build(): return update, (x,), [model, optimizer]")
    eager, compiled = run_json(capsys, "trace", target), run_json(capsys, "trace", target, "--compile")
    assert compiled["compiled"] is True
    assert compiled["primitives"] < eager["primitives"]


def test_checkpointing_in_the_step_is_kept_and_compared_without(
    capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    build = (
        "from oomguard.model.checkpoint import checkpoint_layers\n"
        "checkpoint_layers(model.layers, 'every')\n"
        "def build(): return update, (x,), [model, optimizer]"
    )
    written = run_json(capsys, "trace", own_target(own, build), "--compare", "none")
    plain = own.with_name("plain_" + own.name)
    found = run_json(
        capsys, "trace", own_target(plain, "def build(): return update, (x,), [model, optimizer]")
    )
    plain_peak = written["compared"]["peak_bytes"]
    assert written["peak_bytes"] < plain_peak
    # The two processes queue a different number of dispatches before their first step, which shifts where tasks end.
    assert plain_peak == pytest.approx(found["peak_bytes"], rel=0.02)


def test_what_a_users_file_prints_is_no_part_of_the_report(
    capsys: pytest.CaptureFixture[str], own: Path
) -> None:
    build = "print('from the file')\ndef build():\n    print('from build')\n    return update, (x,)"
    status, out, err = run(capsys, "trace", own_target(own, build), "--json")
    assert status == 0
    assert json.loads(out)["schema"] == "oomguard.trace/1"
    assert "from the file\nfrom build" in err


def test_a_case_that_recomputes_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "trace", "--case", "mlp-every", "--compare", "none")
    assert status == 2
    assert "--compare: the step recomputes already" in err


def test_a_named_case_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "trace", "--case", "mlp", "--compare", "every")
    assert found["title"].startswith("case mlp: ")
    assert found["compared"]["peak_bytes"] < found["peak_bytes"]


def test_files_are_written_beside_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    timeline, page = tmp_path / "step.json", tmp_path / "step.html"
    files = ["--timeline", str(timeline), "--html", str(page), "--compare", "every", "--budget", "1GiB"]
    status, out, err = run(capsys, *TINY, *files)
    assert status == 0
    assert str(timeline) in err
    assert str(page) in err
    assert str(page) not in out
    peaks = {e["args"]["bytes"] for e in json.loads(timeline.read_text())["traceEvents"] if e["ph"] == "i"}
    assert peaks == {traced().peak_bytes, traced("every").peak_bytes}
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_example_is_traced(capsys: pytest.CaptureFixture[str], project: Path) -> None:
    example = project / "examples" / "trace_own_step.py"
    found = run_json(capsys, "trace", f"{example}:build", "--compare", "every")
    assert found["compared"]["peak_bytes"] < found["peak_bytes"]
    runpy.run_path(str(example), run_name="__main__")
    assert re.match(r"peak [\d.]+ MiB: backward", capsys.readouterr().out)


def page_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *args: str
) -> tuple[int, str, dict[str, Any]]:
    """The exit status, what was printed, and the numbers in the page."""
    path = tmp_path / "page.html"
    status, out, _ = run(capsys, "trace", *args, "--html", str(path))
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    assert found is not None
    return status, out, json.loads(found[1])


def test_page_names_the_machine_asked_about_and_holds_the_step_against_what_it_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, page = page_of(capsys, tmp_path, "--preset", "tiny", "--device", "m5-pro-48gb")
    assert (status, page["fits"], page["advice"]) == (0, True, [])
    assert page["machine"] == "Apple M5 Pro, 48 GiB (metal)"
    assert "below the budget of 35.6 GiB (bound by: recommended working set" in page["verdict"]
    assert "budget" not in out  # nobody asked for one


def test_page_says_what_would_fit_where_the_step_does_not_and_the_status_is_of_what_was_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ("--preset", "huge", "--batch", "24", "--device", "cpu-2gb")
    status, out, page = page_of(capsys, tmp_path, *args)
    assert (status, page["fits"]) == (0, False)
    assert page["verdict"].startswith("Does not fit: ")
    assert page["advice"][0].startswith("The least recompute that fits: ")
    assert "budget" not in out
    assert page_of(capsys, tmp_path, *args, "--budget", "auto")[0] == 1


def test_page_of_this_machine_names_it_and_its_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, _, page = page_of(capsys, tmp_path, "--preset", "tiny")
    assert page["machine"].endswith(f"({page['runs'][0]['backend']})")
    assert page["machine"] != page["runs"][0]["backend"]
    assert page["budget"] > 0


def test_page_of_a_machine_of_unknown_size_says_that_it_is_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, page = page_of(capsys, tmp_path, "--preset", "tiny", "--device", "metal")
    assert (status, page["fits"], page["budget"]) == (0, None, None)
    assert page["verdict"].startswith("Held against no budget: how much memory the machine has is not known")
