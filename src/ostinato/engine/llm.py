"""How is it used offline?

::

    from ostinato import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("To be, or not to be", SamplingParams(max_tokens=64))[0].outputs[0].text)
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ostinato.core.errors import EngineStopped, RequestError, StepFailed
from ostinato.core.sampling_params import SamplingParams
from ostinato.core.tenancy import EraseReceipt
from ostinato.engine.administration import Administration
from ostinato.engine.chat import Message, fields_of, is_conversation, render_chat
from ostinato.engine.config import DEFAULT_MODEL, EngineConfig
from ostinato.engine.engine import Engine
from ostinato.engine.explaining import explain_request
from ostinato.engine.interrupts import InterruptGate
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.progress import GenerationProgress
from ostinato.engine.prompts import Prompt, PromptInput, check_salt, parse_prompt, parse_prompts
from ostinato.engine.requests import EngineRequest
from ostinato.engine.weights import WeightSource, read_weights
from ostinato.observe.counters import CacheStats
from ostinato.observe.explanation import Explanation
from ostinato.tenants.terms import PINNED, LeaseId, LeaseReceipt, LeaseTerms


class LLM:
    """A model with a prefix cache, for batches; in the field's familiar shape."""

    def __init__(self, model: str | Path = DEFAULT_MODEL, **settings: Any) -> None:
        """Load a model.

        Args:
            model: Embedded model, checkpoint directory or hub name.
            **settings: See ``EngineConfig``.

        Raises:
            ConfigError: A setting is out of range.
            ModelError: The model cannot be served.
        """
        self._engine: Engine | None = Engine(EngineConfig.of(model, settings))
        Administration(self._engine).start_recording_if_set()

    @property
    def engine(self) -> Engine:
        """The loop underneath.

        Raises:
            EngineStopped: ``close`` was called.
        """
        if self._engine is None:
            raise EngineStopped("this LLM was closed: make another one")
        return self._engine

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: A text, a row of token ids, a dict (see ``PromptDict``), or a list of those.
            params: One for all, or one per prompt; None is ``SamplingParams()``.
            use_tqdm: Whether to show progress.
            priority: One for all, or one per prompt; lower goes first.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: A prompt or its parameters can never be served; nothing has run.
            StepFailed: A forward pass raised; ``outputs`` holds what the others brought.

        Effects: prompts and outputs stay cached for later calls.
        """
        return self._run(parse_prompts(prompts), params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue conversations.

        Args:
            messages: One conversation, or a list of them.
            params: As in ``generate``.
            chat_template: Jinja; None is the tokenizer's own.
            add_generation_prompt: Whether to open the assistant's turn.
            use_tqdm: As in ``generate``.
            priority: As in ``generate``.

        Returns:
            One output per conversation, in their order.

        Raises:
            MissingTokenizer: The checkpoint has none.
            RequestError: As in ``generate``, or the template refuses.
        """
        tokenizer = self.engine.loaded.require_tokenizer()
        conversations: Any = [messages] if is_conversation(messages) else messages
        prompts = [
            Prompt(
                token_ids=render_chat(tokenizer, m, chat_template, add_generation_prompt),
                fields=fields_of(m),
            )
            for m in conversations
        ]
        return self._run(prompts, params, use_tqdm, priority)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises:
            MissingTokenizer: The checkpoint has none.
        """
        return self.engine.loaded.require_tokenizer()

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of the prefix cache since the start."""
        return self.engine.cache_stats

    def explain(self, request: RequestOutput | str, *, administrator: bool = False) -> Explanation:
        """Say why a request's prompt hit and missed what it did.

        Args:
            request: Its output, or its ``request_id``; one of the last ``keep_explanations``.
            administrator: Whether other tenants may be mentioned; their content never is.

        Returns:
            What became of every token; print it, or read ``stretches``.

        Raises:
            RequestError: It is not remembered.
        """
        return explain_request(self.engine, request, administrator)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self.engine.reset_cache()

    def update_weights(self, source: WeightSource) -> int:
        """Put new weights in the place of the old ones.

        Args:
            source: A checkpoint of the same config, or tensors by the names of the model's
                ``state_dict()``; weights that are not named stay.

        Returns:
            The epoch: the number of updates so far.

        Raises:
            ConfigError: A tensor does not fit, or the checkpoint is of another model; nothing
                has changed.
            ModelError: The checkpoint cannot be read; nothing has changed.

        Effects: nothing that was computed before can hit; leases end.
        """
        update = read_weights(source, self.engine.loaded)
        return Administration(self.engine).update_weights(update)

    def lease(self, prompt: PromptInput, terms: LeaseTerms = PINNED) -> LeaseReceipt:
        """Keep a prompt's cached blocks from being evicted.

        Args:
            prompt: As in ``generate``; it has to be cached already, by a request before.
            terms: For how long: ``PINNED`` until ``end_lease``, or a time to live, such as
                ``ANTHROPIC_5M``.

        Returns:
            Whether all, a part or nothing of it is held, and why.

        Raises:
            RequestError: It is no prompt of this model.
        """
        return Administration(self.engine).lease(parse_prompt(prompt), terms)

    def end_lease(self, lease_id: LeaseId) -> bool:
        """Let go of a lease; returns False if there is none of that number."""
        return Administration(self.engine).end_lease(lease_id)

    def publish(self, name: str, prompt: PromptInput) -> LeaseReceipt:
        """Compute a prefix once for several tenants, and hold it until it is unpublished.

        Requests whose dict names it in ``public_prefixes`` share it, whatever their salt; what
        follows it is each tenant's own.

        Args:
            name: To be named by.
            prompt: The prefix; as much of it as fills whole blocks is published.

        Returns:
            Accepted with its number of tokens, or rejected and why.

        Raises:
            RequestError: The name is taken, or the prompt fills no block.
        """
        administration = Administration(self.engine)
        made = administration.publishable(name, parse_prompt(prompt))
        self._run([made], SamplingParams(max_tokens=1, detokenize=False), False, 0)
        return administration.publish(made)

    def unpublish(self, name: str) -> EraseReceipt:
        """Forget a public prefix, and what all tenants computed behind it.

        Raises:
            RequestError: There is none of that name.
            CacheInUse: Requests under way in ``engine`` begin with it.
        """
        return Administration(self.engine).unpublish(name)

    def erase(self, cache_salt: str, cancel_running: bool = False) -> EraseReceipt:
        """Leave nothing of a tenant in cache, statistics and KV store.

        Args:
            cache_salt: The tenant's.
            cancel_running: Whether requests of it that are under way in ``engine`` are cancelled.

        Returns:
            What was erased, by place.

        Raises:
            CacheInUse: Requests of it are under way in ``engine``, and were not to be cancelled.
        """
        check_salt(cache_salt)
        names = self.engine.requests_of(cache_salt) if cancel_running else []
        for name in names:
            self.engine.cancel(name)
        return Administration(self.engine).erase(cache_salt, len(names))

    def start_recording(self, path: str | Path) -> Path:
        """Record what happens from now on, for ``ostinato simulate``.

        Times, lengths and pseudonyms are written, no content: see ``core.trace``.

        Args:
            path: A file that does not exist.

        Raises:
            ConfigError: A recording runs already, or the file cannot be made.
        """
        return Administration(self.engine).start_recording(path)

    def stop_recording(self) -> Path | None:
        """End the recording and return where it is; None if none runs."""
        return Administration(self.engine).stop_recording()

    def close(self) -> None:
        """Let go of the model, its memory and its sockets; a second call does nothing."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> "LLM":
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: int | Sequence[int],
    ) -> list[RequestOutput]:
        """Check everything, then add everything, then step until all have ended."""
        engine = self.engine
        each_params = _one_each(
            "params", SamplingParams() if params is None else params, len(prompts)
        )
        each_priority = _one_each("priority", priority, len(prompts))
        made = [
            engine.make_request(prompt, p, priority=rank)
            for prompt, p, rank in zip(prompts, each_params, each_priority, strict=True)
        ]
        with InterruptGate(lambda: engine.is_computing) as gate:
            try:
                outputs = self._drain(made, use_tqdm, gate)
            finally:
                for request in made:  # after an interruption, nothing stays behind
                    engine.discard(request.request.request_id)
        return _raise_failures([outputs[request.request.request_id] for request in made])

    def _drain(
        self, made: list[EngineRequest], use_tqdm: bool, gate: InterruptGate
    ) -> dict[str, RequestOutput]:
        engine = self.engine
        outputs: dict[str, RequestOutput] = {}
        with GenerationProgress(
            len(made), engine.cache_stats, engine.scheduler_stats, use_tqdm
        ) as progress:
            for request in made:
                engine.add(request)
            while engine.has_work:
                gate.check()
                finished = [state for state in engine.step() if state.finished]
                outputs.update((state.request.request_id, state.output()) for state in finished)
                progress.update(len(finished))
        return outputs


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    """Repeat a single setting, or check that there is one per prompt."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{len(value)} {name} for {count} prompts: give one for all, or one per prompt"
        )
    return list(value)


def _raise_failures(outputs: list[RequestOutput]) -> list[RequestOutput]:
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise StepFailed(
            f"{len(failed)} of {len(outputs)} requests failed: {failed[0].error}; "
            "the exception's 'outputs' holds the others",
            outputs,
        )
    return outputs
