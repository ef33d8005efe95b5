"""Embeddings, scores and classes are those of transformers, with and without a hit."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from ostinato import LLM
from ostinato.engine.scoring.pooling_params import PoolingParams
from tests.engine.scoring.conftest import MakeHeaded, reference
from tests.exactness.reference import PROMPTS
from tests.exactness.test_logits import TOLERANCE
from tests.support.engines import MakeLLM, assert_idle
from tests.support.models.checkpoints import Checkpoints

EXACT = {"dtype": "float64", "block_size": 4}
LONG = {"max_position_embeddings": 1024}
RAW = PoolingParams(normalize=False)
QUERY = "a block of sixteen tokens"
DOCUMENTS = ["computed twice", "another tune above it", "the same bass"]


def last_hidden(model: torch.nn.Module, prompt: list[int]) -> list[float]:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).last_hidden_state[0, -1].tolist()


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2"])
def test_an_embedding_is_the_last_hidden_state(family: str, headed: MakeHeaded):
    """Checkpoints without any head: E5-Mistral's kind."""
    path = headed(family)
    model, llm = reference(AutoModel, path), LLM(str(path), **EXACT)
    expected = [last_hidden(model, prompt) for prompt in PROMPTS]

    for _ in range(2):  # at first computed, then read from the cache
        outputs = llm.embed(PROMPTS, pooling_params=RAW, use_tqdm=False)
        for output, vector in zip(outputs, expected, strict=True):
            assert output.outputs.embedding == pytest.approx(vector, abs=TOLERANCE)
    assert [o.num_cached_tokens for o in outputs] == [len(prompt) - 1 for prompt in PROMPTS]
    assert_idle(llm.engine)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_chat_model_embeds_as_well(family: str, checkpoints: Checkpoints, make_llm: MakeLLM):
    model = reference(AutoModelForCausalLM, checkpoints.path(family)).base_model
    llm = make_llm(family)
    llm.generate(PROMPTS[:2], use_tqdm=False)  # its prompts are hits of the embeddings

    outputs = llm.embed(PROMPTS, pooling_params=RAW, use_tqdm=False)

    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.outputs.embedding == pytest.approx(last_hidden(model, prompt), abs=TOLERANCE)
    assert outputs[0].num_cached_tokens == len(PROMPTS[0]) - 1


@pytest.mark.parametrize(("family", "num_labels"), [("qwen3", 1), ("qwen3", 3), ("mistral", 3)])
def test_classes_are_those_of_the_head(family: str, num_labels: int, headed: MakeHeaded):
    path = headed(family, num_labels)
    model, llm = reference(AutoModelForSequenceClassification, path), LLM(str(path), **EXACT)
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)

    for _ in range(2):
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        probs = torch.tensor([output.outputs.probs for output in outputs], dtype=torch.float64)
        torch.testing.assert_close(probs, expected, atol=TOLERANCE, rtol=0)
    labels = [model.config.id2label[int(row.argmax())] for row in logits]
    assert [output.outputs.label for output in outputs] == labels


def test_a_reranker_scores_pairs_with_its_head(headed: MakeHeaded):
    path = headed("qwen2", 1)
    model, llm = reference(AutoModelForSequenceClassification, path), LLM(str(path), **EXACT)
    tokenizer = llm.get_tokenizer()
    rows = [tokenizer(QUERY, text, return_tensors="pt")["input_ids"] for text in DOCUMENTS]
    with torch.inference_mode():
        expected = [model(row).logits.sigmoid().item() for row in rows]

    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)

    assert [o.outputs.score for o in outputs] == pytest.approx(expected, abs=TOLERANCE)


def test_a_language_model_scores_by_two_answers(make_llm: MakeLLM, checkpoints: Checkpoints):
    """Qwen3-Reranker's kind: the share of the positive answer among both."""
    llm = make_llm("qwen3", config=LONG, score_tokens="a,t")
    tokenizer = llm.get_tokenizer()
    no, yes = (tokenizer(word)["input_ids"][0] for word in ("a", "t"))
    model = reference(AutoModelForCausalLM, checkpoints.path("qwen3", **LONG))

    outputs = llm.score(QUERY, DOCUMENTS, instruction="Be strict", use_tqdm=False)

    for output in outputs:
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        expected = logits[[no, yes]].softmax(0)[1].item()
        assert output.outputs.score == pytest.approx(expected, abs=TOLERANCE)
    written = tokenizer.decode(outputs[0].prompt_token_ids)
    assert f"<Instruct>: Be strict\n<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}" in written


def test_documents_share_the_query(make_llm: MakeLLM):
    """Law 1: the query and its template are computed once, in one step with the documents."""
    llm = make_llm("qwen3", config=LONG, score_tokens="a,t", max_step_ms=None)

    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)

    first, *others = sorted(output.num_cached_tokens for output in outputs)
    assert first == 0 and min(others) > 100
    assert llm.engine.scheduler_stats.num_steps == 1
    computed = llm.engine.runner.num_tokens_computed
    assert computed == sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs)


def test_an_embedder_scores_by_cosine(headed: MakeHeaded):
    path = headed("mistral")
    llm = LLM(str(path), **EXACT)
    query, *documents = llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)

    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)

    for output, document in zip(outputs, documents, strict=True):
        pairs = zip(query.outputs.embedding, document.outputs.embedding, strict=True)
        assert output.outputs.score == pytest.approx(sum(a * b for a, b in pairs), abs=1e-12)


@pytest.mark.parametrize("num_labels", [0, 3])
def test_numbers_are_the_same_bits_with_a_hit(num_labels: int, headed: MakeHeaded):
    """In float32, where the native library computes whole steps, law 7 is about bits."""
    path = str(headed("qwen3", num_labels))
    llm, alone = LLM(path), LLM(path, enable_prefix_caching=False)

    def numbers(llm: LLM, prompt: list[int]) -> list[float]:
        if num_labels:
            return llm.classify([prompt], use_tqdm=False)[0].outputs.probs
        return llm.embed([prompt], use_tqdm=False)[0].outputs.embedding

    for prompt in PROMPTS:
        numbers(llm, prompt[:-1])  # computed, so that the whole prompts hit
    for prompt in PROMPTS:
        assert numbers(llm, prompt) == numbers(alone, prompt)


@pytest.mark.parametrize("kind", ["classes", "yes_no"])
def test_scores_are_the_same_bits_behind_a_shared_query(kind: str, headed: MakeHeaded, checkpoints):
    """Both kinds of rerankers: documents together, read from the cache, and each alone."""
    is_head = kind == "classes"
    path = headed("qwen2", 1) if is_head else checkpoints.path("qwen3", **LONG)
    words = {} if is_head else {"score_tokens": "a,t"}
    llm = LLM(str(path), block_size=16, **words)
    alone = LLM(str(path), block_size=16, enable_prefix_caching=False, **words)

    def scores(llm: LLM, documents: list[str]) -> list[float]:
        return [o.outputs.score for o in llm.score(QUERY, documents, use_tqdm=False)]

    together, again = scores(llm, DOCUMENTS), scores(llm, DOCUMENTS)

    assert llm.engine.scorer.score_kind == kind
    assert together == again == [score for text in DOCUMENTS for score in scores(alone, [text])]
