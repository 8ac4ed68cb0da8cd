"""The peak of a step from closed forms: inventory x coefficients, microseconds, no MLX import."""

from __future__ import annotations

from dataclasses import dataclass

from oomguard.config.model import ModelConfig
from oomguard.config.step import StepConfig, check_seq_len
from oomguard.estimate.coefficients import Coefficients, Mode, shipped
from oomguard.estimate.inventory import CATEGORIES, Backend, Inventory, Moment
from oomguard.estimate.traffic import step_flops, step_traffic_bytes

CATEGORY_OF = {
    "loss": "logits_and_loss",
    "last": "backward_temporaries",
    "inner": "backward_temporaries",
    "end": "update_temporaries",
}
GIVES_WAY = ("saved_tensors", "attention_scores", "recompute", "gradients")
STANDING = ("weights", "optimizer_state", "batch")  # what a step finds and leaves
PHASE_OF = {"loss": "forward and loss", "end": "update"}


@dataclass(frozen=True)
class Estimate:
    """What one step is expected to hold.

    Attributes:
        peak_bytes: the largest moment, with the in-flight window.
        low_bytes, high_bytes: the band; measured rows lie inside it (see ``Coefficients``).
        footprint_bytes: peak and the buffer cache beside it, what the system sees. Where no cache was measured (on a
            GPU, where MLX keeps nearly all that it may) it is what a step frees and the next one takes again.
        sequenced_peak_bytes: the peak when nothing runs ahead (``mx.set_memory_limit(0)``).
        phase: when the peak is: ``forward and loss``, ``backward of block 3``, ``update``.
        phases: the bytes of every phase, largest moment of each.
        breakdown: ``peak_bytes`` by category; sums to it.
        largest_tensor_bytes: the largest single buffer.
        step_seconds: time of one update.
        warnings: what makes this estimate less sure.
    """

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    footprint_bytes: int
    sequenced_peak_bytes: int
    phase: str
    phases: dict[str, int]
    breakdown: dict[str, int]
    largest_tensor_bytes: int
    step_seconds: float
    warnings: tuple[str, ...] = ()


def estimate(
    model: ModelConfig,
    step: StepConfig,
    coefficients: Coefficients | None = None,
    *,
    backend: Backend | None = None,
) -> Estimate:
    """Peak, phases and time of one training step of the preset GPT, from step 2 on.

    Counts: weights, optimizer state, gradients, batch, saved tensors, segment inputs, recompute, logits,
    backward and update temporaries, in-flight window, page rounding.
    Not counted: the process itself (interpreter, libraries, compiled kernels), other processes.

    Args:
        model: the shape.
        step: the settings.
        coefficients: a calibrated profile; the one shipped for the backend if not given.
        backend: ``cpu``, ``metal`` or ``cuda``; the profile's own if not given.

    Raises:
        InputError: the sequence is longer than the model's context.

    Accuracy: leave-one-out, in ``coefficients.median_error`` and ``worst_error``; ``oomguard validate`` prints
    every row.
    """
    check_seq_len(model, step)
    if coefficients is None:
        coefficients = shipped(backend or "cpu")
    inventory = Inventory(model, step, backend or coefficients.backend)
    mode = coefficients.mode(step.compiled)
    phases: dict[str, int] = {}
    peak, top, in_turn = -1, None, 0
    for moment in inventory.moments():
        graph = moment.held_bytes + int(mode.alive[moment.kind] * moment.alive_bytes)
        in_flight = _in_flight(moment, mode)
        size = graph + in_flight
        name = _phase_name(moment)
        phases[name] = max(phases.get(name, 0), size)
        in_turn = max(in_turn, graph + int(mode.sequenced * in_flight))
        if size > peak:
            peak, top = size, moment
    assert top is not None
    breakdown = _breakdown(top, mode)
    peak = sum(breakdown.values())
    phases[_phase_name(top)] = peak
    low, high = mode.band(step)
    cache = coefficients.cache_bytes or peak - sum(breakdown.get(category, 0) for category in STANDING)
    return Estimate(
        peak_bytes=peak,
        low_bytes=int(peak * low),
        high_bytes=int(peak * high),
        footprint_bytes=peak + cache,
        sequenced_peak_bytes=min(in_turn, peak),
        phase=_phase_name(top),
        phases=phases,
        breakdown=breakdown,
        largest_tensor_bytes=inventory.largest_tensor_bytes,
        step_seconds=step_seconds(inventory, coefficients),
        warnings=tuple(_warnings(inventory, coefficients)),
    )


def step_seconds(inventory: Inventory, coefficients: Coefficients) -> float:
    """Time of one update: counted FLOPs and bytes over two fitted rates."""
    speed = coefficients.speed
    rate = speed.flops_per_second.get(inventory.step.dtype) or min(speed.flops_per_second.values())
    return step_flops(inventory) / rate + step_traffic_bytes(inventory) / speed.bytes_per_second


def _in_flight(moment: Moment, mode: Mode) -> int:
    scales = mode.in_flight
    window = scales.get("window", 0.0) * moment.window_bytes
    # Counted tensors are fitted over sizes, so some counts are below 0, and of tiny tensors so is the sum.
    return max(0, int(scales[moment.kind] * moment.in_flight_bytes + window))


def _phase_name(moment: Moment) -> str:
    return PHASE_OF.get(moment.kind) or f"backward of block {moment.block}"


def _breakdown(moment: Moment, mode: Mode) -> dict[str, int]:
    """Bytes by category. At some moments part of what is held is gone already: that part is taken off it."""
    found = dict.fromkeys(CATEGORIES, 0)
    for category, size in moment.held.items():
        found[category] += size
    alive = int(mode.alive[moment.kind] * moment.alive_bytes)
    if alive >= 0:
        found[CATEGORY_OF[moment.kind]] += alive
    else:
        for category in sorted(found, key=lambda name: -found[name] if name in GIVES_WAY else 0):
            taken = min(found[category], -alive) if category in GIVES_WAY else 0
            found[category] -= taken
            alive += taken
    found["in_flight_window"] += _in_flight(moment, mode)
    return {category: size for category, size in found.items() if size}


def _warnings(inventory: Inventory, coefficients: Coefficients) -> list[str]:
    """A setting outside what was measured is said, not hidden."""
    names = {"params": "parameters", "tokens": "tokens a micro-batch", "seq_len": "sequence length"}
    warnings = [coefficients.passed_over] if coefficients.passed_over else []
    for name, value in inventory.features().items():
        low, high = coefficients.ranges.get(name, (0, float("inf")))
        if not low <= value <= high:
            side, bound = ("above", high) if value > high else ("below", low)
            warnings.append(
                f"{names.get(name, name)} {_short(value)} is {side} what was measured ({_short(bound)}); "
                "the estimate is extrapolated"
            )
    return warnings


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:g}"
