"""How are durations written for people?"""


def write_seconds(seconds: float) -> str:
    """Write a duration with two or three digits, such as ``8.4 ms``, ``120 ms`` or ``1.4 s``."""
    milliseconds = seconds * 1000
    if milliseconds < 9.95:
        return f"{milliseconds:.1f} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:,.0f} s"
