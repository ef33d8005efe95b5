r"""Writes rules that set aside what varies in a template, for ``ostinato serve --stabilise``.

A rule has the words before a slot, and the common form of its values: digits where all have
digits, letters where all have letters. It is written only if it matches what varies in every
request of the log that has it, so nothing is guessed::

    It is 9:41. You are a herald.
    It is 10:07. You are a herald.
    ─►  pattern = '''It\s{1,8}+is\s{1,8}+(\d{1,9}+:\d{1,9}+\.)'''

Quantifiers are bounded and possessive: a pattern matches in one way, however a text looks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ostinato.lab.lint.slots import Slot, SlotKind
from ostinato.lab.log.request_log import LoggedRequest

KINDS: tuple[SlotKind, ...] = ("timestamp", "date", "id", "counter", "nonce")
"""What a constant may take the place of; users and wording carry meaning."""

_MAX_WORDS_BEFORE = 3
_MAX_PATTERN_CHARS = 512
_BLANK = r"\s{1,8}+"
_RUNS = re.compile(r"\d+|[A-Za-z]+|\s+|[^\sA-Za-z\d]")
_LIKE_DIGITS, _LIKE_LETTERS, _LIKE_WORD = r"\d{1,24}+", r"[A-Za-z]{1,32}+", r"\S{1,128}+"


@dataclass(frozen=True, slots=True)
class VolatileRule:
    """A rule of ``--stabilise``.

    Attributes:
        name: Name of the rule.
        where: Which messages it reads.
        pattern: Its group is what varies.
        put: Constant in its place.
    """

    name: str
    where: str
    pattern: str
    put: str

    def as_toml(self) -> str:
        """Write it as a table of the file of rules."""
        return (
            f'[[rule]]\nname = "{self.name}"\nwhere = "{self.where}"\n'
            f"pattern = '''{self.pattern}'''\nput = \"{self.put}\"\n"
        )


def rules_for(
    kind: SlotKind, slots: Sequence[Slot], requests: Sequence[LoggedRequest]
) -> tuple[VolatileRule, ...]:
    """Return rules for slots of one kind, as far as one pattern fits all values of a slot."""
    if kind not in KINDS:
        return ()
    rules: list[VolatileRule] = []
    for slot in slots:
        pattern = _pattern(slot)
        if pattern is not None and _fits(pattern, slot, requests):
            name = kind if not rules else f"{kind}-{len(rules) + 1}"
            roles = {request.prompt.messages[0].role for request in requests}
            where = "system" if roles == {"system"} else "any"
            rules.append(VolatileRule(name, where, pattern, f"[{kind}]"))
    return tuple(rules)


def _pattern(slot: Slot) -> str | None:
    """Return the pattern of a slot; None if words around it vary, or it would be too long."""
    words = slot.before.split()[-_MAX_WORDS_BEFORE:]
    if any("…" in word for word in words):
        words = words[max(i for i, word in enumerate(words) if "…" in word) + 1 :]
        if not words:
            return None
    head = _BLANK.join(map(re.escape, words)) + _BLANK if words else r"\A"
    values = list(dict.fromkeys(value for value in slot.values.values() if value))
    pattern = f"{head}({_common_form(values)})"
    return (
        pattern if values and len(pattern) <= _MAX_PATTERN_CHARS and "'''" not in pattern else None
    )


def _common_form(values: Sequence[str]) -> str:
    """Return an expression for values: run by run where they have the same runs, else by words."""
    runs = [_RUNS.findall(value) for value in values]
    forms = {tuple(map(_form, row)) for row in runs}
    if len(forms) == 1:
        return "".join(_merged(column) for column in zip(*runs, strict=True))
    num_words = {len(value.split()) for value in values}
    if len(num_words) == 1:
        return _BLANK.join([_LIKE_WORD] * num_words.pop())
    return r"(?!)"  # matches nothing, so that it fits no slot


def _form(run: str) -> str:
    return "1" if run.isdigit() else "a" if run.isalpha() else " " if run.isspace() else run


def _merged(column: Iterable[str]) -> str:
    """Return an expression for the same run of all values."""
    runs = set(column)
    [form] = {_form(run) for run in runs}
    likes = {"1": _LIKE_DIGITS, "a": _LIKE_LETTERS, " ": _BLANK}
    if form == "1" or form == " " or (form == "a" and len(runs) > 1):
        return likes[form]
    return re.escape(runs.pop())


def _fits(pattern: str, slot: Slot, requests: Sequence[LoggedRequest]) -> bool:
    """Whether a pattern matches the values of a slot, each in its own request."""
    compiled = re.compile(pattern)
    return all(
        any(match[1] == value for text in _texts(requests[number]) for match in
            compiled.finditer(text))
        for number, value in slot.values.items()
        if value
    )  # fmt: skip


def _texts(request: LoggedRequest) -> Iterator[str]:
    prompt = request.prompt
    for message in prompt.messages[: prompt.num_leading]:
        yield from (block.text for block in message.blocks)
