"""The engine loop, without I/O and without threads.

Requests are added, ``step`` is called while there is work, and returns what changed. ``LLM`` and
``AsyncLLM`` wrap it::

    add ─► scheduler.plan ─► runner.execute ─► scheduler.commit ─► request states ─► outputs
                                  └─ raises ─► scheduler.fail ───┘

A step that raises ends the requests that took part in it and no others.
"""

import itertools
import logging
import random
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace

from ostinato.assembly import build_cache, build_scheduler
from ostinato.cache.observer import CacheObserver
from ostinato.core.errors import InvalidSamplingParams, RequestError
from ostinato.core.identity import Identity
from ostinato.core.ids import RequestId
from ostinato.core.plan import TokenConstraint
from ostinato.core.request import FinishReason, Request
from ostinato.engine.adapters import Adapters, NamedAdapter
from ostinato.engine.audit import HitAudit
from ostinato.engine.caller import Owner
from ostinato.engine.config import EngineConfig
from ostinato.engine.grammar import GrammarCompiler
from ostinato.engine.image_encoder import ImageEncoder
from ostinato.engine.kv_events_publisher import publish_kv_events
from ostinato.engine.open_tiers import open_tiers
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.prompt_tokenizer import PromptTokenizer
from ostinato.engine.prompts import Prompt
from ostinato.engine.public_prefixes import PublicPrefixes, salt_of_public
from ostinato.engine.recorder import Recorder
from ostinato.engine.request_state import RequestState
from ostinato.engine.request_validation import (
    PreparedRequest,
    check_priority,
    check_request_id,
    draw_seeds,
    kept_prompt_tokens,
    settle_params,
    tokenize,
)
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.setup import set_up
from ostinato.engine.tier_stores import TierStores
from ostinato.engine.tiered_cache import WAIT_S, TieredCache
from ostinato.engine.token_table import TokenTable
from ostinato.observe.counters import CacheStats
from ostinato.runner.image_store import ServedImage
from ostinato.runner.lora import LoraAdapter
from ostinato.runner.model_loader import LoadedModel
from ostinato.sched.sequence import Sequence, SequenceUpdate
from ostinato.sched.stats import SchedulerStats
from ostinato.scheduling.held_requests import HeldRequests

logger = logging.getLogger("ostinato")


class Engine:
    """One model, one cache, one scheduler.

    Attributes:
        owner: The process that it runs in.
        config: As given.
        loaded: The model.
        runner: Executes steps.
        compute_path: How it does so, and why not faster.
        adapters: LoRA adapters by name.
        cache: The prefix cache.
        public_prefixes: The prefixes that several tenants share.
        scheduler: Plans steps.
        audit: Computes hits again in idle moments, and compares.
        grammars: Compiles structured outputs; safe in any thread.
        is_computing: Whether a forward pass is running: an exception now only ends the step.
        recorder: Records traces, where one was started.
        tiers: Where prefixes outlive the pool; None unless one is set.
        kv_events: Publishes KV events; None unless ``kv_events_endpoint`` is set.
        prompts: Turns the texts and images of prompts into token ids.
        texts: Tokenizes texts, and remembers them; None if the checkpoint has no tokenizer.
        image_prompts: Loads the images of prompts; safe in any thread.
        image_encoder: Encodes them beside the steps; None for a model that serves text alone.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Load the model and size the pool.

        Raises:
            ConfigError: A setting cannot be met.
            ModelError: The model cannot be served.
            ForkedProcess: The process was forked from one whose engine used several threads.
        """
        self.owner = Owner()
        self.config = config
        setup = set_up(config)
        self.loaded: LoadedModel = setup.loaded
        self.runner, self.compute_path = setup.runner, setup.compute_path
        scheduling, sizes = setup.scheduling, setup.sizes
        longest = -(-scheduling.max_model_len // config.block_size)
        self.recorder = Recorder(clock)
        stores = TierStores(config.block_size)
        held: HeldRequests = set()
        more: tuple[CacheObserver, ...] = (stores,) if config.has_tiers else ()
        caching = config.cache(
            sizes.num_blocks, sizes.windows, min(longest, sizes.num_blocks), sizes.states
        )
        self.adapters = Adapters(config, self.runner.adapters)
        if config.enable_lora:
            more = (*more, self.adapters)
        self.cache = build_cache(caching, self.recorder.clock, more_observers=more)
        self.public_prefixes = PublicPrefixes(self.cache.admin, config.block_size)
        self.image_encoder: ImageEncoder | None = None
        holding = [held] if config.has_tiers else []
        if self.runner.images is not None:
            self.image_encoder = ImageEncoder(self.runner.images)
            holding.append(self.image_encoder.held)
        self.scheduler = build_scheduler(scheduling, self.cache, clock, holding)
        self.audit = HitAudit(config.audit_share, config.audit_quarantine, self.runner, self.cache)
        self.is_computing = False
        self._clock = clock
        tokenizer = self.loaded.tokenizer
        self._tokens = None if tokenizer is None else TokenTable(tokenizer)
        self.prompts = PromptTokenizer(self.loaded, config, self.public_prefixes)
        self.texts, self.image_prompts = self.prompts.texts, self.prompts.images
        self.grammars = GrammarCompiler(self.loaded)
        self._states: dict[RequestId, RequestState] = {}
        self._random = random.Random(config.seed)
        self._numbers = itertools.count()
        self.kv_events = publish_kv_events(config, self.cache, self.loaded.device.type, clock)
        if self.kv_events is not None:  # also without a call of close()
            weakref.finalize(self, self.owner.only_here(self.kv_events.close))
        self.tiers: TieredCache | None = None
        if config.has_tiers:
            opened = open_tiers(config, self.runner, stores.events)
            parts = self.cache, self.scheduler, self.runner, self.compute_path
            self.tiers = TieredCache(opened, stores, held, *parts)
            weakref.finalize(self, self.owner.only_here(self.tiers.stop))
        self._blocked: list[bytes] = []  # tenants that are being erased
        weakref.finalize(self, self.owner.only_here(self.recorder.stop))

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return self.scheduler.has_work

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the cache."""
        return self.cache.stats

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.scheduler.config.max_model_len

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """Counters of the scheduler."""
        return self.scheduler.stats

    def make_request(
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
            RequestError: The request can never be served; the message says why.
            MissingTokenizer: Text is involved and the checkpoint has no tokenizer.
        """
        arrival_s = self._clock()
        params = settle_params(params, self.loaded, self.config.max_logprobs)
        if params.detokenize or prompt.text is not None:
            self.loaded.require_tokenizer()
        name = self._new_id() if request_id is None else check_request_id(request_id)
        wanted = params.structured_outputs
        keep = kept_prompt_tokens(params, self.max_model_len)
        if prompt.images and keep is not None:
            raise InvalidSamplingParams(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens}: a prompt with images is "
                "not cut; leave it out"
            )
        if keep is None:
            prompt = self.prompts.tokenized(
                self.prompts.with_placeholders(prompt), self.max_model_len
            )
        tokens = tokenize(prompt, self.loaded, self.max_model_len, keep=keep)
        tokens, images, spans = self.prompts.placed(prompt, tokens)
        known = prompt.known if keep is None else None
        if wanted is not None and constraint is None:
            constraint = self.grammars.compile(wanted, prompt.cache_salt)
        cache_read = prompt.cache_read and not params.skip_reading_prefix_cache
        reads = cache_read and params.prompt_logprobs is None
        request = Request(
            RequestId(name),
            tokens,
            params,
            identity=self.identity_of(prompt, tokens[: spans[0].start] if spans else tokens, reads),
            images=spans,
            priority=check_priority(priority),
            cache_read=cache_read,
            cache_write=prompt.cache_write,
            eos_token_ids=self.loaded.eos_token_ids,
            constraint=constraint,
            prompt_sections=prompt.sections,
            num_kept_tokens=0 if known is None else known.num_generated_tokens,
        )
        self.scheduler.check(request)
        seeds = draw_seeds(params, self._random)
        is_noted = prompt.cache_write and prompt.keep_tokens and prompt.publishes is None
        if known is not None and not (is_noted and known.boundaries.ends):
            known = None
        return PreparedRequest(request, params, prompt.text, seeds, arrival_s, known, images)

    def add(self, made: PreparedRequest) -> None:
        """Add a request.

        Raises:
            DuplicateRequest: Another one of its name was added meanwhile.
            RequestError: Its tenant is being erased.
        """
        if any(made.request.identity.belongs_to(salt) for salt in self._blocked):
            raise RequestError(
                "the tenant of the request, or a public prefix that it begins with, is being "
                "erased: send it again when that is done"
            )
        adapter = made.request.identity.adapter
        if adapter and not self.adapters.is_usable(adapter):
            raise RequestError("the adapter of the request was unloaded: load it again")
        self.recorder.tick()
        self.scheduler.add(made.request, made.seeds)
        self.recorder.on_added(made.request, made.arrival_s)
        state = RequestState(made, self._tokens)
        self._states[made.request.request_id] = state
        if made.images:
            self._begin_images(state, made.images)
        if self.tiers is not None:
            self.tiers.begin(made.request.request_id)
        self.prompts.note(made)

    def step(self) -> list[RequestState]:
        """Run one step.

        Returns:
            The requests that got a token or ended; the engine drops those that ended. Their
            outputs are made when ``output()`` is called.

        Raises:
            BaseException: Other than an ``Exception``, such as ``KeyboardInterrupt``, after the
                step's requests have ended.
        """
        for request_id, note in () if self.tiers is None else self.tiers.begin_step():
            if request_id in self._states:
                self._states[request_id].load_note = note
        failed = self._begin_image_step()
        if self.tiers is not None and self.tiers.wait_for_loads():
            return failed
        try:
            return [*failed, *self._step()]
        finally:
            if self.tiers is not None:
                self.tiers.end_step()
            if self.image_encoder is not None and not self.scheduler.num_running:
                self.image_encoder.wait(WAIT_S)

    def _step(self) -> list[RequestState]:
        """Plan, run and commit a step."""
        self.recorder.tick()
        plan = self.scheduler.plan()
        if not plan.sequences:
            return []
        self.recorder.on_planned()
        try:
            self.is_computing = True
            result = self.runner.execute(plan)
            self.is_computing = False
        except Exception as error:
            self.is_computing = False
            logger.exception("a step failed; its %d sequences end", len(plan.sequences))
            return self._fail(f"the forward pass failed: {type(error).__name__}: {error}")
        except BaseException as interruption:
            self.is_computing = False
            self._fail(f"interrupted: {type(interruption).__name__}")
            raise
        self.recorder.tick()
        updates = self.scheduler.commit(result)
        self.recorder.on_committed()
        return self._take(updates)

    def _begin_images(self, state: RequestState, images: tuple[ServedImage, ...]) -> None:
        """Hold a request back until those of its images that miss are encoded."""
        store, encoder = self.runner.images, self.image_encoder
        assert store is not None and encoder is not None, "prompts with images were checked"
        state.images = store.add(images)
        request_id = state.request.request_id
        [sequence] = self.scheduler.requests.live[request_id]

        def look_up() -> list[ServedImage]:
            hit = self.scheduler.num_cached_tokens(sequence)
            spans = zip(state.images, state.request.images, strict=True)
            return [image for image, span in spans if span.end > hit]

        encoder.begin(request_id, look_up)

    def _begin_image_step(self) -> list[RequestState]:
        """Take what was encoded; returns requests that ended because an image cannot be."""
        if self.image_encoder is None:
            return []
        loading: HeldRequests = set() if self.tiers is None else self.tiers.loads.held
        failed = self.image_encoder.begin_step(loading, self.scheduler.num_running)
        touched = {request_id: self._states[request_id] for request_id in failed}
        for request_id, error in failed.items():
            self._cancel(request_id)
            touched[request_id].fail(FinishReason.ERROR, error, self._clock())
        return self._collect(touched)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request between steps, and release its blocks.

        Returns:
            Its output; None if no such request is live.
        """
        now_s, ended = self._clock(), self._cancel(RequestId(request_id))
        state = self._states.pop(RequestId(request_id), None)
        if state is None:
            return None
        for sequence in ended:
            state.take(sequence, None, now_s)
        state.fail(FinishReason.ABORT, None, now_s)
        self.prompts.note_answers(state)
        self._free_adapters()
        return state.output()

    def discard(self, request_id: str) -> None:
        """End a request without an output; unknown ids are ignored."""
        self._cancel(RequestId(request_id))
        self._states.pop(RequestId(request_id), None)
        self._free_adapters()

    def reset_cache(self, preempt_running: bool = False) -> None:
        """Remove every cached prefix, between steps.

        Raises:
            CacheInUse: Requests run, and ``preempt_running`` is off.
        """
        self.recorder.tick()
        self.drain_tiers()
        if preempt_running:
            self.scheduler.preempt_all()
        self.cache.admin.reset()
        self.prompts.forget_texts()
        self.recorder.on_reset(preempt_running)

    @property
    def request_ids(self) -> list[RequestId]:
        """The live requests."""
        return list(self._states)

    def requests_of(self, salt: str | bytes) -> list[RequestId]:
        """List the live requests of a tenant, or of a public prefix."""
        tenant, states = _packed(salt), self._states.items()
        return [name for name, state in states if state.request.identity.belongs_to(tenant)]

    def block_tenant(self, salt: str | bytes) -> None:
        """Refuse a tenant's requests until ``unblock_tenant`` was called as often."""
        self._blocked.append(_packed(salt))

    def unblock_tenant(self, salt: str | bytes) -> None:
        """Accept a tenant's requests again."""
        self._blocked.remove(_packed(salt))

    def add_adapter(self, named: NamedAdapter) -> None:
        """Let requests use an adapter from now on, between steps.

        Raises:
            RequestError: There are too many, or its number is another one's.

        Effects: one of the same name is unloaded, as ``remove_adapter`` does.
        """
        replaced = self.adapters.add(named)
        if replaced is not None:
            self._end_adapter(replaced)

    def remove_adapter(self, name: str) -> None:
        """Let no new request use an adapter, between steps.

        Raises:
            RequestError: None of that name is loaded.

        Effects: requests that have it finish, and publish nothing more; then its weights are
        freed. What it has cached stays, for when the same content is loaded again.
        """
        self._end_adapter(self.adapters.remove(name))

    def _end_adapter(self, adapter: LoraAdapter) -> None:
        if self.adapters.end(adapter, self.cache.manager.live_tables):
            self.audit.forget_adapter(adapter.digest)
        self._free_adapters()

    def _free_adapters(self) -> None:
        """Free the weights of unloaded adapters that no live request has."""
        if self.adapters.num_ending:
            self.adapters.free({s.request.identity.adapter for s in self._states.values()})

    def drain_tiers(self) -> None:
        """End all loads from tiers; their requests compute what is missing."""
        if self.tiers is not None:
            self.tiers.drain()

    def forget_images(self, tenant: bytes | None = None) -> None:
        """Forget what the encoder made of a tenant's images; of all, after new weights."""
        if self.runner.images is None or self.image_encoder is None:
            return
        if tenant is None:
            self.image_encoder.start_over()
        self.image_encoder.settle()
        self.runner.images.forget(tenant)

    def identity(self, cache_salt: str) -> Identity:
        """Return the identity of a tenant's requests now."""
        return Identity(
            weights=self.loaded.fingerprint,
            epoch=self.cache.manager.epoch,
            kv_dtype=str(self.runner.kv_stores[0].dtype),
            tenant=cache_salt.encode(),
        )

    def identity_of(self, prompt: Prompt, tokens: "array[int]", reads: bool = True) -> Identity:
        """Return the identity of a prompt now; unless it reads, it uses no public prefix."""
        own = self.identity(prompt.cache_salt)
        if prompt.publishes is not None:
            return replace(own, tenant=salt_of_public(prompt.publishes))
        if prompt.adapter:
            own = self.adapters.identity_of(own, prompt.adapter, tokens)
        prefixes = prompt.public_prefixes if reads else ()
        public = self.public_prefixes.longest_of(tokens, prefixes)
        if public is not None and 0 < own.adapter_start < public.num_tokens:
            public = None  # the adapter computes the end of it
        return replace(own, public_prefix=public)

    def close(self) -> None:
        """Stop recording and publishing; a second call does nothing, nor does one in a fork."""
        if not self.owner.is_here:
            return
        self.recorder.stop()
        if self.image_encoder is not None:
            self.image_encoder.stop()
        if self.tiers is not None:
            self.tiers.close()
        if self.kv_events is not None:
            self.kv_events.close()

    def _take(self, updates: list[SequenceUpdate]) -> list[RequestState]:
        """Add a step's tokens to the requests, and end those that reached a stop string."""
        now_s = self._clock()
        touched: dict[RequestId, RequestState] = {}
        for update in updates:
            sequence, request_id = update.sequence, update.sequence.request.request_id
            state = touched[request_id] = self._states[request_id]
            if state.images and self.image_encoder is not None:
                self.image_encoder.end(request_id)  # its prompt is computed
            stop = state.take(sequence, update.token, now_s)
            if stop is not None:
                self.scheduler.finish(sequence, FinishReason.STOP, stop)
            self.recorder.record_output(sequence)
        return self._collect(touched)

    def _fail(self, error: str) -> list[RequestState]:
        """End the requests of a failed step, with all of their continuations."""
        now_s = self._clock()
        self.recorder.tick()
        touched: dict[RequestId, RequestState] = {}
        ended = self.scheduler.fail()
        self.recorder.on_failed()
        for update in ended:
            self.recorder.record_output(update.sequence)
            request_id = update.sequence.request.request_id
            touched[request_id] = self._states[request_id]
            touched[request_id].take(update.sequence, None, now_s)
        for request_id, state in touched.items():
            for sequence in self.scheduler.cancel(request_id):
                self.recorder.record_output(sequence)
            if self.image_encoder is not None:
                self.image_encoder.end(request_id)
            state.fail(FinishReason.ERROR, error, now_s)
        return self._collect(touched)

    def _collect(self, touched: dict[RequestId, RequestState]) -> list[RequestState]:
        """Drop the requests that have ended."""
        for request_id, state in touched.items():
            if state.finished:
                del self._states[request_id]
                self.prompts.note_answers(state)
                self.audit.note(state.request, state.num_cached_tokens)
                self.recorder.on_ended(request_id)
        self._free_adapters()
        return list(touched.values())

    def _cancel(self, request_id: RequestId) -> list[Sequence]:
        """End all sequences of a request; an unknown id has none."""
        self.recorder.tick()
        if self.image_encoder is not None:
            self.image_encoder.end(request_id)
        ended = self.scheduler.cancel(request_id)
        self.recorder.on_cancelled(request_id, ended)
        return ended

    def _new_id(self) -> str:
        """Return a name that no live request has."""
        names = map("request-{}".format, self._numbers)
        return next(name for name in names if name not in self._states)


def _packed(salt: str | bytes) -> bytes:
    """Return a salt as identities hold it; those of public prefixes are bytes already."""
    return salt.encode() if isinstance(salt, str) else salt
