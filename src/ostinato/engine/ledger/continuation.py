"""A prompt of frames and written turns.

Each message of the assistant is looked up at its place. One that means what was written there is
put back as it was written:

=========================================  ==================================================
the turn is                                its text in the prompt
=========================================  ==================================================
behind the last message of the user        all that was written, reasoning included
before it, and the template writes all     all that was written
before it, and the template drops part     what was written behind the reasoning
not in the ledger, or unequal              what the template writes
=========================================  ==================================================

A message that lists a turn's calls as text, with their ids, means that turn (``listed_calls``). The
user's message behind it has their results, so it does not end the loop.

Whether a template drops reasoning is tried: the reasoning of each known turn is a mark when the
conversation is rendered.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.engine.ledger.frames import Frames, cut, frames_between, make_marks
from ostinato.engine.ledger.listed_calls import with_listed_calls
from ostinato.engine.ledger.meaning import (
    REASONING_KEYS,
    Message,
    call_ids_of,
    digest,
    meaning_of,
    places,
    reasoning_of,
)
from ostinato.engine.ledger.seal import TurnSeal
from ostinato.engine.ledger.turns import OpenTurn, TurnLedger, TurnScope, WrittenTurn
from ostinato.images.picture import Picture
from ostinato.protocol.conversation import ASIDE

Render = Callable[[Sequence[Message], bool], str]
"""From messages to text; the second argument is whether to open the assistant's turn."""

Spell = Callable[["array[int]", "array[int]"], str]
"""From tokens, and those before them, to text; special ones included."""

_NEXT: tuple[Message, ...] = (
    {"role": "tool", "content": "?", "tool_call_id": "000000000"},
    {"role": "user", "content": "?"},
)
"""What follows an answer, so that it is not the last message: templates write that one in another
way. A result leaves the answer in its loop; a template that refuses it gets a question."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from.

    Attributes:
        namespace: Whose turns may be put back.
        root: The place before the first message.
        history: The messages as the client sent them.
        messages: The messages as the template reads them.
        always: Whether reasoning is kept where the template drops it.
        opens_turn: Whether the prompt ends with the beginning of an answer.
    """

    namespace: TurnScope
    root: bytes
    history: Sequence[Message]
    messages: Sequence[Message]
    always: bool = False
    opens_turn: bool = True


@dataclass(frozen=True, slots=True)
class DroppedReasoning:
    """Reasoning that the model wrote and the template left out of a prompt.

    Attributes:
        message: The number of the message, from 0.
        num_tokens: Tokens of the reasoning.
        place: Where it would begin: bytes of the prompt's text, then its tokens.
    """

    message: int
    num_tokens: int
    place: int


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What the ledger did to one prompt.

    Attributes:
        num_turns: Turns of the assistant that it knew.
        num_restored: Of those, how many it put back where the template writes something else.
        num_restored_tokens: The tokens of those.
        num_reasoning: How many of them had reasoning that the client had dropped.
        num_listed: How many turns the client sent as a text that lists their calls.
        num_unequal: Messages that differ from all that was written at their place.
        num_seals: Sealed names that chose a turn.
        num_ignored_seals: Sealed names without effect.
        dropped: Reasoning that the template left out.
    """

    num_turns: int = 0
    num_restored: int = 0
    num_restored_tokens: int = 0
    num_reasoning: int = 0
    num_listed: int = 0
    num_unequal: int = 0
    num_seals: int = 0
    num_ignored_seals: int = 0
    dropped: tuple[DroppedReasoning, ...] = ()

    def count(self, ledger: TurnLedger) -> None:
        """Add it to the ledger's counters."""
        ledger.count(
            restored=self.num_restored,
            restored_tokens=self.num_restored_tokens,
            restored_reasoning=self.num_reasoning,
            unequal=self.num_unequal,
            opened_seals=self.num_seals,
            ignored_seals=self.num_ignored_seals,
            dropped=len(self.dropped),
            dropped_tokens=sum(drop.num_tokens for drop in self.dropped),
        )


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """A turn that stands in a prompt as it was written.

    Attributes:
        start: Letters of the prompt before its first token.
        turn: The turn.
        is_restored: Whether it is counted as put back, since the template writes another text.
    """

    start: int
    turn: WrittenTurn
    is_restored: bool


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt's text, and what is known of its turns.

    Attributes:
        text: The prompt.
        report: What was put back and dropped; places of ``dropped`` are in letters.
        placed: The turns that stand in it with all of their tokens.
        begun: Where the answer is noted; None if it is not.
    """

    text: str
    report: TurnReport = field(default_factory=TurnReport)
    placed: tuple[PlacedTurn, ...] = ()
    begun: OpenTurn | None = None


@lru_cache(maxsize=16)
def root_of(template: str) -> bytes:
    """Return the place before the first message of a conversation.

    Tools are no part of it: what a message means does not depend on them, and agents add some.
    """
    return digest("root", template)


@dataclass(slots=True)
class _Known:
    """A message of the conversation with its turn in the ledger.

    Attributes:
        number: Number of the message in the history.
        message: The message as it was sent.
        turn: What was written.
        is_in_loop: Whether it is behind the last message of the user.
        thought: A mark in place of its reasoning.
    """

    number: int
    message: Message
    turn: WrittenTurn
    is_in_loop: bool
    thought: str = ""


class TurnContinuer:
    """Continues one conversation."""

    def __init__(
        self, ledger: TurnLedger, seal: TurnSeal, spell: Spell, render: Render, talk: Conversation
    ) -> None:
        """Take a conversation.

        Args:
            ledger: The turns.
            seal: Opens sealed names.
            spell: Writes tokens as text.
            render: Writes messages by the chat template.
            talk: The conversation.
        """
        self._ledger, self._seal, self._spell = ledger, seal, spell
        self._render, self._talk = render, talk
        self._report = TurnReport()
        *self._places, self._end = places(talk.root, talk.history)

    def continuation(self) -> Continuation:
        """Render the conversation, with the turns of the ledger as they were written.

        Raises:
            RequestError: The template refuses it.

        Cost: two renderings; one if the template refuses the conversation with marks.
        """
        talk = self._talk
        numbers = places = _answers(talk.history)
        if talk.messages is not talk.history:
            places = _answers(talk.messages)
        is_alike, turns = len(numbers) == len(places), dict[int, _Known]()
        if is_alike and numbers:
            at = dict(zip(numbers, places, strict=True))  # the number of a message for the template
            turns = {at[number]: turn for number, turn in self._known(numbers).items()}
        messages = self._with_thoughts(turns) if turns else talk.messages
        rendered = self._render(messages, talk.opens_turn)
        frames: Frames | None = None
        for following in _NEXT if is_alike else ():
            frames = frames or self._frames(rendered, turns, following)
        if frames is None:
            plain = self._render(talk.messages, talk.opens_turn) if turns else rendered
            return Continuation(plain, self._seals_only())
        return self._composed(frames, list(turns.values()))

    def _known(self, numbers: Sequence[int]) -> dict[int, _Known]:
        """Look up the messages of the assistant, up to the first that is unequal."""
        history = self._talk.history
        chosen, listed = dict[int, WrittenTurn](), set[int]()
        for number in numbers:
            message, turns = history[number], list[WrittenTurn]()
            if not self._report.num_unequal:
                turns = self._ledger.at(self._talk.namespace, self._places[number])
            equal = _equal(turns, message)
            if turns and not equal:
                equal = _listed(turns, message)
                listed.update([number] if equal else ())
                self._add(num_unequal=not equal, num_listed=bool(equal))
            sealed, ids = self._sealed(turns, number), call_ids_of(message)
            equal.sort(key=lambda turn: (turn.number not in sealed, turn.call_ids != ids))
            chosen.update((number, turn) for turn in equal[:1])
        asks = (n for n, m in enumerate(history) if _asks(m) and n - 1 not in listed)
        last = max(asks, default=-1)
        return {n: _Known(n, history[n], turn, n > last) for n, turn in chosen.items()}

    def _sealed(self, turns: Sequence[WrittenTurn], number: int) -> set[bytes]:
        """Return the numbers of turns that a message's sealed names choose."""
        aside, place = self._talk.history[number].get(ASIDE) or {}, self._places[number]
        sealed = aside.get("seals", ())
        names = [self._seal.open(self._talk.namespace.data, text) for text in sealed]
        present = {turn.number for turn in turns}
        chosen = {n.number for n in names if n is not None and n.place == place} & present
        self._add(num_seals=len(chosen), num_ignored_seals=len(sealed) - len(chosen))
        return chosen

    def _with_thoughts(self, turns: dict[int, _Known]) -> list[Message]:
        """Return the messages with a mark in place of the reasoning of known turns."""
        messages = list(self._talk.messages)
        for number, known in turns.items():
            if known.turn.reasoning:
                [known.thought] = make_marks(1)
                messages[number] = {
                    **messages[number],
                    **dict.fromkeys(REASONING_KEYS, known.thought),
                }
        return messages

    def _frames(self, rendered: str, turns: dict[int, _Known], following: Message) -> Frames | None:
        """Cut a rendered conversation at the known turns, and at the answer before ``following``.

        Returns:
            None if the template refuses it with marks, or does not keep its frames.
        """
        talk, messages = self._talk, list(self._talk.messages)
        marks = make_marks(len(turns) + talk.opens_turn)
        for number, mark in zip(turns, marks, strict=False):
            messages[number] = {"role": "assistant", "content": mark}
        if talk.opens_turn:
            messages += [{"role": "assistant", "content": marks[-1]}, following]
        try:
            marked = self._render(messages, False)
        except RequestError:  # such as a template that wants a call before each result
            return None
        texts = frames_between(marked, marks)
        if texts is None:
            return None
        frames = cut(rendered, texts[:-1] if talk.opens_turn else texts)
        return None if frames is None or (frames.opening and not talk.opens_turn) else frames

    def _composed(self, frames: Frames, turns: Sequence[_Known]) -> Continuation:
        """Write the known turns between the frames."""
        pieces, length = [frames.texts[0]], len(frames.texts[0])
        placed, dropped = list[PlacedTurn](), list[DroppedReasoning]()
        for known, template, frame in zip(turns, frames.turns, frames.texts[1:], strict=True):
            turn, is_whole = known.turn, self._is_whole(known, template)
            if is_whole:
                body = turn.opening + self._spell(turn.tokens, turn.context)
            else:
                body = self._without_reasoning(known, template)
                if turn.num_reasoning_tokens:
                    drop = DroppedReasoning(known.number, turn.num_reasoning_tokens, length)
                    dropped.append(drop)
            is_restored = self._count(known, template, body, is_whole)
            if is_whole:
                placed.append(PlacedTurn(length + len(turn.opening), turn, is_restored))
            pieces += [body, frame]
            length += len(body) + len(frame)
        report = replace(self._report, num_turns=len(turns), dropped=tuple(dropped))
        begun = None
        if self._talk.opens_turn:
            begun = OpenTurn(self._talk.namespace, self._end, frames.opening, array("I"))
        text = "".join([*pieces, frames.opening])
        return Continuation(text, report, tuple(placed), begun)

    def _is_whole(self, known: _Known, template: str) -> bool:
        """Whether a turn is put back with its reasoning, and with all that the template opened."""
        if known.is_in_loop or self._talk.always:
            return True
        turn, content = known.turn, known.message.get("content")
        if isinstance(content, str) and content.strip() not in template:
            return False  # it has reasoning of its own, which the template drops
        if turn.reasoning:
            return known.thought in template
        return template.lstrip().startswith(turn.opening.strip())

    def _without_reasoning(self, known: _Known, template: str) -> str:
        """Return what was written behind the reasoning, in the template's white space."""
        turn = known.turn
        if known.thought and known.thought in template:
            return template.replace(known.thought, reasoning_of(known.message))
        spoken = turn.spoken
        if spoken is None and not turn.reasoning:
            spoken = self._spell(turn.tokens, turn.context)
        content = known.message.get("content")
        is_cut = isinstance(content, str) and content.strip() not in template
        if spoken is None or is_cut:
            return template
        bare = template.strip()
        lead = template[: len(template) - len(template.lstrip())]
        return lead + spoken.strip() + template[len(lead) + len(bare) :]

    def _count(self, known: _Known, template: str, body: str, is_whole: bool) -> bool:
        """Count a turn if the template would have written it otherwise; returns whether it does."""
        sent = reasoning_of(known.message)
        if known.thought:
            template = template.replace(known.thought, sent.strip("\n"))
        if body != template:
            is_missing = is_whole and bool(known.turn.reasoning) and not sent
            num_tokens = len(known.turn.tokens)
            if not is_whole:
                num_tokens -= known.turn.num_reasoning_tokens
            self._add(num_restored=1, num_restored_tokens=num_tokens, num_reasoning=is_missing)
        return body != template

    def _seals_only(self) -> TurnReport:
        """Return the report of a prompt into which nothing was put back."""
        report = self._report
        ignored = report.num_seals + report.num_ignored_seals
        return TurnReport(num_unequal=report.num_unequal, num_ignored_seals=ignored)

    def _add(self, **amounts: int) -> None:
        sums: dict[str, Any] = {k: getattr(self._report, k) + n for k, n in amounts.items()}
        self._report = replace(self._report, **sums)


def _answers(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the assistant's messages."""
    return [n for n, message in enumerate(messages) if message.get("role") == "assistant"]


def _equal(turns: Sequence[WrittenTurn], message: Message) -> list[WrittenTurn]:
    """Return the turns that a message means."""
    meaning, thought = meaning_of(message), reasoning_of(message)
    reasoning = digest(thought) if thought else b""
    return [t for t in turns if t.meaning == meaning and reasoning in (b"", t.reasoning)]


def _listed(turns: Sequence[WrittenTurn], message: Message) -> list[WrittenTurn]:
    """Return the turns whose calls, ids included, a message lists as text."""
    called = with_listed_calls(message)
    if called is None or not all(ids := call_ids_of(called)):
        return []
    return [turn for turn in _equal(turns, called) if turn.call_ids == ids]


def _asks(message: Message) -> bool:
    """Whether it is a question of the user, not what the user says beside the result of a call."""
    aside = message.get(ASIDE) or {}
    return message.get("role") == "user" and not aside.get("is_beside_result", False)


def with_image_digests(messages: Sequence[Message], images: Sequence[Picture]) -> list[Message]:
    """Name the images of messages by their content, in order, so that places depend on them."""
    left = iter(images)

    def named(part: Any) -> Any:
        return {**part, "digest": next(left).digest.hex()} if part == {"type": "image"} else part

    return [
        {**m, "content": [named(part) for part in m["content"]]}
        if isinstance(m.get("content"), list)
        else m
        for m in messages
    ]
