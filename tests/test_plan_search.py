"""The search: the largest rung is the largest, the fastest the fastest, and few estimates are asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import SHAPE, FakeEstimator, budget, request

from oomguard.config.model import ModelConfig
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.plan.planner import _candidates, _search
from oomguard.plan.search import Families, Ladder, Search, fastest, last_fitting, recomputed_share
from oomguard.units import GIB, MIB

STEP = StepConfig(batch=1, seq_len=128)


@given(size=st.integers(1, 3000), data=st.data())
def test_last_fitting_finds_the_boundary_from_any_guess(size: int, data: st.DataObject) -> None:
    boundary = data.draw(st.integers(-1, size - 1))
    guess = data.draw(st.integers(0, 2 * size))
    asked: list[int] = []

    def fits(index: int) -> bool:
        assert 0 <= index < size
        asked.append(index)
        return index <= boundary

    assert last_fitting(fits, size, guess) == (None if boundary < 0 else boundary)
    assert len(asked) == len(set(asked)) <= 2 * size.bit_length() + 2


def test_last_fitting_asks_twice_when_the_guess_is_right() -> None:
    asked: list[int] = []

    def fits(index: int) -> bool:
        asked.append(index)
        return index <= 500

    assert last_fitting(fits, 1 << 20, guess=500) == 500
    assert asked == [500, 501]


def test_ladder_of_a_target_has_the_divisors_and_keeps_the_product() -> None:
    ladder = Ladder.of(batch=None, accumulate=None, target_batch=12)
    steps = [ladder.step(STEP, NO_CHECKPOINT, rung) for rung in range(len(ladder))]
    assert [step.batch for step in steps] == [1, 2, 3, 4, 6, 12]
    assert {step.batch * step.accumulate for step in steps} == {12}


def test_ladder_of_a_target_and_accumulation_has_one_rung() -> None:
    ladder = Ladder.of(batch=None, accumulate=4, target_batch=12)
    assert [ladder.step(STEP, NO_CHECKPOINT, 0).batch, len(ladder)] == [3, 1]


@given(size=st.integers(2 * MIB, GIB), n_layers=st.integers(1, 9), band=st.sampled_from([0.0, 0.05]))
def test_best_is_maximal_for_every_policy(size: int, n_layers: int, band: float) -> None:
    model = ModelConfig(n_layers=n_layers, d_model=64, n_heads=4, d_mlp=256, context=128)
    search = Search(model, STEP, Ladder.of(None, None, None), budget(size), FakeEstimator(band=band))
    for policy in (NO_CHECKPOINT, EVERY_BLOCK, CheckpointPolicy.parse("attention")):
        rung = search.largest_rung(policy)
        if rung is not None:
            assert search.at(policy, rung).fits
        assert not search.at(policy, 0 if rung is None else rung + 1).fits


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(4 * MIB, 400 * MIB),
    n_layers=st.integers(1, 8),
    speed=st.sampled_from([(1e12, 5e10), (1e13, 5e9), (1e11, 1e12)]),
)
def test_choice_is_as_fast_as_an_exhaustive_search(
    size: int, n_layers: int, speed: tuple[float, float]
) -> None:
    model = ModelConfig(n_layers=n_layers, d_model=64, n_heads=4, d_mlp=256, context=128)
    estimator = FakeEstimator(flops_per_second=speed[0], bytes_per_second=speed[1])
    asked = request(model)
    search = _search(asked, budget(size), estimator)
    chosen = fastest(_candidates(search, asked), n_layers)
    families = Families(n_layers)
    every_setting = [NO_CHECKPOINT, *families.attention, *families.blocks, *families.strides]
    fitting = [c for c in (search.best(policy) for policy in every_setting) if c.fits]
    if chosen is None:
        assert not fitting
    else:
        best = max(c.tokens_per_second for c in fitting)
        assert chosen.tokens_per_second >= 0.98 * best


def test_equals_in_speed_are_decided_for_less_recompute() -> None:
    estimator = FakeEstimator(flops_per_second=1e30)  # recompute costs nothing
    asked = request(batch=4)
    search = _search(asked, budget(GIB), estimator)
    chosen = fastest(_candidates(search, asked), SHAPE.n_layers)
    assert chosen is not None
    assert chosen.policy == NO_CHECKPOINT


@pytest.mark.parametrize("size", [GIB, 16 * GIB, 400 * GIB])
def test_search_of_a_deep_model_stays_within_two_hundred_estimates(size: int) -> None:
    titan = ModelConfig(n_layers=48, d_model=1536, n_heads=24, d_mlp=6144, context=1024)
    estimator = FakeEstimator()
    asked = request(titan)
    _candidates(_search(asked, budget(size), estimator), asked)
    assert len(estimator.calls) <= 200


def test_families_recompute_ever_more() -> None:
    families = Families(12)
    for family in (families.attention, families.blocks):
        shares = [recomputed_share(policy, 12) for policy in family]
        assert shares == sorted(set(shares))
    assert recomputed_share(families.blocks[-1], 12) == 1


def test_families_hold_no_bare_custom_function() -> None:
    families = Families(12)
    policies = [*families.ends, *families.attention, *families.blocks]
    assert "custom_function" not in {policy.policy for policy in policies}


def test_a_tensor_over_the_largest_buffer_does_not_fit_whatever_is_free() -> None:
    search = Search(SHAPE, STEP, Ladder.of(None, None, None), budget(64 * GIB, 4 * MIB), FakeEstimator())
    best = search.best(NO_CHECKPOINT)
    assert best.fits
    above = search.above(best)
    assert above is not None
    assert above.headroom_bytes > 0
    assert not above.tensor_fits
    assert not above.fits
