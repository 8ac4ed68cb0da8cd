"""Proof of the pick: is the batch a plan picks the largest that truly fits?

    python benchmarks/pick.py                 # every pair; writes benchmarks/pick.txt
    python benchmarks/pick.py --only tiny     # the pairs whose name starts so; writes nothing

For each pair of a shape and a budget: what the plan picks, and what is true, found by measuring ever larger
batches, each in a process of its own, until the budget is passed. The highest peak of the measured steps
counts. A pick is exact, below, or over budget; over is a failure however small.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig
from oomguard.measure import Settings, measure, provenance
from oomguard.plan.planner import Plan, plan, read_model
from oomguard.units import format_bytes, parse_bytes

OUTPUT = Path(__file__).with_suffix(".txt")
SETTINGS = Settings(steps=3, sequenced=False, force=True)
MOST_STEPS_UP = 40
LAYOUT = "{:<30} {:>7}  {:<19} {:>6} {:>7}  {:<8} {:>9} {:>9} {:>9}"
EXACT, ONE_BELOW, OVER = "exact", "1 below", "OVER"

WIDE = ModelConfig(name="wide", n_layers=4, d_model=512, n_heads=8, d_mlp=2048, context=128)
DEEP = ModelConfig(name="deep", n_layers=16, d_model=128, n_heads=4, d_mlp=512, context=128)
LONG = ModelConfig(name="long", n_layers=4, d_model=128, n_heads=8, d_mlp=512, context=512)


@dataclass(frozen=True)
class Pair:
    """A shape, a budget, and what else is asked of the plan."""

    model: str | ModelConfig
    memory: str
    policy: str = "auto"
    seq_len: int | None = None
    optimizer: str = "adamw"
    dtype: str = "float32"
    compiled: bool = True

    @property
    def name(self) -> str:
        shape = read_model(self.model)
        words = [f"{shape.name} x {self.seq_len or shape.context}", self.policy]
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [self.dtype] if self.dtype != "float32" else []
        words += [] if self.compiled else ["eager"]
        return ", ".join(words)

    def plan(self) -> Plan:
        return plan(
            self.model,
            memory=self.memory,
            seq_len=self.seq_len,
            grad_checkpoint=self.policy,
            optimizer=self.optimizer,
            dtype=self.dtype,
            compiled=self.compiled,
        )


PAIRS = (
    Pair("tiny", "100MB", "none"),
    Pair("tiny", "60MB", "every"),
    Pair("tiny", "150MB"),
    Pair("tiny", "80MB", "none", optimizer="sgd", compiled=False),
    Pair("tiny", "70MB", "none", dtype="bfloat16"),
    Pair("small", "300MB", "none"),
    Pair("small", "170MB", "every"),
    Pair("small", "450MB"),
    Pair("small", "260MB", "attention", optimizer="lion"),
    Pair("huge", "700MB", "none"),
    Pair("huge", "320MB", "every"),
    Pair("huge", "900MB"),
    Pair("huge", "420MB", "blocks=6", seq_len=128),
    Pair("huge", "500MB", "attention", seq_len=128),
    Pair(WIDE, "600MB"),
    Pair(DEEP, "350MB", "none"),
    Pair(DEEP, "110MB", "stride=2"),
    Pair(LONG, "500MB"),
)


@dataclass(frozen=True)
class Truth:
    """What measuring found: the largest batch within the budget, the peak of the pick, the peak above it."""

    largest: int
    picked_peak_bytes: int
    above_peak_bytes: int


def measured_peak(model: ModelConfig, step: StepConfig) -> int:
    """The highest peak of the measured steps, bytes.

    Raises:
        SystemExit: the child gave no measurement.
    """
    row = measure(model, step, SETTINGS)
    if row.status != "ok" or row.peak_bytes is None:
        raise SystemExit(f"{model.name} {step.batch} x {step.seq_len}: {row.reason}")
    return row.peak_high_bytes or row.peak_bytes


def find_truth(model: ModelConfig, step: StepConfig, budget_bytes: int) -> Truth:
    """Measures upward from half of the picked batch until the budget is passed; downward if that is over."""
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in peaks:
            peaks[batch] = measured_peak(model, step.but(batch=batch))
        return peaks[batch] <= budget_bytes

    batch = max(1, step.batch // 2)
    while batch > 0 and not fits(batch):
        batch -= 1
    for above in range(batch + 1, batch + MOST_STEPS_UP):
        if not fits(above):
            break
        batch = above
    fits(step.batch)
    return Truth(batch, peaks[step.batch], peaks.get(batch + 1, 0))


def judge(picked: int, truth: Truth, budget_bytes: int) -> str:
    if truth.picked_peak_bytes > budget_bytes:
        return OVER
    below = truth.largest - picked
    return EXACT if below == 0 else f"{below} below"


def check(pair: Pair) -> tuple[str, str]:
    """One pair's line of the report, and its verdict."""
    found, budget_bytes = pair.plan(), parse_bytes(pair.memory)
    if found.choice is None or found.budget.budget_bytes != budget_bytes:
        raise SystemExit(f"{pair.name}, {pair.memory}: no plan within exactly that budget")
    choice = found.ceiling or found.choice  # the pick before speed makes it smaller
    truth = find_truth(found.request.model, choice.step, budget_bytes)
    verdict = judge(choice.batch, truth, budget_bytes)
    peaks = (choice.peak_bytes, truth.picked_peak_bytes, truth.above_peak_bytes)
    cells = (pair.name, pair.memory, str(choice.policy), choice.batch, truth.largest, verdict)
    return LAYOUT.format(*cells, *map(format_bytes, peaks)), verdict


def report(pairs: Sequence[Pair], verdicts: list[str]) -> Iterator[str]:
    """The report, line by line as it comes; the verdicts are left in ``verdicts``."""
    yield f"# {provenance.machine()}; {provenance.system()}; MLX {provenance.mlx_version()}"
    yield f"# commit {provenance.commit()}, {provenance.now()}; python benchmarks/pick.py"
    yield "# peaks: highest of 3 steps from step 2 on; the budget is --memory, without headroom"
    heads = ("asked", "budget", "policy", "picked", "largest", "", "predicted", "measured", "next up")
    yield LAYOUT.format(*heads)
    for pair in pairs:
        line, verdict = check(pair)
        verdicts.append(verdict)
        yield line
    exact, below, over = (verdicts.count(verdict) for verdict in (EXACT, ONE_BELOW, OVER))
    rest = len(verdicts) - exact - below - over
    yield f"{len(verdicts)} pairs: {exact} exact, {below} one below, {rest} further below, {over} over budget"


def good_enough(verdicts: Sequence[str]) -> bool:
    """None over budget, and 11 of 12 exact or one below."""
    close = verdicts.count(EXACT) + verdicts.count(ONE_BELOW)
    return OVER not in verdicts and 12 * close >= 11 * len(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="pairs whose name starts so")
    only = parser.parse_args().only
    pairs = tuple(pair for pair in PAIRS if pair.name.startswith(only))
    if not pairs:
        raise SystemExit(f"no pair starts with {only!r}; there are: {'; '.join(pair.name for pair in PAIRS)}")
    began = time.monotonic()
    lines: list[str] = []
    verdicts: list[str] = []
    for line in report(pairs, verdicts):
        print(line, flush=True)
        lines.append(line)
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if not only:
        OUTPUT.write_text("\n".join(lines) + "\n")
    return 0 if good_enough(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
