"""Embeddings, scores, classes and choices of a batch, offline."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from ostinato.engine.api.adapter_api import with_adapters
from ostinato.engine.loop.adapters import LoRARequest
from ostinato.engine.loop.batch import ShowProgress, run_batch
from ostinato.engine.loop.engine import Engine
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import (
    Prompt,
    PromptInput,
    parse_prompt,
    parse_prompts,
    whole_characters,
)
from ostinato.engine.scoring.choices import ChoiceOutput, read_choices
from ostinato.engine.scoring.outputs import (
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from ostinato.engine.scoring.pairs import Query
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.errors import RequestError, naming

ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")

Adapters = LoRARequest | Sequence[LoRARequest | None] | None


def embed(
    engine: Engine,
    prompts: PromptInput | Iterable[PromptInput],
    params: PoolingParams,
    prompt_name: str | None,
    use_tqdm: ShowProgress,
    lora_request: Adapters,
) -> list[EmbeddingRequestOutput]:
    """Embed prompts; see ``LLM.embed``."""
    scorer = engine.scorer
    sampling, preface = scorer.embedding_params(params), scorer.named_prompt(prompt_name)
    parsed = [_preceded(prompt, preface) for prompt in parse_prompts(prompts)]
    parsed = with_adapters(engine, parsed, lora_request)
    cut = _named_each("text", parsed, lambda prompt: scorer.cut(prompt, params))
    outputs = run_batch(engine, cut, sampling, use_tqdm, None)
    return _each(outputs, lambda o: EmbeddingOutput(scorer.embedding(o, params).tolist()))


def classify(
    engine: Engine,
    prompts: PromptInput | Iterable[PromptInput],
    params: PoolingParams,
    use_tqdm: ShowProgress,
    lora_request: Adapters,
) -> list[ClassificationRequestOutput]:
    """Classify prompts; see ``LLM.classify``."""
    scorer = engine.scorer
    sampling = scorer.class_params()
    parsed = with_adapters(engine, parse_prompts(prompts), lora_request)
    cut = _named_each("text", parsed, lambda prompt: scorer.cut(prompt, params))
    outputs = run_batch(engine, cut, sampling, use_tqdm, None)
    return _each(outputs, lambda output: scorer.classes(output, params))


def score(
    engine: Engine,
    queries: Sequence[Query],
    documents: Sequence[str],
    params: PoolingParams,
    use_tqdm: ShowProgress,
    lora_request: Adapters,
    cache_salt: str,
) -> list[ScoringRequestOutput]:
    """Score documents against a query, or each against its own; see ``LLM.score``."""
    scorer, of_query = engine.scorer, pair_up(len(queries), len(documents))
    [sender] = with_adapters(engine, [Prompt(cache_salt=cache_salt)], lora_request)
    sampling, items = scorer.score_params(), scorer.scored_items(queries, documents, of_query)
    prompts = _named_each("text", items, lambda item: scorer.score_prompt(item, sender, params))
    outputs = run_batch(engine, prompts, sampling, use_tqdm, None)
    scores = scorer.scores(outputs, of_query, params)
    pairs = zip(outputs[-len(documents) :], scores, strict=True)
    return [_result(output, ScoringOutput(value)) for output, value in pairs]


def choose(
    engine: Engine,
    prompt: PromptInput,
    choices: Sequence[str | Sequence[int]],
    use_tqdm: ShowProgress,
    lora_request: LoRARequest | None,
) -> ChoiceOutput:
    """Compare given continuations; see ``LLM.choose``."""
    check_choices(choices)
    [parsed] = with_adapters(engine, [parse_prompt(prompt)], lora_request)
    requests = _named_each("choice", choices, lambda each: engine.scorer.choice(parsed, each))
    prompts, sampling = [prompt for prompt, _ in requests], [params for _, params in requests]
    return read_choices(run_batch(engine, prompts, sampling, use_tqdm, None), choices)


def check_choices(choices: Sequence[str | Sequence[int]]) -> None:
    """Raise RequestError unless choices are several texts or rows of token ids."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"choices={choices!r:.80}: must be a list of texts or of token ids")
    for choice in choices:
        if isinstance(choice, str):
            whole_characters("choice", choice)


def pair_up(num_queries: int, num_documents: int) -> list[int]:
    """Return the query of each document: the only one, or the one at its place.

    Raises:
        RequestError: There are several queries, and not as many documents.
    """
    if num_queries == 1:
        return [0] * num_documents
    if num_queries != num_documents:
        raise RequestError(
            f"{num_queries} queries and {num_documents} documents: give one query for all, or one "
            "per document"
        )
    return list(range(num_documents))


def texts_of(name: str, given: str | Sequence[str]) -> list[str]:
    """Return one text or several as a list.

    Raises:
        RequestError: They are no texts.
    """
    texts = [given] if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name}={text!r:.80}: must be a text")
        whole_characters(name, text)
    return texts


def _named_each(
    noun: str, items: Sequence[ItemT], make: Callable[[ItemT], ResultT]
) -> list[ResultT]:
    """Return what is prepared of each item; an error names the item."""
    prepared = []
    for number, item in enumerate(items):
        with naming(noun, number):
            prepared.append(make(item))
    return prepared


def _preceded(prompt: Prompt, preface: str) -> Prompt:
    """Return a prompt whose text follows another one."""
    if not preface:
        return prompt
    if prompt.text is None:
        raise RequestError("prompt_name precedes texts: give a text in place of token ids")
    return replace(prompt, text=preface + prompt.text)


def _result(output: RequestOutput, value: ResultT) -> PoolingRequestOutput[ResultT]:
    return PoolingRequestOutput(
        output.request_id, value, output.prompt_token_ids, output.num_cached_tokens
    )


def _each(
    outputs: Sequence[RequestOutput], read: Callable[[RequestOutput], ResultT]
) -> list[PoolingRequestOutput[ResultT]]:
    return [_result(output, read(output)) for output in outputs]
