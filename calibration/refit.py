"""Makes the shipped coefficients from the shipped rows, and nothing else.

    python -m oomguard.calibration.refit oomguard/data/coefficients

The CPU profile is fitted by itself. The M5 Pro's table has 16 rows and no sequenced peaks, so its fit stays
near the CPU's counts of the graph, which is nearly the same, and learns what differs: Metal's window.
"""

from __future__ import annotations

import json

from oomguard.calibration.tool import output_path, run_tool
from oomguard.estimate.coefficients import Coefficients
from oomguard.estimate.fit import RIDGE, Refit, fit_profile
from oomguard.rows import read_rows, shipped_rows_path

USAGE = "python -m oomguard.calibration.refit FOLDER (of coefficients, <backend>.json)"
# The small M5 Pro rows peak in MLX-Swift's first step and in buffers that no rule here sizes; plans are for
# steps of 1 GB and more.
METAL_LEAST_PEAK_BYTES = 10**9
METAL_RIDGE = 0.01


def refit_cpu() -> Refit:
    """The CPU profile from ``rows/cpu.jsonl``."""
    header, rows = read_rows(shipped_rows_path("cpu.jsonl"))
    return fit_profile("cpu", header, rows, ridge=RIDGE)


def refit_metal(cpu: Coefficients) -> Refit:
    """The Metal profile from ``rows/metal-m5pro.jsonl``, beside the CPU's."""
    header, rows = read_rows(shipped_rows_path("metal-m5pro.jsonl"))
    large = [row for row in rows if (row.peak_bytes or 0) >= METAL_LEAST_PEAK_BYTES]
    return fit_profile("m5-pro", header, large, prior=cpu, ridge=METAL_RIDGE)


def refits() -> dict[str, Refit]:
    """Every shipped profile, fitted anew."""
    cpu = refit_cpu()
    return {"cpu": cpu, "metal": refit_metal(cpu.coefficients)}


def to_json(coefficients: Coefficients) -> str:
    """The text of a coefficients file."""
    return json.dumps(coefficients.model_dump(by_alias=True), indent=1) + "\n"


def main(arguments: list[str]) -> None:
    folder = output_path(arguments, USAGE)
    folder.mkdir(exist_ok=True)
    for name, refit in refits().items():
        (folder / f"{name}.json").write_text(to_json(refit.coefficients))
        found = refit.coefficients
        print(
            f"{name}: {found.rows} rows, leave-one-out median {found.median_error:.1%}, worst {found.worst_error:.1%}; "
            f"step time median {found.speed.median_error:.0%} off"
        )


if __name__ == "__main__":
    run_tool(main)
