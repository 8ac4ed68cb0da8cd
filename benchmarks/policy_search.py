"""How long it takes to price the checkpoint policies of a step and to find the cheapest that fits.

    python benchmarks/policy_search.py

Each line is a process of its own: one capture, all named policies, then the cheapest for a budget. The budget lies the
given share of the way from what recomputing every block holds to what no recompute holds. Writes
``benchmarks/policy_search.txt``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from oomguard.measure import provenance
from oomguard.units import format_bytes

OUTPUT = Path(__file__).with_suffix(".txt")
LAYOUT = "{:22} {:>8} {:>9} {:>7} {:>12} {:>22} {:>9} {:>7}"
ONE = """
import json, sys, time
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
from oomguard.config.presets import presets
from oomguard.trace.policies import Policies
name, batch, seq_len, share = json.loads(sys.argv[1])
built = build_step(presets()[name], StepConfig(batch=batch, seq_len=seq_len), evaluated=False)
start = time.perf_counter()
policies = Policies.of_built(built)
captured = time.perf_counter()
named = len(policies.table())
priced = time.perf_counter()
plain, every = (policies.price(policy).peak_bytes for policy in (NO_CHECKPOINT, EVERY_BLOCK))
budget = int(every + share * (plain - every))
found = policies.cheapest(budget)
end = time.perf_counter()
print(json.dumps([captured - start, priced - captured, named, end - priced, policies.simulated, budget,
                  str(found.policy), found.peak_bytes, end - start]))
"""
TASKS = [(name, 1, 1024, share) for name in ("behemoth", "titan") for share in (0.05, 0.4, 0.8)]


def line(task: tuple[str, int, int, float]) -> str:
    command = [sys.executable, "-c", ONE, json.dumps(task)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    captured, priced, named, searched, simulated, budget, policy, peak, total = json.loads(out)
    name, batch, seq_len, share = task
    return LAYOUT.format(
        f"{name} {batch} x {seq_len}, {share:.0%}",
        f"{captured:.1f} s",
        f"{priced:.1f} s",
        f"{searched:.1f} s",
        format_bytes(budget),
        f"{policy}, {format_bytes(peak)}",
        f"{simulated} ({named})",
        f"{total:.1f} s",
    )


def main() -> None:
    lines = [f"# {provenance.machine()}; {provenance.system()}; MLX {provenance.mlx_version()}"]
    lines += [f"# commit {provenance.commit()}, {provenance.now()}; python benchmarks/policy_search.py"]
    columns = ("step, budget", "capture", "named", "search", "budget", "cheapest", "simulated", "total")
    lines += [LAYOUT.format(*columns)]
    print("\n".join(lines), flush=True)
    for task in TASKS:
        lines.append(line(task))
        print(lines[-1], flush=True)
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
