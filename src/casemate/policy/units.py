"""Sizes, counts and durations as people write them."""

from __future__ import annotations

import math
import re

__all__ = ["format_duration", "format_size", "parse_count", "parse_cpu", "parse_duration", "parse_size"]

_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,6}))?\s?([kmgtKMGT]?)(?:i?[bB])?", re.ASCII)
_PART = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?(ms|s|m|h|d)", re.ASCII)
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX = (1 << 63) - 1
# A timer takes less than this; about 31 years.
_MAX_SECONDS = 1e9


def parse_size(value: int | str, *, least: int) -> int | None:
    """Bytes, or None for ``unlimited``. Raises ValueError with a sentence for the person."""
    if isinstance(value, str):
        text = value.strip()
        if text == "unlimited":
            return None
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"{_quote(value)} is not a size; write bytes, or text such as 512M or 2G")
        whole, fraction, unit = match.groups()
        factor = _FACTORS[unit.lower()]
        number = int(whole) * factor
        if fraction:
            number += int(fraction) * factor // 10 ** len(fraction)
    else:
        number = value
    return _between(number, least, "bytes")


def parse_count(value: int | str, *, least: int) -> int | None:
    """A whole number, or None for ``unlimited``. Raises ValueError."""
    if isinstance(value, str):
        text = value.strip()
        if text == "unlimited":
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise ValueError(f"{_quote(value)} is not a whole number")
        value = int(text)
    return _between(value, least, "")


def parse_cpu(value: float | str) -> float | None:
    """Processors' worth of time, or None for ``unlimited``. Raises ValueError."""
    if isinstance(value, str):
        text = value.strip()
        if text == "unlimited":
            return None
        if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII) is None:
            raise ValueError(f"{_quote(value)} is not a number of processors; write for example 1.5")
        value = float(text)
    # One hundredth is the least that the kernel's quota of a 100 ms period can say.
    if 0.01 <= value <= 1 << 20:  # false for nan as well
        return float(value)
    raise ValueError("the number of processors must be at least 0.01")


def parse_duration(value: float | str) -> float | None:
    """Seconds, or None for ``unlimited``. Raises ValueError."""
    if isinstance(value, str):
        text = value.strip()
        if text == "unlimited":
            return None
        if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text, re.ASCII):
            text += "s"
        seconds, at = 0.0, 0
        while match := _PART.match(text, at):
            whole, fraction, unit = match.groups()
            seconds += float(f"{whole}.{fraction or 0}") * _SECONDS[unit]
            at = match.end()
        if at == 0 or at != len(text):
            raise ValueError(f"{_quote(value)} is not a duration; write for example 90s, 10m or 1h30m")
    elif isinstance(value, int) and abs(value) > _MAX_SECONDS:
        seconds = math.inf  # too large for a float, perhaps
    else:
        seconds = float(value)
    if not 0.001 <= seconds <= _MAX_SECONDS:
        raise ValueError("a duration must be between 1ms and about 30 years; write unlimited for none")
    return seconds


def format_size(value: int | None) -> str:
    """The shortest exact form that ``parse_size`` reads back."""
    if value is None:
        return "unlimited"
    for unit in ("T", "G", "M", "K"):
        factor = _FACTORS[unit.lower()]
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def format_duration(value: float | None) -> str:
    """The form that ``parse_duration`` reads back, in the largest unit that fits."""
    for unit in ("d", "h", "m"):
        if value and value % _SECONDS[unit] == 0:
            return f"{value / _SECONDS[unit]:.0f}{unit}"
    return "unlimited" if value is None else f"{value:.6f}".rstrip("0").rstrip(".") + "s"


def _between(number: int, least: int, unit: str) -> int:
    if number < least:
        raise ValueError(f"must be at least {least} {unit}".rstrip() + "; write unlimited for no limit")
    if number > _MAX:
        raise ValueError("is larger than any machine; write unlimited for no limit")
    return number


def _quote(text: str) -> str:
    # Values come from files that nobody may have vetted, and go to terminals.
    shown = text if len(text) <= 60 else text[:57] + "..."
    return ascii(shown)
