"""Counts that no machine could hold end in seconds: what only repeats is computed, and what is too much is said."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from limited import run_limited

from oomguard.cli import waiting
from oomguard.config.presets import presets
from oomguard.config.step import StepConfig
from oomguard.config.words import MAX_COUNT
from oomguard.errors import InputError
from oomguard.measure import read_sweep
from oomguard.measure.sweep_file import MOST_CONFIGURATIONS
from oomguard.model.step import build_step
from oomguard.step.repeated import Repeated
from oomguard.trace.engine import trace_built
from oomguard.trace.memory import CPU, Device
from oomguard.trace.metal import Chip, device

TINY = presets()["tiny"]
METAL = device(Chip.named("applegpu_g16s"), (0, 31, 1))
SECONDS = 60  # a few on an idle machine
FITS, NOTHING_FITS, WRONG = 0, 1, 2

LINES = {
    "trace --preset tiny --accumulate 100000": FITS,
    f"trace --preset tiny --accumulate {MAX_COUNT}": FITS,
    f"trace --preset tiny --accumulate {MAX_COUNT} --device m5-pro-48gb": FITS,
    f"trace --preset tiny --accumulate {MAX_COUNT} --budget 1GB": NOTHING_FITS,
    f"trace --preset tiny --batch {MAX_COUNT}": WRONG,
    "plan --preset tiny --target-batch 2147483647": None,
    "plan --preset tiny --batch 7 --target-batch 2147483647": WRONG,
    "plan --preset tiny --accumulate 7 --target-batch 2147483647": WRONG,
    f"plan --preset tiny --accumulate {MAX_COUNT} --memory 1GB": NOTHING_FITS,
    f"plan --preset tiny --batch {MAX_COUNT} --memory 1GB": NOTHING_FITS,
    "plan --preset tiny --memory 60TiB": None,
    f"estimate --preset tiny --batch {MAX_COUNT} --accumulate {MAX_COUNT}": FITS,
    f"estimate --preset tiny --ctx {MAX_COUNT}": WRONG,
    f"measure --preset tiny --accumulate {MAX_COUNT} --memory 1GB": NOTHING_FITS,
    f"measure --preset tiny --batch {MAX_COUNT} --memory 1GB": NOTHING_FITS,
    f"measure --preset tiny --steps {MAX_COUNT}": WRONG,
}


@pytest.mark.parametrize("line", LINES)
def test_absurd_count_ends_in_seconds_without_a_traceback(line: str) -> None:
    done = run_limited(line.split(), seconds=SECONDS)
    assert "Traceback" not in done.stderr
    assert done.returncode in ((FITS, NOTHING_FITS) if LINES[line] is None else (LINES[line],))
    if done.returncode == WRONG:
        assert len(done.stderr.splitlines()) == 1


def test_near_divisors_are_named_for_the_largest_target() -> None:
    done = run_limited(
        ["plan", "--preset", "tiny", "--batch", "6", "--target-batch", "2147483646"], seconds=SECONDS
    )
    assert done.returncode in (FITS, NOTHING_FITS)
    done = run_limited(
        ["plan", "--preset", "tiny", "--batch", "8", "--target-batch", "2147483646"], seconds=SECONDS
    )
    assert "7 or 9 would" in done.stderr


def test_sweep_of_a_hundred_million_is_counted_before_it_is_made(tmp_path: Path) -> None:
    hundred = list(range(1, 101))
    sweep = {"preset": "tiny", "batch": hundred, "accumulate": hundred, "ctx": hundred, "n_layers": hundred}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    done = run_limited(["measure", "sweep.json"], seconds=SECONDS, cwd=tmp_path)
    assert done.returncode == WRONG
    assert "100,000,000 configurations" in done.stderr
    assert not (tmp_path / "sweep.rows.jsonl").exists()


def test_sweep_is_counted_over_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    entry = {"preset": "tiny", "batch": [1] * (MOST_CONFIGURATIONS // 2)}
    path.write_text(json.dumps([entry, entry]))
    assert len(read_sweep(path).tasks) == 1
    path.write_text(json.dumps([entry, entry, {"preset": "small", "batch": 1}]))
    with pytest.raises(InputError, match="10,001 configurations, and 10,000 are the most"):
        read_sweep(path)


@pytest.mark.parametrize("count", [3, 7, 40])
@pytest.mark.parametrize("target", [CPU, METAL], ids=["cpu", "metal"])
def test_repeated_micro_batches_are_traced_as_each_by_itself(count: int, target: Device) -> None:
    step = StepConfig(batch=3, seq_len=128, accumulate=count)
    alike = build_step(TINY, step, evaluated=False)
    assert isinstance(alike.batch, Repeated)
    found = trace_built(alike, device=target)
    each = build_step(TINY, step.but(evaluate_micro_steps=False), evaluated=False)
    each.step = step  # the same micro-batches, and each of them there
    assert not isinstance(each.batch, Repeated)
    expected = trace_built(each, device=target)
    assert found.peak_bytes == expected.peak_bytes
    assert found.timeline.active == expected.timeline.active
    assert found.breakdown == expected.breakdown
    assert found.largest_buffer_bytes == expected.largest_buffer_bytes


def test_traced_batch_grows_by_what_each_micro_batch_holds() -> None:
    few, many = (
        trace_built(build_step(TINY, StepConfig(batch=1, seq_len=128, accumulate=n), evaluated=False))
        for n in (10, MAX_COUNT)
    )
    micro_batch_bytes = 2 * 128 * 4
    assert many.state_bytes - few.state_bytes == (MAX_COUNT - 10) * micro_batch_bytes
    assert many.largest_buffer_bytes == few.largest_buffer_bytes


def test_repeated_is_a_sequence_of_its_three_kinds() -> None:
    items = Repeated("a", "b", "c", 5)
    assert list(items) == ["a", "b", "b", "b", "c"]
    assert items[1:3] == ["b", "b"]
    assert items[-1] == "c"
    assert list(items.kinds()) == [(0, "a", 1), (1, "b", 3), (4, "c", 1)]
    with pytest.raises(IndexError):
        items[5]


def test_what_takes_long_says_so_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.05)
    with waiting.waiting("simulating the step"):
        time.sleep(0.2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0].startswith("oomguard: simulating the step, ")
    with waiting.waiting("simulating the step"):
        pass
    assert capsys.readouterr().err == ""
