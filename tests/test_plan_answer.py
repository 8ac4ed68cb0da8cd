"""The plan: its choice, its budget, what it says when nothing fits, and what confirms it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from plan_fakes import HERE, SHAPE, FakeCoefficients, FakeEstimate, FakeEstimator, request

from oomguard.config.model import ModelConfig
from oomguard.config.policy import EVERY_BLOCK, NO_CHECKPOINT, CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.errors import InputError, TraceError
from oomguard.machine.budget import Headroom
from oomguard.machine.device import Device
from oomguard.plan.engines import trace_step
from oomguard.plan.planner import Plan, Request, answer, check_request, largest_batch, plan, read_model
from oomguard.plan.search import Traced
from oomguard.report.plan_text import plan_text
from oomguard.units import GIB, MIB


def ask(asked: Request, estimator: FakeEstimator | None = None, **rest: object) -> Plan:
    return answer(
        asked,
        HERE,
        estimator=estimator or FakeEstimator(),
        calibration=FakeCoefficients(),
        **rest,  # type: ignore[arg-type]
    )


def test_plan_is_maximal() -> None:
    found = ask(request(memory_bytes=100 * MIB))
    assert found.choice is not None
    assert found.next_up is not None
    assert found.next_up.batch == found.choice.batch + 1
    assert found.next_up.policy == found.choice.policy
    assert found.choice.fits
    assert not found.next_up.fits


def test_high_end_of_the_band_must_fit() -> None:
    sure = ask(request(memory_bytes=100 * MIB))
    unsure = ask(request(memory_bytes=100 * MIB), FakeEstimator(band=0.2))
    assert sure.choice is not None
    assert unsure.choice is not None
    assert unsure.choice.batch < sure.choice.batch
    assert unsure.choice.high_bytes <= 100 * MIB < 1.25 * unsure.choice.peak_bytes


def test_no_recompute_is_chosen_before_some_and_some_before_all() -> None:
    sizes = [ask(request(batch=8, memory_bytes=size * MIB)).choice for size in (2000, 62, 30)]
    plain, some, every = sizes
    assert plain is not None
    assert some is not None
    assert every is not None
    assert plain.policy == NO_CHECKPOINT
    assert some.policy.policy in ("attention", "blocks")
    assert 0 < len(some.policy.segments(SHAPE.n_layers)) <= SHAPE.n_layers
    assert every.policy.policy in ("blocks", "every")
    assert plain.tokens_per_second > some.tokens_per_second > every.tokens_per_second


def test_fixed_policy_is_kept() -> None:
    found = ask(request(checkpoint=EVERY_BLOCK, memory_bytes=100 * MIB))
    assert found.choice is not None
    assert found.choice.policy == EVERY_BLOCK
    assert {c.policy for c in found.candidates} == {EVERY_BLOCK}


def test_target_batch_takes_the_largest_micro_batch_that_divides_it() -> None:
    found = ask(request(checkpoint=NO_CHECKPOINT, target_batch=24, memory_bytes=100 * MIB))
    free = ask(request(checkpoint=NO_CHECKPOINT, memory_bytes=100 * MIB))
    assert found.choice is not None
    assert free.choice is not None
    assert found.choice.batch * found.choice.step.accumulate == 24
    larger = [n for n in (1, 2, 3, 4, 6, 8, 12, 24) if n > found.choice.batch]
    assert larger == [] or larger[0] > free.choice.batch - 1


def test_nothing_fits_is_a_result_that_names_the_least() -> None:
    found = ask(request(memory_bytes=MIB))
    assert found.choice is None
    assert not found.fits
    assert found.smallest is not None
    assert found.smallest.batch == 1
    assert found.smallest.headroom_bytes < 0
    assert found.smallest.high_bytes == min(c.high_bytes for c in found.candidates)
    assert found.smallest in found.candidates


def test_nothing_fits_names_a_change_that_fits() -> None:
    found = ask(request(batch=64, checkpoint=NO_CHECKPOINT, memory_bytes=150 * MIB))
    assert found.choice is None
    options = dict(found.reliefs)
    spread = found.reliefs[1].candidate
    assert spread.batch * spread.step.accumulate == 64
    assert list(options)[:3] == [
        "--grad-checkpoint auto",
        f"--batch {spread.batch} --accumulate {spread.step.accumulate}",
        "--batch auto --grad-checkpoint auto",
    ]
    assert all(candidate.fits for candidate in options.values())


def test_nothing_fits_names_the_memory_that_would_do_where_the_machine_has_it() -> None:
    found = ask(request(memory_bytes=2 * MIB))
    options = dict(found.reliefs)
    assert set(options) == {"--memory 10MiB"}
    assert options["--memory 10MiB"].fits
    assert options["--memory 10MiB"].high_bytes <= 10 * MIB


def test_nothing_fits_names_the_optimizer_with_one_moment() -> None:
    found = ask(request(memory_bytes=6 * MIB), LionEstimator())
    assert "--optimizer lion" in dict(found.reliefs)


class LionEstimator(FakeEstimator):
    """Half the optimizer state with Lion."""

    def __call__(self, model: ModelConfig, step: StepConfig) -> FakeEstimate:
        found = super().__call__(model, step)
        saved = found.breakdown["optimizer_state"] // 2 if step.optimizer == "lion" else 0
        return replace(found, peak_bytes=found.peak_bytes - saved, high_bytes=found.high_bytes - saved)


def test_largest_of_the_shorter_contexts_that_fit_is_named() -> None:
    base = ask(request(memory_bytes=6 * MIB))
    shorter = [options for options, _ in base.reliefs if options.startswith("--ctx")]
    assert shorter == ["--ctx 64"]


def test_a_batch_that_buys_nothing_is_not_chosen() -> None:
    found = ask(request(checkpoint=NO_CHECKPOINT, memory_bytes=4 * GIB))
    assert found.choice is not None
    assert found.ceiling is not None
    assert found.largest is not None
    assert found.choice.fits
    assert found.choice.batch <= found.ceiling.batch // 4
    assert found.largest.batch == found.ceiling.batch
    assert found.choice.tokens_per_second >= 0.97 * found.ceiling.tokens_per_second


def test_a_batch_that_was_asked_for_is_not_made_smaller() -> None:
    found = ask(request(checkpoint=NO_CHECKPOINT, memory_bytes=4 * GIB, batch=100))
    assert found.choice is not None
    assert found.choice.batch == 100


def test_tradeoff_compares_the_ends_at_one_batch() -> None:
    found = ask(request(memory_bytes=100 * MIB))
    assert found.tradeoff is not None
    assert found.tradeoff.every.batch > found.tradeoff.plain.batch
    assert 0.2 < found.tradeoff.slowdown < 0.4


def test_cache_limit_never_takes_the_footprint_over_the_budget() -> None:
    found = ask(request(memory_bytes=100 * MIB), FakeEstimator(band=0.05))
    assert found.choice is not None
    assert found.choice.high_bytes + found.choice.cache_limit_bytes <= 100 * MIB
    assert found.choice.footprint_bytes == found.choice.peak_bytes + found.choice.cache_limit_bytes


def test_cache_limit_is_what_the_allocator_keeps_however_much_is_left() -> None:
    found = ask(request(batch=1, memory_bytes=GIB), FakeEstimator(cache_bytes=8 * MIB))
    assert found.choice is not None
    assert found.choice.headroom_bytes > 500 * MIB
    assert found.choice.cache_limit_bytes == 8 * MIB
    assert found.choice.footprint_bytes == found.choice.peak_bytes + 8 * MIB


def test_target_batch_that_only_accumulation_breaks_says_what_it_needs_and_what_fits_instead() -> None:
    """Gradients that are summed up stand beside the new ones, so one sequence fits where seven of them do not."""
    alone = ask(request(memory_bytes=8 * MIB)).choice
    assert alone is not None
    found = ask(request(target_batch=7 * alone.batch, memory_bytes=alone.high_bytes + 1024))
    assert found.choice is None
    assert found.least is not None
    assert found.smallest is not None
    assert found.least.batch * found.least.step.accumulate == 7 * alone.batch
    assert not found.least.fits
    assert found.smallest.fits
    assert f"--target-batch {alone.batch}" in dict(found.reliefs)
    assert not any(candidate.fits for candidate in found.candidates)
    words = " ".join(plan_text(found).split())
    assert f"Does not fit: the target batch of {7 * alone.batch}" in words
    assert "not even" not in words
    assert "accumulated with" in words
    assert "more than the budget." in words


def test_breakdown_of_every_candidate_sums_to_its_peak() -> None:
    for candidate in ask(request(memory_bytes=100 * MIB)).candidates:
        assert sum(candidate.estimate.breakdown.values()) == candidate.peak_bytes


def test_headroom_is_left_unused() -> None:
    found = ask(request(memory_bytes=100 * MIB, headroom=Headroom(share=0.5)))
    assert found.budget.budget_bytes == 50 * MIB


def test_more_memory_than_the_machine_has_is_said() -> None:
    found = ask(request(memory_bytes=32 * GIB))
    assert found.budget.bound_by == "memory free now"
    assert any("32.0 GiB was allowed" in warning for warning in found.warnings)


def test_other_mlx_than_the_calibration_is_said() -> None:
    found = answer(
        request(), replace(HERE, mlx="0.99.0"), estimator=FakeEstimator(), calibration=FakeCoefficients()
    )
    assert any("0.99.0" in warning and "0.32.4" in warning for warning in found.warnings)


def test_warning_of_the_estimate_reaches_the_plan_once() -> None:
    found = ask(request(memory_bytes=100 * MIB), FakeEstimator(warnings=("outside the fitted range",)))
    assert found.warnings.count("outside the fitted range") == 1


class FakeTracer:
    """Finds ``factor`` times what the fake estimator says."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls: list[StepConfig] = []

    def __call__(self, model: ModelConfig, step: StepConfig) -> Traced:
        self.calls.append(step)
        found = FakeEstimator()(model, step)
        breakdown = {name: int(size * self.factor) for name, size in found.breakdown.items()}
        peak = sum(breakdown.values())
        return Traced(peak, peak, peak, peak, "backward", breakdown, found.largest_tensor_bytes)

    def least_recompute(
        self, model: ModelConfig, step: StepConfig, budget_bytes: int
    ) -> CheckpointPolicy | None:
        """The first of the whole-block policies that fits, each tried."""
        blocks = [CheckpointPolicy(policy="blocks", blocks=n) for n in range(1, model.n_layers)]
        fitting = (
            policy
            for policy in (NO_CHECKPOINT, *blocks, EVERY_BLOCK)
            if self.factor * FakeEstimator()(model, step.but(checkpoint=policy)).peak_bytes <= budget_bytes
        )
        return next(fitting, None)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.12])
def test_trace_moves_the_choice_to_the_batch_it_finds(factor: float) -> None:
    tracer = FakeTracer(factor)
    found = ask(
        request(checkpoint=NO_CHECKPOINT, memory_bytes=100 * MIB), FakeEstimator(band=0.02), tracer=tracer
    )
    assert found.choice is not None
    assert found.next_up is not None
    assert found.choice.engine == found.next_up.engine == "trace"
    assert found.choice.fits
    assert not found.next_up.fits
    assert len(tracer.calls) <= 12
    assert found.choice.tokens_per_second > 0


@pytest.mark.parametrize("factor", [0.6, 0.7])
def test_trace_finds_that_less_recompute_is_enough(factor: float) -> None:
    tracer = FakeTracer(factor)
    asked = request(batch=8, memory_bytes=40 * MIB)
    estimated, found = ask(asked).choice, ask(asked, tracer=tracer).choice
    assert estimated is not None
    assert found is not None
    assert (found.engine, found.fits) == ("trace", True)
    assert found.policy == tracer.least_recompute(SHAPE, found.step, 40 * MIB) != estimated.policy
    assert found.tokens_per_second > estimated.tokens_per_second


def test_trace_finds_what_fits_where_the_estimate_sees_nothing() -> None:
    asked = request(batch=8, memory_bytes=15 * MIB)
    assert ask(asked).choice is None
    found = ask(asked, tracer=FakeTracer(0.5)).choice
    assert found is not None
    assert (found.engine, found.fits) == ("trace", True)


@pytest.mark.parametrize("memory", [100 * MIB, 4 * GIB, 15 * GIB])
@pytest.mark.parametrize("factor", [0.9, 1.0, 1.12])
@pytest.mark.parametrize("policy", [None, NO_CHECKPOINT, EVERY_BLOCK])
def test_choice_of_the_trace_engine_was_always_traced(
    memory: int, factor: float, policy: CheckpointPolicy | None
) -> None:
    tracer = FakeTracer(factor)
    found = ask(request(checkpoint=policy, memory_bytes=memory), FakeEstimator(band=0.02), tracer=tracer)
    assert found.choice is not None
    assert found.choice.engine == "trace"
    assert found.choice.step in tracer.calls
    for near in (found.next_up, found.ceiling):
        assert near is None or (near.engine == "trace" and near.step in tracer.calls)
    assert found.largest is not None
    assert found.ceiling is not None
    assert found.largest.batch >= found.ceiling.batch >= found.choice.batch
    words = " ".join(plan_text(found).split())
    assert ", confirmed by a trace" in words
    rows = [line for line in plan_text(found).splitlines() if " trace " in line or " estimate " in line]
    assert len(rows) >= len(found.candidates)
    if found.tradeoff is not None:
        assert found.tradeoff.plain.batch >= (
            found.choice.batch if found.choice.policy == NO_CHECKPOINT else 0
        )


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_reliefs_of_the_trace_engine_were_traced(factor: float) -> None:
    tracer = FakeTracer(factor)
    asked = request(batch=64, checkpoint=NO_CHECKPOINT, memory_bytes=60 * MIB)
    found = ask(asked, FakeEstimator(band=0.02), tracer=tracer)
    assert found.choice is None
    assert found.least is not None
    assert found.least.engine == "trace"
    assert found.reliefs
    for options, candidate in found.reliefs:
        assert (candidate.engine, candidate.fits) == ("trace", True), options


def test_policy_asked_for_is_never_replaced_by_the_trace() -> None:
    asked = request(batch=8, checkpoint=EVERY_BLOCK, memory_bytes=60 * MIB)
    found = ask(asked, tracer=FakeTracer(0.7)).choice
    assert found is not None
    assert found.policy == EVERY_BLOCK


def test_trace_outside_the_band_is_believed_and_said() -> None:
    found = ask(
        request(checkpoint=NO_CHECKPOINT, memory_bytes=100 * MIB),
        FakeEstimator(band=0.02),
        tracer=FakeTracer(1.12),
    )
    assert any("the trace is believed" in warning for warning in found.warnings)


def test_trace_inside_the_band_says_nothing() -> None:
    found = ask(request(memory_bytes=100 * MIB), FakeEstimator(band=0.02), tracer=FakeTracer(1.0))
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 5, "target_batch": 12}, "batch 5 does not divide the target batch 12; 4 or 6 would"),
        ({"accumulate": 5, "target_batch": 12}, "accumulate 5 does not divide the target batch 12"),
        ({"batch": 4, "accumulate": 4, "target_batch": 32}, "batch 4 times accumulate 4 is 16"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_request(request(**changes))


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="longer than"):
        plan(SHAPE, seq_len=4096)


def test_shape_can_be_a_dictionary_and_says_its_mistake() -> None:
    shape = SHAPE.model_dump()
    assert read_model(shape) == SHAPE
    with pytest.raises(InputError, match="n_heads 3 does not divide d_model 64"):
        read_model({**shape, "n_heads": 3})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "0 is too few"),
        ({"batch": "many"}, "'many' is not a batch size"),
        ({"batch": 10**12}, "does not fit into a dimension"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"memory": 0}, "holds nothing"),
        ({"memory": "3PB"}, "more memory than any machine has"),
        ({"optimizer": "adamm"}, "did you mean adam or adamw"),
        ({"dtype": "int8"}, "choose fp32, bf16 or fp16"),
        ({"grad_checkpoint": "evry"}, "is not a checkpoint policy"),
        ({"headroom": "100%"}, "leaves nothing to use"),
        ({"headroom": "some"}, "is not a headroom"),
        ({"engine": "trase"}, "did you mean trace"),
        ({"device": "m5pro-48gb"}, "did you mean m5-pro-48gb"),
        ({"accumulate": -1}, "-1 is too few"),
    ],
)
def test_wrong_value_is_told_with_what_would_work(settings: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan("tiny", **settings)  # type: ignore[arg-type]


def test_largest_batch_is_zero_when_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "oomguard.plan.planner._calibrated", lambda device: (FakeCoefficients(), FakeEstimator())
    )
    assert largest_batch(SHAPE, memory="1MiB") == 0
    plain = largest_batch(SHAPE, memory="100MiB")
    every = largest_batch(SHAPE, memory="100MiB", grad_checkpoint="every")
    assert 0 < plain < every <= largest_batch(SHAPE, memory="100MiB", grad_checkpoint="auto")


def test_policy_that_recomputes_nothing_is_accepted() -> None:
    found = ask(request(checkpoint=CheckpointPolicy.parse("blocks=0"), memory_bytes=100 * MIB))
    assert found.choice is not None


def test_engine_auto_says_why_it_did_without_a_trace() -> None:
    gpu = Device("gpu", "cuda", working_set_bytes=16 * GIB)
    found = answer(
        request(engine="auto", memory_bytes=GIB),
        gpu,
        estimator=FakeEstimator(),
        calibration=FakeCoefficients(),
    )
    assert any("not confirmed by a trace" in warning for warning in found.warnings)
    assert found.choice is not None
    assert found.choice.engine == "estimate"


def test_engine_trace_fails_where_it_cannot_be_had() -> None:
    gpu = Device("gpu", "cuda", working_set_bytes=16 * GIB)
    with pytest.raises(TraceError, match="--engine estimate does without"):
        answer(request(engine="trace"), gpu, estimator=FakeEstimator(), calibration=FakeCoefficients())


def test_trace_of_a_preset_step_needs_no_memory_and_sums_up() -> None:
    step = StepConfig(batch=2, seq_len=64, checkpoint=EVERY_BLOCK)
    traced = trace_step(SHAPE, step)
    assert sum(traced.breakdown.values()) == traced.peak_bytes
    assert traced.low_bytes <= traced.peak_bytes < traced.high_bytes
    assert traced.peak_bytes > 4 * 4 * SHAPE.params * 0.9


def test_public_names_are_the_functions_whatever_was_imported_before() -> None:
    import oomguard
    import oomguard.cli.plan
    import oomguard.plan.planner

    assert callable(oomguard.plan)
    assert inspect.signature(oomguard.plan) == inspect.signature(plan)
    settings = {"memory": "2GB", "seq_len": 64, "device": "m5-pro-48gb"}
    assert oomguard.plan("tiny", **settings) == plan("tiny", **settings)
    assert oomguard.largest_batch is largest_batch
    assert {"plan", "largest_batch", "Guard", "Plan"} <= set(dir(oomguard))
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = oomguard.plans


def test_metal_is_traced_from_a_graph_captured_here() -> None:
    mac = Device("mac", "metal", working_set_bytes=16 * GIB, architecture="applegpu_g16s", mlx="0.31.1")
    plain, every = (
        trace_step(SHAPE, StepConfig(batch=4, seq_len=64, checkpoint=policy), mac)
        for policy in (NO_CHECKPOINT, EVERY_BLOCK)
    )
    assert every.sequenced_peak_bytes < plain.sequenced_peak_bytes
    assert sum(plain.breakdown.values()) == plain.peak_bytes
