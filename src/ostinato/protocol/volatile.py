r"""Sets volatile bytes of prompts aside: what a client changes without meaning, by rules.

Agents write the date, the state of a repository or a checksum into their instructions, and nothing
behind it hits. A rule names such a text, and the constant that takes its place::

    [[rule]]
    name = "today"
    where = "system"                      # or "user", "tool", "any"
    pattern = '''Today's date: (\d{4}-\d\d-\d\d)'''
    put = "(see the last message)"

What is in parentheses changes and is replaced; the rest of the pattern is where it stands. A
pattern without parentheses is replaced as a whole. Nothing is set aside that no rule matches.

Patterns are the operator's, texts are the clients': so a pattern is bounded (``pattern_limits``),
and a text that takes too long stays as it is, is counted, and misses as it would without rules.
"""

import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex

from ostinato.core.config import one_of
from ostinato.core.errors import ConfigError
from ostinato.protocol.conversation import Message
from ostinato.protocol.pattern_limits import check_pattern

MAX_RULES = 64
MAX_MATCHES = 64
"""Texts that one rule replaces in one prompt."""

TIME_LIMIT_S = 0.1
"""For all rules on one prompt; what is left stays as it is."""

_ROLES = {
    **{role: (role,) for role in ("system", "user", "tool")},
    "any": ("system", "user", "assistant", "tool"),
}
_MAX_NAME_CHARS = 40
_NAME = regex.compile(r"[a-z0-9][a-z0-9-]*")
_MAX_PUT_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A text that is set aside.

    Attributes:
        name: For the header, the metric and explanations.
        where: Which messages: ``system``, ``user``, ``tool`` or ``any``.
        pattern: Its groups are what changes; without groups, all of it.
        put: Constant in the place of each.
    """

    name: str
    where: str = "system"
    pattern: str
    put: str = ""
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check and compile it.

        Raises:
            ConfigError: A value is of the wrong type or out of range.
        """
        for name in ("name", "where", "pattern", "put"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r:.80}: must be a text")
        if not _NAME.fullmatch(self.name) or len(self.name) > _MAX_NAME_CHARS:
            raise ConfigError(
                f"name={self.name!r:.80}: must be lower-case letters, digits and hyphens, at most "
                f"{_MAX_NAME_CHARS}"
            )
        one_of("where", self.where, tuple(_ROLES))
        if len(self.put) > _MAX_PUT_CHARS:
            raise ConfigError(
                f"put has {len(self.put)} characters: at most {_MAX_PUT_CHARS} stand in one place"
            )
        check_pattern(self.pattern)
        object.__setattr__(self, "_compiled", regex.compile(self.pattern))

    def spans(self, text: str, limit_s: float) -> list[tuple[int, int]]:
        """Return what changes in a text, in order.

        Raises:
            TimeoutError: It takes longer than the limit.
        """
        spans: list[tuple[int, int]] = []
        for match in self._compiled.finditer(text, timeout=limit_s, concurrent=True):
            groups = range(1, self._compiled.groups + 1) if self._compiled.groups else (0,)
            spans += [match.span(group) for group in groups if match.start(group) >= 0]
            if len(spans) >= MAX_MATCHES:
                break
        return [span for span in spans if span[0] < span[1]]


CHECKSUM_RULES = tuple(
    Rule(
        name="claude-code-checksum",
        pattern=r"\Ax-anthropic-billing-header:[^\n]{0,256}?" + changes,
    )
    for changes in (
        r"\bcc_version=\d{1,9}+\.\d{1,9}+\.\d{1,9}+(\.[0-9a-f]{1,16}+)\b",
        r"\b(cch=[0-9a-f]{1,16}+;?+)",
    )
)
"""Claude Code begins its system text with a line for the vendor's accounts, in which a checksum
follows the version. It differs from conversation to conversation."""


def read_rules(path: str | None) -> tuple[Rule, ...]:
    """Read a file of rules; None has none.

    Raises:
        ConfigError: It cannot be read, or a rule is invalid.
    """
    if path is None:
        return ()
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"stabilise={path!r}: cannot be read: {error}") from error
    rules = content.pop("rule", [])
    if content or not isinstance(rules, list) or not all(isinstance(r, dict) for r in rules):
        raise ConfigError(f"stabilise={path!r}: must have [[rule]] tables, and nothing else")
    if len(rules) > MAX_RULES:
        raise ConfigError(f"stabilise={path!r}: {len(rules)} rules, and at most {MAX_RULES} apply")
    return tuple(_read_rule(path, number, rule) for number, rule in enumerate(rules, 1))


def _read_rule(path: str, number: int, values: Mapping[str, Any]) -> Rule:
    try:
        return Rule(**values)
    except TypeError as error:
        reason = "it has name, where, pattern and put, of which name and pattern are needed"
        raise ConfigError(f"stabilise={path!r}, rule {number}: {reason}") from error
    except ConfigError as error:
        raise ConfigError(f"stabilise={path!r}, rule {number}: {error}") from error


@dataclass(frozen=True, slots=True)
class Settled:
    """A conversation whose volatile bytes are set aside.

    Attributes:
        messages: For chat templates.
        counts: Replaced texts by the names of rules.
        late: Names of rules that were not tried to the end, for lack of time.
        changed: Names of rules by the number of the message.
    """

    messages: list[Message]
    counts: Counter[str] = field(default_factory=Counter)
    late: tuple[str, ...] = ()
    changed: dict[int, list[str]] = field(default_factory=dict)

    def named(self, sections: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Say in the names of sections which rules changed them, for explanations."""
        if not self.changed:
            return tuple(sections)
        notes = {
            f"messages[{place}]": f", {' and '.join(names)} set aside"
            for place, names in self.changed.items()
        }
        return tuple((name + notes.get(name.split(" ")[0], ""), text) for name, text in sections)


class Stabiliser:
    """Applies rules to conversations, in their order.

    Attributes:
        roles: Roles of the messages that any rule reads.
    """

    def __init__(self, rules: Sequence[Rule], limit_s: float = TIME_LIMIT_S) -> None:
        """Apply these rules, and spend at most so long on one prompt."""
        self._rules, self._limit_s = tuple(rules), limit_s
        self.roles = frozenset(role for rule in rules for role in _ROLES[rule.where])

    def __bool__(self) -> bool:
        """Whether there is any rule."""
        return bool(self._rules)

    def settle(self, messages: Sequence[Message]) -> Settled:
        """Return a conversation without what changes."""
        settled, late = Settled([*messages]), dict[str, None]()
        end = time.monotonic() + self._limit_s
        for rule in self._rules:
            for place in range(len(settled.messages)):
                try:
                    self._apply(rule, settled, place, end)
                except TimeoutError:
                    late[rule.name] = None
        return Settled(settled.messages, settled.counts, tuple(late), settled.changed)

    def _apply(self, rule: Rule, settled: Settled, place: int, end: float) -> None:
        message = settled.messages[place]
        if message["role"] not in _ROLES[rule.where]:
            return
        content, num = _replaced(rule, message.get("content"), end)
        if num:
            settled.messages[place] = {**message, "content": content}
            settled.counts[rule.name] += num
            names = settled.changed.setdefault(place, [])
            names += [rule.name] if rule.name not in names else []


def _replaced(rule: Rule, content: Any, end: float) -> tuple[Any, int]:
    """Return a content without what a rule names, and the number of replaced texts."""
    if isinstance(content, list):
        parts, nums = [], 0
        for part in content:
            text, num = _replaced(rule, part.get("text"), end)
            parts.append({**part, "text": text} if num else part)
            nums += num
        return parts, nums
    if not isinstance(content, str):
        return content, 0
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    pieces = list(_pieces(content, rule.spans(content, left_s), rule.put))
    return "".join(pieces), len(pieces) // 2


def _pieces(text: str, spans: Sequence[tuple[int, int]], put: str) -> Iterator[str]:
    """Yield a text in pieces, every second one of which is a constant."""
    at = 0
    for start, stop in spans:
        if start >= at:
            yield text[at:start]
            yield put
            at = stop
    yield text[at:]
