"""Renders conversations with the turns of the ledger, and notes their answers there.

The ledger gives such a prompt its text, and ``known_texts`` gives the text its tokens. A turn that
is not among the known texts any more, or that stands behind another text than it was written
behind, is added to them first, with the tokens that the ledger has.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
from ostinato.engine.ledger.turns import Namespace, OpenTurn, TurnLedger, WrittenTurn
from ostinato.engine.prompts.text_tokenizer import PartlyTokenized, TextTokenizer
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.protocol.conversation import ASIDE
from ostinato.settings import KeepReasoning

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
            Namespace(prompt.cache_salt.encode(), prompt.adapter),
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
    ) -> tuple[PartlyTokenized, Continuation]:
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
