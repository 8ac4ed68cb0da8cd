"""A sweep loses no finished row: killed at any moment, stopped by Ctrl-C, or out of disk."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomguard.errors import InputError
from oomguard.measure import Progress, Settings, Task, sweep
from oomguard.rows import Header, Row, append_row, read_rows

STEPS = Path(__file__).parent / "measure_steps.py"
QUICK = Settings(steps=1, sequenced=False)


def tasks(*names: str) -> list[Task]:
    return [Task(function=f"{STEPS}:{name}") for name in names]


def collect(out: Path, *names: str, retry: bool = False) -> list[Progress]:
    return list(sweep(tasks(*names), out, QUICK, retry=retry))


def sweep_command(folder: Path, *, entries: object, out: Path) -> list[str]:
    file = folder / "sweep.json"
    file.write_text(json.dumps(entries))
    options = ["--steps", "1", "--no-sequenced", "--out", str(out)]
    return [sys.executable, "-m", "oomguard", "measure", str(file), *options]


SMALL = {"n_layers": 1, "d_model": 32, "n_heads": 2, "seq_len": 16, "compiled": False}
FIVE = [{**SMALL, "batch": [1, 2, 3, 4, 5]}]


def batches(out: Path) -> list[int]:
    return [row.step.batch for row in read_rows(out)[1] if row.step is not None]


@pytest.mark.slow
def test_sweep_killed_again_and_again_measures_every_row_once(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = sweep_command(tmp_path, entries=FIVE, out=out)
    draw = random.Random(7)
    kills = 0
    before: list[int] = []
    for patience in range(60):  # a busy machine finishes nothing in a second
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=draw.uniform(0.3, 2.0) * (1 + patience / 8))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
        after = batches(out) if out.exists() and out.stat().st_size else []
        assert after[: len(before)] == before
        before = after
    assert process.returncode == 0
    assert kills > 0
    assert batches(out) == [1, 2, 3, 4, 5]


def test_ctrl_c_keeps_the_rows_and_the_same_command_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = sweep_command(tmp_path, entries=[{**SMALL, "batch": [1, 2, 3]}], out=out)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 2) and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    kept = batches(out)
    assert kept == [1, 2, 3][: len(kept)]
    assert f"stopped: {len(kept)} of 3 rows are in {out}; the same command goes on" in said
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"{3 - len(kept)} measured, 0 failed, {len(kept)} were there already" in second.stderr
    assert batches(out) == [1, 2, 3]


def test_row_that_is_there_is_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    first = collect(out, "four_and_eight", "large_first")
    assert [step.kept for step in first] == [False, False]
    again = collect(out, "large_first", "four_and_eight", "cyclic")
    assert [step.kept for step in again] == [True, True, False]
    assert [step.row for step in again[:2]] == [first[1].row, first[0].row]
    assert len(read_rows(out)[1]) == 3


def test_failed_row_is_measured_again_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert [step.row.status for step in collect(out, "killed", "four_and_eight")] == ["failed", "ok"]
    assert [step.kept for step in collect(out, "killed", "four_and_eight")] == [True, True]
    assert [step.kept for step in collect(out, "killed", "four_and_eight", retry=True)] == [False, True]
    assert [row.status for row in read_rows(out)[1]] == ["failed", "ok", "failed"]


def test_function_whose_file_was_edited_is_measured_again(tmp_path: Path) -> None:
    out, file = tmp_path / "rows.jsonl", tmp_path / "own.py"
    file.write_text(STEPS.read_text())
    task = Task(function=f"{file}:four_and_eight")
    os.utime(file, (0, 0))
    assert [step.kept for step in sweep([task, task], out, QUICK)] == [False]
    assert [step.kept for step in sweep([task], out, QUICK)] == [True]
    file.write_text(file.read_text().replace("[kept, kept]", "[kept, kept, kept]"))
    (again,) = sweep([task], out, QUICK)
    assert not again.kept
    assert again.row.peak_bytes == 16 << 20


def test_death_of_one_child_leaves_the_rest_of_the_sweep(tmp_path: Path) -> None:
    steps = collect(tmp_path / "rows.jsonl", "aborted", "four_and_eight", "segmentation_fault", "cyclic")
    assert [step.row.status for step in steps] == ["failed", "ok", "ok", "ok"]


def test_progress_counts_and_ends_with_nothing_left(tmp_path: Path) -> None:
    steps = collect(tmp_path / "rows.jsonl", "four_and_eight", "cyclic", "large_first")
    assert [(step.done, step.total) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert 0 < steps[0].seconds_left < 600
    assert steps[-1].seconds_left == 0


def test_line_cut_short_by_a_crash_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    collect(out, "four_and_eight", "cyclic")
    whole = out.read_bytes()
    out.write_bytes(whole[:-25])
    steps = collect(out, "four_and_eight", "cyclic")
    assert [step.kept for step in steps] == [True, False]
    assert len(read_rows(out)[1]) == 2


def test_leaving_the_loop_ends_the_sweep_and_lets_go_of_the_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    running = sweep(tasks("four_and_eight", "cyclic"), out, QUICK)
    next(running)
    running.close()
    assert len(collect(out, "four_and_eight", "cyclic")) == 2


def test_two_sweeps_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    running = sweep(tasks("four_and_eight", "cyclic"), out, QUICK)
    next(running)
    with pytest.raises(InputError, match="is being written by another oomguard measure"):
        collect(out, "cyclic")
    running.close()


@pytest.mark.parametrize(("field", "what"), [("mlx", "MLX"), ("machine", "machine")])
def test_rows_of_another_machine_or_mlx_are_not_mixed_in(field: str, what: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    collect(out, "four_and_eight")
    header, rows = read_rows(out)
    out.unlink()
    append_row(out, header.model_copy(update={field: "another"}), rows[0])
    with pytest.raises(InputError, match=f"was measured with {what} 'another'"):
        collect(out, "cyclic")
    assert len(read_rows(out)[1]) == 1


def test_nothing_is_left_behind_when_no_row_was_made(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sweep(tasks("four_and_eight"), out, QUICK).close()
    with pytest.raises(InputError):
        collect(out, "four_and_eight", "absent" + "!")
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "said"),
    [("gone/rows.jsonl", "No such file or directory"), (".", "not a file"), ("/dev/full", "not a file")],
)
def test_row_file_that_cannot_be_written_is_refused_before_measuring(
    out: str, said: str, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=f"cannot write row file .*{said}"):
        collect(tmp_path / out, "hangs")
    assert time.monotonic() - start < 5


def test_file_that_is_no_row_file_is_not_added_to(tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    with pytest.raises(InputError, match=r"notes\.txt, line 1"):
        collect(out, "four_and_eight")
    assert out.read_text() == "my notes\n"


def limited_to(room: int) -> None:
    """In a child: files may not grow past ``room`` bytes, and a write beyond fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))


def padded(out: Path, room: int) -> None:
    """A row file with one row of another configuration, padded so that ``room`` bytes are left to write."""
    header = read_rows(out)[0]
    row = read_rows(out)[1][0]
    out.unlink()
    append_row(out, header, row.model_copy(update={"case": "padding", "reason": "x" * room}))


def test_file_that_cannot_grow_keeps_its_rows_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    collect(out, "four_and_eight")
    padded(out, 65536)
    before = out.read_bytes()
    command = sweep_command(tmp_path, entries=[{**SMALL, "batch": 1}], out=out)
    room = len(before) + 40
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, preexec_fn=lambda: limited_to(room)
    )
    assert done.returncode == 2
    assert "cannot store the row of custom 1 x 16" in done.stderr
    assert "the rows before it are kept" in done.stderr
    assert out.read_bytes() == before
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    assert len(read_rows(out)[1]) == 2


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB with 4 KiB left."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this system lets nobody mount a small disk")
    try:
        (folder / "ballast").write_bytes(b"x" * 60 * 1024)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_fills_up_loses_no_finished_row(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk") as disk:
        out = disk / "rows.jsonl"
        command = sweep_command(tmp_path, entries=[{**SMALL, "batch": list(range(1, 13))}], out=out)
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2
        assert "No space left on device; the rows before it are kept" in done.stderr
        kept = batches(out)
        assert kept == list(range(1, len(kept) + 1))
        assert 1 <= len(kept) < 12
        (disk / "ballast").unlink()
        assert subprocess.run(command, capture_output=True, timeout=200).returncode == 0
        assert batches(out) == list(range(1, 13))


def test_ctrl_c_while_a_row_is_stored_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"

    def interrupted(path: Path, header: Header, row: Row) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        append_row(path, header, row)

    monkeypatch.setattr("oomguard.measure.collect.append_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(out, "four_and_eight", "cyclic")
    assert len(read_rows(out)[1]) == 1
