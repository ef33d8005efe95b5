"""An explanation of one's own, as ``FILE.py:function``, beside that of the engine.

The function is called as ``explain(prompt, num_hit, earlier, tenant)`` and returns spans: anything
with ``start``, ``stop``, ``reason`` and ``other``. They have to sum to the prompt.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ostinato.core.errors import ConfigError
from ostinato.core.ids import BlockId
from ostinato.observe.history import RequestHistory, RequestRecord
from ostinato.plugins.child import pass_contract
from ostinato.plugins.loading import load_plugin

MAX_EARLIER = 200
"""Earlier requests that a function is shown, the newest."""


@dataclass(frozen=True, slots=True)
class EarlierRequest:
    """An earlier request, as a function of one's own sees it.

    Attributes:
        name: Its name.
        tokens: Prompt and answer.
        num_kept: Leading tokens that were still cached when the explained prompt came.
        tenant: Whose it was; empty for the shared namespace.
    """

    name: str
    tokens: list[int]
    num_kept: int
    tenant: str


@dataclass(frozen=True, slots=True)
class ExplainedPrompt:
    """What a function is called with."""

    prompt: list[int]
    num_hit: int
    earlier: list[EarlierRequest]
    tenant: str


def read_prompt(history: RequestHistory, name: str) -> ExplainedPrompt | None:
    """Return what is remembered of a request and those before it, oldest first; None if nothing."""
    record = history.record_of(name)
    if record is None or not record.prompt:
        return None
    before = [r for r in history.records() if r.number < record.number and r.tokens and r.writes]
    before.sort(key=lambda one: one.number)
    shown = [_earlier(history, one, record) for one in before[-MAX_EARLIER:]]
    tenant = record.identity.tenant.decode(errors="replace")
    return ExplainedPrompt(_ids(record.prompt), record.num_hits, shown, tenant)


def _ids(packed: bytes) -> list[int]:
    return array("I", packed).tolist()


def _earlier(history: RequestHistory, one: RequestRecord, record: RequestRecord) -> EarlierRequest:
    tenant = one.identity.tenant.decode(errors="replace")
    return EarlierRequest(one.name, _ids(one.tokens), _num_kept(history, one, record), tenant)


def _num_kept(history: RequestHistory, one: RequestRecord, record: RequestRecord) -> int:
    """Count the leading tokens that were cached when another request was admitted."""
    if one.ended is None or one.lived_at(record.number):
        return one.num_computed
    for place in range(one.num_blocks):
        if history.loss_of(BlockId(one.blocks[place]), one.ended, record.number) is not None:
            return place * history.block_size
    return one.num_findable


class Explainer:
    """Calls a function of one's own."""

    def __init__(self, value: str) -> None:
        """Load it by a setting's value; raises ConfigError if that fails."""
        self.name = value.rpartition("/")[2]
        self._explain: Any = load_plugin("explainer", value)

    def spans(self, explained: ExplainedPrompt) -> dict[str, Any]:
        """Return the function's spans as JSON, or in ``error`` why they cannot be shown."""
        try:
            result = self._explain(
                explained.prompt, explained.num_hit, explained.earlier, explained.tenant
            )
            spans = [
                {"start": int(s.start), "stop": int(s.stop), "reason": str(s.reason),
                 "other": str(s.other)}
                for s in result
            ]  # fmt: skip
        except Exception as error:
            return {"name": self.name, "spans": [], "error": f"{type(error).__name__}: {error}"}
        fault = sum_error(spans, len(explained.prompt))
        return {"name": self.name, "spans": [] if fault else spans, "error": fault}


def sum_error(spans: Sequence[dict[str, Any]], num_tokens: int) -> str:
    """Return where spans do not cover a prompt exactly once; empty if they do."""
    at = 0
    for span in spans:
        if span["start"] != at or span["stop"] <= at:
            return f"the span {span['start']}..{span['stop']} does not begin at token {at}"
        at = span["stop"]
    return "" if at == num_tokens else f"the spans end at token {at} of {num_tokens}"


def check_explainer(value: str) -> None:
    """Check a function in a process of its own.

    Raises:
        ConfigError: It cannot be loaded or breaks its contract; the message has the counterexample.
    """
    pass_contract("explainer", "ostinato.plugins.explainer:failure_of", [value])


def failure_of(value: str) -> str:
    """Return why a function breaks its contract; empty if it passes.

    Its spans sum to the prompt, for all short prompts of two letters and a few histories.
    """
    try:
        explainer = Explainer(value)
    except ConfigError as error:
        return str(error)
    histories: tuple[list[str], ...] = ([], ["AB"], ["ABAB"], ["ABBA", "BB"])
    prompts = ("".join(text) for length in range(1, 5) for text in product("AB", repeat=length))
    for prompt, history in product(prompts, histories):
        earlier = [
            EarlierRequest(f"request {number}", [ord(letter) for letter in text], 2, "")
            for number, text in enumerate(history)
        ]
        explained = ExplainedPrompt([ord(letter) for letter in prompt], 0, earlier, "")
        fault = explainer.spans(explained)["error"]
        if fault:
            return f"{fault}; prompt {prompt}, earlier {', '.join(history) or 'none'}"
    return ""
