"""Finding the fast BLAS, putting it first, and saying how to get it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.measure import blas
from oomguard.measure.blas import child_environment, find_openblas, missing_blas_hint


@pytest.mark.parametrize(
    "place",
    [
        "libopenblas.so.0",
        "x86_64-linux-gnu/libopenblas.so.0",
        "aarch64-linux-gnu/libopenblas.so.0",
        "aarch64-linux-gnu/openblas-pthread/libopenblas.so.0",
    ],
)
def test_openblas_is_found_where_distributions_put_it(place: str, tmp_path: Path) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert blas._first_match([str(tmp_path / "empty"), str(tmp_path)]) == file


def test_openblas_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    assert blas._first_match([str(tmp_path)]) is None


def test_child_gets_openblas_first_and_on_one_thread() -> None:
    environment = child_environment({"HOME": "/home"}, Path("/lib/libopenblas.so.0"))
    assert environment == {
        "HOME": "/home",
        "LD_PRELOAD": "/lib/libopenblas.so.0",
        "OPENBLAS_NUM_THREADS": "1",
    }


def test_child_keeps_what_the_user_preloads_and_sets() -> None:
    base = {"LD_PRELOAD": "/lib/libjemalloc.so", "OPENBLAS_NUM_THREADS": "4"}
    environment = child_environment(base, Path("/lib/libopenblas.so.0"))
    assert environment["LD_PRELOAD"] == "/lib/libjemalloc.so:/lib/libopenblas.so.0"
    assert environment["OPENBLAS_NUM_THREADS"] == "4"


def test_openblas_the_user_preloads_is_not_joined_by_another() -> None:
    base = {"LD_PRELOAD": "/own/libopenblas.so.0 /lib/libjemalloc.so"}
    environment = child_environment(base, Path("/lib/libopenblas.so.0"))
    assert environment["LD_PRELOAD"] == "/own/libopenblas.so.0:/lib/libjemalloc.so"


def test_child_without_openblas_keeps_its_environment() -> None:
    assert child_environment({"LD_PRELOAD": "x"}, None) == {"LD_PRELOAD": "x"}


@pytest.mark.parametrize(
    ("platform", "found", "hinted"),
    [("linux", None, True), ("linux", Path("/lib/libopenblas.so.0"), False), ("darwin", None, False)],
)
def test_hint_comes_only_where_a_fast_blas_is_missing(
    platform: str, found: Path | None, hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(blas, "find_openblas", lambda: found)
    hint = missing_blas_hint()
    assert bool(hint) == hinted
    assert "\n" not in hint
    assert not hinted or "apt install libopenblas0" in hint


@pytest.mark.skipif(find_openblas() is None, reason="OpenBLAS is not installed")
def test_loaded_blas_is_read_from_the_process_itself() -> None:
    code = "from oomguard.measure.blas import loaded_blas; print(loaded_blas('cpu'), loaded_blas('metal'))"
    environment = child_environment({"PATH": "/usr/bin"}, find_openblas())
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "openblas 1 thread"
    del environment["LD_PRELOAD"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "reference"


@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("sh") is None, reason="Linux only")
def test_install_script_names_a_package_and_runs_nothing_when_asked_not_to(project: Path) -> None:
    script = str(project / "calibration" / "install-fast-blas.sh")
    done = subprocess.run(["sh", script, "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "openblas" in done.stdout
    wrong = subprocess.run(["sh", script, "--now"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "usage" in wrong.stderr
