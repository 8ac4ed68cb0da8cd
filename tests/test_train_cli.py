"""``oomguard train`` as a person runs it: plan first, train inside it, end with one line."""

from __future__ import annotations

import json
import os
import pty
import pydoc_data.topics
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oomguard.measure.blas import find_openblas
from oomguard.model.saving import open_run
from oomguard.rows import read_rows

DOCUMENTATION = Path(pydoc_data.topics.__file__)
FINAL = re.compile(
    r"predicted [\d.]+ MiB, peak [\d.]+ MiB, active [\d.]+ MiB, cache [\d.]+ [KMG]?i?B, "
    r"within the budget of [\d.]+ MiB, [\d,]+ tokens/s"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape between tiny and nothing, so that a step takes milliseconds."""
    path = tmp_path_factory.mktemp("shapes") / "mini.json"
    path.write_text(json.dumps({"n_layers": 2, "d_model": 64, "n_heads": 2, "d_mlp": 256, "context": 64}))
    return path


class Oomguard:
    def __init__(self, cwd: Path, home: Path) -> None:
        self.cwd = cwd
        self.variables = {**os.environ, "OOMGUARD_HOME": str(home)}

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oomguard", *map(str, arguments)]
        return subprocess.Popen(
            command,
            cwd=self.cwd,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def train(self, *arguments: object) -> tuple[int, str, str]:
        return self.run("train", *arguments)

    def json(self, *arguments: object) -> Any:
        status, out, err = self.run(*arguments, "--json")
        assert status == 0, err
        return json.loads(out)


@pytest.fixture
def oomguard(tmp_path: Path, home: Path) -> Oomguard:
    return Oomguard(tmp_path, home)


def mini(shape: Path, *more: object) -> tuple[object, ...]:
    return ("--config", shape, "--corpus", DOCUMENTATION, "--memory", "500MB", "--batch", 4, *more)


def test_train_ends_with_the_line_and_adds_its_row(oomguard: Oomguard, shape: Path, home: Path) -> None:
    status, out, err = oomguard.train(*mini(shape, "--steps", 6))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert FINAL.fullmatch(lines[-1]), lines[-1]
    assert lines[-2] == f"row added to {home / 'rows.jsonl'}"
    assert sum(line.startswith("step ") for line in lines) == 6
    _, rows = read_rows(home / "rows.jsonl")
    assert rows[-1].model is not None
    assert (rows[-1].model.d_model, rows[-1].steps, rows[-1].status) == (64, 5, "ok")


def test_train_on_linux_runs_on_the_fast_blas_where_it_is_installed(
    oomguard: Oomguard, shape: Path, home: Path
) -> None:
    openblas = find_openblas()
    if openblas is None:
        pytest.skip("no OpenBLAS here")
    oomguard.variables.pop("LD_PRELOAD", None)
    assert oomguard.train(*mini(shape, "--steps", 3))[0] == 0
    row = read_rows(home / "rows.jsonl")[1][-1]
    assert row.backend != "cpu" or row.blas.startswith("openblas")


def test_train_shows_a_bar_on_a_terminal(oomguard: Oomguard, shape: Path) -> None:
    seen = on_a_terminal(oomguard, "train", *mini(shape, "--steps", 4, "--no-learn"))
    assert "4/4" in seen
    assert "val" in seen
    assert "\x1b[" in seen
    assert FINAL.search(seen.replace("\r\n", ""))


def on_a_terminal(oomguard: Oomguard, *arguments: object) -> str:
    """What a command shows on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oomguard", *map(str, arguments)]
    variables = {**oomguard.variables, "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=oomguard.cwd, env=variables, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = bytearray()
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            part = b""
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(60) == 0
    return seen.decode()


def test_train_no_learn_leaves_the_calibration_alone(oomguard: Oomguard, shape: Path, home: Path) -> None:
    rows = home / "rows.jsonl"
    before = rows.read_bytes() if rows.exists() else None
    status, out, _ = oomguard.train(*mini(shape, "--steps", 3, "--no-learn"))
    assert status == 0
    assert "row added" not in out
    assert (rows.read_bytes() if rows.exists() else None) == before


def test_train_takes_the_setting_the_plan_gives(oomguard: Oomguard, shape: Path) -> None:
    asked = ("--config", shape, "--memory", "60MB", "--target-batch", 32)
    plan = oomguard.json("plan", *asked)
    found = oomguard.json("train", *asked, "--corpus", DOCUMENTATION, "--steps", 3, "--no-learn")
    step, choice = found["settings"]["step"], plan["choice"]
    assert (step["batch"], step["accumulate"]) == (choice["batch"], choice["accumulate"])
    assert step["batch"] * step["accumulate"] == 32
    assert step["checkpoint"]["policy"] == choice["checkpoint"]["policy"]
    assert found["predicted_bytes"] == choice["peak_bytes"]
    assert found["peak_bytes"] <= found["budget_bytes"] == 60_000_000
    assert found["within_budget"]
    assert found["cache_bytes"] <= found["cache_limit_bytes"]


def test_train_lowers_the_loss_on_real_text_with_its_defaults(oomguard: Oomguard, shape: Path) -> None:
    found = oomguard.json("train", *mini(shape, "--steps", 60, "--no-learn"))
    assert found["losses"][0] > 4.5
    assert sum(found["losses"][-10:]) / 10 < 3.5
    assert found["val_losses"][-1] == pytest.approx([60, 3], abs=0.6)
    assert found["val_losses"][0][1] > found["val_losses"][-1][1]


def test_train_resumes_with_its_settings_and_says_what_changed(oomguard: Oomguard, shape: Path) -> None:
    first = mini(shape, "--steps", 4, "--grad-checkpoint", "every", "--out", "run.safetensors", "--no-learn")
    assert oomguard.train(*first)[0] == 0
    on = ("--resume", "run.safetensors", "--no-learn")
    status, out, _ = oomguard.train(*on, "--steps", 6)
    assert status == 0
    assert "resumed run.safetensors at step 4: steps 4 -> 6" in out
    assert "every block recomputed" in out
    status, out, _ = oomguard.train(*on, "--steps", 8, "--grad-checkpoint", "none")
    assert "resumed run.safetensors at step 6: grad-checkpoint every -> none, steps 6 -> 8" in out
    status, out, _ = oomguard.train(*on, "--steps", 10, "--grad-checkpoint", "every", "--optimizer", "lion")
    assert status == 0
    assert "grad-checkpoint none -> every, optimizer adamw -> lion, steps 8 -> 10" in out
    assert "the state of lion starts anew" in out
    status, _, err = oomguard.train(*on)
    assert status == 2
    assert "is at step 10 of 10 already; give more with --steps" in err
    assert open_run(oomguard.cwd / "run.safetensors").step == 10


def test_train_stopped_by_ctrl_c_saves_and_ends_with_the_line(oomguard: Oomguard, shape: Path) -> None:
    process = oomguard.start("train", *mini(shape, "--steps", 100_000, "--out", "run.safetensors"))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "stopped after step" in out
    assert FINAL.fullmatch(out.splitlines()[-1])
    saved = open_run(oomguard.cwd / "run.safetensors")
    assert 0 < saved.step < 100_000
    status, out, _ = oomguard.train("--resume", "run.safetensors", "--steps", saved.step + 2, "--no-learn")
    assert status == 0
    assert f"resumed run.safetensors at step {saved.step}: steps 100000 -> {saved.step + 2}" in out


def test_train_that_cannot_fit_says_what_would_and_reads_no_corpus(oomguard: Oomguard) -> None:
    status, out, _ = oomguard.train("--preset", "behemoth", "--corpus", "no such file", "--memory", "1GB")
    assert status == 1
    assert "Does not fit" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "hueg", "--corpus", "x"), "unknown preset 'hueg'; did you mean huge or mega?"),
        (("--preset", "tiny"), "Give --corpus FILE"),
        (("--corpus", "x"), "which model? Give --preset"),
        (("--preset", "tiny", "--corpus", "nothing.txt"), "cannot read corpus nothing.txt: No such file"),
        (("--preset", "tiny", "--corpus", "empty.txt"), "corpus empty.txt is empty"),
        (("--preset", "tiny", "--corpus", "short.txt"), "holds 20 bytes, fewer than one window of 129"),
        (("--preset", "tiny", "--corpus", "x", "--batch", "0"), "0 is too few; the least is 1"),
        (("--preset", "tiny", "--corpus", "x", "--memory", "0"), "a budget of 0 bytes holds nothing"),
        (("--preset", "tiny", "--corpus", "x", "--memory", "lots"), "'lots' is not a size"),
        (("--preset", "tiny", "--corpus", "x", "--ctx", "129"), "sequence length 129 is longer"),
        (("--preset", "tiny", "--corpus", "x", "--lr", "-1"), "--lr: -1 is too small; the least is 1e-12"),
        (("--preset", "tiny", "--corpus", "x", "--lr", "nan"), "--lr: 'nan' is not a number"),
        (("--preset", "tiny", "--corpus", "x", "--clip-norm", "nan"), "--clip-norm: 'nan' is not a number"),
        (("--preset", "tiny", "--corpus", "x", "--weight-decay", "inf"), "'inf' is not a number"),
        (("--preset", "tiny", "--corpus", "x", "--val-fraction", "1"), "1 is too large; the most is 0.9"),
        (("--preset", "tiny", "--corpus", "x", "--seed", str(10**30)), "--seed: 1000000"),
        (("--preset", "tiny", "--corpus", "x", "--save-every", "5"), "--save-every: where to? Give --out"),
        (("--preset", "tiny", "--corpus", "x", "--device", "m5-pro-48gb"), "train runs on this machine"),
        (("--preset", "tiny", "--corpus", "x", "--out", "no/run.safetensors"), "there is no folder no"),
        (("--resume", "nothing"), "cannot read nothing: No such file"),
        (("--resume", "empty.txt"), "empty.txt is empty"),
        (("--resume", "short.txt"), "short.txt is not a safetensors file"),
    ],
)
def test_train_answers_a_mistake_in_one_line_with_status_2(
    arguments: tuple[str, ...], said: str, oomguard: Oomguard
) -> None:
    (oomguard.cwd / "empty.txt").touch()
    (oomguard.cwd / "short.txt").write_text("twenty bytes of text")
    status, out, err = oomguard.train(*arguments)
    assert status == 2
    assert said in err.replace("\n", " ")
    assert "Traceback" not in err + out


def test_train_on_another_shape_or_a_cut_file_overwrites_nothing(oomguard: Oomguard, shape: Path) -> None:
    oomguard.train(*mini(shape, "--steps", 2, "--out", "run.safetensors", "--no-learn"))
    path = oomguard.cwd / "run.safetensors"
    whole = path.read_bytes()
    status, _, err = oomguard.train("--resume", path.name, "--preset", "tiny", "--steps", 9)
    assert status == 2
    assert "holds a mini of 2 blocks of width 64; it cannot go on as tiny" in err
    path.write_bytes(whole[:-100])
    status, _, err = oomguard.train("--resume", path.name, "--steps", 9)
    assert status == 2
    assert "run.safetensors is cut short" in err
    assert path.read_bytes() == whole[:-100]


def test_train_passing_its_budget_says_so_with_status_1(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that promises too much, as one from a spoiled calibration might."""
    import oomguard.plan.planner as planner
    from oomguard.cli.main import main
    from oomguard.machine.budget import Budget

    real = planner.plan

    def too_small(*arguments: Any, **settings: Any) -> Any:
        from dataclasses import replace

        found = real(*arguments, **settings)
        return replace(
            found, budget=Budget(3_000_000, "the memory given", 0, {"the memory given": 3_000_000})
        )

    monkeypatch.setattr(planner, "plan", too_small)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, mini(shape, "--steps", 3))])
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "over the budget of 2.9 MiB" in out
    assert "OVER the budget of 2.9 MiB" in out.splitlines()[-1]
    assert "not added to the calibration: the memory limit held its peak down" in out
