"""Conversations with the ledger of turns and no model: what it writes is given.

::

    talk = LedgerTalk(FAMILIES["qwen"])
    talk.say("user", "Which files?")
    talk.answer("I look.", "", [Call("list", '{"b": 1,"a": 2}')])
    talk.say("tool", "none")
    assert talk.prompt().tokens[: len(talk.written)] == talk.written
"""

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.engine.prompts.chat import ChatTurns, RenderedChat, WrittenAnswer, render_checked
from ostinato.engine.prompts.text_tokenizer import TextTokenizer
from ostinato.engine.requests.prompts import Prompt
from ostinato.server.answers.answer_formats import TOOL_FORMATS
from ostinato.server.prompting import read_arguments
from tests.support.models.chat_families import MARKS, Call, ChatFamily, Message

Client = Callable[[Message], Message]
"""What a client does to a message of the assistant before it sends it back."""


def drops_reasoning(message: Message) -> Message:
    """Send no reasoning."""
    return {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}


def respells(message: Message) -> Message:
    """Write arguments anew: other spaces, sorted keys."""
    calls = [
        {**c, "function": {**c["function"], "arguments": _respelled(c["function"]["arguments"])}}
        for c in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls}


def renames(message: Message) -> Message:
    """Give calls other ids."""
    calls = [{**call, "id": f"mine-{n}"} for n, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls}


def _respelled(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(", ", " : "))


class LedgerTalk:
    """One conversation of one client."""

    def __init__(
        self,
        family: ChatFamily,
        turns: ChatTurns | None = None,
        max_bytes: int = 2**20,
        keep_reasoning: Any = "template",
        **sender: Any,
    ) -> None:
        """Begin a conversation; with the ``turns`` of another one, on the same engine."""
        self.family = family
        self.tokenizer = family.tokenizer()
        if turns is None:
            texts = TextTokenizer(self.tokenizer, 2**20)
            eos = frozenset({self.tokenizer.eos_token_id})
            turns = ChatTurns(texts, max_bytes, keep_reasoning, eos, 16)
        self.turns, self.texts = turns, turns.texts
        self.without = ChatTurns(self.texts, 0, "template", frozenset(), 0)
        self.sender = Prompt(**sender)
        self.messages: list[Message] = []
        self.written: list[int] = []  # all tokens up to the end of the last answer
        self.num_calls = 0

    def say(self, role: str, content: str) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": content})

    def prompt(
        self, messages: Sequence[Message] | None = None, is_on: bool = True, **options: Any
    ) -> RenderedChat:
        """Render the conversation, or another one, as this client's prompt.

        Switched off, known texts keep their tokens as ever, and there is no ledger.
        """
        history = list(self.messages if messages is None else messages)
        shown = read_arguments(history, TOOL_FORMATS[self.family.tools].takes_text)
        sender = replace(self.sender, **options)
        turns = self.turns if is_on else self.without

        def render(messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
            return render_checked(self.tokenizer, messages, opens, opening=self.family.opening)

        template = self.family.template
        continuation = turns.continued(sender, render, shown, history, template)
        partly, continuation = turns.begin(continuation, (sender.cache_salt.encode(),))
        return turns.finished(continuation, self.texts.finish(partly))

    def answer(
        self,
        reasoning: str,
        content: str,
        calls: Sequence[Call] = (),
        client: Client = lambda message: message,
        is_ended: bool = True,
    ) -> RenderedChat:
        """Answer the conversation, and add to it what the client makes of the answer."""
        chat, text = self.prompt(), self.family.answer(reasoning, content, calls)
        assert chat.begun is not None, "the template's frames are told"
        tokens = self.spelled(text) + [self.tokenizer.eos_token_id] * is_ended
        named = []
        for call in calls:
            function = {"name": call.name, "arguments": call.arguments}
            named.append({"id": f"call_{self.num_calls}", "function": function})
            self.num_calls += 1
        message: Message = {"role": "assistant", "content": content}
        if named:
            message["tool_calls"] = named
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        _, closing, spoken = text.partition("</think>")
        num_reasoning = len(self.spelled(text.partition("</think>")[0])) + 1 if reasoning else 0
        salt = self.sender.cache_salt.encode()
        self.texts.known.note(salt, chat.tokens)
        self.texts.known.note_answer(salt, chat.tokens, array("I", tokens))
        self.turns.note(
            chat.begun,
            WrittenAnswer(message, tokens, (), spoken if closing else None, num_reasoning),
        )
        self.written = [*chat.tokens, *tokens]
        self.messages.append(client(message))
        return chat

    def spelled(self, text: str) -> list[int]:
        """Return tokens that no tokenizer would choose: a letter each, and marks."""
        pieces = re.split(f"({'|'.join(MARKS)})", text)
        row: list[int] = []
        for piece in pieces:
            parts = [piece] if piece in MARKS else list(piece)
            row += [t for part in parts for t in self.tokenizer(part)["input_ids"]]
        return row

    def text(self, chat: RenderedChat) -> str:
        """Return a prompt's text."""
        return chat.tokens.text.decode()
