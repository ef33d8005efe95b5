"""Clients of embeddings and scores, as PyPI ships them, against the real server.

OpenAI's and Cohere's, langchain's classes for them and for Jina's shapes; lm-evaluation-harness;
and what sentence-transformers itself computes of the same checkpoint.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.harness import evaluate, random_questions, write_task
from ostinato import AsyncLLM, models
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.agents.clients import AgentClient
from tests.agents.installing import Installer
from tests.engine.scoring.conftest import headed
from tests.engine.scoring.test_pooling import PROMPTS, modules, write
from tests.support.servers.servers import await_idle, serving

__all__ = ["headed"]

pytestmark = pytest.mark.nightly

CLIENTS = AgentClient(
    name="clients of scores",
    source="pypi",
    packages=("langchain-cohere", "langchain-openai", "langchain-community", "cohere", "openai"),
)

PROGRAM = """
import json, sys
import cohere, openai
from langchain_cohere import CohereRerank
from langchain_community.document_compressors import jina_rerank
from langchain_community.embeddings import jina
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings

url, query, *texts = sys.argv[1:]
documents = [Document(text) for text in texts]
client = cohere.ClientV2(api_key="none", base_url=url)
ranked = client.rerank(model="judge", query=query, documents=texts, top_n=2)
reranker = CohereRerank(client=client, model="judge", top_n=2)
jina_rerank.JINA_API_URL = url + "/v1/rerank"
jina.JINA_API_URL = url + "/v1/embeddings"
jinas = jina_rerank.JinaRerank(model="judge", jina_api_key="none", top_n=2)
embeddings = OpenAIEmbeddings(
    model="judge", base_url=url + "/v1", api_key="none", check_embedding_ctx_length=False
)

def compressed(by):
    found = by.compress_documents(documents, query)
    return [[texts.index(each.page_content), each.metadata["relevance_score"]] for each in found]

made = openai.OpenAI(base_url=url + "/v1", api_key="none").embeddings.create(
    model="judge", input=texts
)
print(json.dumps({
    "rankings": [
        [[each.index, each.relevance_score] for each in ranked.results],
        compressed(reranker),
        compressed(jinas),
    ],
    "embeddings": [
        embeddings.embed_documents(texts),
        [embeddings.embed_query(text) for text in texts],
        jina.JinaEmbeddings(model_name="judge", jina_api_key="none").embed_documents(texts),
        [each.embedding for each in made.data],
    ],
}))
"""

SENTENCES = AgentClient(
    name="sentence-transformers",
    source="pypi",
    packages=(
        "sentence-transformers",
        "--no-deps",  # torch and transformers are those of the tests
        "scikit-learn",
        "scipy",
        "joblib",
        "cloudpickle",
        "loky",
        "threadpoolctl",
        "narwhals",
    ),
)

ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu", model_kwargs={"dtype": "float32"})
query, documents = sys.argv[2], sys.argv[3:]
query_vectors = model.encode([query], prompt_name="query")
document_vectors = model.encode(documents)
print(json.dumps({
    "query": query_vectors[0].tolist(),
    "documents": document_vectors.tolist(),
    "similarity": model.similarity(query_vectors, document_vectors)[0].tolist(),
}))
"""

HARNESS = AgentClient(name="lm-evaluation-harness", source="pypi", packages=("lm_eval[api]",))

DOCUMENTS = ["It was Hamlet's father.", "It rains in Bergen.", "Claudius is the king."]
QUERY = "Who is the king?"
UNREAD = {"cache": {"read": False, "write": False}}


@contextmanager
def served(path: Path, name: str) -> Iterator[str]:
    """Serve a checkpoint; returns the address."""
    llm = AsyncLLM(str(path), dtype="float32", block_size=16, num_blocks=256)
    with serving(ServerState(llm, ServerConfig(model_names=(name,)))) as url:
        yield url
    await_idle(llm)
    llm.shutdown()


def printed(folder: Path, python: Path, program: str, *arguments: str, **environment: str) -> Any:
    """Run a program in a process of its own; returns the JSON of its last line."""
    ended = subprocess.run(
        [str(python), "-c", program, *arguments],
        capture_output=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin", **environment},
    )
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]
    return json.loads(ended.stdout.decode().splitlines()[-1])


def test_rerankers_and_embeddings_of_official_clients_agree(headed, tmp_path: Path):
    """All rerankers get the same order and scores, and all embeddings of a text are the same."""
    python = Installer(tmp_path).folder(CLIENTS) / "bin/python"

    with served(headed("qwen2", 1), "judge") as url:
        answer = printed(tmp_path, python, PROGRAM, url, QUERY, *DOCUMENTS)

    first, *others = answer["rankings"]
    assert len(first) == 2 and first[0][1] >= first[1][1]
    for ranking in others:
        assert [index for index, _ in ranking] == [index for index, _ in first]
        scores = [score for _, score in first]
        assert [score for _, score in ranking] == pytest.approx(scores, abs=1e-5)
    vectors, *again = answer["embeddings"]
    assert len(vectors) == 3
    for rows in again:
        for row, vector in zip(rows, vectors, strict=True):
            assert row == pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings_are_those_of_sentence_transformers(mode: str, headed, tmp_path: Path):
    """With the prompt of the query, normalised, and compared; of both kinds of pooling."""
    [packages] = Installer(tmp_path).folder(SENTENCES).glob("lib/python*/site-packages")
    path, kinds = tmp_path / mode, modules("Transformer", "Pooling", "Normalize")
    shutil.copytree(headed("qwen2"), path)
    write(path, pooling={"pooling_mode": mode, "embedding_dimension": 48}, modules=kinds)
    write(path, prompts=PROMPTS)
    own = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    expected = printed(tmp_path, Path(sys.executable), ENCODE, str(path), QUERY, *DOCUMENTS, **own)
    with served(path, "embedder") as url, httpx.Client(base_url=url) as client:

        def embedded(texts: list[str], **fields: str) -> list[list[float]]:
            body = {"model": "embedder", "input": texts, **fields}
            data = client.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
            return [each["embedding"] for each in data]

        query, documents = embedded([QUERY], prompt_name="query")[0], embedded(DOCUMENTS)
        body = {"model": "embedder", "text_1": QUERY, "text_2": DOCUMENTS}
        scores = client.post("/v1/score", json=body).raise_for_status().json()["data"]

    assert query == pytest.approx(expected["query"], abs=1e-4)
    for row, vector in zip(documents, expected["documents"], strict=True):
        assert row == pytest.approx(vector, abs=1e-4)
    assert [each["score"] for each in scores] == pytest.approx(expected["similarity"], abs=1e-4)


@pytest.mark.timeout(1800)
def test_lm_evaluation_harness_prefers_what_the_server_does(tmp_path: Path):
    """Its ``local-completions`` echoes each of four choices with its question, which hits."""
    [packages] = Installer(tmp_path).folder(HARNESS).glob("lib/python*/site-packages")
    path = Path(models.__file__).parent / "tiny-shakespeare"
    questions = random_questions(3, 200)

    with served(path, path.name) as url, httpx.Client(base_url=url) as client:
        for question in questions:
            texts = [f" {choice}" for choice in question["choices"]]  # as the harness joins them
            body = {"prompt": question["context"], "choices": texts}
            answer = client.post("/v1/choose", json={"model": path.name, **body, **UNREAD})
            question["answer"] = answer.raise_for_status().json()["best"]
        write_task(tmp_path / "task", questions)
        accuracy = evaluate(url, path, tmp_path / "task", Path(sys.executable), str(packages))
        metrics = client.get("/metrics").text

    assert accuracy == 1.0
    hits = re.search(r'result="hit",route="/v1/completions"} (\d+)', metrics)
    assert int(hits[1]) >= 3 * 3 * 200
