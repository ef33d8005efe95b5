"""How does an answer begin with its prompt?"""

from dataclasses import dataclass
from typing import Any

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.outputs import RequestOutput
from ostinato.server.deltas import Delta
from ostinato.server.protocol.logprobs import Positions, completion_logprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt, as the beginning of its answer.

    Attributes:
        text: Of the prompt; empty without ``echo``.
        first_token: Text of its first token, of which there is no log-probability.
        positions: Of its tokens; None unless asked for.
        is_alone: Whether nothing follows: the prompt was only to be scored.
    """

    text: str = ""
    first_token: str = ""
    positions: Positions | None = None
    is_alone: bool = False

    @classmethod
    async def of(cls, llm: AsyncLLM, output: RequestOutput, is_alone: bool) -> "Echo":
        """Return the beginning of an answer.

        Raises:
            MissingTokenizer: There is no text without a tokenizer.
        """
        ids = output.prompt_token_ids
        text = await llm.decode(ids) if output.prompt is None else output.prompt
        scored = output.prompt_logprobs is not None
        first = await llm.decode(ids[:1]) if scored else ""
        return cls(text, first, output.prompt_logprobs, is_alone)

    def choice(self, delta: Delta, index: int) -> dict[str, Any]:
        """Lay out what was added to one choice, the prompt before its first piece.

        Args:
            delta: What was added.
            index: Of the choice.
        """
        text = "" if self.is_alone else delta.text
        return {
            "index": index,
            "text": text if delta.is_later else self.text + text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        added: Positions = [] if self.is_alone else delta.logprobs
        if delta.is_later:
            return completion_logprobs(added, len(self.text) + delta.offset)
        return completion_logprobs([*(self.positions or ()), *added], 0, self.first_token)
