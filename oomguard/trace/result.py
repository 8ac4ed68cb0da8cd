"""What a trace answers: the peak of a step, when it is reached, and what is alive then."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.trace.ledger import CATEGORIES

WORTH_SAYING = 0.01  # of a peak

BUFFER_REFUSED = "one buffer takes"
"""How the warning begins that the device refuses the largest buffer."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One primitive of a step: its place among those evaluated, and where in the model it belongs."""

    index: int
    primitive: str
    phase: str
    block: int
    scope: str

    def __str__(self) -> str:
        if self.index < 0:
            return "before the step"
        where = self.scope or (f"block {self.block}" if self.block >= 0 else "")
        return f"{self.phase}, {self.primitive}" + (f" in {where}" if where else "")


@dataclass(frozen=True, slots=True)
class Holder:
    """One buffer alive at the peak, or as many as are alike.

    Attributes:
        name: the parameter, or the module whose output it is, or the module it was made in; "" at top level.
        nbytes: bytes of the buffer; of all of them where it stands for several.
        category: one of ``CATEGORIES``.
        phase: of the primitive that wrote it; "" for what existed before the step.
        block: index of the model's block, -1 in none.
        primitive: what wrote it; "" for what existed before.
        shape: of the array, () for scratch space.
        dtype: of the array, "" for scratch space.
        count: how many buffers it stands for.
    """

    name: str
    nbytes: int
    category: str
    phase: str
    block: int
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """What one buffer held from primitive ``start`` until ``end`` (exclusive), by position in the timeline."""

    holder: Holder
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Active bytes over the primitives of a step, in the order evaluated.

    Attributes:
        active: once each primitive has allocated.
        totals: the same by category, in the order of ``CATEGORIES``; each sums to ``active``.
        moments: what the primitives are.
        spans: what every buffer held, and from when to when; those around a primitive sum to its ``active``.
    """

    active: list[int]
    totals: list[tuple[int, ...]]
    moments: list[Moment]
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OrderPeak:
    """The steady peak of a step whose ``mx.eval`` is given its arrays in another order.

    Attributes:
        order: one of ``orders.ORDERS``.
        peak_bytes: of active memory.
        given_bytes: the same in the order given.
    """

    order: str
    peak_bytes: int
    given_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What the order saves over the one given."""
        return self.given_bytes - self.peak_bytes

    @property
    def worth_saying(self) -> bool:
        """Whether it is more than what is in flight makes of it."""
        return self.saved_bytes > WORTH_SAYING * self.given_bytes


@dataclass(frozen=True)
class TraceResult:
    """The peak of a step, simulated.

    Attributes:
        peak_bytes: of active memory, as ``mx.get_peak_memory`` gives it, in the steady state.
        low_bytes, high_bytes: the least and most over some steps; they differ in what is in flight.
        first_peak_bytes: of the first step: the one that creates the state, where the step does so itself. A process
            that must first compile its fused kernels stays below it: meanwhile the queue runs empty.
        sequenced_peak_bytes: with the memory limit at 0: nearly nothing in flight.
        graph_peak_bytes: with nothing in flight at all: what the order of evaluation alone needs.
        state_bytes: active before the step: parameters, optimizer state, batch.
        largest_buffer_bytes: the largest single allocation; must fit the device's largest buffer.
        moment: when the peak is reached.
        holders: what is alive then, largest first; their bytes sum to ``peak_bytes``.
        breakdown: the same by category, without empty ones.
        timeline: the step that made the peak.
        primitives: how many are evaluated.
        unknown: primitives no rule is known for, with their number. They are counted from above.
        order: an order of evaluation that holds clearly less; None where none is known.
        warnings: what could make the numbers wrong.
        backend, compiled: what was simulated.
        compiled_calls: calls of compiled functions in a step that is not compiled itself; each is compiled alone.
        compiled_calls: calls of compiled functions in a step that is not compiled itself; each is compiled alone.
        memory_limit_bytes: as given, else MLX's own on the device; None where that is not known, and none simulated.
        waited_at_limit: whether the evaluator waited because more was active than the limit.
        largest_allowed_bytes: the largest buffer the device hands out; None for no bound, or where none is known.
    """

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    first_peak_bytes: int
    sequenced_peak_bytes: int
    graph_peak_bytes: int
    state_bytes: int
    largest_buffer_bytes: int
    moment: Moment
    holders: list[Holder]
    breakdown: dict[str, int]
    timeline: Timeline
    primitives: int
    backend: str
    compiled: bool
    memory_limit_bytes: int | None = None
    waited_at_limit: bool = False
    largest_allowed_bytes: int | None = None
    compiled_calls: int = 0
    order: OrderPeak | None = None
    unknown: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def mode(self) -> str:
        """``compiled``, ``eager``, or how many calls of an eager step are compiled, in words."""
        if self.compiled or not self.compiled_calls:
            return "compiled" if self.compiled else "eager"
        return f"eager, {self.compiled_calls} compiled {'call' if self.compiled_calls == 1 else 'calls'}"

    @property
    def most_bytes(self) -> int:
        """The highest of the simulated steps, the first one included: what a budget must hold."""
        return max(self.first_peak_bytes, self.high_bytes)

    @property
    def buffer_fits(self) -> bool | None:
        """Whether the device hands out the largest buffer, whatever is free; None where its bound is not known."""
        if self.largest_allowed_bytes is None:
            return None
        return self.largest_buffer_bytes <= self.largest_allowed_bytes

    @property
    def in_flight_bytes(self) -> int:
        """What the peak has over that of the graph alone."""
        return max(0, self.peak_bytes - self.graph_peak_bytes)


__all__ = ["CATEGORIES", "Holder", "Moment", "OrderPeak", "Span", "Timeline", "TraceResult"]
