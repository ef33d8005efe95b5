"""How are counts written for people?"""


def count(num: int, noun: str) -> str:
    """Write a count and its noun: ``1 token``, ``1,000 tokens``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
