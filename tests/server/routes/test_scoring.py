"""Embeddings, scores and classes over HTTP, through OpenAI's client and as Cohere and Jina do."""

import asyncio
import base64
import json
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest

from ostinato import AsyncLLM
from ostinato.engine.scoring.pooling_params import PoolingParams
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.engine.scoring.conftest import headed
from tests.support.servers.servers import await_idle, serving

__all__ = ["headed"]

MODEL = "tiny-shakespeare"
JSON = {"content-type": "application/json"}
TEXTS = ["To be, or not to be", "To be a king", "Farewell"]
QUERY = "Who is the king of Denmark, and who was it before him?"


@pytest.fixture(scope="module")
def scorer_url(headed) -> Iterator[str]:
    """Serve a classifier with one class, which scores pairs."""
    llm = AsyncLLM(str(headed("qwen2", 1)), dtype="float32", block_size=16, num_blocks=256)
    config = ServerConfig(model_names=("judge",), max_texts=6, max_text_tokens=700)
    with serving(ServerState(llm, config)) as url:
        yield url
    await_idle(llm)
    llm.shutdown()


def engine_embedding(state: ServerState, text: str, params: PoolingParams) -> list[float]:
    """Return what the engine itself makes of a text, with a salt of its own."""
    scorer = state.llm.engine.scorer
    prompt = {"prompt": text, "cache_salt": "reference"}

    async def embed() -> list[float]:
        async for output in state.llm.generate(prompt, scorer.embedding_params(params)):
            last = output
        return scorer.embedding(last, params).tolist()

    return asyncio.run(embed())


def test_openais_client_gets_embeddings(client: openai.OpenAI, state: ServerState):
    """It asks for base64 by itself, and reads float32."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)

    for index, (data, text) in enumerate(zip(answer.data, TEXTS, strict=True)):
        assert data.index == index
        expected = engine_embedding(state, text, PoolingParams())
        assert data.embedding == pytest.approx(expected, abs=1e-6)
        assert np.linalg.norm(data.embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))


def test_a_second_request_hits_all_but_a_token(http: httpx.Client):
    """Law 4; and the numbers are the same to the bit."""
    body = {"model": MODEL, "input": "A text of some length that was never embedded before."}
    first, second = (http.post("/v1/embeddings", json=body).json() for _ in range(2))

    assert first["data"] == second["data"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(body["input"]) - 1
    explained = http.get(f"/v1/explain/{second['id']}").json()
    assert explained["num_hit_tokens"] == cached if "num_hit_tokens" in explained else explained


def test_salts_and_switched_off_reads_share_nothing(http: httpx.Client):
    """A chat's prompt is a hit of its own tenant's embeddings alone."""
    text = "Some have greatness thrust upon them."
    chat = {"model": MODEL, "prompt": text, "max_tokens": 1, "cache_salt": "own"}
    assert http.post("/v1/completions", json=chat).status_code == 200

    def cached(**fields: object) -> int:
        answer = http.post("/v1/embeddings", json={"model": MODEL, "input": text, **fields}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="other") == 0
    assert cached(cache_salt="own", cache={"read": False}) == 0
    assert cached(cache_salt="own") == len(text) - 1


def test_dimensions_cut_and_normalise_again(client: openai.OpenAI, http: httpx.Client):
    whole = client.embeddings.create(model=MODEL, input="To be", encoding_format="float")
    few = client.embeddings.create(
        model=MODEL, input="To be", dimensions=8, encoding_format="float"
    )
    numbers = np.array(whole.data[0].embedding[:8])

    assert few.data[0].embedding == pytest.approx(numbers / np.linalg.norm(numbers), abs=1e-6)
    packed = http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": "To be", "dimensions": 8, "encoding_format": "base64"},
    ).json()["data"][0]["embedding"]
    unpacked = np.frombuffer(base64.b64decode(packed), "<f4")
    assert unpacked == pytest.approx(few.data[0].embedding, abs=1e-6)


def test_a_long_text_is_refused_or_cut(http: httpx.Client):
    long = "To be, or not to be " * 400
    refused = http.post("/v1/embeddings", json={"model": MODEL, "input": long})
    assert refused.status_code == 400
    assert "max_model_len" in refused.json()["error"]["message"]

    body = {"model": MODEL, "input": [long, long[:64]], "truncate_prompt_tokens": 64}
    data = http.post("/v1/embeddings", json=body).json()["data"]
    assert data[0]["embedding"] == data[1]["embedding"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4096}, "dimensions=4096"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 10**20}, "from -1 to 2147483647"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": [[5000]]}, "5000"),
        ({"input": ["a"] * 1025}, "--max-texts"),
        ({"input": "a", "messages": []}, "messages"),
    ],
)
def test_a_mistake_is_named(http: httpx.Client, fields: dict, named: str):
    answer = http.post("/v1/embeddings", json={"model": MODEL, **fields})

    assert answer.status_code in (400, 404, 422)
    assert named in answer.text


def test_half_a_character_is_refused(http: httpx.Client):
    body = b'{"model": "tiny-shakespeare", "input": "half \\ud83d"}'
    answer = http.post("/v1/embeddings", content=body, headers=JSON)

    assert answer.status_code == 400
    assert "half of a character" in answer.json()["error"]["message"] or "half a" in answer.text


def test_choices_over_http_are_those_of_the_engine(http: httpx.Client, client: openai.OpenAI):
    """The log-probability of each is what an echo of the whole text says."""
    prompt, choices = "To be, or not to ", ["be", "go there", "x"]
    body = {"model": MODEL, "prompt": prompt, "choices": choices}
    first, second = (http.post("/v1/choose", json=body).json() for _ in range(2))

    assert first["data"] == second["data"]
    for entry, text in zip(first["data"], choices, strict=True):
        echo = client.completions.create(
            model=MODEL, prompt=prompt + text, echo=True, logprobs=1, max_tokens=0
        )
        scored = echo.choices[0].logprobs.token_logprobs[len(prompt) :]
        assert entry["logprob"] == pytest.approx(sum(scored), abs=1e-4)
    best = max(first["data"], key=lambda entry: entry["logprob"])
    assert first["best"] == best["index"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 3 * (len(prompt) - 1)


def test_prompt_logprobs_from_a_start_hit_over_http(client: openai.OpenAI):
    body = {"model": MODEL, "prompt": "Friends, Romans, countrymen", "max_tokens": 1}
    extra = {"prompt_logprobs": 0, "prompt_logprob_start": 20}
    for attempt in range(2):
        answer = client.completions.create(**body, extra_body=extra)
        given = answer.choices[0].prompt_logprobs
        assert given[:20] == [None] * 20 and all(given[20:])
        if attempt:
            assert answer.usage.prompt_tokens_details.cached_tokens == 19
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(**body, echo=True, extra_body=extra)


def test_a_chat_model_refuses_classes(http: httpx.Client):
    answer = http.post("/classify", json={"model": MODEL, "input": "To be"})

    assert answer.status_code == 400
    assert "ForSequenceClassification" in answer.json()["error"]["message"]


def test_scores_in_vllms_shape(scorer_url: str):
    body = {"model": "judge", "text_1": QUERY, "text_2": TEXTS}
    first, second = (httpx.post(f"{scorer_url}/v1/score", json=body).json() for _ in range(2))

    assert [entry["index"] for entry in first["data"]] == [0, 1, 2]
    assert all(0 < entry["score"] < 1 for entry in first["data"])
    assert first["data"] == second["data"]
    shared = first["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert shared >= 2 * 16  # the second and the third document read the query of the first


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_in_the_shapes_of_cohere_and_jina(scorer_url: str, path: str):
    scores = httpx.post(
        f"{scorer_url}/score", json={"model": "judge", "queries": QUERY, "documents": TEXTS}
    ).json()["data"]
    best = sorted(range(3), key=lambda index: -scores[index]["score"])
    body = {"model": "judge", "query": QUERY, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}

    answer = httpx.post(f"{scorer_url}{path}", json={**body, "top_n": 2}).json()

    assert [result["index"] for result in answer["results"]] == best[:2]
    for result in answer["results"]:
        assert result["relevance_score"] == scores[result["index"]]["score"]
        assert result["document"]["text"] == TEXTS[result["index"]]
    assert answer["meta"]["billed_units"]["search_units"] == 1
    assert answer["usage"]["total_tokens"] > 0
    short = {**body, "return_documents": False, "max_tokens_per_doc": 1}
    assert "document" not in httpx.post(f"{scorer_url}{path}", json=short).json()["results"][0]


def test_a_classifier_generates_nothing(scorer_url: str):
    """Nor does the refusal say in which folder of the server it lies."""
    answer = httpx.post(
        f"{scorer_url}/v1/completions", json={"model": "judge", "prompt": "a", "max_tokens": 1}
    )

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "no language head" in message and "/" not in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_2": ["a"] * 7}, "--max-texts"),
        ({"text_2": ["a b c d e f g " * 12] * 6}, "--max-text-tokens"),
        ({"text_1": ["a", "b"]}, "2 queries and 3 documents"),
        ({"text_2": []}, "text_2"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens=5"),
        ({"instruction": "\ud83d"}, "half a character"),
    ],
)
def test_limits_are_named(scorer_url: str, fields: dict, named: str):
    body = {"model": "judge", "text_1": QUERY, "text_2": TEXTS, **fields}
    answer = httpx.post(f"{scorer_url}/v1/score", content=json.dumps(body).encode(), headers=JSON)

    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_a_pair_is_cut_in_its_document(scorer_url: str):
    """Of the second document nothing remains but what the first one is."""
    body = {"model": "judge", "text_1": QUERY, "truncate_prompt_tokens": 50}
    texts = [
        "the same bass, another tune above it, " * 4,
        "the same bass, another tune above it, " * 5,
    ]
    data = httpx.post(f"{scorer_url}/v1/score", json={**body, "text_2": texts}).json()["data"]

    assert data[0]["score"] == data[1]["score"]


def test_choices_that_echo_their_prompt_hit(http: httpx.Client):
    """As lm-evaluation-harness's ``local-completions`` asks, choice by choice."""
    prompt = "What is it that stands on four legs in the morning, and on two at noon? "
    body = {"model": MODEL, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    cached, firsts = [], []
    for choice in ("man", "dog", "x"):
        answer = http.post("/v1/completions", json={**body, "prompt": prompt + choice}).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        firsts.append(values[: len(prompt)])

    assert cached[0] == 0
    assert min(cached[1:]) >= len(prompt) - 16
    assert firsts[0] == firsts[1] == firsts[2]
