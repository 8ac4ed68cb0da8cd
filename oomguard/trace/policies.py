"""Every checkpoint policy of a step, priced from one capture; the cheapest that fits a budget.

A price is what the step holds under a policy, simulated, and what it computes twice. Within a family of policies
(the first n blocks, or their attention cores) more recompute does not hold more, so the least that fits is found
by narrowing down between an end that fits and one that does not. Whether a policy fits is simulated, never inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy, Segment
from oomguard.errors import TraceError
from oomguard.step.opening import returned_then_state
from oomguard.trace.backends import Machine, simulated
from oomguard.trace.capture import Capture, Evaluate
from oomguard.trace.collector import collector_paused
from oomguard.trace.engine import built_for, capture_built, capture_for, chained, surroundings_of
from oomguard.trace.graph import Graph, Node
from oomguard.trace.lower import ATTENTION
from oomguard.trace.memory import CPU, Device, Program
from oomguard.trace.remat import ATTENTION_KINDS, VIEWS, apply_policy, block_calls, saved_ratio
from oomguard.trace.steps import ALONE, Surroundings, peaks_and_buffer, within_update

MARKED = frozenset(("block", "attention", ATTENTION))
"""Kinds of regions whose backward a capture must mark for all policies to be had from it."""

FLOPS_PER_BYTE = 20.0
"""What a machine computes while it moves a byte, roughly. Used only to rank one kind of recompute with another."""

ATTENTION_CORES = CheckpointPolicy(policy="attention")
BARE = CheckpointPolicy(policy="custom_function")

# What is in flight may make a policy hold a little more than one of its family that recomputes less.
UNEVEN = 0.005
LOOK_BELOW = 3

FEW_PRIMITIVES = 60_000  # some six seconds

RISES_IN_A_ROW = 3  # strides, each holding more than the one before, after which longer ones are not tried
STEPS = 2  # the first of a process, and one that finds what the first left

_MOVE_NOTHING = frozenset((*VIEWS, "CustomTransforms"))
_PRODUCTS = frozenset(
    ("Matmul", "AddMM", "BlockMaskedMM", "GatherMM", "SegmentedMM", "QuantizedMatmul", "GatherQMM")
)


@dataclass(frozen=True, slots=True)
class Price:
    """What a step costs under a policy.

    Attributes:
        policy: which.
        segments: what it recomputes.
        peak_bytes: of active memory in the steady state.
        first_peak_bytes: of the first step of a process.
        costs: of each block, what is computed again, as operations: arithmetic, and bytes by ``FLOPS_PER_BYTE``.
        forward_cost: the same of everything in the forward.
        largest_buffer_bytes: the largest single allocation.
        buffer_fits: whether the device hands out a buffer of that size.
    """

    policy: CheckpointPolicy
    segments: tuple[Segment, ...]
    peak_bytes: int
    first_peak_bytes: int
    costs: tuple[float, ...]
    forward_cost: float
    largest_buffer_bytes: int = 0
    buffer_fits: bool = True

    @property
    def cost(self) -> float:
        return sum(self.costs)

    @property
    def share(self) -> float:
        """What is computed again over the whole forward: 0 for nothing, about 1 for all of it."""
        return self.cost / self.forward_cost if self.forward_cost else 0.0

    @property
    def most_bytes(self) -> int:
        """The higher of the first step and a later one: what a budget must hold."""
        return max(self.peak_bytes, self.first_peak_bytes)

    def fits(self, budget_bytes: int) -> bool:
        """Whether neither the first step nor a later one passes the budget, and every buffer can be had."""
        return self.most_bytes <= budget_bytes and self.buffer_fits


class Policies:
    """The prices of one captured step, each simulated once."""

    def __init__(
        self,
        captures: Sequence[Capture],
        *,
        compiled: bool | None = None,
        device: Device = CPU,
        memory_limit: int | None = None,
        surroundings: Surroundings = ALONE,
        calls: int = 1,
    ):
        """Args:
            captures: the different calls of one update, without recompute, with ``MARKED | device.marked`` marked.
                The largest of their peaks counts.
            compiled, device, memory_limit, surroundings: as for ``engine.simulate``.
            calls: how many calls an update makes.

        Raises:
            TraceError: the step recomputes already.
        """
        regions = [region for captured in captures for region in captured.graph.regions]
        if any(captured.graph.recomputes for captured in captures):
            raise TraceError("the step recomputes already; search the policies of one that does not")
        self.compiled = captures[0].compiled if compiled is None else compiled
        self.device = device
        self.memory_limit = memory_limit
        self.surroundings = surroundings
        self.calls = calls
        with collector_paused():
            self._chains = [[built_for(device, call) for call in captured.calls] for captured in captures]
            self._links = [captured.links for captured in captures]
            self._graphs: list[Graph] = [chain[-1] for chain in self._chains]
            self._ratio = saved_ratio(self._graphs[0])
        self.n_blocks = len(block_calls(self._graphs[0]))
        self.attends = any(region.kind in ATTENTION_KINDS for region in regions)
        self._prices: dict[tuple[tuple[Segment, ...], bool], Price] = {}

    @classmethod
    def of_built(
        cls,
        built: Any,
        *,
        compiled: bool | None = None,
        device: Machine = None,
        memory_limit: int | None = None,
    ) -> Policies:
        """Those of a step made without a checkpoint policy by ``build_step`` or ``build_case``.

        Args:
            built: with ``evaluated=False`` it takes no memory.
            compiled, device, memory_limit: as for ``engine.trace``.
        """
        target = simulated(device)
        return cls(
            capture_built(built, device=target, marked=MARKED),
            compiled=compiled,
            device=target,
            memory_limit=memory_limit,
            surroundings=surroundings_of(built),
            calls=len(built.graphs()),
        )

    @classmethod
    def of_step(
        cls,
        step: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any] | None = None,
        *,
        state: Sequence[Any] | None = None,
        evaluate: Evaluate = returned_then_state,
        compiled: bool | None = None,
        device: Machine = None,
        memory_limit: int | None = None,
    ) -> Policies:
        """Those of any step. What it recomputes itself is taken as plain code.

        Args:
            step, arguments, keywords, state, evaluate, compiled, device, memory_limit: as for ``engine.trace``.

        Raises:
            InputError, TraceError: as ``engine.trace``.
        """
        captured, target, surroundings = capture_for(
            step,
            arguments,
            keywords,
            state=state,
            evaluate=evaluate,
            device=device,
            marked=MARKED,
            plain=True,
        )
        return cls(
            [captured], compiled=compiled, device=target, memory_limit=memory_limit, surroundings=surroundings
        )

    @property
    def simulated(self) -> int:
        """How many settings have been simulated so far."""
        return len(self._prices)

    def price(self, policy: CheckpointPolicy) -> Price:
        """What the step costs under a policy; simulated at most once.

        Raises:
            TraceError: the policy recomputes blocks or attention, and the step has none.
        """
        if not self.n_blocks and policy != NO_CHECKPOINT:
            raise TraceError(f"{policy} recomputes blocks, and the captured step has none")
        segments = policy.segments(self.n_blocks, self._ratio)
        key = segments, policy == BARE
        if key not in self._prices:
            self._prices[key] = self._simulate(policy, segments)
        return self._prices[key]

    def table(self) -> list[Price]:
        """The policies that have a name, each setting once: from no recompute to every block, and strides.

        Without strides where the step does something between its blocks.
        """
        prices = [self.price(NO_CHECKPOINT)]
        if self.attends:
            prices.append(self.price(ATTENTION_CORES))
        if self.n_blocks:
            prices.append(self.price(EVERY_BLOCK))
            strides: list[Literal["auto", "sqrt"] | int] = ["auto", 2, "sqrt"]
            for k in strides:
                with suppress(TraceError):
                    prices.append(self.price(CheckpointPolicy(policy="stride", stride=k)))
            prices.append(self.price(BARE))
        return list(dict.fromkeys(prices))

    def cheapest(self, budget_bytes: int) -> Price:
        """The policy with the least recompute that fits; where none fits, the one that holds least.

        Exact over ``blocks=n``, ``attention,blocks=n``, and, where every block alone is not enough, strides; but
        on a GPU, where the model is large and the window a great part of its peak, a policy may be found that
        recomputes a few blocks more than the least. ``custom_function`` is never chosen.
        """
        plain = self.price(NO_CHECKPOINT)
        if plain.fits(budget_bytes) or not self.n_blocks:
            return plain
        best: Price | None = None
        for family in (self.attention_family, self.block_family):
            best = self._least(family, budget_bytes, best) or best
        return best or self._stride(budget_bytes)

    @property
    def attention_family(self) -> list[CheckpointPolicy]:
        """Attention cores of the first block, of two, ..., of all; empty where nothing attends."""
        some = [CheckpointPolicy(policy="attention", blocks=n) for n in range(1, self.n_blocks)]
        return [*some, ATTENTION_CORES] if self.attends else []

    @property
    def block_family(self) -> list[CheckpointPolicy]:
        """The first block, two, ..., every one."""
        return [
            *(CheckpointPolicy(policy="blocks", blocks=n) for n in range(1, self.n_blocks)),
            EVERY_BLOCK,
        ]

    def _least(self, family: list[CheckpointPolicy], budget_bytes: int, best: Price | None) -> Price | None:
        """The first of a family that fits, if it recomputes less than ``best``."""
        if family and best is not None:
            costs = accumulate(self.price(family[-1]).costs)
            family = family[: sum(cost < best.cost for cost in costs)]
        if family and self._tries_all(len(family)):
            return next((price for price in map(self.price, family) if price.fits(budget_bytes)), None)
        if not family or not self.price(family[-1]).fits(int(budget_bytes * (1 + UNEVEN))):
            return None
        first = self._first_fitting(family, budget_bytes)
        found = None if first == len(family) else self.price(family[first])
        for policy in reversed(family[max(0, first - LOOK_BELOW) : first]):
            price = self.price(policy)
            if price.fits(budget_bytes):
                found = price
            elif not price.fits(int(budget_bytes * (1 + UNEVEN))):
                break
        return found

    def _tries_all(self, count: int) -> bool:
        """Whether so many policies are simulated one by one, from the least recompute on.

        On a GPU the window can be half of a small model's peak, and then a peak can rise when more is recomputed.
        Small models are quick to simulate.
        """
        primitives = sum(len(graph.nodes) for graph in self._graphs)
        return self.device.name != "cpu" and count * primitives <= FEW_PRIMITIVES

    def _first_fitting(self, family: list[CheckpointPolicy], budget_bytes: int) -> int:
        """Index of the first policy that fits, past the end where the last one does not, taking peaks to fall.

        The next guess is where the line between the two ends meets the budget; the middle, where a guess before took
        off less than half.
        """
        low, high = -1, len(family) - 1
        above, within = self.price(NO_CHECKPOINT), self.price(family[high])
        if not within.fits(budget_bytes):
            return len(family)
        halve = False
        while high - low > 1:
            width = high - low
            share = (above.peak_bytes - budget_bytes) / max(1, above.peak_bytes - within.peak_bytes)
            guess = low + (width // 2 if halve else round(share * width))
            middle = min(max(guess, low + 1), high - 1)
            found = self.price(family[middle])
            if found.fits(budget_bytes):
                high, within = middle, found
            else:
                low, above = middle, found
            halve = high - low > width // 2
        return high

    def _stride(self, budget_bytes: int) -> Price:
        """Segments of two blocks, three, ...: the first that fits; where none does, what holds least of all."""
        rises, before = 0, self.price(EVERY_BLOCK)
        for k in range(2, self.n_blocks + 1):
            try:
                price = self.price(CheckpointPolicy(policy="stride", stride=k))
            except TraceError:  # the step does something between its blocks
                break
            if price.fits(budget_bytes):
                return price
            rises = rises + 1 if price.peak_bytes > before.peak_bytes else 0
            if rises == RISES_IN_A_ROW:
                break
            before = price
        known = [price for (_, bare), price in self._prices.items() if not bare]
        return min(known, key=lambda price: (price.peak_bytes, price.cost))

    @collector_paused()
    def _simulate(self, policy: CheckpointPolicy, segments: tuple[Segment, ...]) -> Price:
        costs = [0.0] * self.n_blocks
        forward, largest = 0.0, 0
        programs = [
            chained(
                [apply_policy(graph, policy, block_to_boundary=self._ratio) for graph in chain],
                links,
                compiled=self.compiled,
                device=self.device,
            )
            for chain, links in zip(self._chains, self._links, strict=True)
        ]
        first = steady = 0
        around = within_update(programs, self.calls, self.surroundings)
        for program, surroundings in zip(programs, around, strict=True):
            found, buffer = peaks_and_buffer(
                program, STEPS, memory_limit=self.memory_limit, surroundings=surroundings
            )
            first, steady = max(first, found[0]), max(steady, found[-1])
            largest = max(largest, buffer)
            again, once = _costs(program, self.n_blocks)
            costs = [sum(pair) for pair in zip(costs, again, strict=True)]
            forward += once
        allowed = self.device.largest_buffer
        fits = allowed is None or largest <= allowed
        return Price(policy, segments, steady, first, tuple(costs), forward, largest, fits)


def _costs(program: Program, n_blocks: int) -> tuple[list[float], float]:
    """What each block computes again, and what the forward computes once."""
    again, once = [0.0] * n_blocks, 0.0
    for step in program.evaluations[0]:
        node = step.node
        if node.phase == "recompute" and 0 <= node.block < n_blocks:
            again[node.block] += _cost(program.graph, node)
        elif node.phase == "forward":
            once += _cost(program.graph, node)
    return again, once


def _cost(graph: Graph, node: Node) -> float:
    """Operations of one primitive; a byte counts as ``FLOPS_PER_BYTE`` of them."""
    if node.primitive in _MOVE_NOTHING:
        return 0.0
    arrays = graph.arrays
    moved = sum(arrays[i].nbytes for i in (*node.inputs, *node.outputs))
    return _flops(graph, node) + FLOPS_PER_BYTE * moved


def _flops(graph: Graph, node: Node) -> int:
    """Multiplications and additions in matrix products; those of everything else are hidden behind its bytes."""
    output = graph.arrays[node.outputs[0]]
    first, *rest = (graph.arrays[i] for i in node.inputs) if node.inputs else (output,)
    if node.primitive in _PRODUCTS:
        return 2 * output.size * first.shape[-1]
    if node.primitive == "Convolution":
        return 2 * output.size * rest[0].size // rest[0].shape[0]
    if node.primitive == "ScaledDotProductAttention":
        return 4 * first.size * rest[0].shape[-2]
    return 0
