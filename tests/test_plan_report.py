"""Reports: strings that are returned, never printed; the same facts in words and in JSON."""

from __future__ import annotations

import pytest
from plan_fakes import HERE, FakeCoefficients, FakeEstimator, request

from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.machine.budget import Headroom
from oomguard.plan.planner import Plan, answer
from oomguard.report.estimate_text import breakdown_lines
from oomguard.report.plan_text import plan_text, train_command
from oomguard.report.style import Ink, bar, paragraph, table
from oomguard.report.words import exact_bytes, say_batch, say_count, say_policy
from oomguard.units import GIB, MIB, parse_bytes


def found(**changes: object) -> Plan:
    return answer(
        request(**changes), HERE, estimator=FakeEstimator(band=0.03), calibration=FakeCoefficients()
    )


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("none", "no recompute"),
        ("every", "every block recomputed"),
        ("blocks=5", "5 of 12 blocks recomputed"),
        ("blocks=99", "every block recomputed"),
        ("blocks=0", "no recompute"),
        ("attention", "attention recomputed in every block"),
        ("attention,blocks=3", "attention recomputed in 3 of 12 blocks"),
        ("stride=4", "recompute in segments of 4 blocks"),
        ("stride=auto", "recompute in segments (stride=auto)"),
        ("custom_function", "every block recomputed by a bare custom function"),
    ],
)
def test_policy_is_said_in_words(policy: str, words: str) -> None:
    assert say_policy(CheckpointPolicy.parse(policy), 12) == words


def test_batch_is_said_with_its_accumulation() -> None:
    assert say_batch(StepConfig(batch=8, seq_len=4)) == "batch 8"
    assert say_batch(StepConfig(batch=8, seq_len=4, accumulate=3)) == "batch 8 x 3 accumulated"


@pytest.mark.parametrize("size", [2 * 10**9, 600 * MIB, 16 * GIB, 123_456_789, 400 * 10**6])
def test_exact_bytes_are_read_back_as_they_were(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


def test_counts_are_short() -> None:
    assert [say_count(n) for n in (12, 9_600, 404_400_000, 1_400_000_000)] == ["12", "9.6K", "404.4M", "1.4B"]


def test_command_to_run_names_what_differs_from_the_defaults() -> None:
    plain = train_command(found(memory_bytes=2 * 10**9), "--preset huge")
    assert plain.startswith("oomguard train --preset huge --corpus FILE --batch ")
    assert plain.endswith(" --memory 2GB")
    assert "--optimizer" not in plain
    assert "--headroom 2.5%" in train_command(found(headroom=Headroom(share=0.025)))
    assert "--headroom 64MiB" in train_command(found(headroom=Headroom(size_bytes=64 * MIB)))
    asked = request(target_batch=24, memory_bytes=100 * MIB)
    step = asked.step.but(optimizer="lion", dtype="bfloat16", clip_norm=True, compiled=False, seq_len=64)
    changed = answer(
        type(asked)(model=asked.model, step=step, target_batch=24, memory_bytes=20 * MIB),
        HERE,
        estimator=FakeEstimator(),
        calibration=FakeCoefficients(),
    )
    command = train_command(changed)
    for words in ("--ctx 64", "--optimizer lion", "--dtype bf16", "--clip", "--no-compile", "--accumulate "):
        assert words in command


def test_text_of_a_large_batch_says_that_it_buys_nothing() -> None:
    words = " ".join(plan_text(found(checkpoint=CheckpointPolicy(), memory_bytes=4 * GIB)).split())
    assert "A larger batch buys nothing here: up to batch" in words


def test_text_of_a_tensor_that_is_too_large_names_the_largest_buffer() -> None:
    from dataclasses import replace

    small = replace(HERE, largest_buffer_bytes=4 * MIB)
    plan = answer(
        request(checkpoint=CheckpointPolicy()),
        small,
        estimator=FakeEstimator(),
        calibration=FakeCoefficients(),
    )
    words = " ".join(plan_text(plan).split())
    assert "and the largest buffer is 4.0 MiB" in words


def test_text_without_recompute_says_what_it_would_need() -> None:
    words = " ".join(plan_text(found(batch=8, memory_bytes=30 * MIB)).split())
    assert "without recompute, " in words
    assert "more than the budget" in words


def test_colour_adds_nothing_but_colour() -> None:
    import re

    plan = found(memory_bytes=100 * MIB)
    assert re.sub(r"\x1b\[[\d;]*m", "", plan_text(plan, colour=True)) == plan_text(plan, colour=False)


def test_report_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    plan_text(found(memory_bytes=100 * MIB))
    assert capsys.readouterr() == ("", "")


def test_words_that_are_not_ours_stay_out() -> None:
    for size in (MIB, 30 * MIB, GIB):
        text = plan_text(found(memory_bytes=size)).lower()
        assert "vram" not in text
        assert "residual" not in text


def test_breakdown_sums_up_slivers() -> None:
    lines = breakdown_lines({"weights": 10**6, "batch": 10, "constants": 4})
    assert [line.split()[:2] for line in lines] == [["weights", "976.6"], ["the", "rest"]]
    assert breakdown_lines({}) == []


def test_table_lines_up() -> None:
    assert table([("a", "1"), ("bbb", "22")], "<>") == ["  a     1", "  bbb  22"]


def test_bar_shows_a_sliver_of_anything() -> None:
    assert bar(0, 10) == ""
    assert bar(1e-9, 10) == "▏"
    assert bar(1, 10) == "█" * 10
    assert bar(7, 10) == "█" * 10


def test_paragraph_keeps_options_whole() -> None:
    text = paragraph("x" * 70 + " --grad-checkpoint attention,blocks=4", "  ")
    assert "--grad-checkpoint" in text.splitlines()[1]


def test_ink_without_colour_is_plain() -> None:
    ink = Ink()
    assert (ink.good("a"), ink.bad("b"), Ink(True).strong("")) == ("a", "b", "")
