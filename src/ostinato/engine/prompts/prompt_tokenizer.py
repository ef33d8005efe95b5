"""Turns the texts and images of one engine's prompts into token ids."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ostinato.core.identity import ImageSpan
from ostinato.engine.ledger.continuation import Continuation, Render
from ostinato.engine.ledger.meaning import Message
from ostinato.engine.prompts.chat import ChatTurns, WrittenAnswer, check_messages, render_checked
from ostinato.engine.prompts.image_prompts import ImagePrompts
from ostinato.engine.prompts.public_prefixes import PublicPrefixes
from ostinato.engine.prompts.text_tokenizer import PartialText, TextTokenizer
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.request_state import RequestState
from ostinato.engine.requests.request_validation import PreparedRequest, tokenize
from ostinato.engine.requests.scored_prompts import ScoredPrompts
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.runner.images.store import ServedImage
from ostinato.runner.loaded_model import LoadedModel


class PromptTokenizer:
    """Tokenizes prompts, and remembers which tokens their texts and answers have.

    Attributes:
        texts: Tokenizes texts, and remembers them; None if the checkpoint has no tokenizer.
        turns: Continues conversations with what was written; None without a tokenizer.
        scored: Log-probabilities of the last scored prompts.
        images: Loads the images of prompts; safe in any thread.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, public_prefixes: PublicPrefixes
    ) -> None:
        max_bytes = config.keep_texts_bytes if config.keep_tokens else 0
        tokenizer = loaded.tokenizer
        self.texts = None if tokenizer is None else TextTokenizer(tokenizer, max_bytes)
        self.turns: ChatTurns | None = None
        if self.texts is not None:
            ledger_bytes = config.ledger_bytes if config.keep_tokens else 0
            self.turns = ChatTurns(
                self.texts,
                ledger_bytes,
                config.keep_reasoning,
                loaded.eos_token_ids,
                config.keep_explanations,
            )
        self.scored = ScoredPrompts()
        self.images = ImagePrompts(loaded, config.media, config.max_images)
        self._loaded = loaded
        self._keep_tokens = config.keep_tokens
        self._keeps_scores = config.enable_prefix_caching
        self._public_prefixes = public_prefixes

    def with_placeholders(self, prompt: Prompt) -> Prompt:
        """Return a prompt whose text has one placeholder token for each of its images."""
        if not prompt.images or prompt.text is None or prompt.token_ids is not None:
            return prompt
        return replace(prompt, text=self.images.spelled(prompt.text, prompt.images))

    def placed(
        self, prompt: Prompt, tokens: "array[int]"
    ) -> tuple["array[int]", tuple[ServedImage, ...], tuple[ImageSpan, ...]]:
        """Return a prompt's tokens, its images, and where they are among them."""
        if not prompt.images:
            return tokens, (), ()
        return self.images.place(prompt.images, tokens, prompt.cache_salt.encode())

    def tokenized(self, prompt: Prompt, max_tokens: int | None = None) -> Prompt:
        """Return a prompt with its ids; what is known of its text is not tokenized again.

        Raises:
            MissingTokenizer: It is a text, and the checkpoint has no tokenizer.
            PromptTooLong: A text is certainly longer than ``max_tokens`` tokens.
        """
        if prompt.token_ids is not None:
            return prompt
        if self.texts is None or not self.texts.takes_prompts:
            return replace(prompt, token_ids=tokenize(prompt, self._loaded, max_tokens))
        partly = self.begin_text(prompt.text or "", prompt)
        return self.with_ids(prompt, self.texts.finish(partly, max_tokens=max_tokens))

    def tokenized_chat(self, prompt: Prompt, continuation: Continuation) -> Prompt:
        """Return a prompt that is a conversation, with its ids."""
        assert self.texts is not None and self.turns is not None, "conversations need a tokenizer"
        partly, continuation = self.begin_chat(continuation, prompt)
        return self.turns.finished(continuation, self.texts.finish(partly)).prompt(prompt)

    def begin_text(self, text: str, prompt: Prompt) -> PartialText:
        """Find what is known of a text for the sender of a prompt; safe in any thread."""
        assert self.texts is not None, "there is a tokenizer"
        is_kept = self._keep_tokens and prompt.keep_tokens
        return self.texts.begin(text, self._namespaces(prompt), is_kept)

    def continued(
        self,
        prompt: Prompt,
        messages: Sequence[Message],
        chat_template: str | None = None,
        history: Sequence[Message] | None = None,
        **settings: Any,
    ) -> Continuation:
        """Write a conversation as a text, with its turns as they were written.

        Args:
            prompt: Names the sender, and has the images.
            messages: As the template reads them.
            chat_template: Jinja; None is the tokenizer's own.
            history: The messages as the client sent them; None if they are the same.
            **settings: As of ``render_text``.

        Raises:
            RequestError: There is no message or no template, or the template refuses.
        """
        assert self.turns is not None, "conversations need a tokenizer"
        tokenizer = self._loaded.require_tokenizer()
        check_messages(messages, bool(prompt.images))
        opens = settings.pop("add_generation_prompt", True)
        own = {"chat_template": chat_template, **settings}
        render: Render = partial(render_checked, tokenizer, **own)
        if settings.get("continue_final_message"):
            return Continuation(render(messages, opens))
        template = str(chat_template or getattr(tokenizer, "chat_template", None))
        return self.turns.continued(prompt, render, messages, history, template, opens)

    def begin_chat(
        self, continuation: Continuation, prompt: Prompt
    ) -> tuple[PartialText, Continuation]:
        """Find what is known of a conversation's prompt; as ``ChatTurns.begin``."""
        assert self.turns is not None, "conversations need a tokenizer"
        if prompt.images:
            text = self.images.spelled(continuation.text, prompt.images)
            return self.begin_text(text, prompt), continuation
        if not continuation.placed:
            return self.begin_text(continuation.text, prompt), continuation
        return self.turns.begin(continuation, self._namespaces(prompt))

    def with_ids(self, prompt: Prompt, known: TokenizedText) -> Prompt:
        """Return a prompt that is a text with its ids."""
        assert self.texts is not None, "there is a tokenizer"
        return replace(prompt, token_ids=self.texts.with_special_tokens(known), known=known)

    def note(self, prepared: PreparedRequest) -> None:
        """Remember the tokens of a prompt that is a text, and what the ledger did to it."""
        if prepared.known is not None and self.texts is not None:
            self.texts.known.note(prepared.request.identity.tenant, prepared.known)
        if prepared.report is not None and self.turns is not None:
            self.turns.remember(
                prepared.request.request_id, prepared.request.identity.tenant, prepared.report
            )

    def note_answers(self, state: RequestState) -> None:
        """Remember which tokens a prompt's continuations are made of, and the turns they are.

        Of a prompt that was scored as a whole, the log-probabilities as well, if there is a cache.
        """
        request = state.request
        count = state.params.prompt_logprobs if self._keeps_scores else None
        if count is not None and state.error is None and request.cache_write:
            prompt = request.prompt_token_ids
            self.scored.note(request.identity, prompt, count, state.prompt_rows)
        if state.known is not None and self.texts is not None:
            for answer in state.answers():
                self.texts.known.note_answer(state.request.identity.tenant, state.known, answer)
        if state.begun is not None and self.turns is not None and state.params.detokenize:
            for index, text, tokens in state.whole_answers():
                message = {"role": "assistant", "content": text}
                self.turns.note(state.begun, WrittenAnswer(message, tokens), index)

    def remove_texts(self, tenant: bytes | None = None) -> tuple[int, int]:
        """Remove the known texts and the turns of a tenant, or all; returns how many of each."""
        self.scored.erase(tenant)
        if self.texts is None or self.turns is None:
            return 0, 0
        known, turns = self.texts.known, self.turns
        if tenant is None:
            return known.clear(), turns.clear()
        return known.erase(tenant), turns.erase(tenant)

    def _namespaces(self, prompt: Prompt) -> tuple[bytes, ...]:
        """Return whose texts a prompt may use, its sender's own first."""
        own, public = prompt.cache_salt.encode(), self._public_prefixes
        return (own, *public.salts_of(prompt.public_prefixes)) if public.by_name else (own,)
