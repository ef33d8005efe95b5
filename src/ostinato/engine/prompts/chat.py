"""Renders conversations as prompts, with the turns of the ledger, and notes their answers there.

With a template that keeps earlier turns unchanged, every turn is a prefix of the next, and hits.

The ledger gives such a prompt its text, and ``known_texts`` gives the text its tokens. A turn that
is not among the known texts any more, or that stands behind another text than it was written
behind, is added to them first, with the tokens that the ledger has.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ostinato.core.errors import RequestError
from ostinato.engine.ledger.continuation import (
    Continuation,
    Conversation,
    Render,
    TurnContinuer,
    TurnReport,
    root_of,
    with_image_digests,
)
from ostinato.engine.ledger.meaning import (
    Message,
    call_ids_of,
    digest,
    meaning_of,
    reasoning_of,
)
from ostinato.engine.ledger.reports import ReportBook
from ostinato.engine.ledger.seal import TurnName, TurnSeal
from ostinato.engine.ledger.turns import OpenTurn, TurnLedger, TurnScope, WrittenTurn
from ostinato.engine.prompts.text_tokenizer import PartialText, TextTokenizer
from ostinato.engine.requests.prompts import Prompt, whole_characters
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.protocol.conversation import ASIDE
from ostinato.settings import KeepReasoning


def is_conversation(messages: object) -> bool:
    """Whether it is one conversation rather than a list of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        return True  # ``render_text`` refuses it
    return bool(messages) and not isinstance(messages[0], Sequence)


def sections_of(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Name the texts of a conversation, in order, so that explanations can place a difference."""
    sections: list[tuple[str, str]] = []
    for place, message in enumerate(messages):
        name = f"messages[{place}] ({message['role']})"
        content = message.get("content")
        if isinstance(content, str):
            sections.append((name, content))
        elif isinstance(content, Sequence):
            parts = [part for part in content if isinstance(part, Mapping)]
            sections += [
                (name, part["text"]) for part in parts if isinstance(part.get("text"), str)
            ]
    return tuple(sections)


def render_chat(tokenizer: Any, messages: Sequence[Message], **settings: Any) -> list[int]:
    """Write a conversation as token ids; as ``render_text``."""
    text = render_text(tokenizer, messages, **settings)
    # Not verbose: admission refuses a prompt that is too long.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_text(
    tokenizer: Any, messages: Sequence[Message], *, has_images: bool = False, **options: Any
) -> str:
    """Check a conversation, and write it as ``render_checked``.

    Args:
        tokenizer: Of ``transformers``.
        messages: In order; at least one.
        has_images: Whether ``{"type": "image"}`` stands for an image that is loaded.
        **options: Of ``render_checked``.

    Raises:
        RequestError: There is no message or no template, or the template refuses.
    """
    check_messages(messages, has_images)
    return render_checked(tokenizer, messages, **options)


def render_checked(
    tokenizer: Any,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> str:
    """Write a conversation that ``check_messages`` accepts as the text of a prompt.

    Args:
        tokenizer: Of ``transformers``.
        messages: In order; at least one.
        add_generation_prompt: Whether to open the assistant's turn.
        chat_template: Jinja; None is the tokenizer's own.
        tools: Functions that the model may call, in OpenAI's form; a template without tools leaves
            them out.
        **options: More arguments of ``apply_chat_template``: ``continue_final_message``, and what
            the template itself reads, such as ``enable_thinking``.

    Raises:
        RequestError: There is no template, or it refuses.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: give chat_template, or use generate()"
        )
    template = chat_template or str(tokenizer.chat_template)
    if "image" in template and _reads_parts_only(tokenizer, template):
        messages = _in_parts(messages)
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=chat_template,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **options,
            tokenize=False,
        )
    except Exception as error:  # a template may raise anything
        raise RequestError(f"the chat template refuses these messages: {error}") from error
    return whole_characters("messages", str(text))


def check_messages(messages: Any, has_images: bool = False) -> None:
    """Raise ``RequestError`` for what is no conversation, or has media that were not loaded."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f"a conversation must be a list of messages, not {type(messages).__name__} "
            f"({messages!r:.80})"
        )
    if not messages:
        raise RequestError("messages is empty: a conversation needs at least one message")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise RequestError(
                f"message {position} is {message!r:.80}: it needs a 'role' and a 'content'"
            )
        if not isinstance(message["content"], str):
            _check_parts(position, message["content"], has_images)


def _check_parts(position: int, content: object, has_images: bool) -> None:
    """Refuse media that were not loaded: a template would write their place, empty."""
    for part in content if isinstance(content, Sequence) else ():
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if has_images and part == {"type": "image"}:
            continue
        if any(medium in kind for medium in ("image", "audio", "video")):
            raise RequestError(
                f"message {position} has a part of type {kind!r}, of which nothing is loaded here: "
                "images are taken by chat(), audio and video are not served; leave the part out"
            )


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that knows contents only as parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]


@lru_cache(maxsize=16)
def _reads_parts_only(tokenizer: Any, template: str) -> bool:
    """Whether a template leaves out a content that is a text."""
    messages = [{"role": "user", "content": _MARK}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # a template may raise anything
        return True
    return _MARK not in text


_MARK = "a content as text"


_CONTEXT_TOKENS = 8
"""Tokens before an answer that are kept to decode it after."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a prompt.

    Attributes:
        tokens: The prompt.
        report: What the ledger put back, and what the template dropped.
        begun: Where the answer is noted; None if it is not.
    """

    tokens: TokenizedText
    report: TurnReport
    begun: OpenTurn | None

    def prompt(self, context: Prompt) -> Prompt:
        """Return it as a prompt of the sender that ``context`` names."""
        ids, text = self.tokens, self.tokens.text.decode()
        return replace(
            context, text=text, token_ids=ids, known=ids, begun=self.begun, report=self.report
        )


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """An answer as its client gets it, and as the model wrote it.

    Attributes:
        message: The assistant's message: content, calls and reasoning.
        tokens: All that was generated, but for a token that only ended it.
        marks: Special tokens that may be among them, since the message has their meaning.
        spoken: The text behind the reasoning; None if there is no reasoning, or it is unknown.
        num_reasoning_tokens: Tokens of the reasoning, marks included.
    """

    message: Message
    tokens: Sequence[int]
    marks: Collection[int] = ()
    spoken: str | None = None
    num_reasoning_tokens: int = 0


class ChatTurns:
    """The ledger of one engine; safe in any thread.

    Attributes:
        texts: Gives texts their tokens.
        ledger: The turns.
        seal: Seals names of turns for clients.
        reports: What was done to the last requests.
    """

    def __init__(
        self,
        texts: TextTokenizer,
        max_bytes: int,
        keep_reasoning: KeepReasoning,
        eos_token_ids: frozenset[int],
        max_reports: int,
    ) -> None:
        self.ledger, self.seal = TurnLedger(max_bytes), TurnSeal()
        self.reports = ReportBook(max_reports)
        self.texts, self._eos = texts, eos_token_ids
        self._keep_reasoning = keep_reasoning

    def continued(
        self,
        prompt: Prompt,
        render: Render,
        messages: Sequence[Message],
        history: Sequence[Message] | None = None,
        template: str = "",
        opens_turn: bool = True,
    ) -> Continuation:
        """Return the text of a conversation's prompt.

        Args:
            prompt: Names the sender, its adapter, its images and how it uses the ledger.
            render: Writes messages by the chat template.
            messages: The conversation as the template reads it.
            history: The conversation as the client sent it; None is ``messages``.
            template: The chat template.
            opens_turn: Whether the prompt opens the assistant's turn.

        Raises:
            RequestError: The template refuses the conversation.
        """
        history = messages if history is None else history
        if ASIDE in set[str]().union(*messages):
            messages = [{k: v for k, v in m.items() if k != ASIDE} for m in messages]
        if not (self.ledger.is_on and prompt.keep_tokens):
            return Continuation(render(messages, opens_turn))
        keep = prompt.keep_reasoning or self._keep_reasoning
        talk = Conversation(
            TurnScope(prompt.cache_salt.encode(), prompt.adapter),
            root_of(template),
            with_image_digests(history, prompt.images) if prompt.images else history,
            messages,
            keep == "always",
            opens_turn,
        )
        spell = self.texts.spell
        return TurnContinuer(self.ledger, self.seal, spell, render, talk).continuation()

    def begin(
        self, continuation: Continuation, namespaces: Sequence[bytes]
    ) -> tuple[PartialText, Continuation]:
        """Find what is known of a prompt, its written turns among it.

        Args:
            continuation: The prompt.
            namespaces: Whose texts may be used; the first is the sender's own.

        Returns:
            What is known, and the prompt with all turns counted whose tokens were put back.

        Effects: turns whose tokens are not known at their place become known texts.
        """
        begin, known, text = self.texts.begin, self.texts.known, continuation.text
        partly, report = begin(text, namespaces), continuation.report
        for part in continuation.placed if self.texts.boundaries.ids else ():
            head = text[: part.start]
            written = self.texts.spell(part.turn.tokens, part.turn.context)
            end = len(head.encode()) + len(written.encode())
            if partly.end < end:
                before = self.texts.finish(begin(head, namespaces))
                known.note(namespaces[0], before)
                known.note_answer(namespaces[0], before, part.turn.tokens)
                partly = begin(text, namespaces)
                if partly.end < end:  # the text cannot be cut there
                    break
                if not part.is_restored:
                    num_tokens = report.num_restored_tokens + len(part.turn.tokens)
                    report = replace(
                        report,
                        num_restored=report.num_restored + 1,
                        num_restored_tokens=num_tokens,
                    )
        return partly, replace(continuation, report=report)

    def finished(self, continuation: Continuation, tokens: TokenizedText) -> RenderedChat:
        """Return a tokenized conversation, with places in tokens, and register its answer."""
        report, begun = continuation.report, continuation.begun
        if begun is not None:
            begun.context = tokens.tokens[-_CONTEXT_TOKENS:]
            self.ledger.begin(begun)
        if report.dropped:
            report = replace(
                report,
                dropped=tuple(
                    replace(
                        drop, place=self._num_tokens_before(continuation.text, drop.place, tokens)
                    )
                    for drop in report.dropped
                ),
            )
        return RenderedChat(tokens, report, begun)

    def name(self, begun: OpenTurn, index: int = 0) -> str:
        """Return the sealed name of a turn that is being generated."""
        name = TurnName(begun.place, begun.number(index))
        return self.seal.seal(begun.namespace.data, name)

    def note(self, begun: OpenTurn, answer: WrittenAnswer, index: int = 0) -> bool:
        """Note what was written; returns False if it may not be kept.

        Args:
            begun: As the prompt was rendered.
            answer: The answer.
            index: Which continuation of the prompt.
        """
        tokens, thought = array("I", answer.tokens), reasoning_of(answer.message)
        if tokens and tokens[-1] in self._eos:
            tokens.pop()
        for token in set(tokens).difference(answer.marks):
            if self.texts.table.entry(token).special:
                return False  # the client saw a text without it
        turn = WrittenTurn(
            begun.number(index),
            meaning_of(answer.message),
            digest(thought) if thought else b"",
            call_ids_of(answer.message),
            tokens,
            begun.context,
            begun.opening,
            answer.spoken,
            answer.num_reasoning_tokens,
        )
        return self.ledger.note(begun, turn)

    def remember(self, request_id: str, salt: bytes, report: TurnReport) -> None:
        """Count what was done to a request that was accepted, and remember it."""
        if report != TurnReport():
            report.count(self.ledger)
            self.reports.add(request_id, salt, report)

    def erase(self, tenant: bytes) -> int:
        """Remove all of a tenant; returns how many turns that was."""
        self.reports.erase(tenant)
        return self.ledger.erase(tenant)

    def clear(self) -> int:
        """Remove everything; returns how many turns that was."""
        self.reports.clear()
        return self.ledger.clear()

    def _num_tokens_before(self, text: str, place: int, tokens: TokenizedText) -> int:
        return self.texts.num_tokens_before(tokens, len(text[:place].encode()))
