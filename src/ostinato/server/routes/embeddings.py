"""``/v1/embeddings`` as OpenAI's API has it, and vLLM's ``/classify``."""

import asyncio
import base64
import json
import time
from array import array
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.protocol.completions import PromptBody
from ostinato.protocol.dialects import EMBEDDINGS
from ostinato.protocol.sampling import ShortText
from ostinato.server.access.callers import CallerDep
from ostinato.server.middleware.fields import DialectRoute, accept_fields
from ostinato.server.scoring import ScoringCall, ScoringFields, check_texts, usage_of
from ostinato.server.state import StateDep
from ostinato.server.streaming import until_gone

router = APIRouter(tags=["scoring"], route_class=DialectRoute)


class InputFields(ScoringFields):
    """One text or several."""

    input: PromptBody = Field(description="A text, token ids, or a list of either.")

    @property
    def inputs(self) -> list[str | list[int]]:
        """All texts."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [self.input]
        return self.input  # type: ignore[return-value]


class EmbeddingBody(InputFields):
    """Embed texts."""

    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64 is of little-endian float32."
    )
    dimensions: int | None = Field(
        default=None, ge=1, description="Keep the first so many numbers of each embedding."
    )
    normalize: bool | None = Field(
        default=None, description="Whether embeddings have length 1; else as the checkpoint says."
    )
    prompt_name: ShortText | None = Field(
        default=None, description="Name of a prompt of the checkpoint that precedes each text."
    )


class ClassifyBody(InputFields):
    """Classify texts."""

    use_activation: bool = Field(default=True, description="False gives logits.")


@router.post("/v1/embeddings")
async def embed(
    body: EmbeddingBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return the embedding of each text."""
    accept_fields(request, state, EMBEDDINGS, body)
    check_texts(state, "input", body.inputs)
    call = ScoringCall.open(state, caller, body, "/v1/embeddings", "embd-")
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )
    content = await until_gone(request, _embedded(call, body, params))
    return Response(content, media_type="application/json")


async def _embedded(call: ScoringCall, body: EmbeddingBody, params: PoolingParams) -> str:
    """Return the response; each embedding is written by itself, so that others are not held up."""
    scorer = call.scorer
    reading, before = scorer.embedding_params(params), scorer.named_prompt(body.prompt_name)
    texts = [before + text if isinstance(text, str) else text for text in body.inputs]
    outputs = await call.run(await call.cut(texts, params), reading)
    entries = []
    for index, output in enumerate(outputs):
        vector = _encoded(scorer.embedding(output, params), body.encoding_format)
        entry = {"object": "embedding", "index": index, "embedding": vector}
        entries.append(json.dumps(entry))
        await asyncio.sleep(0)
    head = {
        "id": call.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "usage": usage_of(outputs, body.cache.write),
    }
    return f'{json.dumps(head)[:-1]}, "data": [{", ".join(entries)}]}}'


def _encoded(vector: "array[float]", encoding: str) -> str | list[float]:
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()


@router.post("/classify")
async def classify(
    body: ClassifyBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return the probability of each class, for each text."""
    accept_fields(request, state, EMBEDDINGS, body)
    check_texts(state, "input", body.inputs)
    call = ScoringCall.open(state, caller, body, "/classify", "classify-")
    params = PoolingParams(
        use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens
    )
    return JSONResponse(await until_gone(request, _classified(call, body, params)))


async def _classified(
    call: ScoringCall, body: ClassifyBody, params: PoolingParams
) -> dict[str, Any]:
    reading = call.scorer.class_params()
    outputs = await call.run(await call.cut(body.inputs, params), reading)
    classes = [call.scorer.classes(output, params) for output in outputs]
    return {
        "id": call.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [
            {
                "index": index,
                "label": each.label,
                "probs": each.probs,
                "num_classes": each.num_classes,
            }
            for index, each in enumerate(classes)
        ],
        "usage": usage_of(outputs, body.cache.write),
    }
