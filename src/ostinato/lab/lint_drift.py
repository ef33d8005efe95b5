r"""Finds answers that are resent as other tokens than generated.

This needs logs with token ids: responses with ``prompt_token_ids`` and, for their choice,
``token_ids``, as vLLM and Ostinato return them for ``return_token_ids``::

    turn 1   prompt_token_ids 5 6 7 8    token_ids 11 12 13 14      "\n\n1."
    turn 2   prompt_token_ids 5 6 7 8              11 31 32 14      the same text, other tokens
                                                      └ everything from here on misses
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.core.tokens import TOKEN_BYTES, num_common_tokens
from ostinato.lab.lint_replay import Replayed, replay_ids
from ostinato.lab.request_log import LoggedRequest

DRIFT_ADVICE = (
    "Answers were sent back as text, which has other tokens than those generated. Let the engine "
    "keep them (Ostinato's keep_tokens, on by default), or send earlier answers as token ids."
)

_Turn = tuple[str, str, tuple[tuple[str, str], ...]]
"""Tenant, model, and the messages so far: role and text."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The loss by answers that were resent as other tokens.

    Attributes:
        answers: Texts of such answers, in order.
        lost_tokens: Tokens of earlier turns that could not hit.
        before: What the requests with token ids computed, as they were sent.
    """

    answers: tuple[str, ...]
    lost_tokens: int
    before: Replayed

    @property
    def after(self) -> Replayed:
        """What they had computed without drift."""
        before = self.before
        return Replayed(before.prompt_tokens, before.computed_tokens - self.lost_tokens)


def find_drift(requests: Sequence[LoggedRequest], block_size: int) -> Drift:
    """Compare each prompt's tokens with those of the turn that it continues.

    Cost: a look-up for each answer in each prompt.
    """
    turns: dict[_Turn, LoggedRequest] = {}
    answers, lost_tokens = [], 0
    with_ids = [request for request in requests if request.prompt_ids]
    for request in with_ids:
        earlier = _continued(turns, request)
        if earlier is not None and (lost := _num_lost(earlier, request)):
            answers.append(earlier.answer)
            lost_tokens += lost
        turns[_turn(request, len(request.prompt.messages))] = request
    return Drift(tuple(answers), lost_tokens, replay_ids(with_ids, block_size))


def _turn(request: LoggedRequest, num_messages: int) -> _Turn:
    messages = request.prompt.messages[:num_messages]
    said = tuple((message.role, message.text) for message in messages)
    return request.tenant, request.model, said


def _continued(turns: dict[_Turn, LoggedRequest], request: LoggedRequest) -> LoggedRequest | None:
    """Find the latest turn whose messages and answer a prompt begins with."""
    messages = request.prompt.messages
    for place in range(len(messages) - 1, 0, -1):
        if messages[place].role == "assistant":
            earlier = turns.get(_turn(request, place))
            if earlier is not None and earlier.answer == messages[place].text:
                return earlier
    return None


def _num_lost(earlier: LoggedRequest, request: LoggedRequest) -> int:
    """Count the computed tokens of a turn that another does not begin with, if any of its answer.

    The last token of an answer is sampled and not computed (law 4).
    """
    computed = (earlier.prompt_ids + earlier.reply_ids)[:-TOKEN_BYTES]
    common = num_common_tokens(computed, request.prompt_ids) * TOKEN_BYTES
    is_drift = len(earlier.prompt_ids) <= common < len(computed)
    return (len(computed) - common) // TOKEN_BYTES if is_drift else 0
