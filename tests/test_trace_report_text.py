"""A trace in words: every number of it is the result's."""

from __future__ import annotations

import re

import pytest
from trace_fakes import lower_result, small_report, small_result

from oomguard.report.trace_holders import group_holders
from oomguard.report.trace_report import LabelledTrace
from oomguard.report.trace_text import SHOWN_HOLDERS, trace_text
from oomguard.trace.result import Holder
from oomguard.units import MIB

COMPARED = LabelledTrace("every", "every block recomputed", lower_result())


def words(text: str) -> str:
    return " ".join(text.split())


def test_text_says_the_peak_and_when() -> None:
    text = words(trace_text(small_report()))
    assert "Peak 46.0 MiB" in text
    assert "backward of block 1: Matmul in blocks.1.mlp.up, primitive 4 of 6" in text
    assert "sequenced 42.0 MiB, with mx.set_memory_limit(0)" in text
    assert "the in-flight window adds 4.0 MiB, 9% of the peak" in text
    assert "before the step 14.0 MiB of state and batch" in text
    assert "46.0 MiB in the first and in those after it" in text


def test_steps_that_differ_are_told_apart() -> None:
    result = small_result(low_bytes=44 * MIB, high_bytes=48 * MIB, first_peak_bytes=40 * MIB)
    text = words(trace_text(small_report(asked=LabelledTrace("none", "no recompute", result))))
    assert "40.0 MiB in the first, 44.0 MiB to 48.0 MiB in those after it" in text


def test_holders_are_grouped_over_blocks_and_sum_to_the_peak() -> None:
    result = small_result()
    groups = group_holders(result.holders)
    assert sum(group.total_bytes for group in groups) == result.peak_bytes
    said = [str(group) for group in groups]
    assert said[0] == "blocks.1.mlp.up backward Matmul output, 20.0 MiB"
    assert said[1] == "2 x blocks.*.mlp.up saved AddMM output, 8.0 MiB each"
    assert "2 x blocks.*.mlp.up.weight parameter, 3.0 MiB each" in said
    assert "outside the modules in-flight Softmax output, 4.0 MiB" in said


def test_only_numbers_that_differ_become_a_star() -> None:
    names = ["layers.3.experts.0.up", "layers.3.experts.1.up"]
    holders = [Holder(name, 4, "saved tensors", "forward", 3, "Add", (1,), "float32") for name in names]
    (group,) = group_holders(holders)
    assert group.name == "layers.3.experts.*.up"
    assert group.count == 2


def test_a_number_inside_a_word_is_no_block() -> None:
    names = ["blocks.0.linear1.weight", "blocks.0.linear2.weight"]
    holders = [Holder(name, 4, "parameters", "", -1, "", (1,), "float32") for name in names]
    assert [group.name for group in group_holders(holders)] == names


def test_scratch_space_is_called_so() -> None:
    scratch = Holder("blocks.0", 64, "copies", "backward", 0, "Matmul", (), "")
    assert str(group_holders([scratch])[0]) == "blocks.0 scratch space of Matmul, 64 B"


def test_ten_holders_are_shown_and_the_others_summed() -> None:
    sizes = [(k + 1) * MIB for k in range(14)]
    holders = [Holder(f"part{k}", size, "forward", "forward", -1, "Add", (1,), "float32")
               for k, size in enumerate(sizes)]  # fmt: skip
    result = small_result(holders=holders, peak_bytes=sum(sizes))
    text = trace_text(small_report(asked=LabelledTrace("none", "no recompute", result)))
    shown = re.findall(r"part\d+ forward Add output", text)
    assert len(shown) == SHOWN_HOLDERS
    assert re.search(r"10\.0 MiB +10%  4 other buffers", text)


@pytest.mark.parametrize("budget_bytes", [None, 40 * MIB, 64 * MIB])
@pytest.mark.parametrize("compared", [None, COMPARED])
@pytest.mark.parametrize("colour", [False, True])
def test_text_fits_80_columns(budget_bytes: int | None, compared: LabelledTrace | None, colour: bool) -> None:
    warned = small_result(warnings=["the VJP that something defines is not traced; " * 4], unknown={"Odd": 3})
    asked = LabelledTrace("none", "no recompute", warned)
    report = small_report(asked=asked, budget_bytes=budget_bytes, compared=compared, title="a title " * 20)
    text = trace_text(report, colour)
    assert ("\x1b" in text) is colour
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= 80


def test_budget_is_compared_in_bytes() -> None:
    peak = small_result().peak_bytes
    assert small_report(budget_bytes=peak).fits is True
    assert small_report(budget_bytes=peak - 1).fits is False
    assert small_report().fits is None
    assert "6.0 MiB over the budget of 40.0 MiB" in words(trace_text(small_report(budget_bytes=40 * MIB)))
    assert "18.0 MiB below the budget of 64.0 MiB" in words(trace_text(small_report(budget_bytes=64 * MIB)))


def test_a_memory_limit_is_proposed_only_where_it_would_do() -> None:
    assert "With mx.set_memory_limit(0) the peak is 42.0 MiB" in words(
        trace_text(small_report(budget_bytes=43 * MIB))
    )
    for budget_bytes in (41 * MIB, 46 * MIB, None):
        assert "With mx.set_memory_limit(0)" not in words(trace_text(small_report(budget_bytes=budget_bytes)))


def test_comparison_shows_both_and_what_fits() -> None:
    text = words(trace_text(small_report(compared=COMPARED, budget_bytes=40 * MIB)))
    assert "peak 46.0 MiB 30.0 MiB -35%" in text
    assert "saved tensors 16.0 MiB 0 B -100%" in text
    assert "left of the budget -6.0 MiB 10.0 MiB" in text
    assert "Fits with every block recomputed: 10.0 MiB below the budget of 40.0 MiB." in text


def test_an_unknown_primitive_and_a_warning_are_said_once() -> None:
    result = small_result(unknown={"Odd": 3}, warnings=["Odd (3 times) is not known", "twice", "twice"])
    text = words(trace_text(small_report(asked=LabelledTrace("none", "no recompute", result))))
    assert text.count("Odd") == 1
    assert "unknown primitive: Odd, 3 times; counted from above" in text
    assert text.count("warning: twice") == 1
