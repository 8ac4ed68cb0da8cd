"""Questions to the operating system, against made-up files and programs."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest

from oomguard.machine import system as machine
from oomguard.units import GIB, KIB, MIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def program(path: Path, script: str) -> str:
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_container_limit_of_version_2_counts_droppable_file_caches_as_free(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/pod/app\n")
    root = tmp_path / "cgroup"
    write(root / "pod/app/memory.max", f"{8 * GIB}\n")
    write(root / "pod/app/memory.current", f"{3 * GIB}\n")
    write(root / "pod/app/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n")
    assert machine.container_bytes(root, tmp_path / "self") == 8 * GIB - (3 * GIB - GIB - GIB // 2)


def test_container_limit_is_the_least_along_the_path(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/pod/app\n")
    root = tmp_path / "cgroup"
    write(root / "pod/app/memory.max", "max\n")
    write(root / "pod/app/memory.high", f"{6 * GIB}\n")
    write(root / "pod/app/memory.current", "0\n")
    write(root / "pod/memory.max", f"{4 * GIB}\n")
    write(root / "pod/memory.current", f"{GIB}\n")
    assert machine.container_bytes(root, tmp_path / "self") == 3 * GIB


def test_container_limit_is_found_at_the_root_from_inside_a_container(tmp_path: Path) -> None:
    write(tmp_path / "self", "5:memory:/docker/0123\n4:cpu:/docker/0123\n0::/\n")
    root = tmp_path / "cgroup"
    write(root / "memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root / "memory/memory.usage_in_bytes", f"{GIB}\n")
    write(root / "memory/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n")
    assert machine.container_bytes(root, tmp_path / "self") == 2 * GIB - GIB // 2


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_container_without_a_limit_has_none(tmp_path: Path, limit: str) -> None:
    write(tmp_path / "self", "3:memory:/a\n0::/a\n")
    root = tmp_path / "cgroup"
    write(root / "a/memory.max", limit)
    write(root / "a/memory.current", "1")
    write(root / "memory/a/memory.limit_in_bytes", limit)
    write(root / "memory/a/memory.usage_in_bytes", "1")
    assert machine.container_bytes(root, tmp_path / "self") is None


def test_container_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/\n")
    write(tmp_path / "cgroup/memory.max", "1000")
    write(tmp_path / "cgroup/memory.current", "2000")
    assert machine.container_bytes(tmp_path / "cgroup", tmp_path / "self") == 0


def test_container_is_unknown_without_control_groups(tmp_path: Path) -> None:
    assert machine.container_bytes(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("folders", "platform", "expected"),
    [
        (["mlx-0.32.4", "mlx_cpu-0.32.4", "mlx_lm-0.32.2"], "linux", machine.InstalledMLX("0.32.4", "cpu")),
        (["mlx-0.33.0", "mlx_cuda_12-0.33.0"], "linux", machine.InstalledMLX("0.33.0", "cuda")),
        (["mlx-0.32.4", "mlx_metal-0.32.4"], "darwin", machine.InstalledMLX("0.32.4", "metal")),
        (["mlx_lm-0.32.2", "numpy-2.3.5"], "linux", None),
    ],
)
def test_installed_mlx_is_read_from_the_names_of_its_wheels(
    tmp_path: Path, folders: list[str], platform: str, expected: machine.InstalledMLX | None
) -> None:
    for folder in folders:
        (tmp_path / f"{folder}.dist-info").mkdir()
    paths = [str(tmp_path / "missing"), str(tmp_path)]
    assert machine.installed_mlx(paths, platform) == expected


def test_installed_mlx_is_the_one_that_imports() -> None:
    from importlib.metadata import version

    found = machine.installed_mlx()
    assert found is not None
    assert found.version == version("mlx")


def test_memory_agrees_with_psutil() -> None:
    import psutil

    mine, theirs = machine.memory(), psutil.virtual_memory()
    assert mine.total_bytes == theirs.total
    assert abs(mine.free_bytes - theirs.available) < 512 * MIB  # others come and go between the two


def test_meminfo_is_in_bytes(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "MemTotal:  100 kB\nMemAvailable: 40 kB\nHugePages_Total: 3\n")
    assert machine._meminfo(tmp_path / "meminfo") == {"MemTotal": 100 * KIB, "MemAvailable": 40 * KIB}


def test_probe_that_hangs_is_given_up(tmp_path: Path) -> None:
    sleeper = program(tmp_path / "sleeper", "import time\ntime.sleep(60)")
    began = time.monotonic()
    assert machine.run_probe([sleeper], seconds=0.3) is None
    assert time.monotonic() - began < 5


def test_probe_that_is_missing_says_nothing() -> None:
    assert machine.run_probe(["/nonexistent/program"]) is None


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("NVIDIA H100, 81559, 80994", machine.CudaGPU("NVIDIA H100", 81559 * MIB, 80994 * MIB)),
        ("NVIDIA GB10, [N/A], [N/A]", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_cuda_gpu_reads_what_the_driver_prints(
    monkeypatch: pytest.MonkeyPatch, printed: str, expected: machine.CudaGPU | None
) -> None:
    monkeypatch.setattr(machine, "run_probe", lambda command: printed)
    assert machine.cuda_gpu() == expected


def test_sysctl_leaves_out_what_the_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_probe", lambda command: "hw.memsize: 51539607552\n")
    assert machine.sysctl("hw.memsize", "iogpu.wired_limit_mb") == {"hw.memsize": "51539607552"}


def test_processor_is_named() -> None:
    assert machine.processor_name()
    assert machine.processor_name(Path("/nonexistent"))
