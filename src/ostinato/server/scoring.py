"""The common way of requests for embeddings, scores, classes and choices.

::

    texts ─► check_texts ─► token ids (in a thread) ─► one call each ─► outputs, in order

A window of calls is in the engine at once: enough to fill its steps, and few enough to leave room
for others. All of them share their prefix, which is computed by the first.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import Field, model_validator

from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt, whole_characters
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.scoring.scorer import Scorer
from ostinato.protocol.body import OpenBody
from ostinato.protocol.sampling import CacheUse, ShortText
from ostinato.server.access.callers import Caller
from ostinato.server.call import GenerateCall
from ostinato.server.errors import ApiError
from ostinato.server.generation import adapter_of
from ostinato.server.serving import check_room, last_output
from ostinato.server.state import ServerState
from ostinato.server.usage import Usage

MAX_WINDOW = 128
"""Calls of one request that are in the engine at once."""

TRUNCATION: Any = Field(
    default=None,
    ge=-1,
    description="Maximum tokens of each text, which loses its end; -1: what the model takes.",
)


class ScoringFields(OpenBody):
    """What all of these requests have."""

    model: str
    user: ShortText | None = Field(default=None, description="The client's end user, for records.")
    truncate_prompt_tokens: int | None = TRUNCATION
    cache_salt: ShortText = Field(
        default="",
        description="Only requests of the same salt share blocks; added to the key's salt.",
    )
    cache: CacheUse = CacheUse()
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Lower goes first.")

    @model_validator(mode="after")
    def _something_is_kept(self) -> "ScoringFields":
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens=0 leaves no text: keep 1 or more")
        return self


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """One request of a client, whose texts are calls of their own.

    Attributes:
        state: Server state.
        caller: Its sender.
        body: Its fields.
        endpoint: Path of its route.
        request_id: Its id; text number i is ``<id>-i`` in explanations and records.
        prompt_context: A prompt of its sender.
    """

    state: ServerState
    caller: Caller
    body: ScoringFields
    endpoint: str
    request_id: str
    prompt_context: Prompt
    _num_tokens: list[int] = field(default_factory=lambda: [0])  # of all prompts so far

    @classmethod
    def open(
        cls, state: ServerState, caller: Caller, body: ScoringFields, endpoint: str, prefix: str
    ) -> "ScoringCall":
        """Begin a request.

        Raises:
            ApiError: This server has no such model (404).
        """
        prompt_context = Prompt(
            cache_salt=caller.narrow(body.cache_salt), adapter=adapter_of(state, body.model)
        )
        name = f"{prefix}{uuid.uuid4().hex}"
        return cls(state, caller, body, endpoint, name, prompt_context)

    @property
    def scorer(self) -> Scorer:
        """Turns texts into prompts."""
        return self.state.llm.engine.scorer

    async def prepare(self, work: Callable[[], Any]) -> Any:
        """Run work with the tokenizer, in its thread."""
        return await self.state.llm.tokenizing.run_long(work, self.prompt_context.cache_salt)

    def prompt_of(self, text: str | list[int]) -> Prompt:
        """Return the sender's prompt of a text or of token ids."""
        if isinstance(text, str):
            return replace(self.prompt_context, text=text)
        return replace(self.prompt_context, token_ids=text)

    async def cut(self, texts: Sequence[str | list[int]], params: PoolingParams) -> list[Prompt]:
        """Return the prompts of texts, with their token ids; tenants take turns text by text."""
        prompts = []
        for text in texts:
            cut = await self.prepare(partial(self.scorer.cut, self.prompt_of(text), params))
            prompts.append(self.counted(cut))
        return prompts

    async def run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Serve all prompts, with one set of parameters or one each; returns outputs in order.

        Raises:
            ApiError: One was refused, or failed; the others end.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        calls = [
            GenerateCall(
                endpoint=self.endpoint,
                params=own,
                token_ids=prompt.token_ids,
                adapter=prompt.adapter,
                cache_salt=self.body.cache_salt,
                cache_read=self.body.cache.read,
                cache_write=self.body.cache.write,
                priority=self.body.priority,
                user=self.body.user,
                request_id=f"{self.request_id}-{number}",
            )
            for number, (prompt, own) in enumerate(zip(prompts, each, strict=True))
        ]
        window = min(self._window, len(calls))
        check_room(self.state, self.caller, calls[:window])
        free = asyncio.Semaphore(window)

        async def run(call: GenerateCall) -> RequestOutput:
            async with free:
                return await last_output(self.state, self.caller, call)

        tasks = [asyncio.create_task(run(call)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _window(self) -> int:
        """How many calls may be in the engine at once."""
        config, own = self.state.config, self.caller.limits.max_requests
        share = config.max_requests
        if own is not None:
            share = min(share, own)
        elif self.caller.tenant:
            share = int(share * config.key_share)
        return max(1, min(MAX_WINDOW, share))

    def counted(self, prompt: Prompt) -> Prompt:
        """Count a prompt's tokens, and return it.

        Raises:
            ApiError: It and those before it have too many (400): the next is not tokenized.
        """
        self._num_tokens[0] += len(prompt.token_ids or ())
        most = self.state.config.max_text_tokens
        if self._num_tokens[0] > most:
            raise ApiError(
                400,
                f"the texts have {self._num_tokens[0]} tokens and more, shared ones counted for "
                f"each: at most {most} in a request; send several, or raise --max-text-tokens",
                code="too_many_tokens",
            )
        return prompt


def check_texts(state: ServerState, param: str, texts: Sequence[str | list[int]]) -> None:
    """Refuse too many texts, none, or half of a character.

    Raises:
        ApiError: There are none, or too many (400).
        RequestError: One is no text.
    """
    if not texts:
        raise ApiError(400, f"{param} is empty: give a text at least", param=param)
    most = state.config.max_texts
    if len(texts) > most:
        raise ApiError(
            400,
            f"{param} has {len(texts)} texts: at most {most} in a request; send several, or raise "
            "--max-texts",
            param=param,
            code="too_many_texts",
        )
    for text in texts:
        if isinstance(text, str):
            whole_characters(param, text)


def usage_of(outputs: Sequence[RequestOutput], writes: bool) -> dict[str, Any]:
    """Return the token counts of a response, cached ones included."""
    counts = Usage.of(outputs, writes).as_openai()
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "total_tokens": counts["prompt_tokens"],
        "completion_tokens": 0,
        "prompt_tokens_details": counts["prompt_tokens_details"],
    }
