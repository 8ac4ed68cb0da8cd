"""The search of a plan: for each checkpoint policy the largest batch that fits, then the fastest of them.

A peak never falls when the batch grows, and tokens/s never do, so both are found by galloping and bisection. Whether
a candidate fits is never inferred, always asked. No policy is passed over that could be faster than the best found,
so the choice is the one that trying every setting would give, and more memory never makes it slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from oomguard.config.model import ModelConfig, divisors
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.machine.budget import Budget

if TYPE_CHECKING:
    from oomguard.estimate.peak import Estimate

Estimator = Callable[[ModelConfig, StepConfig], "Estimate"]

LARGEST_BATCH = 1 << 20
NO_GAIN = 0.0075  # a batch grows no further where a larger one cannot add more than this to the tokens/s
USUAL_BATCH = 16  # where to begin to look for the batch that grows no further
SPEED_DIGITS = 3  # of tokens/s: two fitted rates know no more

RULE = (
    "the most tokens/s of what fits; of equals, the least recompute. "
    f"A batch grows no further once no larger one could add more than {NO_GAIN:.2%}"
)
"""What ``fastest`` and ``Search.best`` do, in words."""


@dataclass(frozen=True)
class Candidate:
    """One setting of a step, its estimate, and whether it fits the budget.

    It fits when the *high* end of the band is within the budget and no tensor passes the largest buffer.
    """

    step: StepConfig
    estimate: Estimate
    budget: Budget
    engine: str = "estimate"

    @property
    def batch(self) -> int:
        return self.step.batch

    @property
    def policy(self) -> CheckpointPolicy:
        return self.step.checkpoint

    @property
    def peak_bytes(self) -> int:
        return self.estimate.peak_bytes

    @property
    def high_bytes(self) -> int:
        return self.estimate.high_bytes

    @property
    def sequenced_high_bytes(self) -> int:
        """The high end of the graph alone, without an in-flight window; as wide a band as that of the peak."""
        found = self.estimate
        return -(-found.sequenced_peak_bytes * found.high_bytes // max(1, found.peak_bytes))

    @property
    def headroom_bytes(self) -> int:
        """What the high end of the band leaves of the budget; negative when it does not fit."""
        return self.budget.budget_bytes - self.estimate.high_bytes

    @property
    def tensor_fits(self) -> bool:
        largest = self.budget.largest_buffer_bytes
        return largest is None or self.estimate.largest_tensor_bytes <= largest

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0 and self.tensor_fits

    @property
    def cache_limit_bytes(self) -> int:
        """The cache limit the plan assumes: what the allocator would keep, within what the budget leaves."""
        return max(0, min(self.estimate.footprint_bytes - self.estimate.peak_bytes, self.headroom_bytes))

    @property
    def footprint_bytes(self) -> int:
        """Peak and cache, the cache limited where the setting fits."""
        if not self.fits:
            return self.estimate.footprint_bytes
        return self.estimate.peak_bytes + self.cache_limit_bytes

    @property
    def speed(self) -> float:
        """Tokens a second with every digit of the estimate; 0 where no time is known."""
        return self.step.tokens / self.estimate.step_seconds if self.estimate.step_seconds > 0 else 0.0

    @cached_property
    def tokens_per_second(self) -> float:
        """``speed`` to ``SPEED_DIGITS`` digits, so that what is compared is what is shown."""
        return float(f"{self.speed:.{SPEED_DIGITS}g}")


@dataclass(frozen=True)
class Ladder:
    """The batches a search may take, ascending: a rung is a micro-batch and how many of them are accumulated.

    With ``target_batch`` each rung divides it, and the accumulation makes up the rest.
    """

    batches: Sequence[int]
    accumulate: int = 1
    target_batch: int | None = None

    @classmethod
    def of(cls, batch: int | None, accumulate: int | None, target_batch: int | None) -> Ladder:
        """The rungs that agree with what was asked for; None leaves a choice."""
        if target_batch is not None:
            fixed = batch or (target_batch // accumulate if accumulate else None)
            return cls((fixed,) if fixed else tuple(divisors(target_batch)), target_batch=target_batch)
        return cls((batch,) if batch else range(1, LARGEST_BATCH + 1), accumulate=accumulate or 1)

    def __len__(self) -> int:
        return len(self.batches)

    def step(self, template: StepConfig, policy: CheckpointPolicy, rung: int) -> StepConfig:
        batch = self.batches[rung]
        accumulate = self.target_batch // batch if self.target_batch else self.accumulate
        return template.but(batch=batch, accumulate=accumulate, checkpoint=policy)


def last_fitting(fits: Callable[[int], bool], size: int, guess: int = 0) -> int | None:
    """The last index below ``size`` that fits, None when not even the first does.

    Args:
        fits: true up to some index, false from there on.
        size: number of indices.
        guess: where to start; a good one costs two or three calls.
    """
    low, high, stride = -1, size, 1
    probe = min(guess, size - 1)
    while low + 1 < high:
        if fits(probe):
            low = probe
        else:
            high = probe
        if high == size and low >= 0:  # gallop up
            probe = min(low + stride, size - 1)
        elif low == -1 and high > 0:  # gallop down
            probe = max(high - stride, 0)
        else:
            probe = (low + high) // 2
        stride *= 2
    return None if low < 0 else low


class Search:
    """Estimates of one model under one budget, each setting asked once."""

    def __init__(
        self,
        model: ModelConfig,
        template: StepConfig,
        ladder: Ladder,
        budget: Budget,
        estimator: Estimator,
    ) -> None:
        self.model = model
        self.template = template
        self.ladder = ladder
        self.budget = budget
        self._estimator = estimator
        self._known: dict[tuple[CheckpointPolicy, int], Candidate] = {}
        self._largest: dict[CheckpointPolicy, int | None] = {}

    def at(self, policy: CheckpointPolicy, rung: int) -> Candidate:
        """The candidate on one rung of the ladder."""
        key = (policy, rung)
        if key not in self._known:
            step = self.ladder.step(self.template, policy, rung)
            self._known[key] = Candidate(step, self._estimator(self.model, step), self.budget)
        return self._known[key]

    def largest_rung(self, policy: CheckpointPolicy, guess: int = 0) -> int | None:
        """The highest rung that fits with that policy, None when none does."""
        if policy not in self._largest:
            self._largest[policy] = last_fitting(
                lambda rung: self.at(policy, rung).fits, len(self.ladder), guess
            )
        return self._largest[policy]

    def best(self, policy: CheckpointPolicy, guess: int = 0) -> Candidate:
        """The largest that fits with that policy and is worth its memory; where none fits, the smallest."""
        return self.at(policy, min(self.largest_rung(policy, guess) or 0, self.top))

    @cached_property
    def top(self) -> int:
        """The rung where a batch grows no further: it has all but ``NO_GAIN`` of the tokens/s of the highest one.

        It is asked of the template's policy and depends on no budget. More recompute a sequence makes a step longer and
        what it does but once count less, so with that the rung has no smaller a share. A target batch always takes the
        largest micro-batch.
        """
        highest = len(self.ladder) - 1
        if self.ladder.target_batch is not None:
            return highest
        policy = self.template.checkpoint
        enough = (1 - NO_GAIN) * self.at(policy, highest).speed
        slow = last_fitting(lambda rung: self.at(policy, rung).speed < enough, highest, USUAL_BATCH)
        return 0 if slow is None else slow + 1

    def all_ends(self, families: Families) -> list[Candidate]:
        """``best`` without recompute, and with the most recompute of each kind."""
        candidates, guess = [], 0
        for policy in families.ends:
            candidates.append(self.best(policy, guess))
            guess = self.largest_rung(policy) or 0
        return candidates

    def between(self, family: Sequence[CheckpointPolicy], rival: Candidate | None) -> list[Candidate]:
        """``best`` of every policy of a family, but its end, that could be faster than a rival.

        Nothing that recomputes is faster than no recompute at the same batch, so only larger batches count.

        Args:
            family: policies, the less recomputed the earlier, so the earlier the faster at one batch; the last one
                is an end, searched already.
            rival: the fastest found so far, None where nothing fits.
        """
        plain = self.largest_rung(NO_CHECKPOINT)
        start = 0 if plain is None else plain + 1
        found: list[Candidate] = []
        guess = start
        for policy in family[:-1]:
            if start > self.top or (rival is not None and self._limit(policy) < rival.tokens_per_second):
                break
            if self.at(policy, start).fits:
                found.append(self.best(policy, guess))
                guess = self.rung_of(found[-1])
                rival = fastest([found[-1], *([rival] if rival else [])], self.model.n_layers)
        return found

    def _limit(self, policy: CheckpointPolicy) -> float:
        """Tokens/s that no batch that is tried passes with that policy."""
        return self.at(policy, self.top).tokens_per_second

    def above(self, candidate: Candidate) -> Candidate | None:
        """The rung above a candidate's, None at the top of the ladder."""
        rung = self.rung_of(candidate) + 1
        return self.at(candidate.policy, rung) if rung < len(self.ladder) else None

    def rung_of(self, candidate: Candidate) -> int:
        return self.ladder.batches.index(candidate.batch)


@dataclass(frozen=True)
class Families:
    """The checkpoint policies a plan considers, by kind; in each, the less recomputed the earlier."""

    n_layers: int

    @cached_property
    def attention(self) -> list[CheckpointPolicy]:
        """Only the attention core, of one block, two, ..., all."""
        some = [CheckpointPolicy(policy="attention", blocks=n) for n in range(1, self.n_layers)]
        return [*some, CheckpointPolicy(policy="attention")]

    @cached_property
    def blocks(self) -> list[CheckpointPolicy]:
        """Whole blocks: one, two, ..., every one."""
        some = [CheckpointPolicy(policy="blocks", blocks=n) for n in range(1, self.n_layers)]
        return [*some, EVERY_BLOCK]

    @cached_property
    def strides(self) -> list[CheckpointPolicy]:
        """Segments of several blocks: for models whose blocks save little more than their input."""
        root = CheckpointPolicy(policy="stride", stride="sqrt").resolved_stride(self.n_layers, 1.0)
        sizes = sorted({2, root} - {1})
        return [CheckpointPolicy(policy="stride", stride=k) for k in sizes if k <= self.n_layers]

    @cached_property
    def ends(self) -> list[CheckpointPolicy]:
        """No recompute, then the most recompute of each kind."""
        return [NO_CHECKPOINT, self.attention[-1], EVERY_BLOCK, *self.strides]


def recomputed_share(policy: CheckpointPolicy, n_layers: int) -> float:
    """How much of a model is recomputed, 0 to 1; the attention core of a block counts a quarter of it."""
    weight = {"block": 1.0, "attention": 0.25}
    return sum(len(s) * weight[s.region] for s in policy.segments(n_layers)) / n_layers


def fastest(candidates: Iterable[Candidate], n_layers: int) -> Candidate | None:
    """The fitting candidate with the most tokens/s; of equals the one that recomputes least."""
    fitting = (candidate for candidate in candidates if candidate.fits)
    return min(
        fitting, key=lambda c: (-c.tokens_per_second, recomputed_share(c.policy, n_layers)), default=None
    )


@dataclass(frozen=True)
class Traced:
    """What a simulated step holds: the parts of an Estimate that a simulation knows better."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    sequenced_peak_bytes: int
    phase: str
    breakdown: dict[str, int]
    largest_tensor_bytes: int
    warnings: tuple[str, ...] = ()


class Tracer(Protocol):
    """Simulates steps of one model."""

    def __call__(self, model: ModelConfig, step: StepConfig) -> Traced:
        """What a step holds."""

    def least_recompute(
        self, model: ModelConfig, step: StepConfig, budget_bytes: int
    ) -> CheckpointPolicy | None:
        """The policy that recomputes least and keeps ``high_bytes`` within the budget; None where none does.

        The step's own policy counts for nothing.
        """


def as_traced(candidate: Candidate, traced: Traced) -> Candidate:
    """The candidate with a traced peak in the place of the estimated one; its speed and its cache stay."""
    estimate = candidate.estimate
    simulated = replace(
        estimate,
        peak_bytes=traced.peak_bytes,
        low_bytes=traced.low_bytes,
        high_bytes=traced.high_bytes,
        footprint_bytes=traced.peak_bytes + estimate.footprint_bytes - estimate.peak_bytes,
        sequenced_peak_bytes=traced.sequenced_peak_bytes,
        phase=traced.phase,
        phases={traced.phase: traced.peak_bytes},
        breakdown=traced.breakdown,
        largest_tensor_bytes=traced.largest_tensor_bytes,
        warnings=traced.warnings,
    )
    return replace(candidate, estimate=simulated, engine="trace")
