"""Sizes and times: what a person writes is read exactly, and what is shown can be read back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.errors import InputError
from oomguard.units import GIB, MIB, TIB, format_bytes, format_seconds, parse_bytes, round_up

SIZES = st.integers(min_value=0, max_value=1 << 60)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16GiB", 16 * GIB),
        ("16G", 16 * GIB),
        ("16g", 16 * GIB),
        (" 1.5 TiB ", TIB + TIB // 2),
        ("512MiB", 512 * MIB),
        (".5gb", 5 * 10**8),
        ("3PB", 3 * 10**15),
        ("0", 0),
        ("0.0", 0),
        ("17B", 17),
        ("1.9B", 1),
        (16, 16),
    ],
)
def test_parse_bytes_reads_both_kinds_of_units(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "GB", "-4GB", "16 XB", "1e9", "16GB/s", "1,5GB", "nan", "inf", "4GB 2GB", -4, True]
)
def test_parse_bytes_refuses_what_is_not_a_size(text: str | int) -> None:
    with pytest.raises(InputError, match="is not a size; write it as 16GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "suggestions"),
    [
        ("32", "32GB, 32GiB, 32MiB, or 32B for bytes"),
        (" 1.9 ", "1.9GB, 1.9GiB, 1.9MiB, or 1.9B for bytes"),
        ("90000", "90000MiB, or 90000B for bytes"),
        ("17179869184", "17179869184B for bytes"),
    ],
)
def test_parse_bytes_refuses_a_text_without_a_unit_and_says_what_to_write(
    text: str, suggestions: str
) -> None:
    with pytest.raises(InputError, match="has no unit; write ") as caught:
        parse_bytes(text)
    assert str(caught.value) == f"{text!r} has no unit; write {suggestions}"
    for size in re.findall(r"[\d.]+[GMiB]+", suggestions):
        assert 0 < parse_bytes(size) <= 64 * TIB


@pytest.mark.parametrize("text", ["9" * 19, "9" * 19 + "B", "9300PB", "9" * 5000 + "TiB", "9999999999GiB"])
def test_parse_bytes_refuses_more_than_an_address_holds_in_one_short_line(text: str) -> None:
    with pytest.raises(InputError, match="more memory than a machine can address") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 100


@given(SIZES)
def test_parse_bytes_reads_back_a_whole_number(size: int) -> None:
    assert parse_bytes(f"{size}B") == parse_bytes(f"{size} B") == parse_bytes(size) == size


@given(SIZES)
def test_format_bytes_reads_back_to_half_its_last_digit(size: int) -> None:
    shown = format_bytes(size)
    unit = parse_bytes(f"1{shown.split()[1]}")
    assert abs(parse_bytes(shown) - size) <= 0.05 * unit + 1


@given(SIZES)
def test_format_bytes_never_shows_a_full_larger_unit(size: int) -> None:
    number, unit = format_bytes(size).split()
    assert float(number) < 1024 or unit == "TiB" or size >= 1023.95 * TIB
    assert float(number) >= 1 or size < 1024


@given(SIZES)
def test_format_bytes_of_a_deficit_is_the_size_with_a_sign(size: int) -> None:
    assert format_bytes(-size) == (f"-{format_bytes(size)}" if size else "0 B")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (GIB - 1, "1.0 GiB"),
        (GIB, "1.0 GiB"),
        (12.25 * GIB, "12.2 GiB"),
        (3000 * TIB, "3000.0 TiB"),
    ],
)
def test_format_bytes_takes_the_largest_unit_that_keeps_a_digit(size: float, shown: str) -> None:
    assert format_bytes(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"),
        (0.34, "340 ms"),
        (0.9996, "1.0 s"),
        (1.24, "1.2 s"),
        (59.94, "59.9 s"),
        (59.97, "1 min 0 s"),
        (250, "4 min 10 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_format_seconds_reads_as_a_person_says_it(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@given(SIZES, st.integers(min_value=1, max_value=1 << 20))
def test_round_up_is_the_next_whole_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple
