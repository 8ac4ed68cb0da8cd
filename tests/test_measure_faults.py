"""A child that dies is a row with its reason: processes really killed, really crashed, really too slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.errors import InputError
from oomguard.measure import Settings, measure, measure_callable
from oomguard.measure.process import describe_exit
from oomguard.rows import Row

STEPS = Path(__file__).parent / "measure_steps.py"
QUICK = Settings(steps=3, timeout_seconds=60)


def run(name: str, settings: Settings = QUICK) -> Row:
    return measure_callable(f"{STEPS}:{name}", settings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("killed", "killed (signal 9), most likely by the system for lack of memory"),
        ("segmentation_fault", "segmentation fault (signal 11)"),
        ("aborted", "aborted (signal 6)"),
        ("aborted_while_building", "(while building the step)"),
        ("left_without_a_word", "exit status 0"),
        ("exits", "exit status 1"),
        ("raises", "ValueError: shapes (2,3) and (4,5) do not match (while running step 1)"),
        ("idle", "does it run and evaluate anything?"),
    ],
)
def test_child_that_dies_is_a_row_with_its_reason(name: str, reason: str) -> None:
    row = run(name)
    assert row.status == "failed"
    assert reason in row.reason
    assert row.peak_bytes is None
    assert row.mlx
    assert row.machine


def test_reason_names_the_step_that_died() -> None:
    assert "while running step 2 of 3" in run("segmentation_fault").reason


def test_reason_ends_with_the_last_words_on_stderr() -> None:
    assert run("aborted").reason.endswith("libc++abi: out of memory")


def test_step_1_stays_when_a_later_one_dies() -> None:
    row = run("segmentation_fault")
    assert row.first_peak_bytes == 2 << 20


def test_default_column_stays_when_the_sequenced_steps_die() -> None:
    row = run("dies_sequenced")
    assert row.status == "failed"
    assert "sequenced step 1 of 3" in row.reason
    assert row.peak_bytes == 2 << 20
    assert row.sequenced_peak_bytes is None


@pytest.mark.parametrize("name", ["hangs", "hangs_without_the_interpreter"])
def test_child_that_takes_too_long_is_ended(name: str) -> None:
    start = time.monotonic()
    row = run(name, Settings(timeout_seconds=2.0))
    assert time.monotonic() - start < 20
    assert row.reason == "took longer than 2.0 s (while running step 1)"


@pytest.mark.parametrize("name", ["grows", "grows_outside_mlx"])
def test_child_that_takes_too_much_is_ended_near_its_limit(name: str) -> None:
    limit = 400 << 20
    row = run(name, Settings(max_memory_bytes=limit, timeout_seconds=60))
    assert "the limit is 400.0 MiB" in row.reason
    held = float(row.reason.split("held ")[1].split(" ")[0])
    assert 400 < held < 1500


def test_processes_a_child_started_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "helper"
    monkeypatch.setenv("HELPER_FILE", str(file))
    run("starts_a_helper", Settings(timeout_seconds=3.0))
    assert ends(int(file.read_text()))


def ends(process_id: int, seconds: float = 10.0) -> bool:
    """Whether a process is gone, or a corpse nobody collected, within that time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def wait_for(file: Path, seconds: float = 60.0) -> str:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if file.exists() and file.read_text():
            return file.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_child_ends_when_its_parent_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "id"
    parent = subprocess.Popen(
        [sys.executable, "-m", "oomguard", "measure", f"{STEPS}:writes_its_id"],
        env={**os.environ, "ID_FILE": str(file)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    child = int(wait_for(file))
    assert psutil.pid_exists(child)
    parent.send_signal(number)
    parent.wait(timeout=20)
    assert ends(child)


def test_worker_ends_when_its_order_channel_closes(tmp_path: Path) -> None:
    """What ends a child where the kernel does not do it: macOS."""
    results, child_end = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "oomguard.measure.worker", str(child_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(child_end,),
        env={**os.environ, "ID_FILE": str(tmp_path / "id")},
    )
    os.close(child_end)
    assert worker.stdin is not None
    order = (
        f'{{"task": {{"function": "{STEPS}:writes_its_id"}}, "steps": 1, "sequenced": false, '
        f'"memory_limit_bytes": 1000000000000, "parent": {os.getpid()}}}\n'
    )
    worker.stdin.write(order.encode())
    worker.stdin.flush()
    wait_for(tmp_path / "id")
    worker.stdin.close()
    assert worker.wait(timeout=10) == 1
    os.close(results)


def test_worker_that_never_gets_its_order_ends() -> None:
    worker = subprocess.run(
        [sys.executable, "-P", "-m", "oomguard.measure.worker", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=30,
    )
    assert worker.returncode == 1


def test_what_a_step_prints_cannot_pass_for_a_result() -> None:
    row = run("noisy")
    assert row.status == "ok"
    assert row.peak_bytes == 12 << 20


def test_module_in_the_working_folder_does_not_shadow_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "psutil", "model", "calibration", "mlx"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)
    assert run("four_and_eight").status == "ok"


def test_configuration_that_cannot_fit_is_not_run() -> None:
    model = ModelConfig(n_layers=4, d_model=1024, n_heads=8, d_mlp=4096, context=512)
    row = measure(model, StepConfig(batch=4, seq_len=512), Settings(max_memory_bytes=100 << 20))
    assert row.status == "failed"
    assert row.reason.startswith("not run: the estimate is")
    assert "the limit is 100.0 MiB" in row.reason


def test_force_runs_what_the_estimate_refuses_and_the_limit_still_holds() -> None:
    model = ModelConfig(n_layers=4, d_model=1024, n_heads=8, d_mlp=4096, context=512)
    settings = Settings(max_memory_bytes=150 << 20, force=True, timeout_seconds=60)
    row = measure(model, StepConfig(batch=1, seq_len=64), settings)
    assert row.reason.startswith("ended: it held")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (f"{STEPS}:absent", "has no function 'absent'"),
        (f"{STEPS}:not_a_function", "not_a_function is int, not a function"),
        (f"{STEPS}:returns_a_number", "returned int"),
        ("/nowhere/step.py:build", "no file /nowhere/step.py"),
        ("step.py", "write FILE.py:FUNCTION"),
        (f"{STEPS}:", "write FILE.py:FUNCTION"),
    ],
)
def test_function_that_is_none_is_a_mistake_of_the_caller(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure_callable(spec, QUICK)


def test_file_with_a_syntax_error_is_a_row_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def build(:\n")
    row = measure_callable(f"{file}:build", QUICK)
    assert "SyntaxError" in row.reason


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit status 3"),
        (-6, "aborted (signal 6)"),
        (-15, "terminated (signal 15)"),
        (-99, "ended (signal 99)"),
    ],
)
def test_exit_status_reads_as_a_person_says_it(code: int, text: str) -> None:
    assert describe_exit(code) == text
