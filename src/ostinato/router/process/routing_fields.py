"""The fields of a request's body that routing needs.

Only the length is limited: an invalid body has an empty prompt, and its worker returns the error.
"""

from array import array
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from ostinato.core.errors import PromptTooLong
from ostinato.protocol.lenient import LenientBody, read_leniently
from ostinato.router.policy import RouteRequest

MAX_PROMPT_CHARACTERS = 4_000_000
"""Longer than any model's context."""

_TURN_CHARACTERS = 16
"""What a template adds to each turn, roughly."""


@dataclass(frozen=True, slots=True)
class RoutingFields(LenientBody):
    """What routing needs of a request.

    Attributes, besides those of ``LenientBody``:
        num_characters: Characters or token ids of everything that the prompt is made of.
    """

    num_characters: int = 0

    @classmethod
    def of(cls, path: str, body: bytes) -> "RoutingFields":
        """Read a body; an empty prompt if there is none."""
        read = read_leniently(path, body)
        values = {each.name: getattr(read, each.name) for each in fields(read)}
        return cls(**values, num_characters=_num_characters(read))

    @property
    def is_whole(self) -> bool:
        """Whether the request's hits are those of this prompt alone, and all of it is here."""
        return not (self.is_one_of_several or self.previous)

    @property
    def characters(self) -> str:
        """The prompt as one text, for routing by characters."""
        if self.messages is None:
            return self.text if self.text is not None else "".join(map(chr, self._safe_ids()))
        head = msgspec.json.encode(self.tools).decode() if self.tools else ""
        turns = (f"\x1e{m['role']}\x1f{_all_of(m)}" for m in self.messages)
        return head + "".join(turns)

    def _safe_ids(self) -> list[int]:
        return [token % 0xD800 for token in self.token_ids or ()]

    def route_request(
        self, tokens: "array[int] | None", salt: str, tenant: str, session: str, adapter: str = ""
    ) -> RouteRequest:
        """Return the router's view of it.

        Args:
            tokens: Its token ids; None compares it by characters.
            salt: Cache salt at the workers.
            tenant: The caller's tenant.
            session: The conversation; empty if unknown.
            adapter: As the workers' events name it; empty without one.
        """
        characters = tokens is None
        if tokens is None:
            tokens = array("I", self.characters.encode("utf-32-le", "replace"))
        return RouteRequest(
            tokens or array("I", [0]),
            characters=characters,
            adapter=adapter,
            salt=salt,
            session=session,
            tenant=tenant,
            max_tokens=self.max_tokens,
        )


def check_length(num_characters: int, max_characters: int) -> None:
    """Raise PromptTooLong if a prompt has too many characters or token ids."""
    if num_characters > max_characters:
        raise PromptTooLong(
            f"the prompt has {num_characters} characters or ids, and at most {max_characters} are "
            "routed: shorten it, or raise --max-prompt-characters"
        )


def _num_characters(body: LenientBody) -> int:
    if body.messages is None:
        return len(body.text if body.text is not None else body.token_ids or ())
    turns = sum(_TURN_CHARACTERS + len(_all_of(turn)) for turn in body.messages)
    return turns + sum(len(msgspec.json.encode(x)) for x in (body.tools, body.template) if x)


def _all_of(turn: dict[str, Any]) -> str:
    calls, text = turn.get("tool_calls"), str(turn["content"])
    if reasoning := turn.get("reasoning"):
        text += str(reasoning)
    return text + (msgspec.json.encode(calls).decode() if calls else "")
