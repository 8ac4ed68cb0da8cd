"""The rule of a plan: the choice is what trying everything gives, and more memory never makes it slower."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_fakes import HERE, FakeCoefficients, FakeEstimator, budget, request

from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.machine.device import find_device
from oomguard.plan.planner import Plan, Request, _search, answer, plan
from oomguard.plan.search import NO_GAIN, RULE, Candidate, Families
from oomguard.report.as_json import plan_json
from oomguard.units import GIB, MIB

SPEEDS = st.sampled_from([(1e12, 5e10), (1e13, 5e9), (1e11, 1e12), (1e30, 1e9)])
MODELS = st.builds(
    lambda layers, heads, width, context: ModelConfig(
        n_layers=layers, d_model=heads * width, n_heads=heads, d_mlp=4 * heads * width, context=context
    ),
    layers=st.integers(1, 9),
    heads=st.integers(1, 6),
    width=st.sampled_from([16, 32]),
    context=st.sampled_from([32, 128, 256]),
)


def chosen(asked: Request, speed: tuple[float, float]) -> Plan:
    estimator = FakeEstimator(band=0.03, flops_per_second=speed[0], bytes_per_second=speed[1])
    return answer(asked, HERE, estimator=estimator, calibration=FakeCoefficients())


def speed_of(found: Plan) -> float:
    return found.choice.tokens_per_second if found.choice is not None else 0.0


def fitting(asked: Request, size: int, speed: tuple[float, float]) -> list[Candidate]:
    """Every policy at the batches up to where one grows no further: the first, the last, and around its largest."""
    estimator = FakeEstimator(band=0.03, flops_per_second=speed[0], bytes_per_second=speed[1])
    search = _search(asked, budget(size), estimator)
    families = Families(asked.model.n_layers)
    found = []
    for policy in {*families.ends, *families.attention, *families.blocks}:
        largest = search.largest_rung(policy) or 0
        rungs = {*range(8), *range(largest - 3, largest + 4), search.top - 1, search.top}
        found += [search.at(policy, rung) for rung in rungs if 0 <= rung <= search.top]
    return [candidate for candidate in found if candidate.fits]


@settings(max_examples=60, deadline=None)
@given(
    model=MODELS,
    size=st.integers(MIB, 2 * GIB),
    more=st.integers(0, 4 * GIB),
    speed=SPEEDS,
    target=st.sampled_from([None, None, 24, 31]),
)
def test_more_memory_is_never_a_slower_choice(
    model: ModelConfig, size: int, more: int, speed: tuple[float, float], target: int | None
) -> None:
    less = chosen(request(model, memory_bytes=size, target_batch=target), speed)
    roomier = chosen(request(model, memory_bytes=size + more, target_batch=target), speed)
    assert speed_of(roomier) >= speed_of(less)


@settings(max_examples=25, deadline=None)
@given(model=MODELS, size=st.integers(2 * MIB, 200 * MIB), speed=SPEEDS)
def test_choice_is_never_slower_than_any_setting_that_fits(
    model: ModelConfig, size: int, speed: tuple[float, float]
) -> None:
    asked = request(model, memory_bytes=size)
    found = chosen(asked, speed)
    assert speed_of(found) == max((c.tokens_per_second for c in fitting(asked, size, speed)), default=0.0)
    assert all(c.tokens_per_second <= speed_of(found) for c in found.candidates if c.fits)


@settings(max_examples=25, deadline=None)
@given(preset=st.sampled_from(["tiny", "small", "huge"]), steps=st.lists(st.integers(20, 9000), min_size=2))
def test_more_memory_is_never_a_slower_choice_with_the_shipped_estimate(
    preset: str, steps: list[int]
) -> None:
    device = find_device("cpu-64gb")
    speeds = [speed_of(plan(preset, device=device, memory=size * MIB)) for size in sorted(steps)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("policy", ["none", "every", "attention", "auto"])
def test_batch_that_grows_no_further_leaves_less_than_the_rule_says(policy: str) -> None:
    found = plan("tiny", device="m5-pro-48gb", grad_checkpoint=policy)
    assert found.choice is not None
    assert found.ceiling is not None
    assert found.next_up is None
    assert found.ceiling.batch > found.choice.batch
    assert found.choice.speed >= (1 - NO_GAIN) * found.ceiling.speed
    one_less = plan("tiny", device="m5-pro-48gb", grad_checkpoint=policy, batch=found.choice.batch - 1).choice
    assert one_less is not None
    assert one_less.speed < (1 - NO_GAIN) * found.ceiling.speed * 1.0001


def test_equal_speeds_are_decided_for_less_recompute() -> None:
    found = chosen(request(batch=4, memory_bytes=GIB), (1e30, 1e9))
    assert found.choice is not None
    assert found.choice.policy == CheckpointPolicy()


def test_rule_stands_in_the_json_the_help_and_the_readme() -> None:
    words = re.sub(r"\s+", " ", (Path(__file__).parent.parent / "README.md").read_text())
    rule = plan_json(plan("tiny", device="cpu-16gb"))["rule"]
    assert rule == RULE
    assert RULE[0].upper() + RULE[1:] in words or RULE in words
    from oomguard.cli.plan import command

    assert RULE in re.sub(r"\s+", " ", command.help or "").replace("The rule: ", "")
    assert re.sub(r"\s+", " ", plan.__doc__ or "").count("could add more than 0.75%") == 1


def test_footprint_of_a_small_step_on_a_large_mac_is_near_its_peak() -> None:
    for device in ("m5-pro-48gb", "metal-128gb", "cpu-64gb"):
        found = plan("tiny", device=device, batch=16).choice
        assert found is not None
        assert found.footprint_bytes <= 2 * found.peak_bytes + 32 * MIB
        assert found.cache_limit_bytes <= found.peak_bytes
