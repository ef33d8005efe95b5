r"""Turns a Lark grammar into one regular expression, where it has no recursion.

A custom tool's text stands inside a JSON string, in which a quote or a line end is written
otherwise. Expressions can be applied to such strings, grammars cannot; and the grammars of agents'
tools, such as patches, are regular::

    start: head line+           ─►   \*\*\*\ Begin\n(?:\+(?:.*)\n)+
    head: "*** Begin" LF
    line: "+" /.*/ LF
    %import common.LF

Source: the grammar reference of Lark (https://github.com/lark-parser/lark).
"""

import re
from collections.abc import Iterator

MAX_GRAMMAR_CHARS = 50_000
MAX_EXPRESSION_CHARS = 20_000
MAX_DEPTH = 32

_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": r"[0-9]", "HEXDIGIT": r"[0-9a-fA-F]", "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+", "LETTER": r"[a-zA-Z]", "UCASE_LETTER": r"[A-Z]",
    "LCASE_LETTER": r"[a-z]", "WORD": r"[a-zA-Z]+", "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*)
    |(?P<define>[?!]{0,2}(?P<rule>[a-zA-Z_]\w*)(?:\.-?\d+)?\s*:(?!:))
    |(?P<import>%import\s+common\.(?P<terminal>\w+)(?:\s*->\s*(?P<renamed>\w+))?)
    |(?P<alias>->\s*\w+)
    |(?P<range>"(?:[^"\\]|\\.)"\.\."(?:[^"\\]|\\.)")
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?![/*])(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[a-zA-Z_]\w*)
    |(?P<times>~\s*(?P<low>\d+)(?:\s*\.\.\s*(?P<high>\d+))?)
    |(?P<mark>[|()\[\]?*+])""",
    re.VERBOSE,
)
_UNBOUNDED_LOOKS = re.compile(r"\(\?(?:=|!|<=|<!|P[=>]|\()|\\[1-9]")


class NotRegular(ValueError):
    """A grammar that is no regular expression: recursive, too long, or in another notation."""


def expression_of(grammar: str) -> str:
    """Return a regular expression for the texts of a grammar.

    Raises:
        NotRegular: There is none that this function finds.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise NotRegular(f"{len(grammar)} characters, and at most {MAX_GRAMMAR_CHARS} are read")
    return _Rules(grammar).expression("start", ())


class _Rules:
    """The rules of a grammar, as rows of pieces; expanded from the start."""

    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, list[re.Match[str]]] = {}
        self._imported: dict[str, str] = {}
        self._expanded: dict[str, str] = {}
        current: list[re.Match[str]] | None = None
        for token in _tokens(grammar):
            if token["blank"] or token["alias"]:
                continue
            if token["define"]:
                current = self._rules[token["rule"]] = []
            elif token["import"]:
                name = token["terminal"]
                if name not in _COMMON:
                    raise NotRegular(f"%import common.{name}")
                self._imported[token["renamed"] or name] = _COMMON[name]
            elif current is None:
                raise NotRegular(f"{token[0]!r} outside of a rule")
            else:
                current.append(token)

    def expression(self, name: str, inside: tuple[str, ...]) -> str:
        """Expand a rule; ``inside`` are the rules that are being expanded."""
        if name in self._imported:
            return f"(?:{self._imported[name]})"
        if len(inside) > MAX_DEPTH:
            raise NotRegular(f"rule {name!r} is {len(inside)} rules deep")
        if name in inside or name not in self._rules:
            raise NotRegular(f"rule {name!r} is " + ("recursive" if name in inside else "missing"))
        if name not in self._expanded:
            text = ""
            for token in self._rules[name]:
                text += self._piece(token, (*inside, name))
                if len(text) > MAX_EXPRESSION_CHARS:
                    raise NotRegular(f"rule {name!r} is longer than {MAX_EXPRESSION_CHARS}")
            try:
                re.compile(text)
            except (re.error, RecursionError) as error:
                raise NotRegular(f"rule {name!r}: {error}") from error
            self._expanded[name] = f"(?:{text})"
        return self._expanded[name]

    def _piece(self, token: "re.Match[str]", inside: tuple[str, ...]) -> str:
        if token["name"]:
            return self.expression(token["name"], inside)
        if token["text"]:
            return _literal(token["text"])
        if token["range"]:
            first, last = (
                re.escape(_unquoted(end)) for end in re.split(r"(?<=\")\.\.", token["range"])
            )
            return f"[{first}-{last}]"
        if token["regex"]:
            return _regex(token["regex"])
        if token["times"]:
            return f"{{{token['low']},{token['high'] or token['low']}}}"
        return {"[": "(?:", "]": ")?", "(": "(?:"}.get(token[0], token[0])


def _tokens(grammar: str) -> Iterator["re.Match[str]"]:
    at = 0
    while at < len(grammar):
        token = _TOKEN.match(grammar, at)
        if token is None:
            raise NotRegular(f"{grammar[at : at + 20]!r} is another notation")
        yield token
        at = token.end()


def _literal(text: str) -> str:
    quoted, flag = (text[:-1], "i") if text.endswith("i") else (text, "")
    written = re.escape(_unquoted(quoted))
    return f"(?i:{written})" if flag else f"(?:{written})"


def _unquoted(text: str) -> str:
    escapes = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[1]), text[1:-1])


def _regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    if _UNBOUNDED_LOOKS.search(body) or set(flags) - set("is"):
        raise NotRegular(f"{text!r:.60} looks around, back, or has other flags")
    body = body.replace(r"\/", "/")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"
