"""Log-probabilities as OpenAI writes them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class Logprob(Protocol):
    """The log-probability of one token."""

    @property
    def logprob(self) -> float:
        """Its natural logarithm."""

    @property
    def rank(self) -> int:
        """1 for the most likely token."""

    @property
    def decoded_token(self) -> str | None:
        """Its text; None without a tokenizer."""


Positions = Sequence[Mapping[int, Logprob] | None]


def completion_logprobs(positions: Positions, offset: int, first_token: str = "") -> dict[str, Any]:
    """Return positions in the format of ``/v1/completions``.

    Args:
        positions: Each token and its alternatives, itself first; None for the first token of a
            prompt.
        offset: Characters before the first position.
        first_token: Text of the position that is None.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    for position in positions:
        tokens.append(first_token if position is None else _text(next(iter(position.values()))))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [None if p is None else _first(p) for p in positions],
        "top_logprobs": [None if p is None else _by_text(p) for p in positions],
        "text_offset": offsets,
    }


def prompt_logprobs(positions: Positions) -> list[Any]:
    """Return a prompt's log-probabilities in vLLM's format."""
    return [
        position
        and {
            str(token): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions
    ]


def chat_logprobs(positions: Positions, num_top: int) -> dict[str, Any]:
    """Return positions in the format of ``/v1/chat/completions``."""
    return {"content": [_entry(p, num_top) for p in positions if p is not None], "refusal": None}


def _entry(position: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    ranked = sorted(position.values(), key=lambda logprob: logprob.rank)
    top = [_candidate(logprob) for logprob in ranked if logprob.rank <= num_top]
    return {**_candidate(next(iter(position.values()))), "top_logprobs": top[:num_top]}


def _candidate(logprob: Logprob) -> dict[str, Any]:
    """Return one token; the bytes of a partial character are unknown."""
    text = _text(logprob)
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": _finite(logprob.logprob),
        "bytes": list(text.encode()) if known else None,
    }


def _by_text(position: Mapping[int, Logprob]) -> dict[str, float]:
    """Map texts to log-probabilities; among tokens with equal text the likeliest counts."""
    by_text: dict[str, float] = {}
    for logprob in position.values():
        text, value = _text(logprob), _finite(logprob.logprob)
        by_text[text] = max(value, by_text.get(text, value))
    return by_text


def _first(position: Mapping[int, Logprob]) -> float:
    return _finite(next(iter(position.values())).logprob)


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
