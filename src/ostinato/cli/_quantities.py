"""Formats counts and durations."""


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
    for unit, length, least in _SPANS:
        if seconds >= least * length:
            return f"{seconds / length:,.0f} {unit}s"
    return write_seconds(seconds) if seconds else "0 s"
