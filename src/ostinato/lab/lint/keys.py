"""Writes the JSON objects of a text with their keys in one order.

Members are moved as they are written, so that a text whose keys are in order stays as it is::

    {"name": "Ann", "age": 7}      the first object with these keys: it sets the order
    {"age": 8, "name": "Bob"}  ->  {"name": "Bob", "age": 8}
"""

import json
from collections.abc import Callable, Sequence

Order = Callable[[tuple[str, ...]], Sequence[str]]
"""From the keys of an object, as they are written, to the order that they should have."""

_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


class KeyOrders:
    """The order in which each set of keys was seen first."""

    def __init__(self) -> None:
        self._first: dict[frozenset[str], tuple[str, ...]] = {}

    def __call__(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the order of some keys; theirs, if the set is new."""
        return self._first.setdefault(frozenset(keys), keys)


def reorder_json(text: str, order: Order) -> str:
    """Write every JSON object in a text with its keys in order; other text stays."""
    parts, done = list[str](), 0
    start = text.find("{")
    while start >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
            if not _is_ordered(value, order):
                parts += [text[done:start], _reordered(text, start, order)[0]]
                done = end
        except ValueError:
            end = start + 1
        except RecursionError:
            break
        start = text.find("{", end)
    return "".join([*parts, text[done:]])


def _is_ordered(value: object, order: Order) -> bool:
    """Whether all objects of a value have their keys in order."""
    if isinstance(value, dict):
        keys = tuple(value)
        items = [_is_ordered(item, order) for item in value.values()]  # each sets its order
        return all(items) and (len(keys) < 2 or keys == tuple(order(keys)))
    return not isinstance(value, list) or all([_is_ordered(item, order) for item in value])


def _reordered(text: str, start: int, order: Order) -> tuple[str, int]:
    """Return the valid value at a place, with its keys in order, and where it ended."""
    if text[start] not in "{[":
        end = _DECODER.raw_decode(text, start)[1]
        return text[start:end], end
    members, gaps, done = list[tuple[str, str]](), list[str](), start
    place = _after_blanks(text, start + 1)
    while text[place] not in "}]":
        name, first = "", place
        if text[start] == "{":
            name, colon = _DECODER.raw_decode(text, place)
            place = _after_blanks(text, _after_blanks(text, colon) + 1)
        written, end = _reordered(text, place, order)
        members.append((name, text[first:place] + written))
        gaps.append(text[done:first])
        done, place = end, _after_blanks(text, end)
        if text[place] == ",":
            place = _after_blanks(text, place + 1)
    names = tuple(name for name, _ in members)
    if text[start] == "{" and len(set(names)) == len(names):
        by_name = dict(members)
        members = [(name, by_name[name]) for name in order(names)]
    pairs = zip(gaps, members, strict=True)
    written = "".join(gap + member for gap, (_, member) in pairs)
    return written + text[done : place + 1], place + 1


def _after_blanks(text: str, place: int) -> int:
    while text[place] in _BLANKS:
        place += 1
    return place
