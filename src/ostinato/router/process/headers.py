"""Headers that are forwarded, and that are set here."""

from collections.abc import Mapping

from multidict import CIMultiDict

from ostinato.router.policy import Decision
from ostinato.router.process.config import FleetConfig

_OF_ONE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
    }
)
_KEYS = ("authorization", "x-api-key")
_OURS = "x-ostinato-"
_SESSIONS = (
    *("x-session-id", "x-session-affinity", "x-claude-code-session-id"),
    *("session-id", "session_id", "thread-id", "conversation_id"),
)
"""In which agents name their conversation: OpenCode and others, Claude Code, Codex."""

_MAX_SESSION_CHARS = 200


def session_of(headers: Mapping[str, str], named: str) -> str:
    """Return the conversation of a request; empty if unknown.

    Args:
        headers: Of the request.
        named: The conversation that its body names; headers come first.
    """
    given = next((headers[name] for name in _SESSIONS if headers.get(name)), named)
    return given[:_MAX_SESSION_CHARS]


def keys_for_worker(headers: Mapping[str, str], config: FleetConfig) -> dict[str, str]:
    """Return the key for a worker: the client's, or the router's own."""
    if config.replace_keys:
        return {"Authorization": f"Bearer {config.worker_key}"}
    return {name: headers[name] for name in _KEYS if name in headers}


def headers_to_worker(headers: Mapping[str, str], config: FleetConfig) -> CIMultiDict[str]:
    """Return the client's headers that are forwarded to a worker."""
    forwarded = end_to_end(headers)
    if config.replace_keys:
        for name in _KEYS:
            forwarded.popall(name, None)
        forwarded.update(keys_for_worker(headers, config))
    return forwarded


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that are neither hop-by-hop nor set by the router."""
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (low := name.lower()) not in _OF_ONE_CONNECTION
        and low not in named
        and not low.startswith(_OURS)
    )


def routing_headers(decision: Decision, shows_hits: bool = True) -> dict[str, str]:
    """Return the response headers about a decision, with the expected hits if they may be shown."""
    headers = {
        "x-ostinato-worker": decision.worker,
        "x-ostinato-worker-state": decision.state.value,
    }
    if shows_hits:
        headers["x-ostinato-expected-cached-tokens"] = str(decision.expected_cached_tokens)
    return headers
