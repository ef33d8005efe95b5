"""Formats and parses amounts of memory, counts and durations."""

import re
from fractions import Fraction

from ostinato.core.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def read_bytes(name: str, text: str, minimum: int = 1) -> int:
    """Read an amount of memory, such as ``24GiB``, ``1.5 TB`` or ``4096``.

    Args:
        name: The setting, for messages.
        text: A number and a unit; ``24G`` is refused, since it means two things.
        minimum: Lowest amount, 0 or 1.

    Raises:
        ConfigError: It is no amount, or too small, or the unit is unknown.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    amount = int(Fraction(match[1]) * factor) if match and factor else -1
    if amount < minimum:
        bound = " above 0" if minimum else ""
        raise ConfigError(
            f"{name}={text!r}: must be an amount{bound}, such as 24GiB, 24GB or plain bytes; "
            f"units are {', '.join(unit for unit in _UNITS if unit)}"
        )
    return amount


def write_bytes(num_bytes: int) -> str:
    """Write an amount of memory with three digits, such as ``64 KiB`` or ``1.37 GiB``."""
    amount, unit = float(num_bytes), 0
    # 1023.5 would be written as 1024.
    while amount >= 1023.5 and unit < len(_BINARY_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    number = _three_digits(amount) if unit else f"{num_bytes:,}"
    return f"{number} {_BINARY_UNITS[unit]}"


def _three_digits(amount: float) -> str:
    """Write a number with three digits, without trailing zeros."""
    digits = 0 if amount >= 99.95 else 1 if amount >= 9.995 else 2
    number = f"{amount:,.{digits}f}"
    return number.rstrip("0").rstrip(".") if "." in number else number


_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def read_count(name: str, text: str) -> int:
    """Read a number of things, such as ``2000``, ``2k`` or ``1.5M``.

    Raises:
        ConfigError: It is not a whole number above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?)\s*", text)
    units = _COUNTS | {"K": 10**3}
    amount = Fraction(match[1]) * units[match[2]] if match else Fraction(0)
    if amount < 1 or amount.denominator != 1:
        raise ConfigError(f"{name}={text!r}: must be a whole number above 0, such as 2000 or 2k")
    return int(amount)


def write_count(num: int) -> str:
    """Write a number as tables do: as it is below 1,000, then three digits, such as ``40.1k``."""
    for factor, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if num >= factor * 0.9995:
            return _three_digits(num / factor) + unit
    return f"{num:,}"


def count(num: int, noun: str) -> str:
    """Format a count and its noun: ``1 token``, ``1,000 tokens``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def write_seconds(seconds: float) -> str:
    """Format a duration with two or three digits, such as ``8.4 ms``, ``120 ms`` or ``1.4 s``."""
    milliseconds = seconds * 1000
    if milliseconds < 9.95:
        return f"{milliseconds:.1f} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"


_SPANS = (("day", 86_400, 3), ("hour", 3600, 3), ("minute", 60, 2))


def write_span(seconds: float) -> str:
    """Format a long duration, such as ``40 s``, ``59 minutes`` or ``30 hours``."""
    for unit, length, min_units in _SPANS:
        if seconds >= min_units * length:
            return f"{seconds / length:,.0f} {unit}s"
    return write_seconds(seconds) if seconds else "0 s"
