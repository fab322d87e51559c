"""Sizes, counts and durations."""

from __future__ import annotations

import math

import pytest

from casemate.policy import units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (4096, 4096), ("4096", 4096), ("1K", 1 << 10), ("512M", 512 << 20), ("2G", 2 << 30), ("2g", 2 << 30),
        ("2GiB", 2 << 30), ("2 GB", 2 << 30), ("1.5G", 3 << 29), ("1T", 1 << 40), (" 8G ", 8 << 30),
        ("unlimited", None),
    ],
)  # fmt: skip
def test_sizes_are_read_in_powers_of_1024(text: int | str, value: int | None) -> None:
    """Every way of writing a size comes to the bytes that a person expects."""
    assert units.parse_size(text, least=0) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "-1G",
        "1X",
        "1 0G",
        "1e9",
        "0x10",
        "٣G",
        "1.G",
        "9" * 20,
        "1G\n1",
        "unlimited!",
        "none",
        "∞",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """Nothing is guessed: a size that is not one is an error, in ASCII whatever was written."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        units.parse_size(text, least=0)
    assert str(caught.value).isascii()


def test_sizes_have_a_least_and_a_largest() -> None:
    """A limit under which nothing starts is refused, one byte more is taken; and so at the upper end."""
    assert units.parse_size(4096, least=4096) == 4096
    with pytest.raises(ValueError, match="at least 4096"):
        units.parse_size(4095, least=4096)
    assert units.parse_size((1 << 63) - 1, least=0) == (1 << 63) - 1
    with pytest.raises(ValueError, match="larger than any machine"):
        units.parse_size(1 << 63, least=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), ("1d", 86400), (5, 5),
     (0.5, 0.5),
     ("90", 90), ("1.5", 1.5), ("unlimited", None)],
)  # fmt: skip
def test_durations_are_seconds(text: float | str, value: float | None) -> None:
    """Every way of writing a duration comes to its seconds."""
    assert units.parse_duration(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "s", "1x", "-5s", "1m x", "1h 30m", 0, -1, math.nan, math.inf, 10**400, -(10**400), "0s", "1e3"],
)
def test_what_is_no_duration_is_refused(text: float | str) -> None:
    """No duration is zero, negative, endless or not a number; ``unlimited`` is the only word for none."""
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1, 0, 0.001, 10**400, "", "two", "1,5", "-1", True and "x"]
)
def test_what_is_no_number_of_processors_is_refused(value: float | str) -> None:
    """A share of the processors is a positive, finite number."""
    with pytest.raises(ValueError, match="processors"):
        units.parse_cpu(value)
    assert units.parse_cpu("1.5") == 1.5
    assert units.parse_cpu("unlimited") is None


@pytest.mark.parametrize("value", [-1, 0, "", "-1", "1.5", "many", "9" * 30, 1 << 63])
def test_what_is_no_count_is_refused(value: int | str) -> None:
    """A count is a whole number of at least one, or ``unlimited``."""
    with pytest.raises(ValueError, match=r"\w"):
        units.parse_count(value, least=1)
    assert units.parse_count("16", least=1) == 16
    assert units.parse_count("unlimited", least=1) is None


@pytest.mark.parametrize("size", [None, 0, 1, 1023, 1024, 1536, 512 << 20, 3 << 29, 8 << 30, (1 << 63) - 1])
def test_sizes_print_as_they_are_read(size: int | None) -> None:
    """What ``policy show`` prints can be put back into a file."""
    assert units.parse_size(units.format_size(size), least=0) == size


@pytest.mark.parametrize("seconds", [None, 0.5, 1, 90, 5400, 86400.25])
def test_durations_print_as_they_are_read(seconds: float | None) -> None:
    """The same for durations."""
    assert units.parse_duration(units.format_duration(seconds)) == seconds
