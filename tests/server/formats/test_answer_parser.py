"""Parsers of answers: reasoning, text and calls of every model family, at any chunk boundary."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.server.answers.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from ostinato.server.answers.answer_parser import (
    AnswerParser,
    ArgumentsPiece,
    CallStart,
    ParsedAnswer,
    ReasoningPiece,
    TextPiece,
    parse_answer,
)
from tests.support.servers.memory_search import reachable

ARGS = '{"at": "the } in \\" here", "n": [1]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGS}}}\n</tool_call>'
DEEP = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{ARGS}\n```<｜tool▁call▁end｜>"
DEEP_31 = f"<｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>a <b> c<|end|><|start|>assistant"
LOOK = [("look", ARGS)]

Parts = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, text, and name and arguments of each call."""

HERMES = [
    ("no call at all", ("", "no call at all", [])),
    ("a < b <tool_cal", ("", "a < b <tool_cal", [])),
    ("line\n\n", ("", "line\n\n", [])),
    (CALL, ("", "", LOOK)),
    (f"I look.\n{CALL}\n", ("", "I look.", LOOK)),
    (f"{CALL}\n{CALL}", ("", "", LOOK * 2)),
    (f"{CALL}\nThere.", ("", "There.", LOOK)),
    ("<tool_call>nonsense</tool_call>", ("", "<tool_call>nonsense</tool_call>", [])),
    ("<tool_call>[1]</tool_call>!", ("", "<tool_call>[1]</tool_call>!", [])),
    ('<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>', ("", "", [("x", '{"a": 1}')])),
    ('<tool_call>{"name": "x", "parameters": {}}</tool_call>', ("", "", [("x", "{}")])),
    ('<tool_call>{"name": "x"}', ("", "", [("x", "{}")])),
    ('<tool_call>{"name": "x", "arguments": {"a": "b}', ("", "", [("x", '{"a": "b}')])),
    ('<tool_call>{"name": "x", "argu', ("", '<tool_call>{"name": "x", "argu', [])),
]
LLAMA = [
    (f'{{"name": "look", "parameters": {ARGS}}}', ("", "", LOOK)),
    (f'<|python_tag|>{{"type": "function", "name": "look", "parameters": {ARGS}}}', ("", "", LOOK)),
    (f'{{"name": "look", "parameters": {ARGS}}}; {{"name": "x", "parameters": {{}}}}',
     ("", "", [*LOOK, ("x", "{}")])),
    ('{"colour": "red"}', ("", '{"colour": "red"}', [])),
    (f'See {{"name": "look", "parameters": {ARGS}}}',
     ("", f'See {{"name": "look", "parameters": {ARGS}}}', [])),
]  # fmt: skip
MISTRAL = [
    (f'Hm. [TOOL_CALLS] [{{"name": "look", "arguments": {ARGS}}}]', ("", "Hm.", LOOK)),
    (f'[TOOL_CALLS][{{"name": "look", "arguments": {ARGS}}}, {{"name": "x", "arguments": {{}}}}]',
     ("", "", [*LOOK, ("x", "{}")])),
    (f"[TOOL_CALLS]look[ARGS]{ARGS}[TOOL_CALLS]x[CALL_ID]a1b2c3d4e[ARGS]{{}}",
     ("", "", [*LOOK, ("x", "{}")])),
    (f"[TOOL_CALLS]look{ARGS}", ("", "", LOOK)),
]  # fmt: skip
DEEPSEEK = [
    (f"So:\n<｜tool▁calls▁begin｜>{DEEP}\n{DEEP_31}<｜tool▁calls▁end｜>", ("", "So:", LOOK * 2)),
    ("a <｜tool▁c", ("", "a <｜tool▁c", [])),
]
HARMONY = [
    (f"{ANALYSIS}<|channel|>final<|message|>yes", ("a <b> c", "yes", [])),
    (f"{ANALYSIS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGS}"
     "<|call|>", ("a <b> c", "", LOOK)),
    (f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant to=functions.look"
     f"<|channel|>commentary json<|message|>{ARGS}", ("", "Wait.", LOOK)),
    ("plain", ("", "plain", [])),
]  # fmt: skip
THINKS = [
    ("<think>\na < b\n</think>\n\nyes", ("a < b", "yes", [])),
    ("<think>never ends </thi", ("never ends </thi", "", [])),
    ("no thought</think>", ("", "no thought</think>", [])),
    (f"<think>a</think>\n{CALL}", ("a", "", LOOK)),
]
BEGUN = [("a\n</think>\n\nyes", ("a", "yes", [])), ("<think>a</think>yes", ("<think>a", "yes", []))]
BRACKETS = [("[THINK]a[/THINK]yes [THINK]", ("a", "yes [THINK]", []))]
GRANITE = [
    ("Here is my thought process: a. Here's my response: b", (" a. ", " b", [])),
    ("Here is my cat: a", ("", "Here is my cat: a", [])),
]

FORMATS: list[tuple[tuple[str | None, str | None, bool], list[tuple[str, Parts]]]] = [
    (("hermes", None, False), HERMES),
    (("llama3_json", None, False), LLAMA),
    (("mistral", None, False), MISTRAL),
    (("deepseek_v3", None, False), DEEPSEEK),
    (("openai", "openai_gptoss", False), HARMONY),
    (("hermes", "qwen3", False), THINKS),
    (("hermes", "deepseek_r1", True), BEGUN),
    ((None, "mistral", False), BRACKETS),
    ((None, "granite", False), GRANITE),
]


def parser(tools: str | None, reasoning: str | None, is_reasoning: bool = False) -> AnswerParser:
    return AnswerParser(
        TOOL_FORMATS[tools] if tools else None,
        REASONING_FORMATS[reasoning] if reasoning else None,
        is_reasoning,
    )


def parts_of(answer: ParsedAnswer) -> Parts:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.text, calls


def read(how: tuple[str | None, str | None, bool], text: str, places: list[int]) -> Parts:
    """Feed a text that is cut at these places."""
    reader, answer = parser(*how), ParsedAnswer()
    parts = [text[a:b] for a, b in pairwise([0, *sorted(places), len(text)])]
    for piece in [p for part in parts for p in reader.feed(part)] + reader.finish():
        answer.add(piece)
    return parts_of(answer)


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [(how, text, parts) for how, examples in FORMATS for text, parts in examples],
)
def test_a_text_reads_the_same_wherever_it_is_cut(how, text, expected):
    """In two pieces at every place, and in single letters."""
    assert read(how, text, list(range(len(text)))) == expected
    for place in range(len(text) + 1):
        assert read(how, text, [place]) == expected, f"cut before {text[place:]!r}"


MARKS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "x", "arguments": {', "}",
    "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "analysis", "final", " to=functions.x", "<|message|>",
    "<|end|>", "<|start|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", '"', "\\", "a", " ",
    "; ", "[", "\n",
]  # fmt: skip


@pytest.mark.parametrize("how", [how for how, _ in FORMATS])
@settings(max_examples=40)
@given(marks=st.lists(st.sampled_from(MARKS), max_size=14), cuts=st.lists(st.integers(0, 200)))
def test_nonsense_reads_the_same_however_it_is_cut(how, marks, cuts):
    text = "".join(marks)
    assert read(how, text, [min(cut, len(text)) for cut in cuts]) == read(how, text, [])


def test_parts_go_out_as_they_come():
    """The beginning of a call, or of a thought, is passed on before its end."""
    reader = parser("hermes", "qwen3")
    assert reader.feed("<think>one <") == [ReasoningPiece("one")]
    assert reader.feed("b></think>two <to") == [ReasoningPiece(" <b>"), TextPiece("two")]
    assert reader.feed("p> ") == [TextPiece(" <top>")]
    begin = reader.feed('<tool_call>{"name": "f", "arguments": {"te')
    assert [type(piece) for piece in begin] == [CallStart, ArgumentsPiece]
    assert reader.feed('xt": "on')[0] == ArgumentsPiece(0, 'xt": "on')


def test_calls_above_the_limit_are_left_out():
    reader = AnswerParser(TOOL_FORMATS["hermes"], max_calls=1)
    assert [call.name for call in parse_answer(CALL * 3, reader).calls] == ["look"]


def test_without_formats_all_is_text():
    assert parts_of(parse_answer(CALL, parser(None, None))) == ("", CALL, [])
    [call] = parse_answer(CALL, parser("hermes", None)).calls
    assert json.loads(call.arguments)["n"] == [1] and call.call_id.startswith("call_")


def test_a_long_call_is_read_in_linear_time():
    """Half a million letters, one by one, are looked at once each."""
    reader, num = parser("hermes", None), 20_000
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(num):
        assert reader.feed("x{") == [ArgumentsPiece(0, "x{")]
    held = [thing for thing in reachable(reader) if isinstance(thing, str)]
    assert max(map(len, held)) < num, "what was given out is forgotten"
