"""Cohere's and langchain's clients as PyPI ships them, against the real server."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.agents.clients import AgentClient
from tests.agents.installing import Installer
from tests.engine.scoring.conftest import headed
from tests.support.servers import await_idle, serving

__all__ = ["headed"]

pytestmark = pytest.mark.nightly

CLIENTS = AgentClient(
    name="clients of scores",
    source="pypi",
    packages=("langchain-cohere", "langchain-openai", "cohere"),
)

PROGRAM = """
import json, sys
import cohere
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings

url, query, *documents = sys.argv[1:]
client = cohere.ClientV2(api_key="none", base_url=url)
ranked = client.rerank(model="judge", query=query, documents=documents, top_n=2)
reranker = CohereRerank(client=client, model="judge", top_n=2)
compressed = reranker.compress_documents([Document(text) for text in documents], query)
embeddings = OpenAIEmbeddings(
    model="judge", base_url=url + "/v1", api_key="none", check_embedding_ctx_length=False
)
print(json.dumps({
    "cohere": [[each.index, each.relevance_score] for each in ranked.results],
    "langchain": [
        [documents.index(each.page_content), each.metadata["relevance_score"]]
        for each in compressed
    ],
    "documents": embeddings.embed_documents(documents),
    "query": embeddings.embed_query(documents[0]),
}))
"""


@pytest.fixture
def url(headed) -> Iterator[str]:
    llm = AsyncLLM(str(headed("qwen2", 1)), dtype="float32", block_size=16, num_blocks=256)
    with serving(ServerState(llm, ServerConfig(model_names=("judge",)))) as url:
        yield url
    await_idle(llm)
    llm.shutdown()


def test_rerankers_and_embeddings_of_official_clients_agree(url: str, tmp_path: Path):
    """Both rerankers get the same order and scores; a query's embedding is that of its text."""
    python = Installer(tmp_path).folder(CLIENTS) / "bin/python"
    documents = ["It was Hamlet's father.", "It rains in Bergen.", "Claudius is the king."]

    program = subprocess.run(
        [str(python), "-c", PROGRAM, url, "Who is the king?", *documents],
        capture_output=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )

    assert program.returncode == 0, program.stderr.decode()[-2000:]
    answer = json.loads(program.stdout.decode().splitlines()[-1])
    ours, chained = answer["cohere"], answer["langchain"]
    assert [index for index, _ in ours] == [index for index, _ in chained]
    assert [score for _, score in ours] == pytest.approx([score for _, score in chained], abs=1e-5)
    assert len(ours) == 2
    assert ours[0][1] >= ours[1][1]
    assert len(answer["documents"]) == 3
    assert answer["documents"][0] == pytest.approx(answer["query"], abs=1e-5)
