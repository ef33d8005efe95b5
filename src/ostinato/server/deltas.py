"""What is new in an output since the last look.

Outputs of the engine are cumulative; streams of every API send what was added.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one continuation.

    Attributes:
        index: Which of the request's continuations.
        text: New text; may be empty, since text is held back until it is certain.
        token_ids: New ids.
        logprobs: Of the new ids; None unless asked for.
        offset: Characters of text before this.
        finish_reason: Why it ended; None while it goes on.
        is_later: Whether something of it was sent before.
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
    """Remembers how much of each continuation was sent."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._sent: dict[int, tuple[int, int]] = {}  # index: characters, tokens
        self._ended: set[int] = set()

    def take(self, output: RequestOutput) -> Iterator[Delta]:
        """Yield what each continuation got since the last call; nothing twice."""
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
