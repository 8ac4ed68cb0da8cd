"""What every report of a trace is made from: the step, its simulated result, and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomguard.trace.policies import Price
    from oomguard.trace.result import TraceResult


@dataclass(frozen=True)
class LabelledTrace:
    """One simulated step, under a checkpoint policy or as the user wrote it.

    Attributes:
        label: short, for the head of a column: ``none``, ``every``, ``as written``.
        about: the same in words: ``every block recomputed``.
    """

    label: str
    about: str
    result: TraceResult


@dataclass(frozen=True)
class PricedPolicies:
    """What a step holds and recomputes under checkpoint policies, from one capture.

    Attributes:
        prices: the less recomputed the earlier; may be the cheapest alone.
        cheapest: the least recompute that fits the budget, or what holds least where none does; None without a
            budget.
        n_blocks: of the model.
    """

    prices: tuple[Price, ...]
    cheapest: Price | None
    n_blocks: int


@dataclass(frozen=True)
class TraceReport:
    """A traced step and what a reader wants to know beside it.

    Attributes:
        title: what was traced.
        settings: how, in words; may be empty.
        asked: the step that was asked for.
        compared: the same step under another checkpoint policy, to stand beside it.
        budget_bytes: what the peak is held against.
        bound_by: what sets the budget, in words, where it is the machine's.
        memory_limit_bytes: as given to ``mx.set_memory_limit``; None for MLX's own, which the results name.
        mlx: version of MLX that built the graph.
        machine: which one is simulated, where that was asked for.
        policies: what other checkpointing would hold; None where that is not asked for or there is none.
    """

    title: str
    settings: str
    asked: LabelledTrace
    compared: LabelledTrace | None = None
    budget_bytes: int | None = None
    bound_by: str = ""
    memory_limit_bytes: int | None = None
    mlx: str = ""
    machine: str = ""
    policies: PricedPolicies | None = None

    @property
    def runs(self) -> list[LabelledTrace]:
        """The step asked for, and the one beside it."""
        return [self.asked] if self.compared is None else [self.asked, self.compared]

    @property
    def fits(self) -> bool | None:
        """Whether the run asked for ``holds``."""
        return self.holds(self.asked.result)

    @property
    def least_recompute(self) -> Price | None:
        """The policy with the least recompute that fits; None without a budget, or where none fits."""
        found = self.policies.cheapest if self.policies else None
        return found if found is not None and self.price_fits(found) else None

    def holds(self, result: TraceResult) -> bool | None:
        """Whether every step is within the budget, and the device hands out every buffer; None without a budget."""
        within = self.within(result.most_bytes)
        return within and result.buffer_fits is not False

    def price_fits(self, price: Price) -> bool | None:
        """The same of a policy."""
        return None if self.budget_bytes is None else price.fits(self.budget_bytes)

    def within(self, size_bytes: int) -> bool | None:
        """Whether a size is within the budget; None without one."""
        return None if self.budget_bytes is None else size_bytes <= self.budget_bytes
