"""Makes requests: from a prompt and sampling parameters to what the scheduler takes.

A caller's mistake is found here, before anything is added. The identity of a request names all
that its KV depends on: weights, KV format, tenant, adapter and public prefix.

Parameters are prepared once for all prompts that share them. A call with a thousand prompts passes
one object of parameters. Checking its lists, spelling its bad words and preparing its stop strings
depends on that object alone, so it is done for the first prompt. What was prepared is kept for as
long as the object is alive, and until it is changed.
"""

import itertools
import random
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ostinato.cache.manager import CacheManager
from ostinato.core.identity import Identity, ImageSpan
from ostinato.core.ids import RequestId
from ostinato.core.plan import TokenConstraint
from ostinato.core.request import Request
from ostinato.core.sampling_params import Beams
from ostinato.engine.grammar.grammar import GrammarCompiler
from ostinato.engine.grammar.thinking_budget import ThinkingBudget, ThinkingConstraint
from ostinato.engine.loop.adapters import Adapters
from ostinato.engine.prompts.prompt_tokenizer import PromptTokenizer
from ostinato.engine.prompts.public_prefixes import PublicPrefixes, salt_of_public
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.request_validation import (
    PreparedRequest,
    check_priority,
    check_request_id,
    closing_ids,
    draw_seeds,
    kept_prompt_tokens,
    resolve_params,
    tokenize,
)
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.requests.scored_prompts import Rows
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.engine.text.stop_strings import StopStrings
from ostinato.errors import InvalidSamplingParams
from ostinato.runner.loaded_model import LoadedModel
from ostinato.sched.scheduler import Scheduler
from ostinato.scheduling.beam_search import BeamSearch


@dataclass(frozen=True, slots=True)
class PreparedParams:
    """Sampling parameters as requests use them.

    Attributes:
        params: With bad words as ids; the forks and prompts of a request share it.
        stops: The stop strings, shared likewise; None if there are none.
        closing_ids: The closing mark of the ``thinking_budget``; empty without one.
    """

    params: SamplingParams
    stops: StopStrings | None
    closing_ids: tuple[int, ...] = ()


class ParamsPreparer:
    """Prepares sampling parameters for one engine. Thread-safe."""

    def __init__(self, loaded: LoadedModel, max_logprobs: int) -> None:
        self._loaded, self._max_logprobs = loaded, max_logprobs
        # With a copy of the parameters as they were: callers may change theirs.
        self._prepared: dict[int, tuple[SamplingParams, PreparedParams]] = {}

    def prepare(self, params: SamplingParams) -> PreparedParams:
        """Return prepared parameters; those of an object that was prepared before, at no cost.

        Raises:
            InvalidSamplingParams: As ``resolve_params``.
            MissingTokenizer: As ``resolve_params``, or a ``thinking_budget`` needs one.
        """
        known = self._prepared.get(id(params))
        if known is not None and known[0] == params:
            return known[1]
        resolved = resolve_params(params, self._loaded, self._max_logprobs)
        stops = StopStrings(resolved.stop) if resolved.stop else None
        closing = () if resolved.thinking_budget is None else closing_ids(resolved, self._loaded)
        prepared = PreparedParams(resolved, stops, closing)
        if known is None:
            weakref.finalize(params, self._prepared.pop, id(params), None).atexit = False
        self._prepared[id(params)] = (params.clone(), prepared)
        return prepared


class Identities:
    """Makes the identities of one engine's requests: with whom they may share KV."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_dtype: torch.dtype,
        cache: CacheManager,
        adapters: Adapters,
        public_prefixes: PublicPrefixes,
    ) -> None:
        self._weights = loaded.fingerprint
        self._kv_dtype = str(kv_dtype)
        self._cache = cache
        self._adapters = adapters
        self._public_prefixes = public_prefixes

    def renew(self, loaded: LoadedModel) -> None:
        """Use the fingerprint of new weights from now on."""
        self._weights = loaded.fingerprint

    def of_tenant(self, cache_salt: str) -> Identity:
        """Return the identity of a tenant's requests, without adapter and public prefix."""
        return Identity(
            weights=self._weights,
            epoch=self._cache.epoch,
            kv_dtype=self._kv_dtype,
            tenant=cache_salt.encode(),
        )

    def of_prompt(
        self,
        prompt: Prompt,
        tokens: "array[int]",
        images: Sequence[ImageSpan] = (),
        reads: bool = True,
    ) -> Identity:
        """Return the identity of a prompt; one that does not read uses no public prefix."""
        text = tokens[: images[0].start] if images else tokens
        own = self.of_tenant(prompt.cache_salt)
        if prompt.publishes is not None:
            return replace(own, tenant=salt_of_public(prompt.publishes))
        adapter, start = b"", 0
        if prompt.adapter:
            adapter, start = self._adapters.digest_and_start(prompt.adapter, text)
            text = text[: start + 1]  # the base model computed the public prefix, if any
        if reads and self._public_prefixes.by_name:
            own = self._public_prefixes.identity_of(own, text, prompt.public_prefixes)
        if not adapter:
            return own
        return replace(own, adapter=adapter, base=own if start else None, start=start)


class RequestFactory:
    """Makes the requests of one engine."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        scheduler: Scheduler,
        prompts: PromptTokenizer,
        identities: Identities,
        clock: Callable[[], float],
    ) -> None:
        self.grammars = GrammarCompiler(loaded, max_ms=config.max_grammar_ms)  # for any thread
        self.params = ParamsPreparer(loaded, config.max_logprobs)  # likewise
        self._loaded = loaded
        self._scheduler = scheduler
        self._prompts = prompts
        self._identities = identities
        self._clock = clock
        self._random = random.Random(config.seed)
        self._numbers = itertools.count()

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        constraint: TokenConstraint | None = None,
    ) -> PreparedRequest:
        """Tokenize a prompt and check everything about the request; nothing is added yet.

        Args:
            prompt: With a text or token ids; of both, the ids are taken.
            params: How to sample.
            request_id: None generates one.
            priority: Lower goes first.
            constraint: Compiled from ``params.structured_outputs``; None compiles it here.

        Raises:
            RequestError: The request can never be served.
            MissingTokenizer: Text is involved and the checkpoint has no tokenizer.
        """
        arrival_s = self._clock()
        prepared = self.params.prepare(params)
        params = prepared.params
        if params.detokenize or prompt.text is not None:
            self._loaded.require_tokenizer()
        name = self._new_id() if request_id is None else check_request_id(request_id)
        prompt, tokens = self._tokenized(prompt, params)
        tokens, images, spans = self._prompts.placed(prompt, tokens)
        if params.structured_outputs is not None and constraint is None:
            constraint = self.grammars.compile(params.structured_outputs, prompt.cache_salt)
        if params.thinking_budget is not None:
            constraint = self._bounded(params.thinking_budget, constraint, prepared)
        cache_read = prompt.cache_read and not params.skip_reading_prefix_cache
        reads = cache_read and params.pooling != "mean"
        reads &= params.prompt_logprobs is None or params.prompt_logprob_start > 1
        known = prompt.known
        search, scheduled = None, params
        if params.beams is not None:
            search, scheduled = self._search(params, params.beams, len(tokens))
        identity = self._identities.of_prompt(prompt, tokens, spans, reads)
        scored: Rows = []
        if cache_read and not reads and not spans and params.prompt_logprobs is not None:
            scored = self._prompts.scored.known(identity, tokens, params.prompt_logprobs)
            scheduled = replace(scheduled, prompt_logprob_start=1 + len(scored))
        request = Request(
            RequestId(name),
            tokens,
            scheduled,
            identity=identity,
            images=spans,
            priority=check_priority(priority),
            cache_read=cache_read,
            cache_write=prompt.cache_write,
            eos_token_ids=self._loaded.eos_token_ids,
            constraint=constraint,
            search=search,
            prompt_sections=prompt.sections,
            num_kept_tokens=0 if known is None else known.num_generated_tokens,
        )
        self._scheduler.check(request)
        seeds = draw_seeds(scheduled, self._random)
        is_noted = prompt.cache_write and prompt.keep_tokens and prompt.publishes is None
        if known is not None and not (is_noted and known.boundaries.ends):
            known = None
        begun = prompt.begun if is_noted else None
        parts = request, params, prompt.text, seeds, arrival_s, prepared.stops, known, images
        return PreparedRequest(
            *parts, begun=begun, report=prompt.report, scored=tuple(scored), search=search
        )

    def _search(
        self, params: SamplingParams, beams: Beams, num_tokens: int
    ) -> tuple[BeamSearch, SamplingParams]:
        """Return the search of a request's beams, and what the scheduler samples with.

        Each beam is a sequence whose most likely tokens are read as alternatives.
        """
        ends = frozenset(params.stop_token_ids)
        ends |= frozenset() if params.ignore_eos else self._loaded.eos_token_ids
        longest = self._scheduler.longest_tokens - num_tokens
        max_tokens = longest if params.max_tokens is None else min(longest, params.max_tokens)
        search = BeamSearch(beams, ends, max_tokens, params.logprobs or 0)
        count = min(search.num_alternatives, self._loaded.vocab_size)
        return search, replace(params, n=1, temperature=0.0, logprobs=count, drafts="off")

    def _bounded(
        self, budget: ThinkingBudget, constraint: TokenConstraint | None, prepared: PreparedParams
    ) -> TokenConstraint:
        """Return a constraint that keeps the request's thinking budget as well."""
        num_bytes = 4 * -(-self._loaded.vocab_size // 32)
        return ThinkingConstraint(budget, prepared.closing_ids, self._tokens, num_bytes, constraint)

    @cached_property
    def _tokens(self) -> TokenTable:
        return TokenTable(self._loaded.require_tokenizer())

    def _new_id(self) -> str:
        """Return a name that no live request has."""
        names, live = map("request-{}".format, self._numbers), self._scheduler.requests.live
        return next(name for name in names if name not in live)

    def _tokenized(self, prompt: Prompt, params: SamplingParams) -> tuple[Prompt, "array[int]"]:
        """Return a prompt with what is known of its text, and its tokens, cut if so asked for."""
        longest = self._scheduler.config.max_model_len
        keep = kept_prompt_tokens(params, longest)
        if keep is None:
            if prompt.token_ids is None:
                prompt = self._prompts.tokenized(self._prompts.with_placeholders(prompt), longest)
        elif prompt.images:
            raise InvalidSamplingParams(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens}: a prompt with images is "
                "not cut; leave it out"
            )
        else:
            prompt = replace(prompt, known=None)
        return prompt, tokenize(prompt, self._loaded, longest, keep=keep)
