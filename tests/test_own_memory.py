"""oomguard's own memory is watched: a command that would take the machine down ends with one line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from limited import run_limited

from oomguard.errors import InputError, OwnMemoryError
from oomguard.machine import own_memory
from oomguard.machine.own_memory import allowed_bytes, held_bytes, watched
from oomguard.machine.system import Memory
from oomguard.units import GIB, MIB

HOGS = {
    "in Python": "while True: kept.append(bytearray(1 << 20))",
    "in MLX": "while True:\n        kept.append(mx.ones((1 << 18,)))\n        mx.eval(kept)",
    "in a generator": "kept.extend(b'x' * (1 << 20) for _ in iter(int, 1))",
    "deaf": "while True:\n        try:\n            while True: kept.append(bytearray(1 << 20)); time.sleep(1e-3)\n"
    "        except BaseException: pass",
}


@pytest.mark.parametrize("hog", HOGS)
def test_runaway_ends_with_one_line_and_status_2(hog: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"import time\nimport mlx.core as mx\ndef build():\n    kept = []\n    {HOGS[hog]}\n"
    )
    done = run_limited(["trace", "own.py:build"], cwd=tmp_path, OOMGUARD_OWN_MEMORY="300MB")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("oomguard: stopped: oomguard itself held ")
    assert "OOMGUARD_OWN_MEMORY" in line


@pytest.mark.parametrize("command", ["plan", "estimate", "trace"])
def test_command_within_its_share_says_nothing_of_it(command: str) -> None:
    done = run_limited([command, "--preset", "tiny", *(["--batch", "1"] if command == "estimate" else [])])
    assert (done.returncode, done.stderr) == (0, "")


def test_share_is_of_what_was_free_and_comes_on_top_of_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "memory", lambda: Memory(16 * GIB, 10 * GIB))
    monkeypatch.setattr(own_memory, "container_bytes", lambda: None)
    monkeypatch.setattr(own_memory, "held_bytes", lambda: 1 * GIB)
    assert allowed_bytes() == 6 * GIB
    monkeypatch.setattr(own_memory, "container_bytes", lambda: 4 * GIB)
    assert allowed_bytes() == 3 * GIB


def test_another_size_is_allowed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(own_memory.ALLOWS, "3GiB")
    assert allowed_bytes() == 3 * GIB
    monkeypatch.setenv(own_memory.ALLOWS, "much")
    with pytest.raises(InputError, match="'much' is not a size"):
        allowed_bytes()


def test_memory_held_is_what_was_written() -> None:
    before = held_bytes()
    block = bytearray(64 * MIB)
    block[:: 1 << 12] = b"x" * (64 * MIB >> 12)
    assert held_bytes() - before == pytest.approx(64 * MIB, rel=0.1)


def hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "allowed_bytes", lambda: 6 * GIB)
    monkeypatch.setattr(own_memory, "held_bytes", lambda: 7 * GIB)


def sleep_watched() -> None:
    with watched():
        while True:
            time.sleep(0.001)


def sleep_watched_and_deaf() -> None:
    with watched(), contextlib.suppress(BaseException):
        while True:
            time.sleep(0.001)


@pytest.mark.parametrize("sleep", [sleep_watched, sleep_watched_and_deaf])
def test_message_names_the_figures_and_the_share(
    monkeypatch: pytest.MonkeyPatch, sleep: Callable[[], None]
) -> None:
    hold_too_much(monkeypatch)
    said = r"held 7\.0 GiB, more than 6\.0 GiB, 50% of the memory that was free"
    with pytest.raises(OwnMemoryError, match=said):
        sleep()


def test_watch_is_over_when_its_block_is() -> None:
    before = threading.active_count()
    with watched():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_help_and_readme_state_the_share(project: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "oomguard", "--help"], capture_output=True, text=True)
    for text in (done.stdout, (project / "README.md").read_text(encoding="utf-8")):
        assert f"{own_memory.SHARE:.0%} of the memory" in " ".join(text.split())
        assert own_memory.ALLOWS in text


def test_memory_that_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(): raise MemoryError\n")
    done = run_limited(["trace", "own.py:build"], cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
