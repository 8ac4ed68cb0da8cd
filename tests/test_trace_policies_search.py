"""The prices of all policies from one capture, and the cheapest that fits, against trying every one."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from oomguard.config.model import ModelConfig
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.errors import TraceError
from oomguard.model.step import build_step
from oomguard.trace import metal
from oomguard.trace.capture import capture
from oomguard.trace.engine import trace_built
from oomguard.trace.memory import CPU, Device
from oomguard.trace.policies import ATTENTION_CORES, BARE, MARKED, Policies, Price

N_LAYERS = 6
METAL = metal.device(metal.Chip(17, "s"), (0, 32, 4))


def built(n_layers: int = N_LAYERS, batch: int = 4, tokens: int = 64, **settings: Any) -> Any:
    """A step of a narrow GPT, most of whose peak is saved tensors."""
    model = ModelConfig(
        name="narrow", n_layers=n_layers, d_model=32, n_heads=2, d_mlp=128, context=tokens, vocab_size=67
    )
    return build_step(model, StepConfig(batch=batch, seq_len=tokens, **settings), evaluated=False)


@pytest.fixture(scope="module")
def policies() -> Policies:
    return Policies.of_built(built())


def stride(k: int) -> CheckpointPolicy:
    return CheckpointPolicy(policy="stride", stride=k)


def high(price: Price) -> int:
    return max(price.peak_bytes, price.first_peak_bytes)


@pytest.mark.parametrize("text", ["none", "every", "stride=2", "blocks=3", "attention", "custom_function"])
@pytest.mark.parametrize("compiled", [True, False])
def test_price_is_the_peak_of_the_step_built_with_the_policy(text: str, compiled: bool) -> None:
    policy = CheckpointPolicy.parse(text)
    price = Policies.of_built(built(compiled=compiled)).price(policy)
    result = trace_built(built(compiled=compiled, checkpoint=policy))
    assert price.first_peak_bytes == result.first_peak_bytes
    assert result.low_bytes <= price.peak_bytes <= result.high_bytes


def test_price_of_a_step_in_several_calls_is_that_of_its_largest() -> None:
    price = Policies.of_built(built(batch=2, accumulate=3)).price(EVERY_BLOCK)
    result = trace_built(built(batch=2, accumulate=3, checkpoint=EVERY_BLOCK))
    assert result.low_bytes <= price.peak_bytes <= result.high_bytes


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("device", [CPU, METAL], ids=["cpu", "metal"])
@pytest.mark.parametrize("compiled", [True, False])
def test_cheapest_is_what_trying_all_policies_finds(
    device: Device, compiled: bool, limit: int | None
) -> None:
    search = {"compiled": compiled, "device": device, "memory_limit": limit}
    tried = Policies.of_built(built(), **search)
    families = [tried.price(p) for p in (NO_CHECKPOINT, *tried.attention_family, *tried.block_family)]
    strides = [tried.price(stride(k)) for k in range(2, N_LAYERS + 1)]
    budgets = {b for price in (*families, *strides) for b in (high(price), high(price) - 1)}
    for budget in sorted(budgets):
        fitting = [price for price in families if price.fits(budget)]
        by_stride = [price for price in strides if price.fits(budget)]
        found = tried.cheapest(budget)
        if fitting:
            assert found.cost == min(price.cost for price in fitting), budget
        elif by_stride:
            assert found in by_stride
        else:
            assert not found.fits(budget)


def test_cheapest_simulates_few_of_many_policies() -> None:
    search = Policies.of_built(built(n_layers=24))
    ends = search.price(NO_CHECKPOINT), search.price(EVERY_BLOCK)
    found = search.cheapest((3 * ends[0].peak_bytes + 2 * ends[1].peak_bytes) // 5)
    assert found.policy.policy in ("blocks", "attention")
    assert search.simulated <= 12  # of 47, and strides


def test_budget_above_every_peak_is_met_without_recompute(policies: Policies) -> None:
    found = policies.cheapest(1 << 40)
    assert found.policy == NO_CHECKPOINT
    assert found.cost == found.share == 0


def test_where_nothing_fits_the_lowest_peak_is_given(policies: Policies) -> None:
    found = policies.cheapest(1)
    assert not found.fits(1)
    tried = [EVERY_BLOCK, *(stride(k) for k in range(2, N_LAYERS + 1))]
    assert found.peak_bytes == min(policies.price(policy).peak_bytes for policy in tried)


def test_strides_are_taken_where_every_block_alone_is_not_enough() -> None:
    """Blocks that save little more than what passes between them, and many of them."""
    model = nn.Sequential(*(Scale() for _ in range(16)))
    optimizer = optim.SGD(0.1)
    gradients_of = nn.value_and_grad(model, lambda x: model(x).mean())

    def step(x: mx.array) -> mx.array:
        loss, gradients = gradients_of(x)
        optimizer.update(model, gradients)
        return loss

    found = capture(step, (mx.zeros((64, 512)),), state=[model, optimizer], marked=MARKED)
    search = Policies([found])
    budget = min(high(search.price(stride(k))) for k in range(2, 17))
    assert not any(search.price(policy).fits(budget) for policy in search.block_family)
    best = search.cheapest(budget)
    assert best.policy.policy == "stride"
    assert best.fits(budget)


class Scale(nn.Module):
    """Saves four tensors of the size of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones((512,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.exp(mx.sin(mx.tanh(x * self.weight)))


def test_table_prices_every_named_policy_once(policies: Policies) -> None:
    table = policies.table()
    listed = {price.policy for price in table}
    assert {NO_CHECKPOINT, ATTENTION_CORES, EVERY_BLOCK, stride(2), BARE} <= listed
    assert len({(price.segments, price.policy == BARE) for price in table}) == len(table)


def test_more_recompute_costs_more(policies: Policies) -> None:
    cores, half, every = (policies.price(p) for p in (ATTENTION_CORES, blocks(3), EVERY_BLOCK))
    assert 0 < cores.share < every.share < 1.2
    assert half.costs[:3] == every.costs[:3]
    assert not any(half.costs[3:])


def blocks(n: int) -> CheckpointPolicy:
    return CheckpointPolicy(policy="blocks", blocks=n)


def test_custom_function_recomputes_less_when_compiled() -> None:
    """Compiling merges most of its second forward with the first."""
    merged = Policies.of_built(built(), compiled=True).price(BARE)
    plain = Policies.of_built(built(), compiled=False).price(BARE)
    assert merged.cost < 0.7 * plain.cost


def test_asking_twice_simulates_once(policies: Policies) -> None:
    first = policies.price(EVERY_BLOCK)
    count = policies.simulated
    assert policies.price(stride(1)) is first
    assert policies.simulated == count


def test_step_that_recomputes_already_is_refused() -> None:
    model = nn.Linear(4, 4)
    gradients_of = nn.value_and_grad(model, lambda x: mx.checkpoint(mx.exp)(model(x)).sum())
    found = capture(gradients_of, (mx.zeros((2, 4)),), state=[model], marked=MARKED)
    with pytest.raises(TraceError, match="recomputes already"):
        Policies([found])


def test_step_without_blocks_has_one_policy() -> None:
    model = nn.Linear(4, 4)
    gradients_of = nn.value_and_grad(model, lambda x: model(x).sum())
    search = Policies([capture(gradients_of, (mx.zeros((2, 4)),), state=[model], marked=MARKED)])
    assert [price.policy for price in search.table()] == [NO_CHECKPOINT]
    assert search.cheapest(1).policy == NO_CHECKPOINT
    with pytest.raises(TraceError, match="blocks"):
        search.price(EVERY_BLOCK)


def test_step_captured_without_marks_is_refused_not_priced_wrong() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    gradients_of = nn.value_and_grad(model, lambda x: model(x).sum())
    found = capture(gradients_of, (mx.zeros((2, 4)),), state=[model], marked=frozenset())
    with pytest.raises(TraceError, match="marked"):
        Policies([found]).price(EVERY_BLOCK)
