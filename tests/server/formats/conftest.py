"""What these tests share: servers of a tiny random model that can write JSON, and clients.

The model says nothing sensible, so whatever has a form has it because it was made to. What it would
say of its own accord is dictated with ``structured_outputs.choice``.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from ostinato import AsyncLLM
from ostinato.server.answers.answer_formats import TOOL_FORMATS
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.checkpoints import make_config, make_tokenizer, save_checkpoint
from tests.support.servers.servers import await_idle, await_idle_server, serving

PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Knows nothing of tools."""

TOOL_TEMPLATE = (
    "{% if tools %}TOOLS{% for t in tools %} {{ t['function']['name'] }}{% endfor %}; call in "
    "<tool_call>{{ '\n' }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %} CALL {{ c['function']['name'] }} "
    "{{ c['function']['arguments'] | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Knows tools, and the tags."""

THINKING_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['reasoning_content'] %}<think>"
    "{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}\n{% endfor %}"
    "{% if tools %}TOOLS{% endif %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
"""Begins the answer with reasoning, unless ``enable_thinking`` is false."""

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""As Qwen's tokenizers have them: one token each, and not special."""


CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Parameters of a tool that tells the weather."""

WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def prompt_and_answer(
    server: tuple[str, ServerState], path: str, body: dict[str, Any]
) -> tuple[str, httpx.Response]:
    """Return the prompt that a request becomes, as the engine sees it, and its response."""
    url, state = server
    prompts: list[Any] = []
    make = state.llm.engine.make_request

    def watch(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        prompts.append(prompt.token_ids)
        return make(prompt, *args, **kwargs)

    state.llm.engine.make_request = watch
    try:
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    finally:
        state.llm.engine.make_request = make
    tokenizer = state.llm.engine.loaded.require_tokenizer()
    return str(tokenizer.decode(prompts[0])) if prompts else "", answer


def serve_scribe(
    path: Path, template: str, marks: tuple[str, ...] = ()
) -> Iterator[tuple[str, ServerState]]:
    """Serve a random Llama with a byte-level tokenizer, this template and these marks."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    sizes = {"max_position_embeddings": 4096, "num_hidden_layers": 3, "vocab_size": len(tokenizer)}
    save_checkpoint(path, make_config("llama", **sizes))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    # Least recently used: a policy that learns may keep what another test has asked for often.
    llm = AsyncLLM(str(path), dtype="float32", num_blocks=1024, eviction_policy="lru")
    state = ServerState(llm, ServerConfig(model_names=("scribe",)))
    with serving(state) as url:
        yield url, state
    llm.shutdown()


@pytest.fixture(scope="package")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """Load a model whose marks are tokens, and whose template begins the thinking."""
    path = tmp_path_factory.mktemp("marked")
    save_checkpoint(path, make_config("llama", max_position_embeddings=4096, vocab_size=352))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    special = {mark for one in TOOL_FORMATS.values() for mark in one.marks} - {"<tool_call>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(path)
    llm = AsyncLLM(str(path), dtype="float32", num_blocks=512)
    yield llm
    await_idle(llm)
    llm.shutdown()


@pytest.fixture(scope="package")
def scribe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState]]:
    """Serve a model whose template knows no tools."""
    yield from serve_scribe(tmp_path_factory.mktemp("scribe"), PLAIN_TEMPLATE)


@pytest.fixture(scope="package")
def tool_scribe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState]]:
    """Serve a model whose template knows tools, and whose tokenizer has marks like Qwen's."""
    yield from serve_scribe(tmp_path_factory.mktemp("tool-scribe"), TOOL_TEMPLATE, MARKS)


@pytest.fixture
def url(scribe: tuple[str, ServerState]) -> Iterator[str]:
    """Return the address of the first; nothing is left running or leased (law 9)."""
    yield scribe[0]
    asyncio.run(scribe[1].llm.reset_prefix_cache(preempt_running=True))
    await_idle_server(scribe[1])


def says(text: str, **more: Any) -> dict[str, Any]:
    """Return what lets the model say this, and nothing else."""
    return {"structured_outputs": {"choice": [text]}, **more}
