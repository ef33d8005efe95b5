"""A served model whose answers are written in advance, and computed all the same.

A script reads each prompt, as the chat template wrote it, and returns the answer. The answer's
tokens then go through the real engine: a constraint allows one token per step, so scheduler, cache,
sampler, detokenizer and parsers do what they do for any model. Where a request has a grammar of its
own (``tool_choice``, strict tools), the script must obey it too::

    prompt ─► script ─► answer ─► its tokens ─► one allowed token per step ─► the real engine
                                                    └─ and allowed by the request's own grammar
"""

import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ostinato import AsyncLLM
from ostinato.core.plan import TokenConstraint
from ostinato.engine.grammar.structured_outputs import StructuredOutputs
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.requests.prompts import parse_prompt
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.support.models.chat_families import QWEN_TURNS
from tests.support.models.checkpoints import byte_level_bpe, make_config, save_checkpoint
from tests.support.servers.servers import serving

CONTEXT = 131_072
"""Context of the model, as Qwen3's coders have it and more."""

_START, _END = "<|im_start|>", "<|im_end|>"
_SPECIAL = ("<|endoftext|>", _START, _END)
_START_ID, _END_ID = 1, 2  # a trainer numbers its special tokens first
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
          "<think>", "</think>")  # fmt: skip
"""One token each, and not special, as in Qwen's tokenizers."""

_VOCABULARY = 4096
_TEXTS = Path(__file__).parents[3] / "docs"

_TOOLS = """\
{%- if tools -%}
<bos>system
# Tools

Functions that may be called:
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools>

A call is a JSON object with a name and arguments, between <tool_call> and </tool_call>.<eos>
{% endif -%}
"""
_NO_THOUGHT = (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
TEMPLATE = (_TOOLS + QWEN_TURNS + _NO_THOUGHT).replace("<bos>", _START).replace("<eos>", _END)
"""Of Qwen3's kind, in our own words: the reasoning of turns before the last question is dropped."""


_TOOLS_END = "</tools>\n\nA call is"
"""An agent's instructions may have a tag of this name, too."""

Script = Callable[[str], str]
"""Returns the answer to a prompt."""


@dataclass(frozen=True)
class ToolLoop:
    """A script: a question is answered by calls of one tool, one after the other, then by a text.

    Attributes:
        question: Words of the user's message that starts a loop.
        tool: Name of the tool, as the prompt shows it.
        arguments: Of the call of each step.
        num_calls: Calls until the text.
        reasoning: Whether each answer begins with reasoning.
        words: Whether a text precedes each call.
        ending: The last answer; None for a text.
        result: Words that stand before each result in the prompt.
    """

    question: str
    tool: str
    arguments: Callable[[int], dict[str, Any]]
    num_calls: int = 10
    reasoning: bool = True
    words: bool = True
    ending: str | None = None
    result: str = "<tool_response>"

    def __call__(self, prompt: str) -> str:
        """Return the answer; requests without the tool, such as those for a title, get a word."""
        tools, _, _ = prompt.partition(_TOOLS_END)
        asked = prompt.rfind(self.question)
        if asked < 0 or f'"name": "{self.tool}"' not in tools or len(tools) == len(prompt):
            return "Echoes"
        step = prompt.count(self.result, asked)
        thought = f"<think>\nStep {step} comes now.\n</think>\n\n" if self.reasoning else ""
        if step >= self.num_calls:
            return thought + (self.ending or f"All {step} calls are done.")
        call = written_call(self.tool, self.arguments(step))
        words = f"I make call {step}.\n" if self.words else ""
        return f"{thought}{words}{call}"


@dataclass(frozen=True)
class CodeLoop:
    """A script for agents whose calls are code, and whose results are a user's observations.

    Attributes:
        question: Words of the user's message that starts a loop.
        code: What step n writes between its tags.
        ending: What the last step writes.
        num_calls: Steps before the last one.
    """

    question: str
    code: Callable[[int], str]
    ending: str
    num_calls: int = 10

    def __call__(self, prompt: str) -> str:
        """Return the answer."""
        step = prompt.count("Observation:", max(0, prompt.rfind(self.question)))
        code = self.code(step) if step < self.num_calls else self.ending
        return f"Thought: step {step} comes now.\n<code>\n{code}\n</code>"


@dataclass(frozen=True)
class Talk:
    """A script for agents without tools: a short text for each question."""

    question: str

    def __call__(self, prompt: str) -> str:
        """Return the answer."""
        number = prompt.count(self.question)
        return f"<think>\nQuestion {number}.\n</think>\n\nNothing is to be changed here."


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class Turn:
    """What one request hit.

    Attributes:
        prompt: Its token ids.
        answer: The ids that were generated.
        num_cached: Prompt tokens that hit.
        text: The prompt as text.
        written: The answer as text.
    """

    prompt: list[int]
    answer: list[int]
    num_cached: int
    text: str = field(repr=False, default="")
    written: str = field(repr=False, default="")

    @property
    def num_reusable(self) -> int:
        """Tokens that an append-only client's next request hits.

        It sends prompt and answer again; no step has computed the keys and values of the answer's
        last token.
        """
        return len(self.prompt) + len(self.answer) - 1

    @property
    def num_before(self) -> int:
        """Tokens of its prompt before the end of the last answer that it has.

        All behind is new: a result or the user's words. What the template dropped from earlier
        answers is not among them, since no request with this prompt could hit it.
        """
        starts = [place for place, token in enumerate(self.prompt) if token == _START_ID]
        role = self.prompt[starts[-1] + 1]
        answers = [place for place in starts[:-1] if self.prompt[place + 1] == role]
        return self.prompt.index(_END_ID, answers[-1]) if answers else 0

    def num_repeated(self, earlier: "Turn") -> int:
        """Tokens of its prompt up to the first message that means something else than before.

        A message means the same with or without its reasoning, and with its calls written in
        another way; text that a client took away, moved or wrote anew means something else.
        """
        before = (earlier.text + earlier.written).split(_START)[1:]
        pairs = zip(before, self.text.split(_START)[1:-1], strict=False)
        same = [_meaning(a) == _meaning(b) for a, b in pairs]
        num_same = same.index(False) if False in same else len(same)
        starts = [place for place, token in enumerate(self.prompt) if token == _START_ID]
        return self.prompt.index(_END_ID, starts[num_same - 1]) if num_same else 0

    def is_of(self, tool: str) -> bool:
        """Whether its prompt shows a tool; every prompt shows the tool without a name."""
        tools, closing, _ = self.text.partition(_TOOLS_END)
        return not tool or (bool(closing) and f'"name": "{tool}"' in tools)

    def num_asked(self, question: str) -> int:
        """Return how often its conversation has a question."""
        return self.text.count(question)


def _meaning(message: str) -> tuple[str, list[Any]]:
    """Return what a message of a prompt says, and its calls."""
    said, _, _ = message.partition(_END)
    if not said.startswith("assistant"):
        return said, []
    said = re.sub(r"<think>.*?</think>", "", said, flags=re.DOTALL)
    parts = re.split(r"\s*<tool_call>\n(.*?)\n</tool_call>", said, flags=re.DOTALL)
    words = "".join(parts[::2]).removeprefix("assistant").strip()
    return words, [json.loads(call) for call in parts[1::2]]


class ScriptedLLM(AsyncLLM):
    """An engine that generates what a script says.

    Attributes:
        script: The script; may be replaced between two conversations.
        turns: All requests that have ended, in the order of their ends.
    """

    script: Script
    turns: list[Turn]

    def __init__(self, model: str, script: Script, **settings: Any) -> None:
        """Load a model; ``settings`` as for ``AsyncLLM``."""
        super().__init__(model, **settings)
        self.script, self.turns = script, []
        engine = self.engine
        self._tokenizer = engine.loaded.require_tokenizer()
        self._grammars = _DictatedGrammars(
            engine.grammars, self._tokenizer, engine.loaded.vocab_size
        )
        engine.grammars = self._grammars  # type: ignore[assignment]

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt as the script says."""
        text = await self.decode(list(parse_prompt(prompt).token_ids or ()))
        form = self._grammars.dictate(self.script(text), sampling_params.structured_outputs)
        params = replace(sampling_params, structured_outputs=form)
        last: RequestOutput | None = None
        async for last in super().generate(prompt, params, *args, **more):
            yield last
        if last is not None:
            ids = list(last.prompt_token_ids)
            answer = list(last.outputs[0].token_ids)
            written = self._tokenizer.decode(answer)  # at once: its client may be gone already
            self.turns.append(Turn(ids, answer, last.num_cached_tokens, text, written))


class _DictatedGrammars:
    """The engine's grammars, and answers that were written in advance."""

    def __init__(self, grammars: Any, tokenizer: Any, vocab_size: int) -> None:
        self._grammars, self._tokenizer, self._vocab_size = grammars, tokenizer, vocab_size
        self._inner: dict[str, StructuredOutputs | None] = {}

    def dictate(self, answer: str, inner: StructuredOutputs | None) -> StructuredOutputs:
        """Return a form that is compiled to an answer, within a request's own form."""
        form = StructuredOutputs(choice=[answer])
        self._inner[form.source] = inner
        return form

    def compile(self, wanted: StructuredOutputs, tenant: str) -> TokenConstraint:
        """Compile a form, dictated or not."""
        if wanted.source not in self._inner:
            return self._grammars.compile(wanted, tenant)
        inner = self._inner.pop(wanted.source)
        [answer] = json.loads(wanted.source)
        ids = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids.append(self._tokenizer.eos_token_id)
        return _Dictation(
            ids, self._vocab_size, None if inner is None else self._grammars.compile(inner, tenant)
        )

    def erase(self, tenant: str) -> None:
        """Remove what was compiled for a tenant."""
        self._grammars.erase(tenant)


class _Dictation:
    """Allows one sequence of tokens, where the request's own grammar allows it."""

    def __init__(self, ids: list[int], vocab_size: int, inner: TokenConstraint | None) -> None:
        self._ids, self._place, self._vocab_size, self._inner = ids, 0, vocab_size, inner

    @property
    def is_complete(self) -> bool:
        return self._place >= len(self._ids)

    @property
    def allows_all(self) -> bool:
        return False

    @property
    def error(self) -> str:
        return "" if self._inner is None else self._inner.error

    def copy(self) -> "_Dictation":
        inner = None if self._inner is None else self._inner.copy()
        other = _Dictation(self._ids, self._vocab_size, inner)
        other._place = self._place
        return other

    def mask(self) -> NDArray[np.uint8]:
        mask = np.zeros(-(-self._vocab_size // 32) * 4, dtype=np.uint8)
        token = self._ids[min(self._place, len(self._ids) - 1)]
        mask[token // 8] |= 1 << token % 8
        if self._inner is not None and not self._inner.is_complete:
            allowed = self._inner.mask()[: len(mask)]
            mask[: len(allowed)] &= allowed
        return mask

    def advance(self, token_id: int) -> None:
        self._place += 1
        if self._inner is not None and not self._inner.is_complete:
            self._inner.advance(token_id)


@contextmanager
def scripted_server(path: Path, script: Script, **config: Any) -> Iterator[tuple[str, ScriptedLLM]]:
    """Serve a tiny random Qwen3 with Qwen3's kind of template; yields its address and engine."""
    tokenizer = _train_tokenizer()
    sizes = {"max_position_embeddings": CONTEXT, "vocab_size": len(tokenizer)}
    save_checkpoint(path, make_config("qwen3", **sizes, eos_token_id=tokenizer.eos_token_id))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    llm = ScriptedLLM(str(path), script, dtype="float32", num_blocks=24_000)
    settings = ServerConfig(model_names=("local",), reasoning_parser="qwen3", **config)
    try:
        with serving(ServerState(llm, settings)) as url:
            yield url, llm
    finally:
        llm.shutdown()


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer on the project's pages, so that prompts have a usual length."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(_TEXTS.glob("*.md"))]
    tokenizer = byte_level_bpe(pages, _VOCABULARY, [*_SPECIAL])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token=_END,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    return wrapped
