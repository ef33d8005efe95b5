"""``/v1/embeddings`` as OpenAI's API has it, and vLLM's ``/classify``."""

import asyncio
import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, Self

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from ostinato.engine.requests.prompts import Prompt
from ostinato.protocol.body import MAX_MESSAGES, Items
from ostinato.protocol.chat import ChatMessage, TemplateFields
from ostinato.protocol.completions import PromptBody, each_prompt
from ostinato.protocol.conversation import ToolUse
from ostinato.protocol.dialects import EMBEDDINGS
from ostinato.protocol.sampling import KEEP_TOKENS, ShortText
from ostinato.server.access.callers import CallerDep
from ostinato.server.call import with_content
from ostinato.server.middleware import DialectRoute
from ostinato.server.scoring import ACTIVATION, ScoringCall, ScoringFields, answer
from ostinato.server.state import StateDep

router = APIRouter(tags=["scoring"], route_class=DialectRoute)


class InputFields(TemplateFields, ScoringFields):
    """One text or several, or a conversation."""

    dialect = EMBEDDINGS

    input: PromptBody | None = Field(
        default=None, description="A text, token ids, or a list of either."
    )
    messages: Items[ChatMessage] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_MESSAGES,
        description="A conversation in place of input, also with images; it is one text.",
    )
    add_generation_prompt: bool = Field(default=False, description="Open the assistant's turn.")
    keep_tokens: bool = KEEP_TOKENS

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give one of input and messages")
        return self

    @property
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""
        return {} if self.input is None else {"input": each_prompt(self.input)}

    @property
    def tool_use(self) -> ToolUse:
        """Return the tools that the prompt describes: none."""
        return ToolUse()

    async def prompts(self, call: ScoringCall, preface: str = "") -> list[Prompt]:
        """Return the prompts to pool; ``preface`` precedes each that is a text."""
        if self.messages is not None:
            return [await call.conversation(self, self.messages)]
        texts = each_prompt(self.input or "")
        return [
            with_content(call.prompt_context, preface + text if isinstance(text, str) else text)
            for text in texts
        ]


class EmbeddingBody(InputFields):
    """Embed texts."""

    id_prefix = "embd-"

    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        default=None, description="Number of values kept of each embedding."
    )
    normalize: bool | None = Field(
        default=None, description="Whether embeddings have length 1; else as the checkpoint says."
    )
    prompt_name: ShortText | None = Field(
        default=None, description="Name of a prompt of the checkpoint that precedes each text."
    )


class ClassifyBody(InputFields):
    """Classify texts."""

    id_prefix = "classify-"

    use_activation: bool = ACTIVATION


@router.post("/v1/embeddings")
async def embed(
    body: EmbeddingBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return the embedding of each text."""
    return await answer(request, state, caller, body, _embedded)


async def _embedded(call: ScoringCall, body: EmbeddingBody) -> str:
    """Return the response; each embedding is written by itself, so that others are not held up."""
    scorer, params = call.scorer, call.params
    sampling, preface = scorer.embedding_params(params), scorer.named_prompt(body.prompt_name)
    prompts = await body.prompts(call, preface)
    outputs = await call.run(lambda prompt: (scorer.cut(prompt, params), sampling), prompts)
    entries = []
    for index, output in enumerate(outputs):
        vector = _encoded(scorer.embedding(output, params), body.encoding_format)
        entry = {"object": "embedding", "index": index, "embedding": vector}
        entries.append(json.dumps(entry))
        await asyncio.sleep(0)
    head = json.dumps(call.response(outputs))
    return f'{head[:-1]}, "data": [{", ".join(entries)}]}}'


def _encoded(vector: "array[float]", encoding: str) -> str | list[float]:
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


@router.post("/classify")
async def classify(
    body: ClassifyBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return the probability of each class, for each text."""
    return await answer(request, state, caller, body, _classified)


async def _classified(call: ScoringCall, body: ClassifyBody) -> dict[str, Any]:
    scorer, params = call.scorer, call.params
    sampling = scorer.class_params()
    prompts = await body.prompts(call)
    outputs = await call.run(lambda prompt: (scorer.cut(prompt, params), sampling), prompts)
    classes = [scorer.classes(output, params) for output in outputs]
    data = [
        {"index": index, **asdict(each), "num_classes": each.num_classes}
        for index, each in enumerate(classes)
    ]
    return call.response(outputs, data=data)
