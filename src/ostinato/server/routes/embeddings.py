"""``/v1/embeddings`` as OpenAI's API has it, and vLLM's ``/classify``."""

import asyncio
import base64
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ostinato.protocol.completions import PromptBody, each_prompt
from ostinato.protocol.dialects import EMBEDDINGS
from ostinato.protocol.sampling import ShortText
from ostinato.server.access.callers import CallerDep
from ostinato.server.middleware.fields import DialectRoute
from ostinato.server.scoring import ACTIVATION, ScoringCall, ScoringFields, answer
from ostinato.server.state import StateDep

router = APIRouter(tags=["scoring"], route_class=DialectRoute)


class InputFields(ScoringFields):
    """One text or several."""

    dialect = EMBEDDINGS

    input: PromptBody = Field(description="A text, token ids, or a list of either.")

    @property
    def inputs(self) -> list[str | list[int]]:
        """All texts."""
        return each_prompt(self.input)

    @property
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""
        return {"input": self.inputs}


class EmbeddingBody(InputFields):
    """Embed texts."""

    id_prefix = "embd-"

    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        default=None, description="Keep the first so many numbers of each embedding."
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
    texts = [preface + text if isinstance(text, str) else text for text in body.inputs]
    outputs = await call.run(
        lambda text: (scorer.cut(call.prompt_of(text), params), sampling), texts
    )
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
    outputs = await call.run(
        lambda text: (scorer.cut(call.prompt_of(text), params), sampling), body.inputs
    )
    classes = [scorer.classes(output, params) for output in outputs]
    data = [
        {"index": index, **asdict(each), "num_classes": each.num_classes}
        for index, each in enumerate(classes)
    ]
    return call.response(outputs, data=data)
