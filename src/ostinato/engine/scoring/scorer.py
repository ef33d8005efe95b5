"""Turns texts into requests, and their outputs into numbers.

::

    texts ─► prompts (token ids) ─► one request each ─► hidden states or logits ─► numbers
"""

import copy
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ostinato.engine.prompts.prompt_tokenizer import PromptTokenizer
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.request_validation import tokenize
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.scoring.choices import choice_prompt
from ostinato.engine.scoring.outputs import ClassificationOutput
from ostinato.engine.scoring.pairs import PairTokenizer, Query
from ostinato.engine.scoring.pooling import Pooling
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.scoring.templates import PairTemplate
from ostinato.engine.settings.config import EngineConfig
from ostinato.errors import ConfigError, InvalidSamplingParams, RequestError
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.sampling.readouts import HIDDEN_STATE

ScoreKind = Literal["classes", "embeddings", "yes_no"]


ScoredItem = Query | str | tuple[Query, str]
"""What one request of scores reads: a pair, or of an embedder a query or a document."""


class Scorer:
    """Embeds, scores and classifies with one engine; one thread at a time may call it."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        max_model_len: int,
        prompts: PromptTokenizer,
    ) -> None:
        """Take a model, whose files are read at the first use, and what places its images.

        Raises:
            ConfigError: ``score_template`` is neither a name nor a file of Jinja.
        """
        self._loaded, self._config, self._max_model_len = loaded, config, max_model_len
        self._prompts = prompts
        name = config.score_template
        if name == "auto":
            name = "pair" if loaded.head.kind == "classes" else "qwen3"
        self._template = PairTemplate.named(name)

    @cached_property
    def _pairs(self) -> PairTokenizer:
        return PairTokenizer(self._tokenizer, self._template, self._max_model_len)

    @cached_property
    def _tokenizer(self) -> Any:
        """A copy of the model's tokenizer: cutting texts changes its state for others.

        Raises:
            MissingTokenizer: The checkpoint has none.
        """
        return copy.deepcopy(self._loaded.require_tokenizer())

    @cached_property
    def pooling(self) -> Pooling:
        """How the checkpoint makes embeddings."""
        return Pooling.read(self._loaded.path, self._loaded.config)

    @property
    def score_kind(self) -> ScoreKind:
        """What scores are made of."""
        kind = self._loaded.head.kind
        if kind == "classes":
            return "classes"
        return "embeddings" if kind == "none" or self.pooling.is_embedder else "yes_no"

    # --- embeddings ---

    def embedding_params(self, params: PoolingParams) -> SamplingParams:
        """Return the sampling parameters of an embedding.

        Raises:
            InvalidSamplingParams: The checkpoint has none, or none of that length.
        """
        if self.pooling.refusal:
            raise InvalidSamplingParams(self.pooling.refusal)
        width, sizes = self._loaded.config.get_text_config().hidden_size, self.pooling.dimensions
        size = params.dimensions
        if size is not None and (size > width or (sizes and size not in (*sizes, width))):
            limit = f"one of {', '.join(map(str, sizes))}" if sizes else f"at most {width}"
            raise InvalidSamplingParams(f"dimensions={size}: must be {limit} for this model")
        return replace(_reading(HIDDEN_STATE), pooling=self.pooling.mode)

    def embedding(self, output: RequestOutput, params: PoolingParams) -> "array[float]":
        """Return the embedding of a finished request, shape (dimensions,)."""
        numbers = np.array(_numbers(output))[: params.dimensions]
        does_normalize = self.pooling.normalizes if params.normalize is None else params.normalize
        if does_normalize:
            numbers = numbers / max(float(np.linalg.norm(numbers)), 1e-12)
        return array("d", numbers.tobytes())

    def named_prompt(self, name: str | None) -> str:
        """Return the text that precedes those of a name; empty for None.

        Raises:
            RequestError: The checkpoint has no prompt of that name.
        """
        if name is None:
            return ""
        prompts = self.pooling.prompts
        if name not in prompts:
            raise RequestError(
                f"prompt_name={name!r:.80}: the checkpoint has {', '.join(prompts) or 'none'}"
            )
        return prompts[name]

    def cut(self, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Return a prompt with its token ids, without what is beyond ``truncate_prompt_tokens``.

        Raises:
            MissingTokenizer: It is a text, and the checkpoint has no tokenizer.
            PromptTooLong: It is longer than the model takes, and is not to be cut.
            RequestError: It has images, and the model takes none or is to cut them.
        """
        limit = params.max_tokens(self._max_model_len)
        if limit is not None and prompt.images:
            raise RequestError(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens}: a prompt with images is "
                "not cut; leave it out"
            )
        if prompt.token_ids is not None or limit is None:
            return replace(prompt, token_ids=self._token_ids(prompt)[:limit], known=None)
        tokenizer = self._tokenizer
        ids = tokenizer(prompt.text, truncation=True, max_length=limit, verbose=False)["input_ids"]
        return replace(prompt, token_ids=ids, known=None)

    def choice(self, prompt: Prompt, choice: str | Sequence[int]) -> tuple[Prompt, SamplingParams]:
        """Return the request of a choice; raises as ``choices.choice_prompt``."""
        return choice_prompt(prompt, choice, self._token_ids)

    def _token_ids(self, prompt: Prompt) -> "array[int]":
        """Return the token ids of a prompt, with all placeholders of its images."""
        tokenizer = None if prompt.text is None else self._tokenizer
        spelled = self._prompts.with_placeholders(prompt)
        ids = tokenize(spelled, self._loaded, self._max_model_len, tokenizer)
        return self._prompts.placed(prompt, ids)[0]

    # --- classes ---

    def class_params(self) -> SamplingParams:
        """Return the sampling parameters of a classification.

        Raises:
            InvalidSamplingParams: The checkpoint has no classes.
        """
        num_classes = len(self._loaded.head.labels)
        if not num_classes:
            raise InvalidSamplingParams(
                "this model has no classes: load a checkpoint that ends in "
                "ForSequenceClassification, or compare texts with choose()"
            )
        return _reading(tuple(range(num_classes)))

    def classes(self, output: RequestOutput, params: PoolingParams) -> ClassificationOutput:
        """Return the classes of a finished request."""
        head, logits = self._loaded.head, np.array(_numbers(output))
        label = head.labels[int(logits.argmax())]
        if not params.use_activation:
            return ClassificationOutput(logits.tolist(), label)
        if head.is_multi_label or len(logits) == 1:
            return ClassificationOutput([_sigmoid(x) for x in logits.tolist()], label)
        weights = np.exp(logits - logits.max())
        return ClassificationOutput((weights / weights.sum()).tolist(), label)

    # --- scores ---

    def score_params(self) -> SamplingParams:
        """Return the sampling parameters of a score.

        Raises:
            InvalidSamplingParams: The model gives no scores.
            ConfigError: ``score_tokens`` does not name two tokens.
            MissingTokenizer: The checkpoint has none.
        """
        kind, labels = self.score_kind, self._loaded.head.labels
        if kind == "embeddings":
            return self.embedding_params(PoolingParams())
        if kind == "yes_no":
            return _reading(self._answer_ids)
        if len(labels) != 1:
            raise InvalidSamplingParams(
                f"this model has {len(labels)} classes, and a score is that of one: call classify()"
            )
        return _reading((0,))

    def scored_items(
        self, queries: Sequence[Query], documents: Sequence[str], of_query: Sequence[int]
    ) -> list[ScoredItem]:
        """Return what requests have to read: pairs, or of an embedder queries and documents.

        Args:
            queries: In order.
            documents: In order.
            of_query: Which query each document is compared with, shape (num_documents,).
        """
        if self.score_kind == "embeddings":
            return [*queries, *documents]
        pairs = zip(of_query, documents, strict=True)
        return [(queries[index], document) for index, document in pairs]

    def score_prompt(
        self,
        item: ScoredItem,
        prompt_context: Prompt,
        params: PoolingParams,
        max_document_tokens: int | None = None,
    ) -> Prompt:
        """Return the prompt of an item, with its token ids.

        Args:
            item: A pair, a query or a document.
            prompt_context: A prompt of the sender.
            params: How long a prompt may be.
            max_document_tokens: Tokens of a document, which loses its end; None keeps all.

        Raises:
            PromptTooLong: It is longer than the model takes, and is not to be cut.
            RequestError: The template refuses it.
            MissingTokenizer: The checkpoint has none.
        """
        if isinstance(item, tuple):
            query, document = item
            ids = self._pairs.encode(query, document, params, max_document_tokens)
            return replace(prompt_context, token_ids=ids)
        if isinstance(item, Query):
            text = self._query_text(item)
        else:
            text = self._pairs.first_tokens(item, max_document_tokens)
        return self.cut(replace(prompt_context, text=text), params)

    def scores(
        self, outputs: Sequence[RequestOutput], of_query: Sequence[int], params: PoolingParams
    ) -> list[float]:
        """Return the score of each document from the outputs of all items, in order."""
        if self.score_kind == "embeddings":
            unit = [self.embedding(output, PoolingParams(normalize=True)) for output in outputs]
            pairs = zip(of_query, unit[-len(of_query) :], strict=True)
            return [math.fsum(map(float.__mul__, unit[q], document)) for q, document in pairs]
        logits = [_numbers(output) for output in outputs]
        # Of two logits: softmax's share of the second is the sigmoid of their difference.
        raw = [row[-1] - (row[0] if len(row) == 2 else 0.0) for row in logits]
        return [_sigmoid(x) for x in raw] if params.use_activation else raw

    def _query_text(self, query: Query) -> str:
        """Return a query as an embedder reads it."""
        if query.instruction is not None:
            return f"Instruct: {query.instruction}\nQuery:{query.text}"
        return self.pooling.prompts.get("query", "") + query.text

    @cached_property
    def _answer_ids(self) -> tuple[int, int]:
        """The ids of the two answers, the positive one last.

        Raises:
            ConfigError: ``score_tokens`` does not name two tokens.
        """
        words = self._config.score_tokens.split(",")
        tokenizer = self._tokenizer
        rows = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
        if len(rows) != 2 or any(len(row) != 1 for row in rows):
            raise ConfigError(
                f"score_tokens={self._config.score_tokens!r}: must be two words of one token each "
                f"for this model's tokenizer, the negative one first; they have "
                f"{' and '.join(str(len(row)) for row in rows)} tokens"
            )
        return int(rows[0][0]), int(rows[1][0])


def _reading(readout: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, readout=readout)


def _numbers(output: RequestOutput) -> "array[float]":
    numbers = output.outputs[0].readout
    assert numbers is not None, "a finished request has read them"
    return numbers


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
