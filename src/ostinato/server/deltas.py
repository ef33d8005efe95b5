"""The new part of a cumulative output.

The engine's outputs are cumulative; the streams of every API send only what was added.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of one continuation.

    Attributes:
        index: Index of the continuation.
        text: New text; may be empty, since uncertain text is held back.
        token_ids: New ids.
        logprobs: Log-probabilities of the new ids; None unless requested.
        offset: Characters of text before it.
        finish_reason: Why it ended; None while it continues.
        is_later: Whether an earlier part was sent.
        stop_reason: The stop string or stop id that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    offset: int
    finish_reason: str | None
    is_later: bool
    stop_reason: int | str | None = None


class Deltas:
    """Tracks how much of each continuation was sent."""

    def __init__(self) -> None:
        """Start with nothing sent."""
        self._sent: dict[int, tuple[int, int]] = {}  # index: characters, tokens
        self._ended: set[int] = set()

    def take(self, output: RequestOutput) -> Iterator[Delta]:
        """Yield what each continuation gained since the last call."""
        for part in output.outputs:
            if part.index in self._ended:
                continue
            num_chars, num_tokens = self._sent.get(part.index, (0, 0))
            is_new = len(part.text) > num_chars or len(part.token_ids) > num_tokens
            if is_new or part.finished:
                yield self._delta(part)

    def _delta(self, part: CompletionOutput) -> Delta:
        is_later = part.index in self._sent
        num_chars, num_tokens = self._sent.get(part.index, (0, 0))
        self._sent[part.index] = (len(part.text), len(part.token_ids))
        if part.finished:
            self._ended.add(part.index)
        return Delta(
            part.index,
            part.text[num_chars:],
            part.token_ids[num_tokens:],
            None if part.logprobs is None else part.logprobs[num_tokens:],
            num_chars,
            part.finish_reason,
            is_later,
            part.stop_reason,
        )
