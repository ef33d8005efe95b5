"""``LLM``: batches of prompts, offline.

::

from ostinato import LLM, SamplingParams

llm = LLM()
print(llm.generate("To be, or not to be", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from ostinato.engine.api import scoring_api
from ostinato.engine.api.adapter_api import load_adapter, remove_adapter, with_adapters
from ostinato.engine.api.admin_api import AdminApi
from ostinato.engine.api.beam_api import BeamSearchOutput, BeamSearchParams, beam_search
from ostinato.engine.api.explain_api import explain_request
from ostinato.engine.ledger.meaning import Message
from ostinato.engine.loop.adapters import LoRARequest
from ostinato.engine.loop.batch import ShowProgress, run_batch
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.chat import is_conversation, sections_of
from ostinato.engine.requests.caller import CallGate
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import (
    Prompt,
    PromptInput,
    check_keep_reasoning,
    check_salt,
    parse_prompt,
    parse_prompts,
)
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.scoring.choices import ChoiceOutput
from ostinato.engine.scoring.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from ostinato.engine.scoring.pairs import Query
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import DEFAULT_MODEL
from ostinato.engine.settings.vllm_keywords import refuse_arguments, refuse_call
from ostinato.engine.settings.weights import WeightSource, read_weights
from ostinato.errors import CacheInUse, EngineStopped
from ostinato.observe.counters import CacheStats
from ostinato.observe.explanation import Explanation
from ostinato.tenants.terms import PINNED, EraseReceipt, LeaseId, LeaseReceipt, LeaseTerms

BATCH_STEP_MS = 10_000
"""``max_step_ms`` by default: a batch returns all answers together, so only its rate counts."""

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _pooling(params: PoolingParams | None, truncate_prompt_tokens: int | None) -> PoolingParams:
    """Return the parameters of a call, which may name the truncation apart."""
    params = PoolingParams() if params is None else params
    if truncate_prompt_tokens is None:
        return params
    return replace(params, truncate_prompt_tokens=truncate_prompt_tokens)


def _one_at_a_time(method: MethodT) -> MethodT:
    """Refuse a call while another one is running, in another thread or in this one."""

    @wraps(method)
    def gated(self: "LLM", *args: Any, **kwargs: Any) -> Any:
        with self._gate.enter(method.__name__):
            return method(self, *args, **kwargs)

    return cast(MethodT, gated)


class LLM:
    """A model with a prefix cache, for batches; with vLLM's interface.

    It runs one call at a time, in the process that made it; a call while another one is running
    raises ``ConcurrentCall``, one in a forked process ``ForkedProcess``. For many callers there is
    ``AsyncLLM``.
    """

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model.

        Args:
            model: Embedded model, checkpoint directory or hub name.
            **settings: See ``EngineSettings``; but ``max_step_ms`` is ``BATCH_STEP_MS``.

        Raises:
            ConfigError: A setting is out of range.
            ModelError: The model cannot be served.
        """
        engine = Engine(EngineConfig.of(model, {"max_step_ms": BATCH_STEP_MS} | settings))
        self._engine: Engine | None = engine
        self._gate = CallGate(engine.owner)
        AdminApi(engine).start_recording_if_set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        """Load a model by settings such as ``EngineArgs``; raises as the constructor."""
        return cls(**engine_args.keywords)

    @property
    def engine(self) -> Engine:
        """The loop underneath.

        Raises:
            EngineStopped: ``close`` was called, or this is a fork of the engine's process.
        """
        if self._engine is None:
            raise EngineStopped("this LLM was closed: make another one")
        self._engine.owner.check()
        return self._engine

    if not TYPE_CHECKING:  # hidden from type checkers, which report missing methods

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that says what to use instead of a method of vLLM."""
            refuse_call(self, name)

    @_one_at_a_time
    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ShowProgress = True,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: A text, a row of token ids, a dict (see ``PromptDict``), or a list of those.
            sampling_params: One for all, or one per prompt; None is
                ``get_default_sampling_params()``. Outputs are complete, whatever their
                ``output_kind``.
            use_tqdm: Whether to show progress, or what makes the bar.
            priority: One for all, or one per prompt; lower goes first, None is 0.
            lora_request: One for all, or one per prompt; None is the base model. An adapter is
                loaded when it is first used, and again when its files have changed.
            **unsupported: vLLM's arguments, at values that change nothing.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: A prompt or its parameters can never be served; nothing has run.
            ConcurrentCall: Another call is running.
            StepFailed: A forward pass raised; ``outputs`` holds the outputs of the others.

        Effects: prompts and outputs stay cached for later calls.
        """
        refuse_arguments(unsupported)
        parsed = with_adapters(self.engine, parse_prompts(prompts), lora_request)
        return run_batch(self.engine, parsed, sampling_params, use_tqdm, priority)

    @_one_at_a_time
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ShowProgress = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        keep_tokens: bool = True,
        keep_reasoning: str | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Continue conversations.

        Args:
            messages: One conversation, or a list of them.
            sampling_params: As in ``generate``.
            use_tqdm: As in ``generate``.
            chat_template: Jinja; None is the tokenizer's own.
            add_generation_prompt: Whether to open the assistant's turn.
            continue_final_message: Go on with the last message, instead of a new turn; needs
                ``add_generation_prompt=False``.
            tools: Functions that the model may call, in OpenAI's format.
            chat_template_kwargs: Other variables of the template, such as ``enable_thinking``.
            priority: As in ``generate``.
            lora_request: As in ``generate``.
            keep_tokens: Whether earlier answers keep the tokens that were generated; False
                tokenizes the whole conversation again.
            keep_reasoning: ``always`` keeps reasoning of earlier turns that the template drops,
                ``template`` does not; None is the engine's setting.
            **unsupported: As in ``generate``.

        Returns:
            One output per conversation, in their order.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: As in ``generate``, or the template refuses.
            ConcurrentCall: Another call is running.
        """
        refuse_arguments(unsupported)
        self.engine.loaded.require_tokenizer()
        conversations: Any = [messages] if is_conversation(messages) else messages
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        options |= chat_template_kwargs or {}
        if continue_final_message:
            options["continue_final_message"] = True
        loaded = [self.engine.image_prompts.load_now(messages) for messages in conversations]
        prompts = [
            Prompt(
                keep_tokens=keep_tokens,
                images=images,
                keep_reasoning=check_keep_reasoning(keep_reasoning),
            )
            for _, images in loaded
        ]
        prompts = with_adapters(self.engine, prompts, lora_request)
        continued, tokenized = self.engine.prompts.continued, self.engine.prompts.tokenized_chat
        prompts = [
            replace(
                tokenized(prompt, continued(prompt, m, chat_template, **options)),
                sections=sections_of(m),
            )
            for prompt, (m, _) in zip(prompts, loaded, strict=True)
        ]
        return run_batch(self.engine, prompts, sampling_params, use_tqdm, priority)

    @_one_at_a_time
    def embed(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        *,
        pooling_params: PoolingParams | None = None,
        prompt_name: str | None = None,
        use_tqdm: ShowProgress = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **unsupported: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: the hidden state of its last token.

        Args:
            prompts: As in ``generate``.
            pooling_params: Dimensions, normalisation, truncation.
            prompt_name: Name of a prompt of the checkpoint that precedes each text, as ``query``.
            use_tqdm: As in ``generate``.
            truncate_prompt_tokens: As in ``pooling_params``.
            lora_request: As in ``generate``.
            **unsupported: As in ``generate``.

        Raises:
            RequestError: The checkpoint has no such embedding, or a prompt is too long.
            ConcurrentCall: Another call is running.

        Effects: prompts stay cached for later calls of any kind.
        """
        refuse_arguments(unsupported)
        params = _pooling(pooling_params, truncate_prompt_tokens)
        return scoring_api.embed(self.engine, prompts, params, prompt_name, use_tqdm, lora_request)

    @_one_at_a_time
    def classify(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowProgress = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **unsupported: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each class of a ``ForSequenceClassification``, per prompt.

        Arguments, errors and effects are those of ``embed``.
        """
        refuse_arguments(unsupported)
        params = _pooling(pooling_params, truncate_prompt_tokens)
        return scoring_api.classify(self.engine, prompts, params, use_tqdm, lora_request)

    @_one_at_a_time
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        instruction: str | None = None,
        cache_salt: str = "",
        pooling_params: PoolingParams | None = None,
        use_tqdm: ShowProgress = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> list[ScoringRequestOutput]:
        """Return how well documents answer a query, which is computed once for all of them.

        Args:
            data_1: One query for all documents, or one per document.
            data_2: The documents.
            instruction: What makes a document relevant; None is the template's own.
            cache_salt: As in ``PromptDict``.
            pooling_params: Truncation, and whether to give logits.
            use_tqdm: As in ``generate``.
            truncate_prompt_tokens: Maximum tokens of a pair, of which the document is cut.
            lora_request: As in ``generate``; one for all.
            **unsupported: As in ``generate``.

        Returns:
            One score per document: of a classifier with one class or of the answers in
            ``score_tokens`` from 0 to 1, of an embedder the cosine.

        Raises:
            RequestError: The model gives no scores, or a pair is too long.
            ConcurrentCall: Another call is running.
        """
        refuse_arguments(unsupported)
        check_salt(cache_salt)
        queries = [Query(text, instruction) for text in scoring_api.texts_of("data_1", data_1)]
        documents = scoring_api.texts_of("data_2", data_2)
        params = _pooling(pooling_params, truncate_prompt_tokens)
        return scoring_api.score(
            self.engine, queries, documents, params, use_tqdm, lora_request, cache_salt
        )

    @_one_at_a_time
    def choose(
        self,
        prompt: PromptInput,
        choices: Sequence[str | Sequence[int]],
        *,
        use_tqdm: ShowProgress = False,
        lora_request: LoRARequest | None = None,
    ) -> ChoiceOutput:
        """Return how likely given continuations of a prompt are; it is computed once for all.

        Args:
            prompt: A text, token ids, or a dict (see ``PromptDict``).
            choices: Texts that continue the text, with the space that precedes them; or rows of
                token ids.
            use_tqdm: As in ``generate``.
            lora_request: As in ``generate``.

        Returns:
            The log-probability of each choice, and which is the best.

        Raises:
            RequestError: A choice has no tokens, or is too long behind the prompt.
            ConcurrentCall: Another call is running.
        """
        return scoring_api.choose(self.engine, prompt, choices, use_tqdm, lora_request)

    @_one_at_a_time
    def beam_search(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: ShowProgress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the most likely answers to each prompt, whose blocks all of its beams share.

        Args:
            prompts: As in ``generate``.
            params: Width, length and length penalty of the search.
            lora_request: As in ``generate``.
            use_tqdm: As in ``generate``.
            concurrency_limit: Most prompts at once; None is all of them.

        Returns:
            ``beam_width`` answers per prompt, the best first, as ``transformers`` searches them.

        Raises:
            RequestError: A parameter is out of range, or a prompt can never be served.
            ConcurrentCall: Another call is running.
        """
        return beam_search(self.engine, prompts, params, lora_request, use_tqdm, concurrency_limit)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises:
            MissingTokenizer: The checkpoint has none.
        """
        return self.engine.loaded.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what ``generate`` samples with by default; the caller's own, to be changed.

        These are the values of ``generation_config`` and ``override_generation_config``.
        """
        return self.engine.defaults.params()

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the prefix cache since the start."""
        return self.engine.cache_stats

    @_one_at_a_time
    def explain(self, request: RequestOutput | str, *, administrator: bool = False) -> Explanation:
        """Explain which tokens of a request's prompt hit, and why the others missed.

        Args:
            request: Its output, or its ``request_id``; one of the last ``keep_explanations``.
            administrator: Whether other tenants may be mentioned; their content never is.

        Returns:
            The explanation of every token; print it, or read ``spans``.

        Raises:
            RequestError: It is not remembered.
        """
        return explain_request(self.engine, request, administrator)

    @_one_at_a_time
    def reset_prefix_cache(self) -> bool:
        """Remove every cached prefix.

        Returns:
            Whether it did; False while requests of ``engine`` run.
        """
        try:
            self.engine.reset_cache()
        except CacheInUse:
            return False
        return True

    @_one_at_a_time
    def update_weights(self, source: WeightSource) -> int:
        """Replace the model's weights.

        Args:
            source: A checkpoint of the same config, or tensors by the names of the model's
                ``state_dict()``; weights that are not named stay.

        Returns:
            The epoch: the number of updates so far.

        Raises:
            ConfigError: A tensor does not fit, or the checkpoint is of another model; nothing
                has changed.
            ModelError: The checkpoint cannot be read; nothing has changed.

        Effects: nothing computed before can hit; leases end.
        """
        update = read_weights(source, self.engine.loaded)
        return AdminApi(self.engine).update_weights(update)

    @_one_at_a_time
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter, or load it again where its files have changed.

        Returns:
            Whether anything was loaded.

        Raises:
            RequestError: It cannot be served, or is above a limit; nothing has changed.
        """
        return load_adapter(self.engine, lora_request)

    @_one_at_a_time
    def remove_lora(self, lora_id: int | str) -> bool:
        """Unload a LoRA adapter, by its number or name; returns whether there was one."""
        return remove_adapter(self.engine, lora_id)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return self.engine.adapters.numbers

    @_one_at_a_time
    def lease(self, prompt: PromptInput, terms: LeaseTerms = PINNED) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted.

        Args:
            prompt: As in ``generate``; an earlier request must have cached it.
            terms: For how long: ``PINNED`` until ``end_lease``, or a time to live, such as
                ``ANTHROPIC_5M``.

        Returns:
            Whether all, a part or nothing of it is held, and the reason.

        Raises:
            RequestError: It is not a prompt of this model.
        """
        return AdminApi(self.engine).lease(parse_prompt(prompt), terms)

    @_one_at_a_time
    def end_lease(self, lease_id: LeaseId) -> bool:
        """End a lease; returns False if there is none of that number."""
        return AdminApi(self.engine).end_lease(lease_id)

    @_one_at_a_time
    def publish(self, name: str, prompt: PromptInput) -> LeaseReceipt:
        """Compute a prefix once for several tenants, and hold it until it is unpublished.

        Requests whose dict names it in ``public_prefixes`` share it, whatever their salt; what
        follows it is each tenant's own.

        Args:
            name: What requests name it by.
            prompt: The prefix; as much of it as fills whole blocks is published.

        Returns:
            Accepted with its number of tokens, or rejected with the reason.

        Raises:
            RequestError: The name is taken, or the prompt fills no block.
        """
        admin = AdminApi(self.engine)
        prepared = admin.publishable(name, parse_prompt(prompt))
        run_batch(
            self.engine, [prepared], SamplingParams(max_tokens=1, detokenize=False), False, None
        )
        return admin.publish(prepared)

    @_one_at_a_time
    def unpublish(self, name: str) -> EraseReceipt:
        """Remove a public prefix, and what all tenants computed after it.

        Raises:
            RequestError: There is none of that name.
            CacheInUse: Running requests of ``engine`` begin with it.
        """
        return AdminApi(self.engine).unpublish(name)

    @_one_at_a_time
    def erase(self, cache_salt: str, cancel_running: bool = False) -> EraseReceipt:
        """Remove everything of a tenant from cache, statistics and KV store.

        Args:
            cache_salt: The tenant's.
            cancel_running: Whether its running requests in ``engine`` are cancelled.

        Returns:
            What was erased, by place.

        Raises:
            CacheInUse: Requests of it run in ``engine``, and ``cancel_running`` is off.
        """
        check_salt(cache_salt)
        names = self.engine.requests_of(cache_salt) if cancel_running else []
        for name in names:
            self.engine.cancel(name)
        return AdminApi(self.engine).erase(cache_salt, len(names))

    @_one_at_a_time
    def start_recording(self, path: str | Path) -> Path:
        """Record a trace from now on, for ``ostinato simulate``.

        Times, lengths and pseudonyms are written, no content: see ``traces.format``.

        Args:
            path: A file that does not exist.

        Raises:
            ConfigError: A recording runs already, or the file cannot be made.
        """
        return AdminApi(self.engine).start_recording(path)

    @_one_at_a_time
    def stop_recording(self) -> Path | None:
        """End the recording and return its path; None if none runs."""
        return AdminApi(self.engine).stop_recording()

    def close(self) -> None:
        """Free the model, its memory and its sockets; a second call does nothing.

        Raises:
            ConcurrentCall: Another call is running.
        """
        if self._engine is not None and self._engine.owner.is_here:
            with self._gate.enter("close"):
                self._engine.close()
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
