"""Named machines, and a Mac played by made-up kernel values."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from oomguard.errors import InputError
from oomguard.machine import device
from oomguard.machine import system as machine
from oomguard.machine.device import Device, Probe, find_device, table, working_set_bytes
from oomguard.measure import provenance
from oomguard.units import GIB, MIB

M5_PRO_48 = 40200896512


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """This machine as an M5 Pro with 48 GiB on macOS 26; returns its kernel values, to change."""
    kernel = {"machdep.cpu.brand_string": "Apple M5 Pro", "iogpu.wired_limit_mb": "0"}
    monkeypatch.setattr(machine, "installed_mlx", lambda: machine.InstalledMLX("0.32.4", "metal"))
    monkeypatch.setattr(machine, "sysctl", lambda *names: {n: kernel[n] for n in names if n in kernel})
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(48 * GIB, 30 * GIB))
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(device, "_imported_mlx", lambda: None)
    monkeypatch.setattr(device, "probe_path", lambda: tmp_path / "local" / "device.json")
    return kernel


def test_every_chip_of_the_table_plans() -> None:
    for name in device.device_names():
        found = find_device(name)
        assert found.backend == "metal"
        assert found.working_set_bytes is not None
        assert found.memory_bytes is not None
        assert 0.6 * found.memory_bytes < found.working_set_bytes < 0.9 * found.memory_bytes
        assert found.largest_buffer_bytes is not None
        assert found.largest_buffer_bytes < found.working_set_bytes
        assert found.architecture.startswith("applegpu_g")
        assert (found.free_bytes, found.here, found.held_bytes) == (None, False, 0)


def test_table_states_a_source_for_every_figure() -> None:
    for entry in [*table()["working_sets"], *table()["working_set_fraction"]]:
        assert entry["source"]


@pytest.mark.parametrize(
    ("gib", "macos", "expected"),
    [
        (8, 15, 5726623061),
        (16, 13, 11453246122),
        (16, 26, 12713115648),
        (32, 15, 22906492245),
        (48, 15, 36 * GIB),
        (48, 26, M5_PRO_48),
        (64, 15, 48 * GIB),
        (96, 14, 72 * GIB),
        (128, 26, 115448725504),
        (192, 15, 144 * GIB),
    ],
)
def test_working_set_is_what_machines_of_that_size_report(gib: int, macos: int, expected: int) -> None:
    assert working_set_bytes(gib * GIB, macos) == expected


def test_newer_macos_never_recommends_less() -> None:
    for entry in table()["working_sets"]:
        memory = entry["memory_gib"] * GIB
        assert working_set_bytes(memory, 26) >= working_set_bytes(memory, 13)


def test_largest_buffer_is_what_an_m4_pro_reports_to_a_page() -> None:
    assert abs(device.largest_buffer_bytes(M5_PRO_48) - 30150672384) <= 16384


@pytest.mark.parametrize("name", ["m5-pro-48gb", "M5-Pro-48GB", "m5 pro 48gb"])
def test_name_is_read_in_any_case(name: str) -> None:
    assert find_device(name).working_set_bytes == M5_PRO_48


def test_generic_machines_are_named_by_backend_and_memory() -> None:
    assert find_device("cpu-64gb").memory_bytes == 64 * GIB
    assert find_device("metal-36gb").working_set_bytes == 27 * GIB
    assert find_device("cuda-24gb") == Device("a cuda machine with 24 GiB", "cuda", memory_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m5pro-48gb", "did you mean m5-pro-48gb"),
        ("m5-pro-40gb", "not sold with 40 GB; choose m5-pro-24gb or m5-pro-48gb"),
        ("m77-8gb", "unknown device 'm77-8gb'"),
        ("cpu-0gb", "has no memory"),
        ("toaster", "write metal, cpu or cuda"),
        ("", "write metal, cpu or cuda"),
    ],
)
def test_unknown_name_is_told_with_the_near_ones(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_device(name)


def test_mac_follows_the_table_until_it_was_probed(mac: dict[str, str]) -> None:
    found = find_device()
    assert found.name == found.machine == f"Apple M5 Pro, {os.cpu_count()} cores, 48 GiB"
    assert (found.backend, found.here) == ("metal", True)
    assert found.working_set_bytes == M5_PRO_48
    assert found.wired_limit_bytes is None
    assert found.free_bytes == 30 * GIB


def test_mac_with_a_wired_limit_takes_it_for_the_working_set(mac: dict[str, str]) -> None:
    mac["iogpu.wired_limit_mb"] = "45000"
    found = find_device()
    assert found.wired_limit_bytes == 45000 * MIB
    assert found.working_set_bytes is None


def live(working_set: int = 41 * GIB) -> device.LiveMLX:
    return device.LiveMLX(
        backend="metal",
        held_bytes=GIB,
        architecture="applegpu_g17s",
        memory_bytes=48 * GIB,
        working_set_bytes=working_set,
        largest_buffer_bytes=31 * GIB,
    )


def test_mac_whose_process_has_mlx_believes_it(mac: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_imported_mlx", live)
    found = find_device()
    assert found.working_set_bytes == 41 * GIB
    assert found.held_bytes == GIB
    assert found.name.startswith("Apple M5 Pro")


def test_probe_is_remembered_and_recalled_without_mlx(
    mac: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as inside:
        inside.setattr(device, "_imported_mlx", live)
        device.remember_probe()
    found = find_device()
    assert found.working_set_bytes == 41 * GIB
    assert found.largest_buffer_bytes == 31 * GIB
    assert found.architecture == "applegpu_g17s"


def test_probe_of_another_release_or_memory_is_not_believed(
    mac: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as inside:
        inside.setattr(device, "_imported_mlx", live)
        device.remember_probe()
    monkeypatch.setattr(platform, "mac_ver", lambda: ("27.0", ("", "", ""), "arm64"))
    assert find_device().working_set_bytes == M5_PRO_48


def test_probe_under_a_changed_wired_limit_is_not_kept(
    mac: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac["iogpu.wired_limit_mb"] = "45000"
    monkeypatch.setattr(device, "_imported_mlx", live)
    device.remember_probe()
    assert not device.probe_path().exists()


@pytest.mark.parametrize("text", ["", "[]", '{"name": 3}', "{"])
def test_damaged_probe_is_as_good_as_none(mac: dict[str, str], text: str) -> None:
    device.probe_path().parent.mkdir(parents=True)
    device.probe_path().write_text(text)
    assert find_device().working_set_bytes == M5_PRO_48


def test_probe_type_holds_what_is_asked() -> None:
    assert set(Probe.__dataclass_fields__) >= {"name", "memory_bytes", "macos", "working_set_bytes"}


def test_backend_that_is_not_here_has_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "local_device", lambda: Device("here", "cpu", here=True))
    found = find_device("cuda")
    assert (found.backend, found.here, found.memory_bytes) == ("cuda", False, None)


def test_machine_is_called_what_measured_rows_call_it() -> None:
    assert find_device("cpu").machine == provenance.machine()


def test_cpu_of_this_machine_is_here() -> None:
    found = find_device("cpu")
    assert found.here
    assert found.free_bytes
