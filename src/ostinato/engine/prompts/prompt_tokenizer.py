"""Turns the texts and images of one engine's prompts into token ids."""

from array import array
from dataclasses import replace

from ostinato.core.identity import ImageSpan
from ostinato.engine.prompts.image_prompts import ImagePrompts
from ostinato.engine.prompts.public_prefixes import PublicPrefixes
from ostinato.engine.prompts.text_tokenizer import PartlyTokenized, TextTokenizer
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.request_state import RequestState
from ostinato.engine.requests.request_validation import PreparedRequest, tokenize
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.text.tokenized_text import TokenizedText
from ostinato.runner.images.store import ServedImage
from ostinato.runner.model_loader import LoadedModel


class PromptTokenizer:
    """Tokenizes prompts, and remembers which tokens their texts and answers have.

    Attributes:
        texts: Tokenizes texts, and remembers them; None if the checkpoint has no tokenizer.
        images: Loads the images of prompts; safe in any thread.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, public_prefixes: PublicPrefixes
    ) -> None:
        max_bytes = config.keep_texts_bytes if config.keep_tokens else 0
        tokenizer = loaded.tokenizer
        self.texts = None if tokenizer is None else TextTokenizer(tokenizer, max_bytes)
        self.images = ImagePrompts(loaded, config.media, config.max_images)
        self._loaded = loaded
        self._keep_tokens = config.keep_tokens
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

    def tokenized(self, prompt: Prompt, most: int | None = None) -> Prompt:
        """Return a prompt with its ids; what is known of its text is not tokenized again.

        Raises:
            MissingTokenizer: It is a text, and the checkpoint has no tokenizer.
            PromptTooLong: A text is certainly longer than ``most`` tokens.
        """
        if prompt.token_ids is not None:
            return prompt
        if self.texts is None or not self.texts.takes_prompts:
            return replace(prompt, token_ids=tokenize(prompt, self._loaded, most))
        partly = self.begin_text(prompt.text or "", prompt)
        return self.with_ids(prompt, self.texts.finish(partly, most=most))

    def tokenized_chat(self, prompt: Prompt, text: str) -> Prompt:
        """Return a prompt that is a conversation, written as a text, with its ids."""
        assert self.texts is not None, "conversations need a tokenizer"
        text = self.images.spelled(text, prompt.images)
        known = self.texts.finish(self.begin_text(text, prompt))
        return replace(prompt, text=text, token_ids=known, known=known)

    def begin_text(self, text: str, prompt: Prompt) -> PartlyTokenized:
        """Find what is known of a text for the sender of a prompt; safe in any thread."""
        assert self.texts is not None, "there is a tokenizer"
        names = self._public_prefixes.salts_of(prompt.public_prefixes)
        is_kept = self._keep_tokens and prompt.keep_tokens
        return self.texts.begin(text, (prompt.cache_salt.encode(), *names), is_kept)

    def with_ids(self, prompt: Prompt, known: TokenizedText) -> Prompt:
        """Return a prompt that is a text with its ids."""
        assert self.texts is not None, "there is a tokenizer"
        return replace(prompt, token_ids=self.texts.with_special_tokens(known), known=known)

    def note(self, made: PreparedRequest) -> None:
        """Remember the tokens of a prompt that is a text."""
        if made.known is not None and self.texts is not None:
            self.texts.known.note(made.request.identity.tenant, made.known)

    def note_answers(self, state: RequestState) -> None:
        """Remember which tokens a prompt's continuations are made of."""
        if state.known is not None and self.texts is not None:
            for answer in state.answers():
                self.texts.known.note_answer(state.request.identity.tenant, state.known, answer)

    def remove_texts(self, tenant: bytes | None = None) -> int:
        """Remove the known texts of a tenant, or all; returns how many."""
        if self.texts is None:
            return 0
        known = self.texts.known
        return known.clear() if tenant is None else known.erase(tenant)
