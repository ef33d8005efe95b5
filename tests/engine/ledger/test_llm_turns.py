"""``LLM.chat`` and ``AsyncLLM.chat`` note their answers as turns, too."""

from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, SamplingParams
from ostinato.errors import ConfigError, RequestError
from tests.support.models.chat_families import FAMILIES
from tests.support.models.checkpoints import make_config, save_checkpoint

LETTERS = {"allowed_token_ids": list(range(40, 300)), "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = tmp_path_factory.mktemp("turns")
    tokenizer = FAMILIES["qwen"].tokenizer()
    sizes = {"max_position_embeddings": 2048, "vocab_size": len(tokenizer)}
    save_checkpoint(path, make_config("llama", **sizes))
    tokenizer.save_pretrained(path)
    return LLM(str(path), num_blocks=256)


def ask(llm: LLM, messages: list[dict[str, Any]], **more: Any) -> Any:
    [output] = llm.chat(messages, SamplingParams(**LETTERS), use_tqdm=False, **more)
    return output


def test_a_template_that_opens_the_answer_is_continued(llm: LLM):
    """What it writes before the answer stands in no later prompt; with the ledger it may."""
    opened = {"chat_template_kwargs": {"opening": "<think>\n\n</think>\n\n"}}
    messages = [{"role": "user", "content": "Hi."}]
    first = ask(llm, messages, **opened)
    said = first.prompt_token_ids + first.outputs[0].token_ids
    messages.append({"role": "assistant", "content": first.outputs[0].text})
    messages.append({"role": "user", "content": "So?"})
    always = ask(llm, messages, keep_reasoning="always", **opened)
    assert always.prompt_token_ids[: len(said)] == said
    assert "1 turn was put back as the model wrote them: 12 tokens." in str(llm.explain(always))
    plain = ask(llm, messages, **opened)
    assert plain.prompt_token_ids[: len(said)] != said


def test_erasing_and_resetting_remove_turns(llm: LLM):
    messages = [{"role": "user", "content": "Erase me."}]
    ask(llm, messages)
    assert llm.erase("").num_turns > 0
    ask(llm, messages)
    turns = llm.engine.prompts.turns
    assert turns is not None and turns.ledger.counts.num_turns == 1
    llm.reset_prefix_cache()
    assert turns.ledger.counts.num_turns == 0


def test_wrong_choices_are_refused(llm: LLM):
    with pytest.raises(RequestError, match="keep_reasoning='never'"):
        ask(llm, [{"role": "user", "content": "Hi."}], keep_reasoning="never")
    with pytest.raises(ConfigError, match="keep_reasoning"):
        LLM("no matter", keep_reasoning="never")
    with pytest.raises(ConfigError, match="ledger_bytes"):
        LLM("no matter", ledger_bytes=-1)
