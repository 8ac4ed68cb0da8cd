"""What can happen to a training process: whatever it is, the run up to the last whole update is not lost."""

from __future__ import annotations

import json
import os
import pty
import pydoc_data.topics
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomguard.model.saving import open_run

pytestmark = pytest.mark.slow

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_mlp": 64, "context": 32}
MINI = ("--config", "mini.json", "--corpus", "text.txt", "--batch", "2", "--no-learn")
ENDLESS = (*MINI, "--steps", "100000")
WAIT_SECONDS = 60.0

# Runs the command line as it is, with the lines before it in the same process.
CALL = "import sys\nfrom oomguard.cli.main import main\nmain(sys.argv[1:])"

SAVES_SLOWLY = "import os, time; sync = os.fsync; os.fsync = lambda held: (time.sleep(0.5), sync(held))"
NEVER_SAVED = "import os, time; os.fsync = lambda held: time.sleep(600)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mini.json").write_text(json.dumps(SHAPE))
    (tmp_path / "text.txt").write_bytes(Path(pydoc_data.topics.__file__).read_bytes())
    return tmp_path


class Training:
    """A training process; ended with the test at the latest."""

    def __init__(self, folder: Path, *arguments: str, before: str = "", **how: object) -> None:
        command = [sys.executable, "-c", f"{before}\n{CALL}", "train", *arguments]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, cwd=folder, text=True, **streams)  # type: ignore[call-overload]

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def until_line(self, start: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return
        pytest.fail(f"no line {start!r}: {self.process.communicate()}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, out or "", err or ""


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def begin(*arguments: str, **how: object) -> Training:
        started.append(Training(folder, *arguments, **how))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for training in started:
        training.process.kill()
        training.process.communicate()


Start = Callable[..., Training]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_train_saves_before_a_signal_ends_it(number: signal.Signals, start: Start, folder: Path) -> None:
    training = start(*ENDLESS, "--out", "run.safetensors")
    training.until_line("step ")
    training.process.send_signal(number)
    status, out, err = training.end()
    assert (status, err) == (130, "")
    assert "stopped after step" in out
    assert "saved run.safetensors" in out
    assert open_run(folder / "run.safetensors").step >= 1


def test_train_takes_signals_in_a_burst_for_one(start: Start, folder: Path) -> None:
    """A terminal hangs up itself and through its shell; ``timeout`` signals a process and its group."""
    training = start(*ENDLESS, "--out", "run.safetensors", before=SAVES_SLOWLY)
    training.until_line("step ")
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        training.process.send_signal(number)
        time.sleep(0.01)
    assert training.end()[0] == 130
    assert open_run(folder / "run.safetensors").step >= 1


def test_train_under_nohup_outlives_its_terminal(start: Start, folder: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    training = start(*ENDLESS, "--out", "run.safetensors", "--save-every", "1", before=ignoring)
    training.until_line("step ")
    training.process.send_signal(signal.SIGHUP)
    before = open_run(folder / "run.safetensors").step
    training.until(lambda: open_run(folder / "run.safetensors").step > before + 5)


def on_a_terminal(start: Start) -> tuple[Training, int]:
    """An endless training on a terminal of its own, past its first update, and the other end of the terminal."""
    ours, theirs = pty.openpty()
    training = start(
        *(*ENDLESS, "--out", "run.safetensors"),
        before="import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    while b"loss" not in seen:
        seen += os.read(ours, 4096)
    return training, ours


def test_train_whose_terminal_closes_saves(start: Start, folder: Path) -> None:
    training, terminal = on_a_terminal(start)
    os.close(terminal)
    assert training.end()[0] == 130
    assert open_run(folder / "run.safetensors").step >= 1


def test_train_on_a_terminal_says_at_once_that_ctrl_c_was_heard(start: Start, folder: Path) -> None:
    training, terminal = on_a_terminal(start)
    os.write(terminal, b"\x03")  # the key, as the terminal takes it
    seen = b""
    while b"tokens/s\r\n" not in seen:
        seen += os.read(terminal, 4096)
    assert training.end()[0] == 130
    os.close(terminal)
    assert b"stopping after this micro-batch, to save; Ctrl-C again ends at once" in seen
    assert open_run(folder / "run.safetensors").step >= 1


@pytest.mark.parametrize("reader", ["head -1", "head -6", "true"])
def test_train_into_a_pipe_that_closes_saves(reader: str, folder: Path) -> None:
    options = shlex.join([*MINI, "--steps", "2000", "--out", "run.safetensors"])
    line = f"set -o pipefail; {shlex.quote(sys.executable)} -m oomguard train {options} | {reader}"
    ran = subprocess.run(
        ["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert ran.stderr == ""
    assert ran.returncode == 141
    assert 1 <= open_run(folder / "run.safetensors").step < 2000


def test_train_whose_output_cannot_be_written_saves_and_says_so(start: Start, folder: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    with full.open("w") as stream:
        status, _, err = start(*ENDLESS, "--out", "run.safetensors", stdout=stream).end()
    assert status == 2
    assert err == "oomguard: No space left on device\n"
    assert open_run(folder / "run.safetensors").step == 1


def a_saved_run(start: Start, folder: Path, steps: int = 2) -> Path:
    assert start(*MINI, "--steps", str(steps), "--out", "run.safetensors").end()[0] == 0
    return folder / "run.safetensors"


@pytest.mark.parametrize(
    ("number", "sequences", "seconds"),
    [
        (signal.SIGTERM, 1_000_000, 1.0),  # while its sequences are drawn
        (signal.SIGINT, 1_000_000, 1.0),
        (signal.SIGTERM, 100_000, 5.0),  # while it runs
        (signal.SIGHUP, 100_000, 5.0),
    ],
)
def test_train_is_stopped_inside_a_huge_update(
    number: signal.Signals, sequences: int, seconds: float, start: Start, folder: Path
) -> None:
    run = a_saved_run(start, folder)
    before = run.read_bytes()
    options = ("--resume", "run.safetensors", "--steps", "9", "--ctx", "8", "--memory", "2GB")
    training = start(*options, "--batch", "1", "--target-batch", str(sequences), "--no-learn")
    training.until_line("budget ")
    time.sleep(seconds)
    asked = time.monotonic()
    training.process.send_signal(number)
    status, out, err = training.end()
    assert time.monotonic() - asked < 20
    assert (status, err) == (130, "")
    assert "stopped after step 2 of 9" in out
    assert run.read_bytes() == before  # the last whole update is the one that was saved


def parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".part" in path.name]


def test_train_killed_while_saving_keeps_the_old_run_and_the_next_start_removes_the_part(
    start: Start, folder: Path
) -> None:
    run = a_saved_run(start, folder)
    before = run.read_bytes()
    onward = ("--resume", "run.safetensors", "--no-learn", "--steps")
    saving = start(*onward, "3", before=NEVER_SAVED)
    saving.until(lambda: any(part.stat().st_size >= len(before) for part in parts(folder)))
    (part,) = parts(folder)

    status, out, err = start(*onward, "3", "--out", "other.safetensors").end()
    assert status == 0, err
    assert "left by a save that was killed" not in out
    assert parts(folder) == [part], "a living writer's part is no one else's to remove"

    saving.process.send_signal(signal.SIGKILL)
    saving.end()
    assert run.read_bytes() == before
    assert parts(folder) == [part]

    status, out, err = start(*onward, "4").end()
    assert status == 0, err
    assert f"note: removed {part.name} (" in out
    assert "left by a save that was killed" in out
    assert parts(folder) == []
    assert open_run(run).step == 4


def test_train_stopped_while_saving_ends_the_save_first(start: Start, folder: Path) -> None:
    training = start(*ENDLESS, "--out", "run.safetensors", "--save-every", "1", before=SAVES_SLOWLY)
    training.until(lambda: bool(parts(folder)))
    training.process.send_signal(signal.SIGTERM)
    assert training.end()[0] == 130
    assert open_run(folder / "run.safetensors").step == 1
    assert parts(folder) == []


# Writing past the limit fails as on a full disk; 20 kB are for what else is written.
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"


def test_train_on_a_full_disk_keeps_the_old_run_and_leaves_no_part(start: Start, folder: Path) -> None:
    run = a_saved_run(start, folder)
    before = run.read_bytes()
    status, _, err = start("--resume", "run.safetensors", "--no-learn", "--steps", "4", before=FULL).end()
    assert status == 2
    assert err.startswith("oomguard: cannot save run.safetensors: ")
    assert err.count("\n") == 1
    assert run.read_bytes() == before
    assert parts(folder) == []


FULL_FOR_A_WHILE = """
import oomguard.model.saving as saving
import mlx.core as mx
real, calls = mx.save_safetensors, []
def save(*arguments):
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("[write] Unable to write 3900096 bytes to file.")
    real(*arguments)
mx.save_safetensors = save
"""


def test_train_goes_on_when_a_save_on_the_way_fails(start: Start, folder: Path) -> None:
    options = (*MINI, "--steps", "4", "--save-every", "2", "--out", "run.safetensors")
    status, out, err = start(*options, before=FULL_FOR_A_WHILE).end()
    assert status == 0, err
    assert "note: cannot save run.safetensors: [write] Unable to write" in out
    assert "the run goes on, and is saved later" in out
    assert open_run(folder / "run.safetensors").step == 4


def test_train_whose_place_was_taken_meanwhile_saves_beside_it(start: Start, folder: Path) -> None:
    training = start(*ENDLESS, "--out", "run.safetensors")
    training.until_line("step ")
    (folder / "run.safetensors").write_text("somebody else's")
    training.process.send_signal(signal.SIGTERM)
    status, out, err = training.end()
    assert (status, err) == (130, "")
    assert "saved as run-2.safetensors instead" in out
    assert "saved run-2.safetensors" in out
    assert (folder / "run.safetensors").read_text() == "somebody else's"
    assert open_run(folder / "run-2.safetensors").step >= 1


def test_train_without_room_on_the_disk_does_not_begin(start: Start, folder: Path) -> None:
    small = "import shutil; shutil.disk_usage = lambda path: type(str(path), (), {'free': 1000})"
    status, out, err = start(*MINI, "--steps", "4", "--out", "run.safetensors", before=small).end()
    assert status == 2
    assert "the run takes" in err
    assert "its disk has 1000 B free" in err
    assert "step 1" not in out


def test_train_asked_twice_by_ctrl_c_ends_at_once(start: Start, folder: Path) -> None:
    training = start(*ENDLESS, "--out", "run.safetensors", before=NEVER_SAVED)
    training.until_line("step ")
    training.process.send_signal(signal.SIGINT)
    training.until(lambda: bool(parts(folder)))
    time.sleep(0.7)
    training.process.send_signal(signal.SIGINT)
    status, _, err = training.end()
    assert status == 130
    assert "stopped" in err
    assert parts(folder) == []
