"""Settings x budget -> Plan: the fastest setting of a training step that fits, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from oomguard.config.base import first_problem
from oomguard.config.model import ModelConfig, divisors
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.problems import check_type
from oomguard.config.step import StepConfig, check_seq_len
from oomguard.config.words import (
    AUTO,
    Engine,
    read_batch,
    read_count,
    read_dtype,
    read_engine,
    read_optimizer,
    read_policy,
)
from oomguard.errors import InputError
from oomguard.machine.budget import Budget, Headroom, find_budget, parse_headroom, parse_memory
from oomguard.machine.device import Device, find_device
from oomguard.plan.search import (
    Candidate,
    Estimator,
    Families,
    Ladder,
    Search,
    Tracer,
    as_traced,
    fastest,
    last_fitting,
)
from oomguard.units import KIB, MIB, format_bytes, round_up

if TYPE_CHECKING:
    from oomguard.estimate.coefficients import Coefficients

MOST_TRACES = (
    12  # after so many no other policy is traced; one takes a second or so, and most plans need two to five
)
SHORTEST_CONTEXT = 16  # tokens: no relief asks for less


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
    """The two ends of the choice, each with the largest batch that fits: no recompute, and every block recomputed."""

    plain: Candidate
    every: Candidate
    slowdown: float
    """How much longer a step with every block recomputed takes than one without, at the same batch."""


class Relief(NamedTuple):
    """A change that makes it fit: options to add to what was asked, and what a plan of that chooses."""

    options: str
    candidate: Candidate


@dataclass(frozen=True)
class Plan:
    """The answer. ``choice`` is None when nothing that was asked for fits.

    Attributes:
        candidates: the best of each kind of checkpointing, the fastest first, those that do not fit last.
        next_up: the choice with the next larger batch, where that does not fit.
        ceiling: the choice's policy at the largest batch that fits; larger than the choice where a larger batch buys
            nothing (``search.RULE``).
        grows_to: the batch that none of the candidates passes, since a larger one buys nothing; None where the batch or
            the target batch was given.
        least: when nothing fits, the setting that needs least of those that were asked for.
        smallest: when nothing fits, the setting of the model that needs least; it fits only if the request rules it
            out.
        largest: the largest batch that any of the allowed policies allows.
        reliefs: when nothing fits, changes that would make it fit.
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
    grows_to: int | None = None
    largest: Candidate | None = None
    least: Candidate | None = None
    smallest: Candidate | None = None
    reliefs: tuple[Relief, ...] = ()
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

    The rule is ``search.RULE``: the most tokens/s of what fits; of equals, the least recompute; a batch grows no
    further once no larger one could add more than 0.75%.

    Args:
        model: a preset's name, the path of a JSON config, or a shape as a dictionary or ``ModelConfig``.
        memory: what the run may use at most, ``"16GB"``, or bytes as an integer; None for what the machine has.
        device: this machine if None; a backend of it, another machine by name (``"m5-pro-48gb"``), a Device.
        batch: sequences of a micro-batch, or ``"auto"``.
        seq_len: tokens of a sequence; None for the model's context.
        grad_checkpoint: a checkpoint policy, or ``"auto"``.
        optimizer: sgd, adam, adamw, lion, adafactor or muon.
        dtype: of parameters and activations: fp32, bf16 or fp16.
        accumulate: micro-batches of an update; None for 1, or for what ``target_batch`` takes.
        target_batch: sequences of an update; the plan finds the largest micro-batch that divides it.
        headroom: what to leave unused, ``"10%"``, ``"1GiB"``, or bytes as an integer; None for 5% of the machine, 4 GiB
            at most.
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
    from oomguard.config.presets import preset

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
    warnings = [said] if (said := calibration.passed_over) else []
    if tracer is None and request.engine != "estimate":
        from oomguard.plan.engines import find_tracer

        tracer, warning = find_tracer(request.engine, device)
        warnings += [warning] if warning else []
    prices = _Prices(budget, estimator, tracer)
    solved = prices.solve(request)
    warnings += solved.said
    found = Plan(request, device, budget, calibration, solved.choice, (), largest=solved.largest())
    if request.batch is None and request.target_batch is None:
        found = replace(found, grows_to=solved.search.ladder.batches[solved.search.top])
    if solved.choice is None:
        found = replace(found, **_what_would_fit(request, device, prices, solved))
    else:
        found = replace(found, **_around(solved, solved.choice))
    shown = _shown(found, solved.candidates)
    return replace(found, candidates=shown, warnings=_warnings(found, warnings))


def check_request(request: Request) -> None:
    """Raises InputError for settings that exclude each other or the model."""
    check_seq_len(request.model, request.step)
    target, batch, accumulate = request.target_batch, request.batch, request.accumulate
    if target is None:
        return
    for name, value in (("batch", batch), ("accumulate", accumulate)):
        if value is not None and target % value:
            near = sorted(divisors(target), key=lambda n: abs(n - value))[:2]
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
    from oomguard.estimate.coefficients import load
    from oomguard.estimate.peak import estimate

    coefficients = load(device.backend, mlx_version=device.mlx, device=device.machine or device.name)
    return coefficients, lambda model, step: estimate(model, step, coefficients, backend=device.backend)


def _search(request: Request, budget: Budget, estimator: Estimator) -> Search:
    ladder = Ladder.of(request.batch, request.accumulate, request.target_batch)
    template = request.step.but(checkpoint=request.checkpoint or NO_CHECKPOINT)
    return Search(request.model, template, ladder, budget, estimator)


def _candidates(search: Search, request: Request) -> list[Candidate]:
    """The best of each policy the request allows, but of those that cannot be the fastest."""
    if request.checkpoint is not None:
        return [search.best(request.checkpoint)]
    n_layers = request.model.n_layers
    families = Families(n_layers)
    candidates = search.all_ends(families)
    for family in (families.attention, families.blocks):
        candidates += search.between(family, fastest(candidates, n_layers))
    return candidates


@dataclass(frozen=True)
class _Solved:
    """A request with its candidates and the fastest of them, None where none fits.

    ``traced``: every candidate that was simulated, also those larger than is worthwhile.
    """

    search: Search
    candidates: list[Candidate]
    choice: Candidate | None
    traced: list[Candidate] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def known(self, estimated: Candidate) -> Candidate:
        """The candidate as it was traced, where it was."""
        return next((c for c in self.traced if c.step == estimated.step), estimated)

    def least(self) -> Candidate:
        """The candidate that needs least; a traced one where there is one."""
        return min(self.candidates, key=lambda c: (c.engine != "trace", c.high_bytes))

    def largest(self) -> Candidate | None:
        """The largest batch that fits with any of the policies, whatever it buys."""
        found = (self.ceiling(policy) for policy in {c.policy for c in self.candidates})
        return max((c for c in found if c is not None), key=lambda c: c.batch, default=None)

    def ceiling(self, policy: CheckpointPolicy) -> Candidate | None:
        """The largest batch that fits with that policy; by the trace where one was made."""
        traced = [c for c in self.traced if c.policy == policy]
        if traced:
            return max((c for c in traced if c.fits), key=lambda c: c.batch, default=None)
        rung = self.search.largest_rung(policy)
        return None if rung is None else self.search.at(policy, rung)


@dataclass(frozen=True)
class _Prices:
    """What settings are priced with: the budget, the estimate, and a trace where one confirms it."""

    budget: Budget
    estimator: Estimator
    tracer: Tracer | None = None

    def solve(self, request: Request) -> _Solved:
        """The candidates of a request, and the fastest."""
        solved = self._estimated(request)
        if self.tracer is None:
            return solved
        return _confirm(solved, self.tracer, free=request.checkpoint is None)

    def relief(self, request: Request) -> Candidate | None:
        """What a plan of a changed request would choose; None where the estimate sees nothing that could fit."""
        policies = [request.checkpoint] if request.checkpoint else Families(request.model.n_layers).ends
        search = _search(request, self.budget, self.estimator)
        return self.solve(request).choice if any(search.at(p, 0).fits for p in policies) else None

    def _estimated(self, request: Request) -> _Solved:
        search = _search(request, self.budget, self.estimator)
        candidates = _candidates(search, request)
        return _Solved(search, candidates, fastest(candidates, request.model.n_layers))


def _around(solved: _Solved, choice: Candidate) -> dict[str, Any]:
    """What surrounds the choice: the next rung up, the largest that fits, and the two ends."""
    above, ceiling = solved.search.above(choice), solved.ceiling(choice.policy)
    next_up = None if above is None else solved.known(above)
    grows_no_further = ceiling is not None and ceiling.batch > choice.batch
    return {
        "next_up": None if next_up is None or next_up.fits or grows_no_further else next_up,
        "ceiling": ceiling,
        "tradeoff": _tradeoff(solved),
    }


def _tradeoff(solved: _Solved) -> Tradeoff | None:
    policies = {c.policy for c in solved.candidates}
    if not policies >= {NO_CHECKPOINT, EVERY_BLOCK}:
        return None
    search = solved.search
    plain, every = (
        solved.ceiling(policy) or solved.known(search.at(policy, 0))
        for policy in (NO_CHECKPOINT, EVERY_BLOCK)
    )
    rung = search.rung_of(plain)
    plain_seconds = search.at(NO_CHECKPOINT, rung).estimate.step_seconds
    every_seconds = search.at(EVERY_BLOCK, rung).estimate.step_seconds
    return Tradeoff(plain, every, every_seconds / plain_seconds - 1 if plain_seconds > 0 else 0.0)


def _what_would_fit(request: Request, device: Device, prices: _Prices, solved: _Solved) -> dict[str, Any]:
    """What was asked for needs this much; the least of all needs that; and these changes would fit."""
    least = solved.least()
    freed, _ = _freed(replace(request, target_batch=None))
    smallest = (
        least if freed == request else min(least, prices.solve(freed).least(), key=lambda c: c.high_bytes)
    )
    reliefs: dict[str, Relief] = {}
    for change in _changes(request, prices):
        if change.kind in reliefs or (change.frees and "free" in reliefs):
            continue
        choice = prices.relief(change.request)
        if choice is not None and not any(choice.step == known.candidate.step for known in reliefs.values()):
            reliefs[change.kind] = Relief(change.options or _spelled(choice, request), choice)
    found = (*reliefs.values(), *_more_memory(request, device, least))
    return {"least": least, "smallest": smallest, "reliefs": found}


def _spelled(choice: Candidate, request: Request) -> str:
    """The options that give a choice of another batch and accumulation."""
    words = [f"--batch {choice.batch} --accumulate {choice.step.accumulate}"]
    words += [f"--grad-checkpoint {choice.policy}"] if choice.policy != request.checkpoint else []
    return " ".join(words)


def _more_memory(request: Request, device: Device, least: Candidate) -> Iterator[Relief]:
    """The ``--memory`` that what was asked for needs, where the machine has it."""
    if request.memory_bytes is None:
        return
    headroom = request.headroom or Headroom()
    needed = round_up(int((least.high_bytes + headroom.size_bytes) / (1 - headroom.share)) + KIB, 10 * MIB)
    allowed = replace(least, budget=find_budget(device, needed, request.headroom))
    if allowed.fits:
        yield Relief(f"--memory {needed // MIB}MiB", allowed)


def _freed(request: Request) -> tuple[Request, str]:
    """The request with everything left to the plan that an option can leave to it, and those options."""
    options = []
    if request.batch is not None:
        options.append("--batch auto")
    if request.target_batch is None and request.accumulate not in (None, 1):
        options.append("--accumulate 1")
    if request.checkpoint is not None:
        options.append("--grad-checkpoint auto")
    accumulate = request.accumulate if request.target_batch is not None else None
    return replace(request, batch=None, checkpoint=None, accumulate=accumulate), " ".join(options)


class _Change(NamedTuple):
    """A changed request, of which only the first of a kind that fits is told; no options: those of its choice.

    ``frees``: it leaves to the plan what was fixed, so it is no news where that alone fits.
    """

    kind: str
    options: str
    request: Request
    frees: bool = False


def _changes(request: Request, prices: _Prices) -> Iterator[_Change]:
    """Requests that ask for less, each with the options that, added to what was asked, make the change."""
    if request.checkpoint is not None:
        yield _Change("policy", "--grad-checkpoint auto", replace(request, checkpoint=None))
    yield from _spread(request)
    freed, free = _freed(request)
    if freed != request:
        yield _Change("free", free, freed)
    if request.target_batch is not None and request.accumulate is None:
        yield from _smaller_target(request, prices)
    for kind, option, step in _lighter_steps(request):
        yield _Change(kind, option, replace(request, step=step))
        if freed != request:
            yield _Change(kind, f"{option} {free}", replace(freed, step=step), frees=True)


def _spread(request: Request) -> Iterator[_Change]:
    """As many sequences an update, in smaller micro-batches."""
    if request.batch is None and (request.target_batch is None or request.accumulate is None):
        return
    effective = request.target_batch or (request.batch or 1) * (request.accumulate or 1)
    spread = replace(request, batch=None, accumulate=None, target_batch=effective)
    yield _Change("spread", "", spread)
    yield _Change("spread", "", replace(spread, checkpoint=None))


def _smaller_target(request: Request, prices: _Prices) -> Iterator[_Change]:
    """An update of as many sequences as fit without accumulation, whose gradients are then not kept."""
    alone = prices.relief(replace(request, batch=None, target_batch=None))
    if alone is not None:
        options = "--batch auto " if request.batch is not None else ""
        smaller = replace(request, batch=None, target_batch=alone.batch)
        yield _Change("target", f"{options}--target-batch {alone.batch}", smaller)


def _lighter_steps(request: Request) -> Iterator[tuple[str, str, StepConfig]]:
    """Steps that hold less, with their option."""
    step = request.step
    if step.dtype == "float32":
        yield "dtype", "--dtype bf16", step.but(dtype="bfloat16")
    if step.optimizer in ("adam", "adamw"):  # two moments a parameter; Lion keeps one
        yield "optimizer", "--optimizer lion", step.but(optimizer="lion")
    shorter = step.seq_len // 2
    while shorter >= SHORTEST_CONTEXT:
        yield "ctx", f"--ctx {shorter}", step.but(seq_len=shorter)
        shorter //= 2


def _confirm(solved: _Solved, tracer: Tracer, *, free: bool) -> _Solved:
    """Traces the fastest candidates until one is confirmed that no other could beat; the trace is believed.

    Of each policy that is traced the largest batch is found that fits by the trace. Where the policy is ``free``, the
    least recompute that the chosen batch needs is then looked for, or that the smallest batch would need where
    nothing was confirmed.
    """
    search, n_layers = solved.search, solved.search.model.n_layers
    traced = _Traces(search, tracer)
    left = sorted(
        (c for c in _best_of_kinds(solved.candidates) if c.fits), key=lambda c: -c.tokens_per_second
    )
    for candidate in left or [solved.least()]:
        best = fastest(traced.candidates(), n_layers)
        if best is not None and (
            candidate.tokens_per_second <= best.tokens_per_second or len(traced.known) >= MOST_TRACES
        ):
            break
        traced.climb(candidate.policy, search.rung_of(candidate))
    choice = fastest(traced.candidates(), n_layers)
    if free and (choice is None or choice.policy != NO_CHECKPOINT):
        rung = 0 if choice is None else search.rung_of(choice)
        plain = search.at(NO_CHECKPOINT, rung).step
        least = tracer.least_recompute(search.model, plain, search.budget.budget_bytes)
        if least is not None:
            traced.climb(least, rung)
            choice = fastest(traced.candidates(), n_layers)
    if choice is not None:
        traced.find_ceiling(choice)
    candidates = traced.candidates()
    corrected = {c.policy for c in candidates}
    candidates += [c for c in solved.candidates if c.policy not in corrected]
    return _Solved(search, candidates, choice, list(traced.known.values()), traced.said)


@dataclass
class _Traces:
    """Candidates by trace, each traced once, and what is to be said of the first that surprises."""

    search: Search
    tracer: Tracer
    known: dict[StepConfig, Candidate] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def candidates(self) -> list[Candidate]:
        """Those that are worth their memory."""
        return [c for c in self.known.values() if self.search.rung_of(c) <= self.search.top]

    def climb(self, policy: CheckpointPolicy, rung: int) -> None:
        """Finds the largest worthwhile batch that fits with that policy, from a rung near it."""
        last_fitting(lambda at: self._at(policy, at).fits, self.search.top + 1, rung)

    def find_ceiling(self, choice: Candidate) -> None:
        """Finds the largest batch that fits with the policy of a choice that grows no further."""
        policy = choice.policy
        if self.search.rung_of(choice) == self.search.top:
            guess = self.search.largest_rung(policy) or 0
            last_fitting(lambda at: self._at(policy, at).fits, len(self.search.ladder), guess)

    def _at(self, policy: CheckpointPolicy, rung: int) -> Candidate:
        estimated = self.search.at(policy, rung)
        if estimated.step not in self.known:
            traced = as_traced(estimated, self.tracer(self.search.model, estimated.step))
            self._compare(estimated, traced)
            self.known[estimated.step] = traced
        return self.known[estimated.step]

    def _compare(self, estimated: Candidate, traced: Candidate) -> None:
        low, high = estimated.estimate.low_bytes, estimated.estimate.high_bytes
        if not self.said and not low <= traced.peak_bytes <= high:
            self.said.append(
                f"batch {estimated.batch}, {estimated.policy}: the trace finds a peak of "
                f"{format_bytes(traced.peak_bytes)}, outside the estimate's {format_bytes(low)} to "
                f"{format_bytes(high)}; the trace is believed"
            )


def _shown(found: Plan, candidates: list[Candidate]) -> tuple[Candidate, ...]:
    """The choice, then the best of each kind of policy, then what does not fit."""
    extra = [c for c in (found.choice, found.least, found.next_up) if c is not None]
    if found.smallest is not None and not found.smallest.fits:
        extra.append(found.smallest)
    chosen = {c.step: c for c in (*_best_of_kinds(candidates), *extra)}
    ordered = sorted(chosen.values(), key=lambda c: (c is not found.choice, *_order(c)))
    return tuple(ordered)


def _best_of_kinds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The best of each kind of policy: all blocks and some of them are two kinds."""
    keep: dict[tuple[str, bool], Candidate] = {}
    for candidate in candidates:
        kind = (candidate.policy.policy, candidate.policy.blocks is not None)
        if kind not in keep or _order(candidate) < _order(keep[kind]):
            keep[kind] = candidate
    return list(keep.values())


def _order(candidate: Candidate) -> tuple[bool, float]:
    if candidate.fits:
        return (False, -candidate.tokens_per_second)
    return (True, float(candidate.high_bytes))


def _warnings(found: Plan, said: list[str]) -> tuple[str, ...]:
    """Everything a reader must know before trusting the numbers, each thing once."""
    warnings = list(said)
    shown = found.choice or found.least
    if shown is None or shown.engine != "trace":
        from oomguard.estimate.coefficients import release_warning

        said_of_release = release_warning(found.calibration, found.device.backend, found.device.mlx)
        warnings += [said_of_release] if said_of_release else []
    asked = found.request.memory_bytes
    if asked is not None and found.budget.candidates[found.budget.bound_by] < asked:
        warnings.append(
            f"{format_bytes(asked)} was allowed, but {found.budget.bound_by} binds first: "
            f"{format_bytes(found.budget.candidates[found.budget.bound_by])}"
        )
    if shown is not None:
        warnings += shown.estimate.warnings
    return tuple(dict.fromkeys(warnings))
