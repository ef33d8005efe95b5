"""Tokenizes a query and a document together; of a pair that is too long the document is cut."""

from array import array
from dataclasses import dataclass
from typing import Any

from ostinato.engine.requests.prompts import whole_characters
from ostinato.engine.requests.request_validation import refuse_long_text
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.scoring.templates import INSTRUCTION, PairTemplate
from ostinato.errors import PromptTooLong


@dataclass(frozen=True, slots=True)
class Query:
    """What documents are compared with.

    Attributes:
        text: The query.
        instruction: What makes a document relevant; None is the template's own.
    """

    text: str
    instruction: str | None = None

    def __post_init__(self) -> None:
        """Check the texts.

        Raises:
            RequestError: The instruction is no text, or holds half of a character.
        """
        whole_characters("instruction", self.instruction or "")


class PairTokenizer:
    """Tokenizes pairs as a template writes them."""

    def __init__(self, tokenizer: Any, template: PairTemplate | None, max_model_len: int) -> None:
        """Take a tokenizer; without a template it joins pairs itself."""
        self._tokenizer, self._template, self._max_model_len = tokenizer, template, max_model_len

    def first_tokens(self, text: str, limit: int | None) -> str:
        """Return the first ``limit`` tokens of a text, as text; None is all of it."""
        if limit is None:
            return text
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return text if len(ids) <= limit else str(self._tokenizer.decode(ids[:limit]))

    def encode(
        self,
        query: Query,
        document: str,
        params: PoolingParams,
        max_document_tokens: int | None,
    ) -> "array[int]":
        """Return the tokens of a pair; the document alone is cut.

        Raises:
            PromptTooLong: Without the document there are too many already.
        """
        tokenizer = self._tokenizer
        document = self.first_tokens(document, max_document_tokens)
        limit = params.max_tokens(self._max_model_len)
        if limit is None:
            refuse_long_text(query.text + document, self._max_model_len, tokenizer)
        ids = self._pair_ids(query, document)
        if limit is not None and len(ids) > limit:
            rest = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
            surplus = len(ids) - limit
            while len(ids) > limit:  # what is cut may be tokenized anew with its neighbours
                if surplus >= len(rest):
                    raise PromptTooLong(
                        f"truncate_prompt_tokens={params.truncate_prompt_tokens}: the query and "
                        f"its template have {len(self._pair_ids(query, ''))} tokens, so nothing of "
                        "the document is left; keep more, or shorten the query"
                    )
                ids = self._pair_ids(query, tokenizer.decode(rest[: len(rest) - surplus]))
                surplus += max(0, len(ids) - limit)
        return array("I", ids)

    def _pair_ids(self, query: Query, document: str) -> list[int]:
        texts: tuple[str, ...] = f"{query.instruction or ''}{query.text}", document
        if self._template is not None:
            instruction = INSTRUCTION if query.instruction is None else query.instruction
            texts = (self._template.write(query.text, document, instruction),)
        ids: list[int] = self._tokenizer(*texts, verbose=False)["input_ids"]
        return ids
