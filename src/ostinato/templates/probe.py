"""Renders dialogues with a chat template, and compares each prompt with what was computed before.

A client that only appends sends, after an answer, the same messages and one more. What the engine
has computed by then is the prompt and what the model wrote after it; the next prompt should begin
with both::

    computed   <user> question <assistant> <think> reasoning </think> answer <end>
    next       <user> question <assistant> answer <end> <user> another question <assistant>
                                           └─ lost from here: the template dropped the reasoning

What the model writes is what the template itself shows of an answer while it is the last message,
since models are trained on that. Where a template never shows reasoning, as DeepSeek-R1's, it is
written between the marks that the template names.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ostinato.templates.dialogues import (
    DIALOGUES,
    PLAIN,
    REASONED_CALLS,
    REASONING,
    SWITCHES,
    Dialogue,
    Message,
    Switch,
    reasoning_of,
    with_text_arguments,
    without_reasoning,
)
from ostinato.templates.report import (
    Case,
    Cause,
    TemplateReport,
    TurnLoss,
    first_difference,
)

_SHOWN = 60
"""Letters of a text that a report shows."""

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Marks around reasoning that templates name without showing reasoning."""


class Render(Protocol):
    """Applies the chat template."""

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        has_images: bool,
        **variables: object,
    ) -> str:
        """Return a prompt's text; may raise anything."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Renders and tokenizes for one template.

    Attributes:
        template: Its text.
        render: Applies it.
        encode: Returns the tokens of a text, special tokens included.
        takes_images: Whether the model takes images.
    """

    template: str
    render: Render
    encode: Callable[[str], Sequence[int]]
    takes_images: bool = False

    def report(self, digest: str) -> TemplateReport:
        """Render all dialogues and return what is lost; raises nothing."""
        cases = [self._dialogue(dialogue) for dialogue in DIALOGUES if self._concerns(dialogue)]
        cases += [self._dropping(d) for d in (REASONING, REASONED_CALLS)]
        cases += [self._switch(switch) for switch in SWITCHES if self._reads(switch.name)]
        return TemplateReport(digest, tuple(cases))

    def _concerns(self, dialogue: Dialogue) -> bool:
        if dialogue.has_images:
            return self.takes_images
        return all(self._reads(name) for name in dialogue.variables)

    def _reads(self, variable: str) -> bool:
        """Whether the template reads a variable; a name that others contain is not one."""
        return re.search(rf"(?<![\w.'\"]){variable}\b(?!\s*[:=][^=])", self.template) is not None

    def _dialogue(self, dialogue: Dialogue) -> Case:
        """Compare along a dialogue whose client sends back all that it got."""
        return self._case(dialogue.name, dialogue, dialogue.messages, False)

    def _dropping(self, dialogue: Dialogue) -> Case:
        """Compare along a dialogue whose client sends back no reasoning."""
        sent = [without_reasoning(message) for message in dialogue.messages]
        return self._case(f"{dialogue.name}, dropped by the client", dialogue, sent, True)

    def _case(
        self, name: str, dialogue: Dialogue, sent: Sequence[Message], by_client: bool
    ) -> Case:
        try:
            if not self._shows(dialogue):
                return Case(name, "unused", by_client=by_client)
            losses = tuple(self._losses(dialogue, sent))
        except Exception as error:  # a template may raise anything
            return Case(name, "refused", (), _reason(error), by_client)
        return Case(name, "loses" if losses else "appends", losses, by_client=by_client)

    def _switch(self, switch: Switch) -> Case:
        """Compare two prompts of the same messages with another value of a variable."""
        name, values = f"change of {switch.name}", ((3, switch.before), (5, switch.after))
        try:
            before, after = (
                self._text(PLAIN.messages[:count], PLAIN, **{switch.name: value})
                for count, value in values
            )
        except Exception as error:  # a template may raise anything
            return Case(name, "refused", (), _reason(error), by_client=True)
        at = f"the change from {switch.before!r} to {switch.after!r}"
        loss = self._loss(at, 4, before, after, "variable")
        return Case(name, "loses" if loss else "appends", (loss,) if loss else (), by_client=True)

    def _shows(self, dialogue: Dialogue) -> bool:
        """Whether the template shows what a dialogue is about."""
        if dialogue.tools and "read_file" not in self._text(dialogue.messages[:1], dialogue):
            return False
        if any(reasoning_of(message) for message in dialogue.messages):
            return self._marks() is not None or self._ever_shows_reasoning(dialogue)
        return True

    def _ever_shows_reasoning(self, dialogue: Dialogue) -> bool:
        place = next(i for i, message in enumerate(dialogue.messages) if reasoning_of(message))
        shown = self._text(dialogue.messages[: place + 1], dialogue)
        return reasoning_of(dialogue.messages[place]) in shown

    def _marks(self) -> tuple[str, str] | None:
        return next((pair for pair in _MARKS if pair[1] in self.template), None)

    def _losses(self, dialogue: Dialogue, sent: Sequence[Message]) -> list[TurnLoss]:
        """Compare what was computed by each answer's end with the prompt after it.

        Args:
            dialogue: As the model saw and wrote it.
            sent: As the client sends it back.
        """
        losses = []
        for place, message in enumerate(dialogue.messages):
            if message["role"] != "assistant":
                continue
            computed = self._computed(dialogue, sent, place)
            following = place + 1
            after = self._text(sent[: following + 1], dialogue)
            role = str(sent[following]["role"])
            at = {"tool": "tool result"}.get(role, f"{role} message")
            cause = self._cause(dialogue, place, computed, after)
            loss = self._loss(at, following, computed, after, cause)
            if loss is not None:
                losses.append(loss)
        return losses

    def _computed(self, dialogue: Dialogue, sent: Sequence[Message], place: int) -> str:
        """Return the prompt of an answer, and the answer as the model writes it."""
        prompt = self._text(sent[:place], dialogue)
        answer = dialogue.messages[place]
        shown = self._text([*sent[:place], answer], dialogue)
        reasoning = reasoning_of(answer)
        marks = self._marks()
        common = first_difference(prompt, shown)
        is_told = not reasoning or reasoning in shown[common:]
        if common == len(prompt) and is_told:
            return shown
        if is_told or marks is None:  # the opening is written differently in what was answered
            return prompt + _answered(shown, prompt)
        opening = "" if prompt.rstrip().endswith(marks[0]) else f"{marks[0]}\n"
        body = _answered(shown, prompt)
        return f"{prompt}{opening}{reasoning}\n{marks[1]}\n\n{body}"

    def _cause(self, dialogue: Dialogue, place: int, computed: str, after: str) -> Cause:
        """Return why a prompt does not begin with what was computed."""
        kept = first_difference(computed, after)
        if kept == len(computed):
            return "tokens"
        earlier = [reasoning_of(message) for message in dialogue.messages[: place + 1]]
        if any(text and text in computed and text not in after for text in earlier):
            return "reasoning"
        if len(computed) - kept <= _longest_end(computed):
            return "end mark"
        opening_text = self._text(dialogue.messages[:place], dialogue, add_generation_prompt=False)
        opened = self._text(dialogue.messages[:place], dialogue)
        return "opening" if len(opening_text) <= kept <= len(opened) else "text"

    def _loss(
        self, at: str, message: int, first: str, second: str, cause: Cause
    ) -> TurnLoss | None:
        """Return what a text loses when another one follows it; None if nothing."""
        known, following = self.encode(first), self.encode(second)
        kept_tokens = first_difference(list(known), list(following))
        if kept_tokens == len(known):
            return None
        kept = _whole_marks(first, first_difference(first, second))
        return TurnLoss(
            at, message, cause, len(known) - kept_tokens, len(known),
            first[max(0, kept - _SHOWN // 2) : kept], first[kept : kept + _SHOWN],
            second[kept : kept + _SHOWN],
        )  # fmt: skip

    def _text(self, messages: Sequence[Message], dialogue: Dialogue, **variables: object) -> str:
        """Render messages; an answer is opened unless the last message is one."""
        is_open = messages[-1]["role"] != "assistant"
        more = {"add_generation_prompt": is_open, "has_images": dialogue.has_images}
        more |= {**dialogue.variables, **variables}
        tools = list(dialogue.tools) or None
        try:
            return self.render(messages, tools=tools, **more)
        except Exception:  # some templates join arguments as text
            if not any("tool_calls" in message for message in messages):
                raise
            written = with_text_arguments(messages, json.dumps)
            return self.render(written, tools=tools, **more)


def _answered(shown: str, prompt: str) -> str:
    """Return the part of a rendered answer that the model wrote, after what opens it.

    Where the opening is written differently, its marks differ from ``<`` or ``[`` on.
    """
    return shown[_whole_marks(shown, first_difference(prompt, shown)) :]


def _whole_marks(text: str, end: int) -> int:
    """Return a place at or before ``end`` that is not within a mark such as ``<think>``."""
    start = max(text.rfind("<", 0, end), text.rfind("[", 0, end))
    return start if start >= 0 and not re.search(r"[>\]]", text[start:end]) else end


def _longest_end(computed: str) -> int:
    """Return the length of what ends an answer, such as ``<|im_end|>`` and a line break."""
    start = max(computed.rfind("<"), computed.rfind("["))
    return len(computed) - start if start >= 0 else 0


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
