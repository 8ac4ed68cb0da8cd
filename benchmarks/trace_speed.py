"""How the trace's time and memory grow with the primitives of a step, and the times a person waits.

    python benchmarks/trace_speed.py

Each line is a process of its own: capture and simulation of one training step of the preset GPT, whose parameters are
never evaluated. Writes ``benchmarks/trace_speed.txt``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from oomguard.measure import provenance

OUTPUT = Path(__file__).with_suffix(".txt")
LAYERS = (2, 8, 40, 160, 320)
LAYOUT = "{:28} {:>10} {:>9} {:>9} {:>12} {:>10}"
ONE = """
import json, resource, sys, time
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.model.step import build_step
from oomguard.trace.engine import capture_built, simulate
model, step = ModelConfig.model_validate(json.loads(sys.argv[1])), StepConfig.model_validate(json.loads(sys.argv[2]))
built = build_step(model, step, evaluated=False)
start = time.perf_counter()
captured = capture_built(built)[0]
middle = time.perf_counter()
found = simulate(captured, compiled=True)
end = time.perf_counter()
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([len(captured.graph.nodes), middle - start, end - middle, rss, found.peak_bytes]))
"""


def line(name: str, model: dict[str, object], step: dict[str, object]) -> tuple[str, int, float]:
    """One process: its line, primitives captured and seconds."""
    command = [sys.executable, "-c", ONE, json.dumps(model), json.dumps(step)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    primitives, captured, simulated, rss, _ = json.loads(out)
    cells = (name, f"{primitives:,}", f"{captured:.2f} s", f"{simulated:.2f} s", f"{rss / 2**20:.0f} MiB")
    seconds = captured + simulated
    return LAYOUT.format(*cells, f"{1e6 * seconds / primitives:.0f} us"), primitives, seconds


def main() -> None:
    from oomguard.config.presets import presets

    lines = [f"# {provenance.machine()}; {provenance.system()}; MLX {provenance.mlx_version()}"]
    lines += [f"# commit {provenance.commit()}, {provenance.now()}; python benchmarks/trace_speed.py"]
    lines += [LAYOUT.format("step", "primitives", "capture", "simulate", "process", "each")]
    print("\n".join(lines), flush=True)
    small = {"d_model": 16, "n_heads": 2, "d_mlp": 64, "context": 16}
    tasks = [
        (f"{n} layers of width 16", {"n_layers": n, **small}, {"batch": 1, "seq_len": 16}) for n in LAYERS
    ]
    for name in ("behemoth", "titan"):
        tasks.append((f"{name} 4 x 1024", presets()[name].model_dump(), {"batch": 4, "seq_len": 1024}))
    for task in tasks:
        text, _, _ = line(*task)
        print(text, flush=True)
        lines.append(text)
    OUTPUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
