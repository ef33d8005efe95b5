"""Where are the calls in a text, however it is cut into pieces?"""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.server.tool_parser import (
    ArgumentsPiece,
    CallStart,
    TextPiece,
    ToolCallParser,
    read_answer,
)

ARGUMENTS = '{"at": "the } in \\" here", "n": [1]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'


def read(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Feed a text in pieces; returns the text around the calls, and name and arguments of each."""
    parser, said, calls = ToolCallParser(), "", []
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(places)]
    for piece in [p for part in parts for p in parser.feed(part)] + parser.finish():
        match piece:
            case TextPiece():
                said += piece.text
            case CallStart():
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            case ArgumentsPiece():
                name, arguments = calls[piece.index]
                calls[piece.index] = (name, arguments + piece.text)
    return said, calls


EXAMPLES = [
    ("no call at all", ("no call at all", [])),
    ("a < b <tool_cal", ("a < b <tool_cal", [])),
    ("line\n\n", ("line\n\n", [])),
    (CALL, ("", [("look", ARGUMENTS)])),
    (f"I look.\n{CALL}\n", ("I look.", [("look", ARGUMENTS)])),
    (f"{CALL}\n{CALL}", ("", [("look", ARGUMENTS)] * 2)),
    (f"{CALL}\nThere.", ("There.", [("look", ARGUMENTS)])),
    ("<tool_call>nonsense</tool_call>", ("<tool_call>nonsense</tool_call>", [])),
    ("<tool_call>[1]</tool_call>!", ("<tool_call>[1]</tool_call>!", [])),
    (
        '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>',
        ("", [("x", '{"a": 1}')]),
    ),
    ('<tool_call>{"name": "x", "parameters": {}}</tool_call>', ("", [("x", "{}")])),
    ('<tool_call>{"name": "x"}', ("", [("x", "{}")])),
    ('<tool_call>{"name": "x", "arguments": {"a": "b}', ("", [("x", '{"a": "b}')])),
    ('<tool_call>{"name": "x", "argu', ('<tool_call>{"name": "x", "argu', [])),
]


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_a_text_reads_the_same_however_it_is_cut(
    text: str, expected: tuple[str, list[tuple[str, str]]], cuts: list[int]
) -> None:
    assert read(text, cuts) == read(text, list(range(len(text)))) == expected


def test_arguments_go_out_as_they_come() -> None:
    """Nobody waits for the end of a call to see how it begins."""
    parser = ToolCallParser()
    begin = parser.feed('<tool_call>{"name": "f", "arguments": {"te')
    assert [type(piece) for piece in begin] == [CallStart, ArgumentsPiece]
    assert parser.feed('xt": "on')[0] == ArgumentsPiece(0, 'xt": "on')


def test_text_goes_out_up_to_what_may_be_a_tag() -> None:
    parser = ToolCallParser()
    assert parser.feed("one two <to") == [TextPiece("one two")]
    assert parser.feed("p>") == [TextPiece(" <top>")]


def test_without_tools_all_is_text() -> None:
    assert read_answer(CALL, has_tools=False) == (CALL, [])
    [call] = read_answer(CALL, has_tools=True)[1]
    assert json.loads(call.arguments)["n"] == [1] and call.call_id.startswith("call_")
