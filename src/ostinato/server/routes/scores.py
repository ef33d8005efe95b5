"""Scores: vLLM's ``/score``, ``/rerank`` as Cohere and Jina have it, and choices."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field

from ostinato.engine.api.scoring_api import pair_up
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.scoring.choices import read_choices
from ostinato.engine.scoring.pairs import Query
from ostinato.protocol.body import Items, OpenBody
from ostinato.protocol.dialects import SCORES
from ostinato.server.access.callers import CallerDep
from ostinato.server.call import with_content
from ostinato.server.middleware import DialectRoute
from ostinato.server.scoring import ACTIVATION, ScoringCall, ScoringFields, answer
from ostinato.server.state import StateDep

router = APIRouter(tags=["scoring"], route_class=DialectRoute)


class PairFields(ScoringFields):
    """What scores depend on besides the texts."""

    dialect = SCORES

    instruction: str | None = Field(
        default=None, description="What makes a document relevant; else the template's own."
    )
    use_activation: bool = ACTIVATION


class ScoreBody(PairFields):
    """Score documents against a query, or each against its own."""

    id_prefix = "score-"

    text_1: str | Items[str] = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"),
        description="One query for all documents, or one per document; also named queries.",
    )
    text_2: str | Items[str] = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2"),
        description="The documents; also named documents.",
    )

    @property
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""
        return {"text_1": _as_list(self.text_1), "text_2": _as_list(self.text_2)}


class DocumentBody(OpenBody):
    """A document as an object."""

    text: str


class RerankBody(PairFields):
    """Order documents by how well they answer a query."""

    id_prefix = "rerank-"

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

    @property
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""
        return {"query": [self.query], "documents": self.texts}


class ChooseBody(ScoringFields):
    """Compare given continuations of a prompt."""

    dialect = SCORES
    id_prefix = "choose-"

    prompt: str | Items[int] = Field(description="A text, or token ids.")
    choices: Items[str] | Items[Items[int]] = Field(
        description="Texts that continue it, with the space that precedes them; or token ids."
    )
    truncate_prompt_tokens: None = Field(default=None, description="Prompts are not cut here.")

    @property
    def texts_by_field(self) -> dict[str, Sequence[str | list[int]]]:
        """All texts, by the field that gave them."""
        return {"prompt": [self.prompt], "choices": self.choices}


@router.post("/v1/choose")
async def choose(
    body: ChooseBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return how likely each choice is, and which is the best."""
    return await answer(request, state, caller, body, _chosen)


async def _chosen(call: ScoringCall, body: ChooseBody) -> dict[str, Any]:
    choices: Sequence[str | Sequence[int]] = body.choices
    outputs = await call.run(
        partial(call.scorer.choice, with_content(call.prompt_context, body.prompt)),
        choices,
        "choice",
    )
    result = read_choices(outputs, body.choices)
    data = [asdict(choice) for choice in result.choices]
    return call.response(outputs, best=result.best.index, data=data)


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreBody, request: Request, state: StateDep, caller: CallerDep) -> Response:
    """Return the score of each document."""
    return await answer(request, state, caller, body, _scored)


async def _scored(call: ScoringCall, body: ScoreBody) -> dict[str, Any]:
    queries, documents = _as_list(body.text_1), _as_list(body.text_2)
    scores, outputs = await _scores(call, body, queries, documents)
    data = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores)
    ]
    return call.response(outputs, data=data)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(
    body: RerankBody, request: Request, state: StateDep, caller: CallerDep
) -> Response:
    """Return documents with their scores, the best first.

    Ids of explanations are those of the documents in the order of the request.
    """
    return await answer(request, state, caller, body, _ranked)


async def _ranked(call: ScoringCall, body: RerankBody) -> dict[str, Any]:
    scores, outputs = await _scores(call, body, [body.query], body.texts, body.max_tokens_per_doc)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.texts[result["index"]]}
    response = call.response(outputs, results=results)
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": response["usage"]["prompt_tokens"]},
    }
    return {**response, "meta": meta}


async def _scores(
    call: ScoringCall,
    body: PairFields,
    queries: list[str],
    documents: list[str],
    max_document_tokens: int | None = None,
) -> tuple[list[float], list[RequestOutput]]:
    """Run the requests of pairs; returns scores and outputs."""
    scorer, params = call.scorer, call.params
    of_query, sampling = pair_up(len(queries), len(documents)), scorer.score_params()
    items = scorer.scored_items(
        [Query(text, body.instruction) for text in queries], documents, of_query
    )
    outputs = await call.run(
        lambda item: (
            scorer.score_prompt(item, call.prompt_context, params, max_document_tokens),
            sampling,
        ),
        items,
        "document",
        len(items) - len(documents),
    )
    return scorer.scores(outputs, of_query, params), outputs


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
