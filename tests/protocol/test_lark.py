"""Lark grammars of tools as regular expressions."""

import re
import time

import pytest

from ostinato.protocol.lark import NotRegular, expression_of

PATCH = r"""
// Of the kind that agents send for patches, in our own words.
start: head (added | removed)+ tail
head: "*** Begin" LF
tail: "*** End" LF?
added: "*** New: " name LF line+
removed: "*** Gone: " name LF
name: /(.+)/
line: ("+" | "-" | " ") /(.*)/ LF -> one_line
%import common.LF
"""


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("*** Begin\n*** New: a.py\n+x = 1\n-y\n*** End\n", True),
        ("*** Begin\n*** Gone: a.py\n*** End", True),
        ("*** Begin\n*** End\n", False),
        ("*** Begin\n*** New: a.py\n*** End\n", False),
        ("*** Begin\n*** New: \n+x\n*** End\n", False),
    ],
)
def test_a_grammar_without_recursion_is_an_expression(text: str, fits: bool):
    assert bool(re.fullmatch(expression_of(PATCH), text)) is fits


@pytest.mark.parametrize(
    ("rule", "text", "fits"),
    [
        ('start: "a.b"', "a.b", True),
        ('start: "a.b"', "axb", False),
        ('start: "AB"i', "aB", True),
        ('start: "a".."c"', "b", True),
        ('start: "a".."c"', "d", False),
        ('start: ["x"] "y"~2..3', "yyy", True),
        ('start: ["x"] "y"~2', "xyyy", False),
        (r"start: /[a-z\/]+/i", "A/b", True),
        ("start: A\nA.2: /x/\n | /y/", "y", True),
        ('?start: "say \\"hi\\"\\n"', 'say "hi"\n', True),
        ("start: INT\n%import common.INT", "42", True),
        ("start: N\n%import common.INT -> N", "42", True),
    ],
)
def test_pieces_of_the_notation(rule: str, text: str, fits: bool):
    assert bool(re.fullmatch(expression_of(rule), text)) is fits


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "(" start ")" | "x"',
        "start: missing",
        "start: A\n%import common.MIRACLE",
        "start: /a(?=b)/",
        r"start: /(a)\1/",
        "start: /a/m",
        "start: a{b}",
        '"x"',
        "",
        "start: (",
        "x" * 50_001,
        "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(99)) + 'r99: "x"',
    ],
)
def test_what_is_no_expression_is_said(grammar: str):
    with pytest.raises(NotRegular):
        expression_of(grammar)


def test_a_grammar_that_doubles_in_every_rule_ends_at_once():
    """Thirty rules of two references each would be a gigabyte."""
    rules = "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(30))
    began = time.process_time()
    with pytest.raises(NotRegular, match="longer than"):
        expression_of(rules + 'r30: "x"')
    assert time.process_time() - began < 5
