"""The budget: the smallest bound binds, is named, and headroom comes off it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.errors import InputError
from oomguard.machine.budget import (
    CONTAINER,
    FREE_NOW,
    GIVEN,
    Headroom,
    find_budget,
    parse_headroom,
    parse_memory,
)
from oomguard.machine.device import Device, find_device
from oomguard.units import GIB, TIB

MAC = Device(
    name="mac",
    backend="metal",
    here=True,
    memory_bytes=48 * GIB,
    working_set_bytes=36 * GIB,
    free_bytes=30 * GIB,
    held_bytes=2 * GIB,
    largest_buffer_bytes=27 * GIB,
)


def test_smallest_bound_binds_and_is_named() -> None:
    found = find_budget(MAC, headroom=Headroom())
    assert (found.bound_by, found.budget_bytes) == (FREE_NOW, 32 * GIB)
    assert found.candidates == {"recommended working set": 36 * GIB, FREE_NOW: 32 * GIB}
    assert found.largest_buffer_bytes == 27 * GIB


def test_what_mlx_holds_counts_as_free_also_in_a_container() -> None:
    boxed = Device("box", "cpu", here=True, free_bytes=30 * GIB, container_bytes=4 * GIB, held_bytes=GIB)
    found = find_budget(boxed, headroom=Headroom())
    assert (found.bound_by, found.budget_bytes) == (CONTAINER, 5 * GIB)


def test_given_memory_binds_without_headroom_and_the_machine_with_it() -> None:
    given_less = find_budget(MAC, memory_bytes=16 * GIB)
    assert (given_less.bound_by, given_less.budget_bytes) == (GIVEN, 16 * GIB)
    given_more = find_budget(MAC, memory_bytes=64 * GIB)
    assert given_more.bound_by == FREE_NOW
    assert given_more.headroom_bytes == int(0.05 * 32 * GIB)


def test_given_memory_just_under_the_bound_leaves_the_machine_its_headroom() -> None:
    found = find_budget(MAC, memory_bytes=31 * GIB)
    assert found.bound_by == FREE_NOW
    assert found.budget_bytes < 31 * GIB


def test_default_headroom_stops_at_4_gib() -> None:
    found = find_budget(Device("big", "cpu", here=True, free_bytes=TIB))
    assert found.headroom_bytes == 4 * GIB


def test_wanted_headroom_comes_off_given_memory_too() -> None:
    found = find_budget(MAC, memory_bytes=10 * GIB, headroom=parse_headroom("10%"))
    assert found.budget_bytes == 9 * GIB


def test_headroom_that_takes_everything_is_refused() -> None:
    with pytest.raises(InputError, match=r"headroom 50\.0 GiB leaves nothing of 32\.0 GiB"):
        find_budget(MAC, headroom=parse_headroom("50GiB"))


def test_machine_without_free_memory_has_a_budget_of_nothing() -> None:
    assert find_budget(Device("full", "cpu", here=True, free_bytes=0)).budget_bytes == 0


def test_unknown_machine_asks_for_memory() -> None:
    with pytest.raises(InputError, match="--memory 32GB"):
        find_budget(Device("any", "metal"))
    assert find_budget(Device("any", "metal"), memory_bytes=32 * GIB).budget_bytes == 32 * GIB


def test_other_machines_are_bound_by_what_their_kind_implies() -> None:
    assert find_budget(find_device("m5-pro-48gb")).bound_by == "recommended working set"
    assert find_budget(find_device("cpu-64gb")).bound_by == "the machine's memory"
    assert find_budget(find_device("cuda-24gb")).bound_by == "95% of the GPU's memory"


@given(st.integers(1, TIB), st.integers(0, TIB), st.integers(1, TIB))
def test_budget_never_passes_any_bound(free: int, held: int, given_bytes: int) -> None:
    device = Device("any", "cpu", here=True, free_bytes=free, held_bytes=held)
    found = find_budget(device, memory_bytes=given_bytes)
    assert 0 <= found.budget_bytes <= min(found.candidates.values())
    assert found.budget_bytes + found.headroom_bytes == found.candidates[found.bound_by]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10%", Headroom(share=0.1)), (" 2.5 % ", Headroom(share=0.025)), ("1GiB", Headroom(size_bytes=GIB))],
)
def test_headroom_is_a_share_or_a_size(text: str, expected: Headroom) -> None:
    assert parse_headroom(text) == expected


@pytest.mark.parametrize("text", ["100%", "250%", "-1GiB", "much", "%", "10%%"])
def test_wrong_headroom_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="headroom"):
        parse_headroom(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "holds nothing"),
        ("0GB", "holds nothing"),
        ("3PB", "more memory than any machine has"),
        ("3PiB", "more memory than any machine has"),
        ("lots", "is not a size"),
        ("-4GB", "is not a size"),
        ("1e9", "is not a size"),
        ("nan", "is not a size"),
        ("", "is not a size"),
    ],
)
def test_impossible_memory_is_refused_with_what_would_work(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        parse_memory(text)
    assert "16GB" in str(caught.value)
