"""Shapes, policies and steps: what is wrong is refused by name, what is right reads back as it was."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from oomguard.config.base import first_problem
from oomguard.config.model import ModelConfig, divisors
from oomguard.config.policy import CheckpointPolicy, Segment
from oomguard.config.presets import preset, presets
from oomguard.config.step import OPTIMIZERS, StepConfig, check_seq_len
from oomguard.errors import InputError

SHAPE = {"n_layers": 6, "d_model": 384, "n_heads": 6, "d_mlp": 1536, "context": 256}

LAYERS = st.integers(min_value=1, max_value=200)
POLICIES = st.one_of(
    st.sampled_from(["none", "every", "attention", "custom_function"]).map(lambda name: {"policy": name}),
    st.one_of(st.integers(1, 300), st.sampled_from(["sqrt", "auto"])).map(
        lambda stride: {"policy": "stride", "stride": stride}
    ),
    st.tuples(st.sampled_from(["blocks", "attention"]), st.integers(0, 300)).map(
        lambda pair: {"policy": pair[0], "blocks": pair[1]}
    ),
).map(CheckpointPolicy.model_validate)


@given(POLICIES)
def test_policy_reads_back_from_its_text(policy: CheckpointPolicy) -> None:
    assert CheckpointPolicy.parse(str(policy)) == policy
    assert CheckpointPolicy.parse(f" {str(policy).upper()} ") == policy
    assert CheckpointPolicy.model_validate_json(policy.model_dump_json()) == policy


@given(st.text("abcdeiklnoqrstu_=,-. 0129\n²٣", max_size=20))
def test_policy_parse_gives_a_policy_or_one_line(text: str) -> None:
    policy, said = None, ""
    try:
        policy = CheckpointPolicy.parse(text)
    except InputError as error:
        said = str(error)
    assert (policy is None) == bool(said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "choose none, every, stride=K"),
        ("stride", "choose none, every, stride=K"),
        ("stride=-1", "choose none, every, stride=K"),
        ("every,blocks=2", "choose none, every, stride=K"),
        ("stride=2.5", "choose none, every, stride=K"),
        ("stride=0", "^checkpoint policy 'stride=0': stride: 0 is too small; the least is 1$"),
    ],
)
def test_policy_refuses_what_is_not_one(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        CheckpointPolicy.parse(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "stride"}, "stride needs one|which needs one"),
        ({"policy": "every", "stride": 2}, "a stride belongs to policy stride"),
        ({"policy": "blocks"}, "needs a number: blocks=4"),
        ({"policy": "every", "blocks": 2}, "blocks=2 does not combine with policy every"),
        ({"policy": "blocks", "blocks": -1}, "greater than or equal to 0"),
        ({"policy": "none", "depth": 2}, "depth"),
    ],
)
def test_policy_fields_that_do_not_belong_together_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CheckpointPolicy.model_validate(fields)


@given(POLICIES, LAYERS, st.floats(min_value=0.5, max_value=200))
def test_segments_cover_the_claimed_blocks_in_order_without_overlap(
    policy: CheckpointPolicy, layers: int, ratio: float
) -> None:
    segments = policy.segments(layers, ratio)
    covered = [block for segment in segments for block in range(segment.start, segment.stop)]
    claimed = (
        0 if policy.policy == "none" else layers if policy.blocks is None else min(policy.blocks, layers)
    )
    assert covered == list(range(claimed))
    assert all(len(segment) == segment.stop - segment.start > 0 for segment in segments)
    assert all(before.stop == after.start for before, after in pairwise(segments))
    assert {s.region for s in segments} <= {"attention" if policy.policy == "attention" else "block"}


@given(st.integers(1, 300), LAYERS)
def test_segments_of_a_stride_are_equal_but_the_last(stride: int, layers: int) -> None:
    segments = CheckpointPolicy(policy="stride", stride=stride).segments(layers)
    assert {len(segment) for segment in segments[:-1]} <= {stride}
    assert 1 <= len(segments[-1]) <= min(stride, layers)


@pytest.mark.parametrize(
    ("text", "layers", "ratio", "segments"),
    [
        ("none", 4, 32.0, ()),
        ("every", 3, 32.0, (Segment(0, 1), Segment(1, 2), Segment(2, 3))),
        ("stride=2", 5, 32.0, (Segment(0, 2), Segment(2, 4), Segment(4, 5))),
        ("stride=99", 3, 32.0, (Segment(0, 3),)),
        ("stride=sqrt", 16, 32.0, tuple(Segment(i, i + 4) for i in (0, 4, 8, 12))),
        ("stride=auto", 12, 34.0, tuple(Segment(i, i + 1) for i in range(12))),
        ("stride=auto", 16, 1.0, tuple(Segment(i, i + 4) for i in (0, 4, 8, 12))),
        ("blocks=2", 5, 32.0, (Segment(0, 1), Segment(1, 2))),
        ("blocks=0", 5, 32.0, ()),
        ("attention", 2, 32.0, (Segment(0, 1, "attention"), Segment(1, 2, "attention"))),
        ("attention,blocks=1", 2, 32.0, (Segment(0, 1, "attention"),)),
    ],
)
def test_segments_are_what_the_policy_says(
    text: str, layers: int, ratio: float, segments: tuple[Segment, ...]
) -> None:
    assert CheckpointPolicy.parse(text).segments(layers, ratio) == segments


@pytest.mark.parametrize(
    ("heads", "width", "near"), [(7, 384, "6 or 8"), (5, 12, "4 or 6"), (5, 3, "1 or 3"), (2, 7, "1 or 7")]
)
def test_heads_that_do_not_divide_the_width_are_told_which_would(heads: int, width: int, near: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({**SHAPE, "n_heads": heads, "d_model": width})
    assert first_problem(caught.value) == f"n_heads {heads} does not divide d_model {width}; {near} would"


def test_heads_of_the_largest_prime_width_are_refused_at_once() -> None:
    with pytest.raises(ValidationError, match="1 or 2147483647 would"):
        ModelConfig.model_validate({**SHAPE, "n_heads": 8, "d_model": (1 << 31) - 1})


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_ascending(n: int) -> None:
    assert list(divisors(n)) == [k for k in range(1, n + 1) if n % k == 0]


def test_shape_counts_the_parameters_of_a_block_by_hand() -> None:
    shape = ModelConfig(n_layers=2, d_model=4, n_heads=2, d_mlp=8, context=3, vocab_size=5)
    attention = 4 * (4 * 4 + 4)
    mlp = (4 * 8 + 8) + (8 * 4 + 4)
    norms = 2 * (4 + 4)
    assert shape.block_params == attention + mlp + norms
    assert shape.params == 5 * 4 + 3 * 4 + 2 * shape.block_params + (4 + 4)
    assert shape.head_dim == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layers": 0}, "n_layers: 0 is too small; the least is 1"),
        ({"n_layers": 10**9}, "n_layers: 1000000000 is too large; the most is 10000"),
        ({"context": 1 << 31}, "context: 2147483648 is too large; the most is 2147483647"),
        ({"d_model": "wide"}, "d_model: 'wide' is not a whole number; write one such as 8"),
        ({"dropout": 1.0}, "dropout: 1.0 is too large; it must be less than 1"),
        ({"dropout": float("nan")}, "dropout: "),
        ({"n_head": 6}, "n_head: there is no such field; did you mean n_heads?"),
    ],
)
def test_shape_names_the_field_and_the_value_that_are_wrong(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({**SHAPE, **change})
    assert first_problem(caught.value).startswith(said)


def test_shape_reads_from_a_file_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SHAPE))
    assert ModelConfig.from_file(path) == ModelConfig.model_validate({"name": "mine", **SHAPE})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("4", "is not a JSON object"),
        ('{"n_layers": ', "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ('{"n_layers": ' + "9" * 5000 + "}", "is not a JSON object"),
        ("\ud8ff", "is not text"),
        ('{"n_layers": 2}', "d_model: missing, and it has no default"),
        (json.dumps({**SHAPE, "n_heads": 7}), "n_heads 7 does not divide d_model 384"),
    ],
)
def test_shape_file_that_is_not_one_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=said) as caught:
        ModelConfig.from_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shape_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read config .*: No such file or directory"):
        ModelConfig.from_file(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot read config .*: Is a directory"):
        ModelConfig.from_file(tmp_path)


def test_step_counts_the_tokens_of_one_update() -> None:
    assert StepConfig(batch=4, seq_len=256, accumulate=3).tokens == 4 * 256 * 3
    assert {StepConfig(batch=1, seq_len=1, dtype=d).item_bytes for d in ("float16", "bfloat16")} == {2}


def test_step_changes_are_validated_again() -> None:
    step = StepConfig(batch=4, seq_len=256)
    assert step.but(batch=8) == StepConfig(batch=8, seq_len=256)
    assert {step.but(optimizer=name).optimizer for name in OPTIMIZERS} == set(OPTIMIZERS)
    for wrong in ({"batch": 0}, {"dtype": "int8"}, {"optimizer": "adamax"}, {"batch_size": 2}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            step.but(**wrong)


def test_values_are_frozen_and_make_keys() -> None:
    step = StepConfig(batch=4, seq_len=256, checkpoint=CheckpointPolicy.parse("stride=4"))
    assert {step: 1}[step.but()] == 1
    with pytest.raises(ValidationError, match="frozen"):
        step.batch = 8


def test_step_longer_than_the_context_is_refused() -> None:
    check_seq_len(preset("tiny"), StepConfig(batch=1, seq_len=preset("tiny").context))
    with pytest.raises(InputError, match="sequence length 99999 is longer than tiny's context"):
        check_seq_len(preset("tiny"), StepConfig(batch=1, seq_len=99999))


def test_presets_are_the_named_shapes_smallest_first() -> None:
    assert list(presets()) == ["tiny", "small", "huge", "mega", "behemoth", "titan"]
    sizes = [shape.params for shape in presets().values()]
    assert sizes == sorted(sizes)
    assert all(shape.name == name for name, shape in presets().items())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("behemot", "did you mean behemoth"),
        ("HUGE", "did you mean huge"),
        ("Titen", "did you mean titan"),
        ("gpt5", "known: tiny, small, huge, mega, behemoth, titan"),
        ("", "known: tiny, small"),
    ],
)
def test_preset_that_is_unknown_names_the_near_ones(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        preset(name)
