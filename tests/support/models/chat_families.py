"""Chat templates in the manner of several families, and models that write in them.

The templates are our own, and shorter than the families'. What matters is kept: which marks stand
around a turn, how calls are written, and which reasoning is dropped. Turns begin with ``<bos>`` and
end with ``<eos>``, the special tokens of ``make_tokenizer``.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken

from ostinato.server.answers.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from ostinato.server.answers.answer_parser import AnswerParser, ParsedAnswer, parse_answer
from tests.support.models.checkpoints import make_tokenizer

Message = dict[str, Any]

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_OPEN = "{% if add_generation_prompt %}<bos>assistant\n{{ opening | default('') }}{% endif %}"

_HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
)

CHATML = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}" + _HERMES_CALLS + "<eos>\n"
    "{% endfor %}" + _OPEN
)
"""Knows no reasoning."""

QWEN_TURNS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<bos>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{% else %}<bos>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content)"
    " %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}"
    "{% if m.role == 'assistant' %}{{ m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    + _HERMES_CALLS
    + "<eos>\n{% endif %}{% endfor %}"
    + _OPEN
)
QWEN = "{% if tools %}<bos>system\nTools: {{ tools | tojson }}<eos>\n{% endif %}" + QWEN_TURNS
"""Shows reasoning behind the last message of the user, and always in the last message."""

DEEPSEEK = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not ns.tool %}<bos>outputs\n{% endif %}"
    "[{{ m.content }}]{% set ns.tool = true %}"
    "{% else %}{% if ns.tool %}<eos>\n{% endif %}{% set ns.tool = false %}"
    "<bos>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments }}\n```<｜tool▁call▁end｜>"
    "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<eos>\n{% endif %}{% endfor %}"
    "{% if ns.tool and add_generation_prompt %}<eos>\n{% endif %}" + _OPEN
)
"""Drops all reasoning; takes arguments as text, and joins the results of calls."""

LLAMA = (
    "{% for m in messages %}<bos>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if not loop.first %}; {% endif %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n\n{% endif %}"
)
"""Trims contents; shows calls instead of the text beside them."""

NEEDS_CALLS = (
    "{% set ns = namespace(name=none) %}{% for m in messages %}<bos>"
    "{% if m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "{{ ns.name }} said\n{{ m.content }}{% else %}{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set ns.name = c.function.name %}"
    "to={{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
"""Refuses a result without a call, and names the call at its result."""


@dataclass(frozen=True)
class Call:
    """A call with its arguments as some writer spells them."""

    name: str
    arguments: str


def _hermes(content: str, calls: Sequence[Call]) -> str:
    written = [
        f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>'
        for c in calls
    ]
    return "\n".join([*([content] if content else []), *written])


def _deepseek(content: str, calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```"
        "<｜tool▁call▁end｜>"
        for c in calls
    )
    return content + (f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>" if calls else "")


def _llama(content: str, calls: Sequence[Call]) -> str:
    written = [f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls]
    return "; ".join(written) or content


@cache
def _tokenizer(template: str) -> Any:
    tokenizer = make_tokenizer()
    marks = [AddedToken(mark, special=False, normalized=False) for mark in MARKS]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = template
    return tokenizer


@dataclass(frozen=True)
class ChatFamily:
    """A template, and how the model writes an answer.

    Attributes:
        template: Jinja.
        tools: Name of the format of calls.
        write: From content and calls to text.
        reasons: Whether the model reasons.
        opening: What the template writes before the answer, behind the header.
        shows_text_beside_calls: Whether the format has text and calls in one answer.
    """

    template: str
    tools: str
    write: Callable[[str, Sequence[Call]], str]
    reasons: bool = True
    opening: str = ""
    shows_text_beside_calls: bool = True

    def tokenizer(self) -> Any:
        """Return a byte-level tokenizer with the marks, of which none is special."""
        return _tokenizer(self.template)

    def answer(self, reasoning: str, content: str, calls: Sequence[Call]) -> str:
        """Return what the model writes."""
        is_thought = reasoning or self.opening
        thought = f"<think>\n{reasoning}\n</think>\n\n" if is_thought else ""
        return thought.removeprefix(self.opening) + self.write(content, calls)

    def parsed(self, text: str) -> ParsedAnswer:
        """Parse the text of a turn, with all that stands behind its header."""
        parser = AnswerParser(TOOL_FORMATS[self.tools], REASONING_FORMATS["qwen3"])
        return parse_answer(text, parser)

    def turns(self, prompt: str) -> list[tuple[Any, ...]]:
        """Return the meaning of each turn of a prompt: its role, then what it says.

        Assistants say content, calls with arguments as JSON, and reasoning.
        """
        turns: list[tuple[Any, ...]] = []
        for role, text in re.findall(r"<bos>(\w+)\n+(.*?)(?:<eos>|\Z)", prompt, re.DOTALL):
            if role != "assistant":
                turns.append((role, text))
                continue
            answer = self.parsed(text)
            calls = [(call.name, json.loads(call.arguments)) for call in answer.calls]
            turns.append((role, answer.text.strip(), calls, answer.reasoning))
        return turns


FAMILIES = {
    "chatml": ChatFamily(CHATML, "hermes", _hermes),
    "qwen": ChatFamily(QWEN, "hermes", _hermes),
    "qwen-opened": ChatFamily(QWEN, "hermes", _hermes, opening="<think>\n"),
    "deepseek": ChatFamily(DEEPSEEK, "deepseek_v3", _deepseek),
    "llama": ChatFamily(LLAMA, "llama3_json", _llama, reasons=False, shows_text_beside_calls=False),
}
