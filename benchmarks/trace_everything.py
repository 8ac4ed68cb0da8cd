"""Every case and every preset, under every checkpoint policy, on every backend and release: traced once each.

    python benchmarks/trace_everything.py                        all of it; writes benchmarks/trace_everything.txt
    python benchmarks/trace_everything.py --resume               only what that file does not have yet
    python benchmarks/trace_everything.py --sample 20 --seed 7   some of it, to stdout
    python benchmarks/trace_everything.py --only dropout         one subject, to stdout

A subject is a case, or a preset with all its blocks at a small width. Each is captured and simulated in a process of
its own that may take ``MOST_BYTES`` and ``MOST_SECONDS``; two run at a time, and one that dies is a line of the table.
The columns are peaks in MiB: as the step is written, then under each policy; ``-`` where the step refuses a policy, and
says why. Exit status 1 where anything failed: a cycle, an exception, too much memory, too long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from oomguard.config.presets import presets
from oomguard.measure import provenance
from oomguard.model.cases import CASES
from oomguard.units import GIB, MIB

OUTPUT = Path(__file__).with_suffix(".txt")
MOST_BYTES = 4 * GIB
MOST_SECONDS = 900
AT_A_TIME = 2

POLICIES = (
    "none",
    "attention",
    "attention,blocks=1",
    "blocks=1",
    "every",
    "stride=2",
    "stride=sqrt",
    "stride=auto",
    "custom_function",
)
RELEASES = ((0, 31, 1), (0, 32, 4))
CHIPS = {"g": "applegpu_g16g", "s": "applegpu_g16s", "d": "applegpu_g15d"}
METAL = {
    f"metal-{letter} {'.'.join(map(str, release))}": (chip, release)
    for release in RELEASES
    for letter, chip in CHIPS.items()
}
TARGETS = ("cpu", *METAL)
SUBJECTS = (*(f"preset:{name}" for name in presets()), *CASES)
SMALL = {"head": 16, "context": 64, "batch": 2}

AS_WRITTEN = "as written"
ALL_POLICIES = "policies"
FAILED, REFUSED = "failed", "refused"
LAYOUT = "{:34} {:15}" + " {:>10}" * (1 + len(POLICIES))

Row = dict[str, Any]


# -- in a process of its own ---------------------------------------------------------------------------------


def built(subject: str) -> Any:
    """The step of a subject, holding no memory."""
    if not subject.startswith("preset:"):
        return CASES[subject].build(evaluated=False)
    from oomguard.config.step import StepConfig
    from oomguard.model.step import build_step

    shape = presets()[subject.removeprefix("preset:")]
    width = SMALL["head"] * shape.n_heads
    small = shape.model_copy(update={"d_model": width, "d_mlp": 4 * width, "context": SMALL["context"]})
    return build_step(small, StepConfig(batch=SMALL["batch"], seq_len=SMALL["context"]), evaluated=False)


def simulated(target: str) -> Any:
    """The device of a column."""
    from oomguard.trace import metal
    from oomguard.trace.memory import CPU

    if target == "cpu":
        return CPU
    chip, release = METAL[target]
    return metal.device(metal.Chip.named(chip), release)


def traced(subject: str, target: str) -> Row:
    """The peaks of a subject on a target, and what was refused or failed there, by policy."""
    from oomguard.trace.engine import trace_built
    from oomguard.trace.policies import Policies

    row: Row = {"subject": subject, "target": target, "peaks": {}, REFUSED: {}, FAILED: {}}
    device = simulated(target)
    with _told(row, AS_WRITTEN):
        row["peaks"][AS_WRITTEN] = trace_built(built(subject), device=device).peak_bytes
    if subject in CASES and CASES[subject].training.checkpoint != "none":
        return row  # under another policy it is the case without its own
    with _told(row, ALL_POLICIES):
        policies = Policies.of_built(built(subject), device=device)
        for name in POLICIES:
            with _told(row, name):
                row["peaks"][name] = policies.price(_policy(name)).peak_bytes
    return row


def _policy(name: str) -> Any:
    from oomguard.config.policy import CheckpointPolicy

    return CheckpointPolicy.parse(name)


@contextlib.contextmanager
def _told(row: Row, name: str) -> Iterator[None]:
    """Keeps what is raised: that a step refuses a policy, or all of them, is no failure; anything else is."""
    from oomguard.errors import TraceError
    from oomguard.trace.graph import CycleError

    try:
        yield
    except Exception as error:
        refused = isinstance(error, TraceError) and not isinstance(error, CycleError) and name != AS_WRITTEN
        row[REFUSED if refused else FAILED][name] = f"{type(error).__name__}: {' '.join(str(error).split())}"


# -- the pool ------------------------------------------------------------------------------------------------


def run_one(subject: str, targets: Sequence[str]) -> list[Row]:
    """The rows of a subject, from a process of its own; how that ended where it gave none."""
    command = [sys.executable, __file__, "--child", subject, *targets]
    rows: list[Row] = []
    ended = ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)),
        )
        out = done.stdout
        if done.returncode:
            ended = (done.stderr.strip().splitlines() or [""])[-1] or f"ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
        ended = f"took longer than {MOST_SECONDS} s"
    rows += [json.loads(line) for line in out.splitlines()]
    missing = [target for target in targets if target not in {row["target"] for row in rows}]
    rows += [
        {"subject": subject, "target": target, "peaks": {}, REFUSED: {}, FAILED: {"process": ended}}
        for target in missing
    ]
    return rows


def run_all(work: dict[str, list[str]]) -> Iterator[list[Row]]:
    """The rows of each subject as it finishes."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in as_completed([pool.submit(run_one, *task) for task in work.items()]):
            yield done.result()


# -- the table -----------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row of the table."""
    columns = (AS_WRITTEN, *POLICIES)
    peaks = [f"{row['peaks'][name] / MIB:.2f}" if name in row["peaks"] else "-" for name in columns]
    failed = "".join(f"  {FAILED}: {name}: {text}" for name, text in row[FAILED].items())
    return LAYOUT.format(row["subject"], row["target"], *peaks) + failed


def summary(rows: Sequence[Row]) -> list[str]:
    """How many were traced, and why policies were refused."""
    failed = [row for row in rows if row[FAILED]]
    traces = sum(len(row["peaks"]) for row in rows)
    said = [
        f"# {traces} traces of {len({row['subject'] for row in rows})} subjects; {len(failed)} rows failed"
    ]
    reasons = Counter(text for row in rows for text in row[REFUSED].values())
    return said + [f"# refused {count} times: {text}" for text, count in reasons.most_common()]


def kept(path: Path) -> dict[str, list[str]]:
    """The lines of subjects that a file has for every target."""
    found: dict[str, list[str]] = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            subject = text.partition(" ")[0]
            if subject in SUBJECTS and f"  {FAILED}: " not in text:
                found.setdefault(subject, []).append(text)
    return {subject: lines for subject, lines in found.items() if len(lines) == len(TARGETS)}


def heading() -> list[str]:
    return [
        f"# {provenance.machine()}; {provenance.system()}; MLX {provenance.mlx_version()}",
        f"# commit {provenance.commit()}, {provenance.now()}; python benchmarks/trace_everything.py",
        "# peaks in MiB; - is a policy that the step refuses, or that it has already",
        LAYOUT.format(
            "subject", "backend", AS_WRITTEN, *(name.replace("attention", "attn") for name in POLICIES)
        ),
    ]


def everything(resume: bool) -> int:
    """Traces all of it, and writes the table anew after each subject."""
    lines = kept(OUTPUT) if resume else {}
    before = len(lines)
    rows: list[Row] = []
    for found in run_all({subject: list(TARGETS) for subject in SUBJECTS if subject not in lines}):
        rows += found
        lines[found[0]["subject"]] = [line(row) for row in found]
        table = [text for subject in SUBJECTS for text in lines.get(subject, [])]
        notes = [*summary(rows), *([f"# {before} subjects kept from a run before"] if before else [])]
        OUTPUT.write_text("\n".join([*heading(), *table, *notes]) + "\n", encoding="utf-8")
        print(f"{len(lines)} of {len(SUBJECTS)}: {found[0]['subject']}", flush=True)
        print("".join(f"{line(row)}\n" for row in found if row[FAILED]), end="", flush=True)
    return 1 if any(row[FAILED] for row in rows) else 0


def some(work: dict[str, list[str]]) -> int:
    """Traces a part, and prints it."""
    rows = [row for found in run_all(work) for row in found]
    print(
        "\n".join([*heading(), *map(line, sorted(rows, key=lambda row: str(row["subject"]))), *summary(rows)])
    )
    return 1 if any(row[FAILED] for row in rows) else 0


def sample(count: int, seed: int) -> dict[str, list[str]]:
    """Subjects drawn at random, each on a target drawn at random."""
    drawn = random.Random(seed)
    return {subject: [drawn.choice(TARGETS)] for subject in drawn.sample(SUBJECTS, count)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, metavar="SUBJECT")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        subject, *targets = asked.child
        for target in targets:
            print(json.dumps(traced(subject, target)), flush=True)
        return 0
    if asked.only:
        return some({subject: list(TARGETS) for subject in asked.only})
    return some(sample(asked.sample, asked.seed)) if asked.sample else everything(asked.resume)


if __name__ == "__main__":
    sys.exit(main())
