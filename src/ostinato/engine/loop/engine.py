"""The engine loop, without I/O and without threads.

``LLM`` and ``AsyncLLM`` add requests, and call ``step`` while there is work::

    add ─► scheduler.plan ─► runner.execute ─► scheduler.commit ─► request states ─► outputs
                                  └─ raises ─► scheduler.fail ───┘

A step that raises ends the requests that took part in it and no others.
"""

import logging
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ostinato.assembly import PrefixCache, build_cache, build_scheduler
from ostinato.cache.observer import CacheObserver
from ostinato.core.ids import RequestId
from ostinato.core.plan import StepPlan, StepResult
from ostinato.core.request import FinishReason
from ostinato.engine.loop.adapters import Adapters
from ostinato.engine.loop.audit import HitAudit
from ostinato.engine.loop.drafting import Drafting
from ostinato.engine.loop.idle_rebase import IdleRebase
from ostinato.engine.loop.kv_events_publisher import publish_kv_events
from ostinato.engine.loop.recorder import TraceRecorder
from ostinato.engine.loop.request_factory import Identities, RequestFactory
from ostinato.engine.prompts.image_encoder import ImageEncoder
from ostinato.engine.prompts.prompt_tokenizer import PromptTokenizer
from ostinato.engine.prompts.public_prefixes import PublicPrefixes
from ostinato.engine.prompts.template_report import report_template
from ostinato.engine.requests.caller import ProcessGuard
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.requests.read_defaults import read_defaults
from ostinato.engine.requests.request_state import RequestState
from ostinato.engine.requests.request_validation import PreparedRequest
from ostinato.engine.scoring.scorer import Scorer
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.setup import ModelSetup, set_up
from ostinato.engine.tiers.open_tiers import open_tiers
from ostinato.engine.tiers.stores import TierStores
from ostinato.engine.tiers.tiered_cache import WAIT_S, TieredCache
from ostinato.engine.tiers.waits import WaitBook
from ostinato.errors import ConfigError, RequestError
from ostinato.observe.counters import CacheStats
from ostinato.plugins.plugged import plug_in
from ostinato.runner.loaded_model import LoadedModel
from ostinato.sched.sequence import Sequence, SequenceUpdate
from ostinato.scheduling.held_requests import HeldRequests
from ostinato.scheduling.learned_prices import LearnedPrices

logger = logging.getLogger("ostinato")


class Engine:
    """One model with its runner, one prefix cache, one scheduler.

    Attributes:
        owner: The process that it runs in.
        compute_path: How the runner computes steps, and why not faster.
        drafting: Whether decodes draft, and from which text.
        max_model_len: Most tokens of prompt and answer together.
        scheduler_stats: Counters of the scheduler.
        defaults: Sampling parameters of requests that give none.
        adapters: LoRA adapters by name.
        public_prefixes: The prefixes that several tenants share.
        identities: With whom the KV of a prompt may be shared.
        make_request: Makes a request, checked in full: ``RequestFactory.make``.
        rebase: Computes prompts to come in idle moments.
        audit: Recomputes hits in idle moments, and compares.
        grammars: Compiles structured outputs; safe in any thread.
        params: Prepares sampling parameters; safe in any thread.
        scorer: Turns texts into embeddings, scores and classes; for one thread.
        plugged: What replaces built-in parts.
        is_computing: Whether a forward pass is running: an exception now only ends the step.
        recorder: Records traces, where one was started.
        tiers: Where prefixes outlive the pool; None unless one is set.
        prices: What steps cost on this machine.
        waits: For whose work requests wait.
        kv_events: Publishes KV events; None unless ``kv_events_endpoint`` is set.
        prompts: Turns the texts and images of prompts into token ids.
        texts: Tokenizes texts, and remembers them; None if the checkpoint has no tokenizer.
        template: What the chat template loses of earlier turns; None if there is no template.
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
        self.owner = ProcessGuard()
        self.config = config
        setup = set_up(config)
        self.defaults = read_defaults(config, setup.loaded.path)
        self.loaded: LoadedModel = setup.loaded
        if self.defaults.eos_token_ids is not None:
            self.loaded = replace(setup.loaded, eos_token_ids=self.defaults.eos_token_ids)
        if self.defaults.values:
            logger.info("%s samples by default with %s", self.loaded.name, self.defaults)
        self.runner, self.compute_path = setup.runner, setup.compute_path
        self.recorder = TraceRecorder(clock)
        self.adapters = Adapters(config, self.runner.adapters)
        stores, held = TierStores(config.block_size), HeldRequests()
        self.plugged = plug_in(
            config.index, config.eviction_policy, config.order, config.max_overtakes
        )
        self.drafting = Drafting(config, setup)
        if self.drafting.why_not and config.drafts == "auto":
            logger.info("%s decodes without drafts: %s", self.loaded.name, self.drafting.why_not)
        self.cache = self._build_cache(setup, stores)
        self.public_prefixes = PublicPrefixes(self.cache.admin, config.block_size)
        self.image_encoder: ImageEncoder | None = None
        self._holding = holding = [held] if config.has_tiers else []
        if self.runner.images is not None:
            self.image_encoder = ImageEncoder(self.runner.images)
            holding.append(self.image_encoder.held)
        # Steps are measured by the recorder's clock, so that a replay learns the same prices.
        self.prices, steps_clock = LearnedPrices(), self.recorder.clock
        # A trace has one token per sequence and step, and a replay of it repeats its steps.
        drafter = self.drafting.drafter(self.prices, lambda: self.recorder.path is not None)
        self.scheduler = build_scheduler(
            setup.scheduling, self.cache, steps_clock, holding, self.prices,
            self.plugged.make_order, self.plugged.wrap_order, drafter,
        )  # fmt: skip
        self.scheduler_stats = self.scheduler.stats
        self.max_model_len = self.scheduler.config.max_model_len
        self.waits = WaitBook(self.prices, config.keep_explanations)
        self.audit = HitAudit(config.audit_share, config.audit_quarantine, self.runner, self.cache)
        self.is_computing = False
        self._clock = clock
        self._states: dict[RequestId, RequestState] = {}
        self._blocked: list[bytes] = []  # tenants that are being erased
        self.prompts = PromptTokenizer(self.loaded, config, self.public_prefixes)
        self.texts, self.image_prompts = self.prompts.texts, self.prompts.images
        self.template = report_template(self.loaded.tokenizer, self.loaded.vision is not None)
        if self.template is not None and self.template.summary():
            logger.warning("%s: %s", self.loaded.name, self.template.summary())
        kv_dtype = self.runner.kv_stores[0].dtype
        self.rebase = IdleRebase(
            config.idle_rebase == "auto"
            and config.enable_prefix_caching
            and self.template is not None
            and self.template.drops_at_user_message,
            self.cache,
            self.scheduler,
            self._execute,
            self.loaded.kv_spec.bytes_per_token(kv_dtype),
            self.recorder,
        )
        self.identities = Identities(
            self.loaded, kv_dtype, self.cache.manager, self.adapters, self.public_prefixes
        )
        requests = RequestFactory(
            self.loaded, config, self.scheduler, self.prompts, self.identities, clock
        )
        self.make_request, self.grammars = requests.make, requests.grammars
        self.params = requests.params
        self.scorer = Scorer(self.loaded, config, self.max_model_len, self.prompts)
        self._clean_up_with(self.recorder.stop)
        self.kv_events = publish_kv_events(config, self.cache, self.loaded.device.type, clock)
        if self.kv_events is not None:
            self._clean_up_with(self.kv_events.close)
        self.tiers: TieredCache | None = None
        if config.has_tiers:
            opened = open_tiers(config, self.runner, stores.events)
            parts = self.cache, self.scheduler, self.runner, self.compute_path, self.prices
            self.tiers = TieredCache(opened, stores, held, *parts)
            self._clean_up_with(self.tiers.stop)

    def _build_cache(self, setup: ModelSetup, stores: TierStores) -> PrefixCache:
        """Build the cache, with the observers that the settings need."""
        config, sizes = self.config, setup.sizes
        longest_blocks = -(-setup.scheduling.max_model_len // config.block_size)
        reserved_blocks = min(longest_blocks, sizes.num_blocks)
        caching = config.cache(sizes.num_blocks, sizes.windows, reserved_blocks, sizes.states)
        observers: list[CacheObserver] = [stores] if config.has_tiers else []
        if config.enable_lora:
            observers.append(self.adapters)
        if self.drafting.tree is not None:
            observers.append(self.drafting.tree)
        if self.plugged.make_index is not None and (sizes.windows or sizes.states):
            raise ConfigError(
                f"index={config.index!r}: a plug-in knows full attention alone, and "
                f"{config.model!r} has windows or states: set index='radix'"
            )
        return build_cache(
            caching, self.recorder.clock, more_observers=tuple(observers),
            policy=self.plugged.policy, make_index=self.plugged.make_index,
        )  # fmt: skip

    def _clean_up_with(self, stop: Callable[[], object]) -> None:
        """Call ``stop`` when the engine is collected, or at exit, without a call of ``close``."""
        weakref.finalize(self, self.owner.only_here(stop))

    @property
    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._states)

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the cache."""
        return self.cache.stats

    def add(self, prepared: PreparedRequest) -> None:
        """Add a request.

        Raises:
            DuplicateRequest: Another one of its name was added meanwhile.
            RequestError: Its tenant is being erased.
        """
        identity = prepared.request.identity
        if any(map(identity.belongs_to, self._blocked)):
            raise RequestError(
                "the tenant of the request, or a public prefix that it begins with, is being "
                "erased: send it again when that is done"
            )
        if identity.adapter and not self.adapters.is_usable(identity.adapter):
            raise RequestError("the adapter of the request was unloaded: load it again")
        if prepared.search is not None and self.recorder.path is not None:
            raise RequestError("a trace cannot repeat beams: stop the recording, or sample")
        self.recorder.tick()
        self.scheduler.add(prepared.request, prepared.seeds)
        self.recorder.on_added(prepared.request, prepared.arrival_s)
        if self.rebase.is_on:
            self.rebase.note_request(prepared.request)
        state = RequestState(prepared, None if self.texts is None else self.texts.table)
        self._states[prepared.request.request_id] = state
        [sequence] = self.scheduler.requests.live[prepared.request.request_id]
        self.waits.begin(sequence, self._clock())
        if self.image_encoder is not None and prepared.images:
            num_cached = partial(self.scheduler.num_cached_tokens, sequence)
            state.images = self.image_encoder.begin(prepared.request, prepared.images, num_cached)
        if self.tiers is not None:
            self.tiers.begin(prepared.request.request_id)
        self.prompts.note(prepared)

    def step(self) -> list[RequestState]:
        """Run one step.

        Returns:
            The requests that got a token or ended; the engine keeps no ended one. Their outputs
            are made when ``output()`` is called.

        Raises:
            BaseException: Other than an ``Exception``, such as ``KeyboardInterrupt``, after the
                step's requests have ended.
        """
        for request_id, note in () if self.tiers is None else self.tiers.begin_step():
            if request_id in self._states:
                self._states[request_id].load_note = note
        failed = [] if self.image_encoder is None else self._begin_image_step(self.image_encoder)
        if self.tiers is not None and self.tiers.wait_for_loads():
            return failed
        try:
            return [*failed, *self._step()]
        finally:
            if self.tiers is not None:
                self.tiers.end_step()
            if self.image_encoder is not None and not self._has_ready:
                self.image_encoder.wait(WAIT_S)

    @property
    def _has_ready(self) -> bool:
        """Whether a request runs, or waits for neither a tier nor an image."""
        waiting = (s.request.request_id for s in self.scheduler.requests.waiting)
        return self.scheduler.num_running > 0 or any(
            all(request_id not in held for held in self._holding) for request_id in waiting
        )

    def _step(self) -> list[RequestState]:
        """Plan, run and commit a step."""
        self.recorder.begin_step()
        begun_s = self._clock()
        plan = self.scheduler.plan()
        if not plan.sequences:
            return []
        try:
            result = self._execute(plan)
        except Exception as error:
            logger.exception("a step failed; its %d sequences end", len(plan.sequences))
            return self._fail(f"the forward pass failed: {type(error).__name__}: {error}")
        except BaseException as interruption:
            self._fail(f"interrupted: {type(interruption).__name__}")
            raise
        self.recorder.end_step()
        updates = self.scheduler.commit(result)
        self.waits.add_step(plan, self._clock() - begun_s)
        return self.process_outputs(updates)

    def _execute(self, plan: StepPlan) -> StepResult:
        self.is_computing = True
        try:
            return self.runner.execute(plan)
        finally:
            self.is_computing = False

    def _begin_image_step(self, image_encoder: ImageEncoder) -> list[RequestState]:
        """Take encoded images; returns requests that ended because one cannot be encoded."""
        loading: HeldRequests = set() if self.tiers is None else self.tiers.loads.held
        failed = image_encoder.begin_step(loading, self.scheduler.num_running)
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
        self.free_adapters()
        return state.output()

    def discard(self, request_id: str) -> None:
        """End a request without an output, also after a bug in making it; ignores unknown ids."""
        self._cancel(RequestId(request_id))
        self._states.pop(RequestId(request_id), None)
        self.free_adapters()

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
        self.rebase.erase()
        self.prompts.remove_texts()
        self.recorder.on_reset(preempt_running)

    def offer_next(
        self, request_id: str, prompt_context: Prompt, tokens: "array[int]", in_loop: bool = False
    ) -> bool:
        """Prepare the prompt that follows an answered request, in idle steps; see ``IdleRebase``.

        Args:
            request_id: The request.
            prompt_context: A prompt of its sender.
            tokens: What is known of the prompt, packed, shape (num_tokens,).
            in_loop: Whether it was answered by a call.

        Returns:
            Whether there is something to compute.
        """
        if not self.rebase.is_prepared(request_id) or not len(tokens):
            return False
        try:
            identity = self.identities.of_prompt(prompt_context, tokens)
        except RequestError:  # its adapter was unloaded
            return False
        if any(identity.belongs_to(salt) for salt in self._blocked):
            return False
        return self.rebase.offer(request_id, identity, tokens, in_loop)

    @property
    def request_ids(self) -> list[RequestId]:
        """The live requests."""
        return list(self._states)

    def requests_of(self, salt: str | bytes) -> list[RequestId]:
        """List the live requests of a tenant, or of a public prefix."""
        tenant, states = _salt_bytes(salt), self._states.items()
        return [name for name, state in states if state.request.identity.belongs_to(tenant)]

    def block_tenant(self, salt: str | bytes) -> None:
        """Refuse a tenant's requests until ``unblock_tenant`` was called as often."""
        self._blocked.append(_salt_bytes(salt))

    def unblock_tenant(self, salt: str | bytes) -> None:
        """Accept a tenant's requests again."""
        self._blocked.remove(_salt_bytes(salt))

    def free_adapters(self) -> None:
        """Free the weights of unloaded adapters that no live request has."""
        if self.adapters.ending:
            self.adapters.free({s.request.identity.adapter for s in self._states.values()})

    def is_loading(self, salt: str | bytes) -> bool:
        """Whether a thread may still read something of a tenant from a tier."""
        return self.tiers is not None and self.tiers.loads.has_any_of(_salt_bytes(salt))

    def drain_tiers(self, seconds: float | None = None) -> None:
        """End all loads from tiers, as far as they end in time; their requests compute the rest."""
        if self.tiers is not None:
            self.tiers.loads.drain(seconds)

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

    def process_outputs(self, updates: list[SequenceUpdate]) -> list[RequestState]:
        """Add a step's tokens to the requests, and end those that reached a stop string."""
        now_s = self._clock()
        touched: dict[RequestId, RequestState] = {}
        while updates:
            for update in updates:
                request_id = update.sequence.request.request_id
                state = touched[request_id] = self._states[request_id]
                self._add_token(state, update, now_s)
            updates = self.scheduler.commit_accepted()
        return self._collect(touched)

    def _add_token(self, state: RequestState, update: SequenceUpdate, now_s: float) -> None:
        """Add a token to a request, and end the sequence if that completes a stop string."""
        sequence = update.sequence
        self.waits.end(sequence, now_s)
        if state.images and self.image_encoder is not None:
            self.image_encoder.end(state.request.request_id)  # its prompt is computed
        stop = state.take(sequence, update.token, now_s)
        if stop is not None:
            self.scheduler.finish(sequence, FinishReason.STOP, stop)
        self.recorder.record_output(sequence)

    def _fail(self, error: str) -> list[RequestState]:
        """End the requests of a failed step, with all of their continuations."""
        now_s = self._clock()
        self.recorder.fail_step()
        touched: dict[RequestId, RequestState] = {}
        ended = self.scheduler.fail()
        for update in ended:
            self.waits.end(update.sequence, now_s)
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
        """Remove the requests that have ended, and return all."""
        for request_id, state in touched.items():
            if state.finished:
                del self._states[request_id]
                self.prompts.note_answers(state)
                if self.audit.share:
                    self.audit.note(state.request, state.num_cached_tokens)
                if self.rebase.is_on:
                    self.rebase.note_answer(state)
                self.recorder.on_ended(request_id)
        if self.adapters.ending:
            self.free_adapters()
        return list(touched.values())

    def _cancel(self, request_id: RequestId) -> list[Sequence]:
        """End all sequences of a request; an unknown id has none."""
        self.recorder.tick()
        if self.image_encoder is not None:
            self.image_encoder.end(request_id)
        ended = self.scheduler.cancel(request_id)
        for sequence in ended:
            self.waits.end(sequence, self._clock())
        self.recorder.on_cancelled(request_id, ended)
        return ended


def _salt_bytes(salt: str | bytes) -> bytes:
    """Return a salt as identities hold it; those of public prefixes are bytes already."""
    return salt.encode() if isinstance(salt, str) else salt
