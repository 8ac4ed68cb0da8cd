"""``oomguard plan`` and ``oomguard estimate`` as a person runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plan_fakes import FakeCoefficients, FakeEstimator

from oomguard.cli.main import main
from oomguard.plan import planner
from oomguard.plan.planner import plan
from oomguard.report.as_json import plan_json
from oomguard.units import GIB

CONTRACT = {"schema", "device", "request", "choice", "candidates", "calibration", "warnings"}
BESIDE_THE_CHOICE = {
    "budget",
    "rule",
    "next_up",
    "ceiling",
    "grows_to",
    "tradeoff",
    "least",
    "smallest",
    "reliefs",
}
CANDIDATE = {
    "batch",
    "seq_len",
    "accumulate",
    "checkpoint",
    "peak_bytes",
    "low_bytes",
    "high_bytes",
    "footprint_bytes",
    "headroom_bytes",
    "fits",
    "tokens_per_second",
    "breakdown",
    "engine",
    "cache_limit_bytes",
    "sequenced_high_bytes",
    "largest_tensor_bytes",
    "phase",
    "step_seconds",
}
CALIBRATION = {"profile", "mlx", "backend", "rows", "median_error", "worst_error"}

PLAN = ["plan", "--preset", "huge", "--memory", "2GB", "--device", "cpu-64gb"]


@pytest.fixture(autouse=True)
def _fake_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = (FakeCoefficients(), FakeEstimator(band=0.03))
    monkeypatch.setattr(planner, "_calibrated", lambda device: fakes)
    monkeypatch.delenv("NO_COLOR", raising=False)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run(capsys, *args, "--json")
    assert err == ""
    return status, json.loads(out)


def test_json_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, *PLAN)
    assert status == 0
    assert set(found) == CONTRACT | BESIDE_THE_CHOICE
    assert found["schema"] == "oomguard.plan/1"
    assert set(found["device"]) == {"name", "backend", "budget_bytes", "bound_by"}
    assert set(found["calibration"]) == CALIBRATION
    assert found["candidates"]
    for candidate in [found["choice"], *found["candidates"]]:
        assert set(candidate) == CANDIDATE
        assert set(candidate["checkpoint"]) == {"policy", "stride", "blocks"}
        assert sum(candidate["breakdown"].values()) == candidate["peak_bytes"]
        assert all(isinstance(candidate[key], int) for key in CANDIDATE if key.endswith("_bytes"))
    assert found["choice"] in found["candidates"]
    assert found["device"]["budget_bytes"] == 2 * 10**9


def test_python_and_the_command_line_give_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_json(capsys, *PLAN)
    assert found == json.loads(json.dumps(plan_json(plan("huge", memory="2GB", device="cpu-64gb"))))


def test_every_setting_reaches_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--batch", "2", "--ctx", "64", "--grad-checkpoint", "stride=3", "--optimizer", "lion"]
    settings += ["--dtype", "bf16", "--accumulate", "3", "--clip", "--no-compile", "--headroom", "1MiB"]
    _, found = run_json(capsys, *PLAN, *settings)
    asked, choice = found["request"], found["choice"]
    assert (choice["batch"], choice["seq_len"], choice["accumulate"]) == (2, 64, 3)
    assert choice["checkpoint"] == {"policy": "stride", "stride": 3, "blocks": None}
    assert (asked["optimizer"], asked["dtype"]) == ("lion", "bfloat16")
    assert (asked["clip_norm"], asked["compiled"]) == (True, False)
    assert found["device"]["budget_bytes"] == 2 * 10**9 - (1 << 20)


def test_target_batch_is_reached_by_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run_json(capsys, *PLAN, "--target-batch", "96")
    assert found["choice"]["batch"] * found["choice"]["accumulate"] == 96


def test_nothing_fits_is_status_1_and_names_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--preset", "behemoth", "--memory", "4GB", "--device", "cpu-64gb"]
    status, out, _ = run(capsys, *args)
    assert status == 1
    assert "Does not fit" in out
    assert re.search(r"needs\s+up\s+to\s+[\d.]+\s+GiB", out)
    assert "oomguard train" not in out
    status, found = run_json(capsys, *args)
    assert status == 1
    assert found["choice"] is None
    assert not any(candidate["fits"] for candidate in found["candidates"])


def test_text_says_what_fits_why_what_is_next_and_what_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *PLAN)
    words = " ".join(out.split())
    assert (status, err) == (0, "")
    assert re.search(r"Fits: batch \d+, no recompute", words)
    assert "budget 1.9 GiB (bound by: the memory given)" in words
    assert re.search(
        r"Batch \d+ with every block recomputed; \d+ without recompute, \d+% faster a step", words
    )
    assert re.search(r"Next up: batch \d+ with no recompute needs up to [\d.]+ GiB, [\d.]+ MiB more", words)
    assert "oomguard train --preset huge --corpus FILE" in words
    assert "--memory 2GB" in words
    assert "median error 2.0%" in words


@pytest.mark.parametrize("extra", [[], ["--target-batch", "96"], ["--batch", "3"], ["--dtype", "bf16"]])
@pytest.mark.parametrize("memory", ["2GB", "300MB", "100MB"])
def test_text_stays_within_80_columns(
    capsys: pytest.CaptureFixture[str], extra: list[str], memory: str
) -> None:
    _, out, _ = run(capsys, *PLAN, "--memory", memory, *extra)
    long = [line for line in out.splitlines() if len(line) > 80 and "oomguard train" not in line]
    assert long == []


def test_text_is_plain_when_it_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in run(capsys, *PLAN)[1]


def test_terminal_gets_colour_unless_no_color(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\x1b[" in run(capsys, *PLAN)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(capsys, *PLAN)[1]


def test_config_of_ones_own_is_planned_and_named_in_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "mine.json"
    config.write_text('{"n_layers": 2, "d_model": 64, "n_heads": 4, "d_mlp": 128, "context": 64}')
    status, out, _ = run(capsys, "plan", "--config", str(config), "--memory", "1GB", "--device", "cpu-64gb")
    assert status == 0
    assert f"--config {config}" in out


def test_named_mac_is_planned_from_any_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--preset", "huge", "--device", "m5-pro-48gb")
    assert status == 0
    assert "bound by: recommended working set" in " ".join(out.split())
    assert "Run on Apple M5 Pro, 48 GiB:" in out


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "--help")
    assert status == 0
    options = "preset config memory device batch ctx grad-checkpoint optimizer dtype accumulate"
    for option in f"{options} target-batch headroom clip compile engine json".split():
        assert f"--{option}" in out


MISTAKES = [
    ([], "which model? Give --preset (tiny, small"),
    (["--preset", "behemot"], "--preset: unknown preset 'behemot'; did you mean behemoth?"),
    (["--preset", "zzz"], "known: tiny, small, huge, mega, behemoth, titan"),
    (["--preset", "tiny", "--config", "x.json"], "give one of them"),
    (["--config", "/nonexistent/x.json"], "cannot read config /nonexistent/x.json"),
    (["--batch", "0"], "--batch: 0 is too few; the least is 1"),
    (["--batch", "-3"], "--batch: -3 is too few"),
    (
        ["--batch", "atuo"],
        "--batch: 'atuo' is not a batch size; write a number of sequences such as 8, or auto",
    ),
    (["--batch", "1.5"], "--batch: '1.5' is not a batch size"),
    (["--batch", "9" * 40], "does not fit into a dimension"),
    (["--ctx", "0"], "--ctx: 0 is too few"),
    (["--ctx", "4096"], "sequence length 4096 is longer than tiny's context 128"),
    (["--ctx", "long"], "--ctx: 'long' is not a whole number"),
    (["--grad-checkpoint", "evry"], "--grad-checkpoint: 'evry' is not a checkpoint policy"),
    (["--grad-checkpoint", "stride=0"], "stride"),
    (["--optimizer", "admw"], "--optimizer: unknown optimizer 'admw'; did you mean"),
    (["--dtype", "int4"], "--dtype: unknown dtype 'int4'; choose fp32, bf16 or fp16"),
    (["--accumulate", "0"], "--accumulate: 0 is too few"),
    (["--target-batch", "0"], "--target-batch: 0 is too few"),
    (["--target-batch", "12", "--batch", "5"], "batch 5 does not divide the target batch 12; 4 or 6 would"),
    (["--memory", "32"], "--memory: '32' has no unit; write 32GB, 32GiB, 32MiB, or 32B for bytes"),
    (["--headroom", "5"], "--headroom: '5' has no unit; write it as 5%, 5GB, 5GiB, 5MiB, or 5B for bytes"),
    (["--memory", "0"], "--memory: a budget of 0 bytes holds nothing"),
    (["--memory", "3PB"], "--memory: '3PB' is more memory than any machine has"),
    (["--memory", "lots"], "--memory: 'lots' is not a size; write it as 16GB, 16GiB or 512MiB"),
    (["--memory", "-2GB"], "--memory: '-2GB' is not a size"),
    (["--headroom", "100%"], "--headroom: headroom 100% leaves nothing"),
    (["--headroom", "plenty"], "--headroom: 'plenty' is not a headroom"),
    (["--headroom", "9TiB"], "leaves nothing of"),
    (["--device", "m5pro-48gb"], "did you mean m5-pro-48gb"),
    (["--device", "m5-pro-17gb"], "is not sold with 17 GB"),
    (["--engine", "tarce"], "--engine: unknown engine 'tarce'; did you mean trace?"),
    (["--mem", "lots"], "--mem"),
    (["--batchsize", "3"], "--batchsize"),
    (["surplus"], "surplus"),
]


@pytest.mark.parametrize(("args", "words"), MISTAKES, ids=[" ".join(args)[:40] for args, _ in MISTAKES])
def test_mistake_gets_one_clear_line_and_status_2(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    model = [] if not args or args[0] in ("--preset", "--config") else ["--preset", "tiny"]
    status, out, err = run(capsys, "plan", *model, *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a JSON object"),
        ("[1, 2]", "is not a JSON object"),
        ('{"n_layers": 2}', "d_model: missing, and it has no default"),
        (
            '{"n_layers": 2, "d_model": 64, "n_heads": 5, "d_mlp": 4, "context": 4}',
            "n_heads 5 does not divide d_model 64",
        ),
        ('{"n_layers": 0, "d_model": 64, "n_heads": 4, "d_mlp": 4, "context": 4}', "n_layers"),
        (
            '{"n_layers": 2, "d_model": 64, "n_heads": 4, "d_mlp": 4, "context": 4, "x": 1}',
            "x: there is no such field",
        ),
    ],
)
def test_damaged_config_gets_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    status, out, err = run(capsys, "plan", "--config", str(config))
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_metal_without_a_mac_asks_for_its_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from oomguard.machine import device

    monkeypatch.setattr(device, "local_device", lambda: device.Device("pc", "cpu", here=True, free_bytes=GIB))
    status, _, err = run(capsys, "plan", "--preset", "huge", "--device", "metal")
    assert status == 2
    assert "no metal backend" in err
    assert "m5-pro-48gb" in err
    status, _, _ = run(capsys, "plan", "--preset", "huge", "--device", "metal", "--memory", "16GB")
    assert status == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch", "0"], "--batch: 0 is too few"),
        (["--batch", "auto"], "--batch: 'auto' is not a whole number"),
        (["--grad-checkpoint", "auto"], "--grad-checkpoint: 'auto' is not a checkpoint policy"),
        (["--ctx", "9999"], "longer than tiny's context"),
        (["--device", "toaster"], "unknown device 'toaster'"),
    ],
)
def test_estimate_mistake_gets_one_clear_line(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    status, out, err = run(capsys, "estimate", "--preset", "tiny", *args)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
