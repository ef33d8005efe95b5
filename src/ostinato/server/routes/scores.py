"""Scores: vLLM's ``/score``, ``/rerank`` as Cohere and Jina have it, and choices."""

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, Field

from ostinato.engine.api.scoring_api import pair_up
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import Prompt
from ostinato.engine.scoring.choices import ChoiceOutput, read_choices
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.engine.scoring.scorer import Query, ScoringPlan
from ostinato.protocol.body import Items, OpenBody
from ostinato.protocol.dialects import SCORES
from ostinato.server.access.callers import CallerDep
from ostinato.server.errors import ApiError
from ostinato.server.middleware.fields import DialectRoute, accept_fields
from ostinato.server.scoring import ScoringCall, ScoringFields, check_texts, usage_of
from ostinato.server.state import StateDep
from ostinato.server.streaming import until_gone

router = APIRouter(tags=["scoring"], route_class=DialectRoute)


class PairFields(ScoringFields):
    """What scores depend on besides the texts."""

    instruction: str | None = Field(
        default=None, description="What makes a document relevant; else the template's own."
    )
    use_activation: bool = Field(default=True, description="False gives logits.")

    def params(self) -> PoolingParams:
        """Return the parameters of its scores."""
        return PoolingParams(
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class ScoreBody(PairFields):
    """Score documents against a query, or each against its own."""

    text_1: str | Items[str] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="One query for all documents, or one per document; also named queries.",
    )
    text_2: str | Items[str] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The documents; also named documents.",
    )


class DocumentBody(OpenBody):
    """A document as an object."""

    text: str


class RerankBody(PairFields):
    """Order documents by how well they answer a query."""

    query: str
    documents: Items[str | DocumentBody]
    top_n: int | None = Field(default=None, ge=0, description="Documents returned; 0 is all.")
    return_documents: bool = Field(default=True, description="Whether to return their texts.")
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, description="Cohere's: maximum tokens of a document."
    )

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ChooseBody(ScoringFields):
    """Compare given continuations of a prompt."""

    prompt: str | Items[int] = Field(description="A text, or token ids.")
    choices: Items[str] | Items[Items[int]] = Field(
        description="Texts that continue it, with the space that precedes them; or token ids."
    )
    truncate_prompt_tokens: None = Field(default=None, description="Prompts are not cut here.")


@router.post("/v1/choose")
async def choose(
    body: ChooseBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return how likely each choice is, and which is the best."""
    accept_fields(request, state, SCORES, body)
    check_texts(state, "choices", body.choices)
    if isinstance(body.prompt, str):
        check_texts(state, "prompt", [body.prompt])
    call = ScoringCall.open(state, caller, body, "/v1/choose", "choose-")
    result, outputs = await until_gone(request, _chosen(call, body))
    return JSONResponse(
        {
            "id": call.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "best": result.best.index,
            "data": [asdict(choice) for choice in result.choices],
            "usage": usage_of(outputs, body.cache.write),
        }
    )


async def _chosen(call: ScoringCall, body: ChooseBody) -> tuple[ChoiceOutput, list[RequestOutput]]:
    """Run the requests of choices."""
    prompt = call.prompt_of(body.prompt)
    prompts, each = [], []
    for choice in body.choices:  # tenants take turns
        made, params = await call.prepare(partial(call.scorer.choice, prompt, choice))
        prompts.append(call.counted(made))
        each.append(params)
    outputs = await call.run(prompts, each)
    return read_choices(outputs, body.choices), outputs


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreBody, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Return the score of each document."""
    accept_fields(request, state, SCORES, body)
    queries, documents = _as_list(body.text_1), _as_list(body.text_2)
    check_texts(state, "text_1", queries)
    check_texts(state, "text_2", documents)
    of_query = pair_up(len(queries), len(documents))
    call = ScoringCall.open(state, caller, body, "/v1/score", "score-")
    work = _scored(call, queries, documents, of_query, body)
    scores, outputs = await until_gone(request, work)
    return JSONResponse(
        {
            "id": call.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores)
            ],
            "usage": usage_of(outputs, body.cache.write),
        }
    )


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(
    body: RerankBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return documents with their scores, the best first.

    Ids of explanations are those of the documents in the order of the request.
    """
    accept_fields(request, state, SCORES, body)
    check_texts(state, "query", [body.query])
    check_texts(state, "documents", body.texts)
    call = ScoringCall.open(state, caller, body, "/v1/rerank", "rerank-")
    work = _ranked(call, body)
    scores, outputs = await until_gone(request, work)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.texts[result["index"]]}
    usage = usage_of(outputs, body.cache.write)
    return JSONResponse(
        {
            "id": call.request_id,
            "model": body.model,
            "results": results,
            "usage": usage,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": usage["prompt_tokens"]},
            },
        }
    )


async def _ranked(call: ScoringCall, body: RerankBody) -> tuple[list[float], list[RequestOutput]]:
    """Score documents, each cut to the tokens that are allowed."""
    cut, most = call.scorer.first_tokens, body.max_tokens_per_doc
    texts = [await call.prepare(partial(cut, text, most)) for text in body.texts]
    return await _scored(call, [body.query], texts, [0] * len(texts), body)


async def _scored(
    call: ScoringCall,
    queries: list[str],
    documents: list[str],
    of_query: list[int],
    body: PairFields,
) -> tuple[list[float], list[RequestOutput]]:
    """Run the requests of pairs; returns scores and outputs."""
    scorer, params = call.scorer, body.params()
    asked = [Query(text, body.instruction) for text in queries]
    prompts: list[Prompt] = []
    num_queries, reading = 0, None
    if scorer.score_kind == "embeddings":
        plan = await call.prepare(lambda: scorer.plan(asked, [], [], call.prompt_context, params))
        num_queries, reading = plan.num_queries, plan.params
        prompts = [*map(call.counted, plan.prompts), *await call.cut(documents, params)]
    else:
        for index, text in zip(of_query, documents, strict=True):  # tenants take turns
            pair = [asked[index]], [text], [0], call.prompt_context, params
            plan = await call.prepare(partial(scorer.plan, *pair))
            prompts += map(call.counted, plan.prompts)
            reading = plan.params
    if reading is None:
        raise ApiError(400, "there is nothing to score")
    outputs = await call.run(prompts, reading)
    whole = ScoringPlan(prompts, reading, num_queries, tuple(of_query))
    return scorer.scores(whole, outputs, params), outputs


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
