"""Settings x budget -> Plan: the fastest setting of a training step that fits, and why.

The module is not called ``plan`` because ``oomguard.plan`` is the function: a submodule of that name would
take its place the moment somebody imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from oomguard.budget import Budget, Headroom, find_budget, parse_headroom, parse_memory
from oomguard.config import (
    EVERY_BLOCK,
    NO_CHECKPOINT,
    CheckpointPolicy,
    ModelConfig,
    StepConfig,
    check_seq_len,
    first_problem,
)
from oomguard.device import Device, find_device
from oomguard.errors import InputError
from oomguard.problems import check_type
from oomguard.search import (
    Candidate,
    Estimator,
    Families,
    Ladder,
    Search,
    Tracer,
    as_traced,
    fastest,
    recomputed_share,
)
from oomguard.settings import (
    AUTO,
    Engine,
    read_batch,
    read_count,
    read_dtype,
    read_engine,
    read_optimizer,
    read_policy,
)
from oomguard.units import MIB, format_bytes, round_up

if TYPE_CHECKING:
    from oomguard.coefficients import Coefficients

MUCH_SMALLER = 4  # a batch this many times smaller that is as fast is chosen instead
NO_GAIN = 0.03  # a larger batch that adds less than this to the tokens/s buys nothing
MOST_TRACES = 12  # a trace takes a second or so; the choice and its neighbours need two to five


@dataclass(frozen=True)
class Request:
    """What was asked: a model, the fixed part of the step, and what the plan may choose (None)."""

    model: ModelConfig
    step: StepConfig
    batch: int | None = None
    checkpoint: CheckpointPolicy | None = None
    accumulate: int | None = None
    target_batch: int | None = None
    memory_bytes: int | None = None
    headroom: Headroom | None = None
    engine: Engine = "estimate"


@dataclass(frozen=True)
class Tradeoff:
    """The two ends of the choice: no recompute, and every block recomputed."""

    plain: Candidate
    every: Candidate
    slowdown: float
    """How much longer a step with every block recomputed takes than one without, at the same batch."""


@dataclass(frozen=True)
class Plan:
    """The answer. ``choice`` is None when nothing that was asked for fits.

    Attributes:
        candidates: the best of each kind of checkpointing, the fastest first, those that do not fit last.
        next_up: the choice with the next larger batch, which does not fit.
        ceiling: the choice's policy at the largest batch that fits. The choice is a smaller one where that has
            the same tokens/s but for ``NO_GAIN``: a batch several times as large that buys nothing is no pick.
        smallest: when nothing fits, the setting that needs least; it fits only if the request ruled it out.
        largest: the largest batch that any of the allowed policies allows.
        reliefs: when nothing fits, changes that would make it fit, as options, with what they give.
    """

    request: Request
    device: Device
    budget: Budget
    calibration: Coefficients
    choice: Candidate | None
    candidates: tuple[Candidate, ...]
    next_up: Candidate | None = None
    ceiling: Candidate | None = None
    tradeoff: Tradeoff | None = None
    largest: Candidate | None = None
    smallest: Candidate | None = None
    reliefs: tuple[tuple[str, Candidate], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.choice is not None


def plan(
    model: str | Path | Mapping[str, Any] | ModelConfig,
    *,
    memory: str | int | None = None,
    device: str | Device | None = None,
    batch: str | int = AUTO,
    seq_len: int | None = None,
    grad_checkpoint: str | CheckpointPolicy = AUTO,
    optimizer: str = "adamw",
    dtype: str = "float32",
    accumulate: int | None = None,
    target_batch: int | None = None,
    headroom: str | int | Headroom | None = None,
    clip_norm: bool = False,
    compiled: bool = True,
    evaluate_micro_steps: bool = True,
    engine: str = "estimate",
) -> Plan:
    """The fastest setting of a training step that fits; the same answer as ``oomguard plan``.

    Args:
        model: a preset's name, the path of a JSON config, or a shape as a dictionary or ``ModelConfig``.
        memory: what the run may use at most, ``"16GB"`` or bytes; None for what the machine has.
        device: this machine if None; a backend of it, another machine by name (``"m5-pro-48gb"``), a Device.
        batch: sequences of a micro-batch, or ``"auto"``.
        seq_len: tokens of a sequence; None for the model's context.
        grad_checkpoint: a checkpoint policy, or ``"auto"``.
        optimizer: sgd, adam, adamw, lion, adafactor or muon.
        dtype: of parameters and activations: fp32, bf16 or fp16.
        accumulate: micro-batches of an update; None for 1, or for what ``target_batch`` takes.
        target_batch: sequences of an update; the plan finds the largest micro-batch that divides it.
        headroom: what to leave unused, ``"10%"`` or bytes; None for 5% of the machine, 4 GiB at most.
        clip_norm: gradients are clipped by their global norm.
        compiled: the step is one ``mx.compile`` function.
        evaluate_micro_steps: each micro-batch is evaluated before the next is built.
        engine: ``estimate``; ``trace`` confirms the choice and its neighbours by simulation, which imports
            MLX; ``auto`` does so where it can.

    Returns:
        A Plan. Not fitting is a result: ``plan.choice`` is None and ``plan.smallest`` names what needs least.

    Raises:
        InputError: a value that cannot be; the text says what would work.

    Accuracy: that of the estimate, stated in ``plan.calibration``; a setting counts as fitting when the high
    end of its band does.
    """
    shape = read_model(model)
    policy = read_policy(grad_checkpoint)
    sequences = read_batch(batch)
    switches = {"clip_norm": clip_norm, "compiled": compiled, "evaluate_micro_steps": evaluate_micro_steps}
    for name, switch in switches.items():
        check_type(name, switch, bool, "True or False")
    step = StepConfig(
        batch=1,
        seq_len=shape.context if seq_len is None else read_count(seq_len),
        optimizer=read_optimizer(optimizer),
        dtype=read_dtype(dtype),
        clip_norm=clip_norm,
        compiled=compiled,
        evaluate_micro_steps=evaluate_micro_steps,
    )
    request = Request(
        model=shape,
        step=step,
        batch=None if sequences == AUTO else sequences,
        checkpoint=None if policy == AUTO else policy,
        accumulate=None if accumulate is None else read_count(accumulate),
        target_batch=None if target_batch is None else read_count(target_batch),
        memory_bytes=None if memory is None else parse_memory(memory),
        headroom=None if headroom is None else parse_headroom(headroom),
        engine=read_engine(engine),
    )
    return answer(request, device if isinstance(device, Device) else find_device(device))


def largest_batch(
    model: str | Path | Mapping[str, Any] | ModelConfig,
    *,
    grad_checkpoint: str | CheckpointPolicy = "none",
    **settings: Any,
) -> int:
    """The largest batch that fits with one checkpoint policy, 0 when not even one sequence does.

    Args:
        model: as in ``plan``.
        grad_checkpoint: a checkpoint policy; ``"auto"`` for the largest batch that any of them allows, which
            may be slower than what ``plan`` chooses.
        settings: as in ``plan``, without ``batch``.

    Raises:
        InputError: a value that cannot be; the text says what would work.
    """
    found = plan(model, grad_checkpoint=grad_checkpoint, **settings)
    return found.largest.batch if found.largest is not None else 0


def read_model(model: str | Path | Mapping[str, Any] | ModelConfig) -> ModelConfig:
    """The shape a user names: a preset, a config file, a dictionary, or the shape itself.

    Raises:
        InputError: no such preset, or not a shape.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, Mapping):
        try:
            return ModelConfig.model_validate(dict(model))
        except ValidationError as error:
            raise InputError(f"model: {first_problem(error)}") from error
    check_type("model", model, (str, Path), "a preset's name, a config's path, a dictionary or a ModelConfig")
    if isinstance(model, Path) or model.endswith(".json"):
        return ModelConfig.from_file(model)
    from oomguard.presets import preset

    return preset(model)


def answer(
    request: Request,
    device: Device,
    *,
    estimator: Estimator | None = None,
    calibration: Coefficients | None = None,
    tracer: Tracer | None = None,
) -> Plan:
    """The plan of a request on a device.

    Args:
        request: what was asked.
        device: the machine.
        estimator: prices a step; the calibrated estimate of the device's backend if None.
        calibration: what the estimator was fitted to; loaded for the device if None.
        tracer: simulates a step, to confirm; what the request's engine asks for if None.

    Raises:
        InputError: settings that exclude each other.
    """
    check_request(request)
    budget = find_budget(device, request.memory_bytes, request.headroom)
    if calibration is None or estimator is None:
        calibration, estimator = _calibrated(device)
    search = _search(request, budget, estimator)
    candidates = _candidates(search, request)
    choice = fastest(candidates, request.model.n_layers)
    warnings: list[str] = []
    if tracer is None and request.engine != "estimate":
        from oomguard.engines import find_tracer

        tracer, warning = find_tracer(request.engine, device)
        warnings += [warning] if warning else []
    if tracer is not None:
        candidates, choice, said = _confirm(search, candidates, tracer, free=request.checkpoint is None)
        warnings += said
    largest = max((c for c in candidates if c.fits), key=lambda c: c.batch, default=None)
    found = Plan(request, device, budget, calibration, choice, (), largest=largest)
    if choice is None:
        smallest, reliefs = _what_would_fit(request, device, budget, estimator, candidates)
        found = replace(found, smallest=smallest, reliefs=reliefs)
    else:
        found = replace(found, ceiling=choice, **_around(search, choice, candidates))
        if request.batch is None and request.target_batch is None:
            found = replace(found, choice=_no_larger_than_needed(search, choice))
    shown = _shown(found, candidates)
    return replace(found, candidates=shown, warnings=_warnings(found, warnings))


def check_request(request: Request) -> None:
    """Raises InputError for settings that exclude each other or the model."""
    check_seq_len(request.model, request.step)
    target, batch, accumulate = request.target_batch, request.batch, request.accumulate
    if target is None:
        return
    for name, value in (("batch", batch), ("accumulate", accumulate)):
        if value is not None and target % value:
            near = [n for n in range(1, target + 1) if target % n == 0]
            near = sorted(near, key=lambda n: abs(n - value))[:2]
            raise InputError(
                f"{name} {value} does not divide the target batch {target}; "
                f"{' or '.join(str(n) for n in sorted(near))} would"
            )
    if batch is not None and accumulate is not None and batch * accumulate != target:
        raise InputError(
            f"batch {batch} times accumulate {accumulate} is {batch * accumulate}, not the target batch "
            f"{target}; leave one of the three out"
        )


def _calibrated(device: Device) -> tuple[Coefficients, Estimator]:
    from oomguard.coefficients import load
    from oomguard.estimate import estimate

    coefficients = load(device.backend, mlx_version=device.mlx, device=device.machine or device.name)
    return coefficients, lambda model, step: estimate(model, step, coefficients, backend=device.backend)


def _search(request: Request, budget: Budget, estimator: Estimator) -> Search:
    ladder = Ladder.of(request.batch, request.accumulate, request.target_batch)
    return Search(request.model, request.step, ladder, budget, estimator)


def _candidates(search: Search, request: Request) -> list[Candidate]:
    """The best of the policies the request allows: the ends of each kind, then what lies between."""
    if request.checkpoint is not None:
        return [search.best(request.checkpoint)]
    n_layers = request.model.n_layers
    families = Families(n_layers)
    candidates = search.all_ends(families)
    for family in (families.attention, families.blocks):
        candidates += search.partly(family, fastest(candidates, n_layers))
    return candidates


def _around(search: Search, choice: Candidate, candidates: list[Candidate]) -> dict[str, Any]:
    """What surrounds the choice: the next rung up, and the two ends."""
    n_layers = search.model.n_layers
    above = search.above(choice)
    if above is not None:  # traced, where a trace has confirmed the choice
        above = next((c for c in candidates if c.step == above.step), above)
    plain = next((c for c in candidates if c.policy == NO_CHECKPOINT), None)
    every = next((c for c in candidates if recomputed_share(c.policy, n_layers) == 1), None)
    tradeoff = None
    if plain is not None and every is not None:
        rung = search.rung_of(plain)
        plain_seconds = search.at(NO_CHECKPOINT, rung).estimate.step_seconds
        every_seconds = search.at(EVERY_BLOCK, rung).estimate.step_seconds
        slowdown = every_seconds / plain_seconds - 1 if plain_seconds > 0 else 0.0
        tradeoff = Tradeoff(plain, every, slowdown)
    return {
        "next_up": above if above is not None and not above.fits else None,
        "tradeoff": tradeoff,
    }


def _no_larger_than_needed(search: Search, choice: Candidate) -> Candidate:
    """The choice, or a much smaller batch that is as fast."""
    smaller = search.smallest_as_fast(choice, 1 - NO_GAIN)
    return smaller if smaller.batch * MUCH_SMALLER <= choice.batch and smaller.fits else choice


def _what_would_fit(
    request: Request, device: Device, budget: Budget, estimator: Estimator, candidates: list[Candidate]
) -> tuple[Candidate, tuple[tuple[str, Candidate], ...]]:
    """The setting that needs least, and changes of the request that fit."""
    ends = Families(request.model.n_layers).ends
    search = _search(_freed(request), budget, estimator)
    smallest = min([*candidates, *(search.at(policy, 0) for policy in ends)], key=lambda c: c.high_bytes)
    reliefs: dict[str, tuple[str, Candidate]] = {}
    for options, changed in _changes(request):
        kind = options.split()[0]
        if kind in reliefs:  # a longer sequence fits already
            continue
        search = _search(changed, budget, estimator)
        policies = ends if changed.checkpoint is None else [changed.checkpoint]
        found = fastest([search.best(policy) for policy in policies], request.model.n_layers)
        if found is not None:
            reliefs[kind] = (options, found)
    return smallest, (*reliefs.values(), *_more_memory(request, device, smallest))


def _more_memory(request: Request, device: Device, smallest: Candidate) -> list[tuple[str, Candidate]]:
    """The ``--memory`` that the smallest setting needs, where the machine has it."""
    if request.memory_bytes is None:
        return []
    needed = round_up(smallest.high_bytes, 10 * MIB)
    try:
        roomier = find_budget(device, needed, request.headroom)
    except InputError:  # the headroom takes all of it
        return []
    allowed = replace(smallest, budget=roomier)
    return [(f"--memory {needed // MIB}MiB", allowed)] if allowed.fits else []


def _freed(request: Request) -> Request:
    """The request with everything left to the plan that it may choose."""
    return replace(request, batch=None, checkpoint=None, accumulate=None, target_batch=None)


def _changes(request: Request) -> list[tuple[str, Request]]:
    """Requests that ask for less, each with the options that make the change."""
    changes = []
    if request.checkpoint is not None:
        changes.append(("--grad-checkpoint auto", replace(request, checkpoint=None)))
    if request.batch is not None:
        effective = request.target_batch or request.batch * (request.accumulate or 1)
        changed = replace(request, batch=None, checkpoint=None, accumulate=None, target_batch=effective)
        changes.append((f"--target-batch {effective}", changed))
    free = _freed(request)
    if (request.batch, request.accumulate, request.target_batch) != (None, None, None):
        changes.append(("--batch auto --grad-checkpoint auto", free))
    if request.step.dtype == "float32":
        changes.append(("--dtype bf16", replace(free, step=free.step.but(dtype="bfloat16"))))
    if request.step.optimizer in ("adam", "adamw"):  # two moments a parameter; Lion keeps one
        changes.append(("--optimizer lion", replace(free, step=free.step.but(optimizer="lion"))))
    shorter = request.step.seq_len // 2
    while shorter >= 16:
        changes.append((f"--ctx {shorter}", replace(free, step=free.step.but(seq_len=shorter))))
        shorter //= 2
    return changes


def _confirm(
    search: Search, candidates: list[Candidate], tracer: Tracer, *, free: bool
) -> tuple[list[Candidate], Candidate | None, list[str]]:
    """Traces the choice and its neighbours; what the trace says is believed.

    The fastest candidate is traced; while it does not fit, the rung below, while it fits, the rung above. The
    next candidates follow as long as they could be faster than the best confirmed so far. Where the policy is
    ``free``, the least recompute that the chosen batch needs is then looked for, or that the smallest batch would
    need where nothing was confirmed.
    """
    confirmed: list[Candidate] = []
    said: list[str] = []
    traces = 0

    def trace(candidate: Candidate) -> Candidate:
        nonlocal traces
        traces += 1
        traced = as_traced(candidate, tracer(search.model, candidate.step))
        low, high = candidate.estimate.low_bytes, candidate.estimate.high_bytes
        if not said and not low <= traced.peak_bytes <= high:
            said.append(
                f"batch {candidate.batch}, {candidate.policy}: the trace finds a peak of "
                f"{format_bytes(traced.peak_bytes)}, outside the estimate's {format_bytes(low)} to "
                f"{format_bytes(high)}; the trace is believed"
            )
        confirmed.append(traced)
        return traced

    left = sorted((c for c in candidates if c.fits), key=lambda c: -c.tokens_per_second)
    left = left or sorted(candidates, key=lambda c: c.high_bytes)[:1]
    for candidate in left:
        best = max((c.tokens_per_second for c in confirmed if c.fits), default=0.0)
        if candidate.tokens_per_second <= best or traces >= MOST_TRACES:
            break
        rung = search.rung_of(candidate)
        upward = trace(candidate).fits
        while traces < MOST_TRACES:
            rung += 1 if upward else -1
            if not 0 <= rung < len(search.ladder):
                break
            if trace(search.at(candidate.policy, rung)).fits != upward:
                break
    choice = fastest(confirmed, search.model.n_layers)
    if free and (choice is None or choice.policy != NO_CHECKPOINT):
        rung = 0 if choice is None else search.rung_of(choice)
        least = tracer.least_recompute(
            search.model, search.at(NO_CHECKPOINT, rung).step, search.budget.budget_bytes
        )
        if least is not None and not any(c.policy == least and search.rung_of(c) == rung for c in confirmed):
            trace(search.at(least, rung))
            choice = fastest(confirmed, search.model.n_layers)
    traced_steps = {c.step for c in confirmed}
    rest = [c for c in candidates if c.step not in traced_steps]
    return confirmed + rest, choice, said


def _shown(found: Plan, candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """The choice, then the best of each kind of policy, then what does not fit."""
    keep: dict[tuple[str, bool], Candidate] = {}
    for candidate in candidates:
        kind = (candidate.policy.policy, candidate.policy.blocks is not None)
        best = keep.get(kind)
        if best is None or _order(candidate) < _order(best):
            keep[kind] = candidate
    extra = [c for c in (found.choice, found.smallest, found.next_up) if c is not None]
    chosen = {c.step: c for c in [*keep.values(), *extra]}
    ordered = sorted(chosen.values(), key=lambda c: (c is not found.choice, *_order(c)))
    return tuple(ordered)


def _order(candidate: Candidate) -> tuple[bool, float]:
    if candidate.fits:
        return (False, -candidate.tokens_per_second)
    return (True, float(candidate.high_bytes))


def _warnings(found: Plan, said: list[str]) -> tuple[str, ...]:
    """Everything a reader must know before trusting the numbers, each thing once."""
    warnings = list(said)
    device, calibration = found.device, found.calibration
    if device.mlx is not None and calibration.mlx and calibration.mlx != device.mlx:
        warnings.append(
            f"the coefficients were fitted on MLX {calibration.mlx}, here is {device.mlx}; "
            "oomguard calibrate fits them to this machine, --engine auto simulates the step"
        )
    asked = found.request.memory_bytes
    if asked is not None and found.budget.candidates[found.budget.bound_by] < asked:
        warnings.append(
            f"{format_bytes(asked)} was allowed, but {found.budget.bound_by} binds first: "
            f"{format_bytes(found.budget.candidates[found.budget.bound_by])}"
        )
    shown = found.choice or found.smallest
    if shown is not None:
        warnings += shown.estimate.warnings
    return tuple(dict.fromkeys(warnings))
