"""Tokenizes a prompt and checks a request against the model.

Nothing changes here, so a caller's mistake is found before half of a batch is in the queue.
"""

import hashlib
import operator
import random
from array import array
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ostinato.core.plan import TokenLogprob
from ostinato.core.request import IDLE_WORK, Request
from ostinato.core.tokens import pack_tokens
from ostinato.engine.ledger.continuation import TurnReport
from ostinato.engine.ledger.turns import OpenTurn
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.engine.text.known_texts import TokenizedText
from ostinato.engine.text.stop_strings import StopStrings
from ostinato.errors import InvalidSamplingParams, PromptTooLong, RequestError, TokenOutOfRange
from ostinato.runner.images.store import ServedImage
from ostinato.runner.loaded_model import LoadedModel
from ostinato.scheduling.beam_search import BeamSearch

MAX_SAMPLES = 16384
"""Most continuations of one prompt: each is an object from the first step on."""

_PIECE_CHARACTERS = 16384
_CUT_TOKENS = 16
"""Tokens by which a piece of a text may differ from the same piece within the whole."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that passed every check and may be added."""

    request: Request  # as the scheduler takes it
    params: SamplingParams  # its sampling parameters, with those that concern text
    prompt: str | None  # the text, if it was given as one
    seeds: tuple[int, ...]  # one per continuation
    arrival_s: float  # by the engine's clock
    stops: StopStrings | None  # the stop strings of its parameters, if any
    known: TokenizedText | None = None  # the prompt, if it is to be remembered
    images: tuple[ServedImage, ...] = ()  # among its tokens
    begun: OpenTurn | None = None  # where its answer is noted in the ledger
    scored: "tuple[tuple[TokenLogprob, ...], ...]" = ()  # log-probs known of its first tokens
    search: BeamSearch | None = None  # its beams, which the scheduler asks
    report: TurnReport | None = None  # what the ledger did to the prompt


def tokenize(
    prompt: Prompt,
    loaded: LoadedModel,
    max_tokens: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep: int | None = None,
) -> "array[int]":
    """Return a prompt's packed ids, shape (num_tokens,), all of them in the vocabulary.

    Args:
        prompt: With a text or token ids.
        loaded: The model.
        max_tokens: Tokens that could be served; a text that is certainly longer is refused before
            all of it is tokenized. None tokenizes everything.
        tokenizer: A copy of the model's, for use in another thread; None is the model's own.
        keep: Tokens kept at the prompt's end, however long it is; of a text, what the tokenizer
            adds (such as a beginning-of-sequence id) stays and counts. None keeps all.

    Raises:
        TokenOutOfRange: An id is not.
        MissingTokenizer: It is a text, and the checkpoint has no tokenizer.
        PromptTooLong: A text has more tokens than ``max_tokens``.
    """
    if prompt.token_ids is not None:
        ids = prompt.token_ids
        tokens = ids.tokens[:] if isinstance(ids, TokenizedText) else pack_tokens(ids)
    else:
        assert prompt.text is not None, "a prompt is a text or a row of ids"
        tokenizer = tokenizer or loaded.require_tokenizer()
        if max_tokens is not None and keep is None:
            refuse_long_text(prompt.text, max_tokens, tokenizer)
        tokens = pack_tokens(_encode(tokenizer, prompt.text, keep))
    check_vocabulary(tokens, loaded.vocab_size)
    return tokens if keep is None else tokens[-keep:]


def check_vocabulary(tokens: "array[int]", vocab_size: int) -> None:
    """Raise ``TokenOutOfRange`` if the model has no embedding for an id, ``>= vocab_size``."""
    if len(tokens) and np.frombuffer(tokens, "<u4").max() >= vocab_size:
        position = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        raise TokenOutOfRange(
            f"token id {tokens[position]} at position {position} is outside the vocabulary: "
            f"ids of this model run from 0 to {vocab_size - 1}; was the prompt tokenized "
            "with another model's tokenizer?"
        )


def refuse_long_text(text: str, max_tokens: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a text that has more than ``max_tokens`` tokens, at the cost of about as many.

    Only a text many times as long as usual for ``max_tokens`` is counted: piece by piece, until
    there are too many. Cutting a text changes a few tokens on either side of the cut.
    """
    if len(text) <= 8 * max_tokens + _PIECE_CHARACTERS:
        return
    num_tokens = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        piece = text[start : start + _PIECE_CHARACTERS]
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        num_tokens += max(0, len(ids) - _CUT_TOKENS)
        if num_tokens > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, and its first "
                f"{start + len(piece)} are more than max_model_len={max_tokens} tokens: shorten "
                "it, or raise max_model_len as far as the model goes"
            )


def resolve_params(params: Any, loaded: LoadedModel, max_logprobs: int) -> SamplingParams:
    """Return parameters as this model samples them: words as ids, -1 as the vocabulary's size.

    Args:
        params: As the caller gave them.
        loaded: The model.
        max_logprobs: Most alternatives per token; -1 allows the whole vocabulary.

    Raises:
        InvalidSamplingParams: They are not ``SamplingParams``, name ids that the model does not
            have, or ask for too many continuations or alternatives.
        MissingTokenizer: They have ``bad_words``, and the checkpoint has no tokenizer.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidSamplingParams(f"sampling_params={params!r:.80}: must be SamplingParams")
    if params.n > MAX_SAMPLES:
        raise InvalidSamplingParams(
            f"n={params.n}: must be at most {MAX_SAMPLES}; send the prompt again for more"
        )
    if params.num_sequences > loaded.vocab_size:
        raise InvalidSamplingParams(
            f"beam_width={params.num_sequences}: must be at most the vocabulary's "
            f"{loaded.vocab_size} tokens"
        )
    _check_ids(params, loaded.vocab_size)
    check_purpose(params, loaded)
    params = params.clone()  # the caller may change theirs
    changes: dict[str, Any] = {}
    for name in ("logprobs", "prompt_logprobs"):
        requested = getattr(params, name)
        if requested is None:
            continue
        number = _num_logprobs(name, requested, loaded.vocab_size, max_logprobs)
        if number != requested:
            changes[name] = number
    params = replace(params, **changes) if changes else params
    return _spell_bad_words(params, loaded) if params.bad_words else params


def check_purpose(params: SamplingParams, loaded: LoadedModel) -> None:
    """Refuse what the head of a checkpoint cannot give.

    Raises:
        InvalidSamplingParams: A text of a model without a language head, or rows of the head that
            there are not.
    """
    if params.readout is None:
        if loaded.head.kind != "tokens":
            raise InvalidSamplingParams(
                "this model has no language head and generates nothing: call embed() "
                "or score(), for classes classify(), or load a checkpoint that ends in ForCausalLM"
            )
        return
    for row in params.readout:
        if not 0 <= row < loaded.num_outputs:
            raise InvalidSamplingParams(
                f"readout={row}: must be from 0 to {loaded.num_outputs - 1}"
            )


def _spell_bad_words(params: SamplingParams, loaded: LoadedModel) -> SamplingParams:
    """Return parameters with ``bad_words`` as ids.

    Raises:
        InvalidSamplingParams: A word has no tokens.
        MissingTokenizer: The checkpoint has no tokenizer.
    """
    words = (ids for word in params.bad_words for ids in _spellings(word, loaded))
    return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *words))


def closing_ids(params: SamplingParams, loaded: LoadedModel) -> tuple[int, ...]:
    """Return the tokens of the mark that a ``thinking_budget`` forces.

    Raises:
        InvalidSamplingParams: The vocabulary cannot write it, or the parameters exclude it.
        MissingTokenizer: The checkpoint has no tokenizer.
    """
    budget = params.thinking_budget
    assert budget is not None, "its mark is forced"
    tokenizer, mark = loaded.require_tokenizer(), budget.closing
    single = TokenTable(tokenizer).id_of(mark)
    encoded = tokenizer(mark, add_special_tokens=False)["input_ids"] if single is None else [single]
    ids = tuple(int(token) for token in encoded)
    if not ids or max(ids) >= loaded.vocab_size or tokenizer.decode(ids).strip() != mark.strip():
        raise InvalidSamplingParams(
            f"thinking_budget.closing={mark!r:.80}: this model's vocabulary cannot write it; name "
            "the mark that ends its reasoning"
        )
    allowed = params.allowed_token_ids
    banned = {row[0] for row in params.bad_words_ids if len(row) == 1}
    if banned.intersection(ids) or (allowed is not None and not set(ids) <= set(allowed)):
        raise InvalidSamplingParams(
            f"thinking_budget.closing={mark!r:.80} has the token ids {list(ids)}, which bad_words "
            "or allowed_token_ids exclude: allow them, or leave the budget out"
        )
    return ids


def kept_prompt_tokens(params: SamplingParams, max_model_len: int) -> int | None:
    """Return how many tokens of a prompt ``truncate_prompt_tokens`` keeps; None is all."""
    if params.truncate_prompt_tokens == -1:
        return max(1, max_model_len - (params.max_tokens or 1))
    return params.truncate_prompt_tokens


def check_priority(priority: Any) -> int:
    """Return a priority as a Python integer; other types raise ``RequestError``."""
    try:
        return operator.index(priority)
    except TypeError as error:
        raise RequestError(f"priority={priority!r:.80}: must be an integer") from error


def check_request_id(request_id: Any) -> str:
    """Return a request's id; other types than a str raise ``RequestError``."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id={request_id!r:.80}: must be a str")
    if request_id.startswith(IDLE_WORK):
        raise RequestError(
            f"request_id={request_id!r:.80}: the engine's own work has names that begin with "
            f"{IDLE_WORK!r}; choose another one"
        )
    return request_id


def draw_seeds(params: SamplingParams, generator: random.Random) -> tuple[int, ...]:
    """Return one seed per continuation: the request's own or a drawn one, then derived ones."""
    seed = generator.getrandbits(63) if params.seed is None else params.seed
    seeds = [seed]
    for index in range(1, params.n):
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)
    return tuple(seeds)


def _encode(tokenizer: Any, text: str, keep: int | None) -> list[int]:
    """Return a text's ids, its last ones if there are too many."""
    # Not verbose: admission refuses a prompt that is too long.
    if keep is None or keep <= tokenizer.num_special_tokens_to_add():
        return list(tokenizer(text, verbose=False)["input_ids"])
    text = _end_of(tokenizer, text, keep)
    side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
    try:
        encoded = tokenizer(text, verbose=False, truncation=True, max_length=keep)
    finally:
        tokenizer.truncation_side = side
    return list(encoded["input_ids"])


def _end_of(tokenizer: Any, text: str, num_tokens: int) -> str:
    """Return an end of a text that has its last tokens, at the cost of about as many."""
    size = 8 * num_tokens + _PIECE_CHARACTERS
    while size < len(text):
        ids = tokenizer(text[-size:], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= num_tokens + _CUT_TOKENS:
            break
        size *= 2
    return text[-size:]


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse ids that the model does not have."""
    for name, ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words_ids", list(chain.from_iterable(params.bad_words_ids))),
    ):
        if max(ids, default=-1) >= vocab_size:
            token = next(token for token in ids if token >= vocab_size)
            raise InvalidSamplingParams(
                f"{name} names token id {token}: ids of this model run from 0 to {vocab_size - 1}"
            )


def _num_logprobs(name: str, requested: int, vocab_size: int, limit: int) -> int:
    """Return how many alternatives to give per token."""
    number = vocab_size if requested == -1 else requested
    if limit != -1 and number > limit:
        given = f"{name}={requested}" + (
            f" is the vocabulary of {vocab_size}" if requested == -1 else ""
        )
        raise InvalidSamplingParams(
            f"{given}: at most {limit} alternatives per token are given; ask for fewer, or set the "
            "engine's max_logprobs"
        )
    return number


def _spellings(word: str, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """Return a bad word's ids: as a text's beginning, and after a space if that is another token.

    The second spelling counts where it replaces the first token, as in vLLM.
    """
    tokenizer = loaded.require_tokenizer()
    plain, spaced = (
        tuple(tokenizer(prefix + word.lstrip(), add_special_tokens=False)["input_ids"])
        for prefix in ("", " ")
    )
    if not plain:
        raise InvalidSamplingParams(f"bad_words={word!r}: the tokenizer has no token for it")
    is_other = len(spaced) == len(plain) and spaced[0] != plain[0]
    return [plain, spaced] if is_other else [plain]
