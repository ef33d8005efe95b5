"""How does an answer become the items of a response, and the events of its stream?

::

    output_item.added
      content_part.added ─► output_text.delta ... ─► output_text.done ─► content_part.done
      or: function_call_arguments.delta ... ─► function_call_arguments.done
    output_item.done
"""

import uuid
from collections.abc import Iterator
from typing import Any

from ostinato.server.tool_parser import ArgumentsPiece, CallStart, Piece, TextPiece
from ostinato.server.tools import Message, add_call

Event = tuple[str, dict[str, Any]]
"""Its type without ``response.``, and what it says."""


class ItemWriter:
    """Writes the pieces of one answer down as items.

    Attributes:
        items: So far; the last one may still grow.
    """

    def __init__(self) -> None:
        """Start without an item."""
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def take(self, piece: Piece) -> Iterator[Event]:
        """Take a piece, and yield the events that tell of it."""
        match piece:
            case TextPiece():
                if not self._is_open or self.items[-1]["type"] != "message":
                    yield from self._begin_message()
                part = self.items[-1]["content"][0]
                part["text"] += piece.text
                yield self._said("output_text.delta", delta=piece.text, logprobs=[])
            case CallStart():
                yield from self._begin_call(piece)
            case ArgumentsPiece():
                self.items[-1]["arguments"] += piece.text
                yield self._told("function_call_arguments.delta", delta=piece.text)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """Take the end, and yield the events that tell of it; an answer of nothing is a text.

        Args:
            is_cut: Whether there was no room for all of it.
        """
        if not self.items:
            yield from self._begin_message()
        yield from self._close("incomplete" if is_cut else "completed")

    def messages(self) -> list[Message]:
        """Return the items as messages of the conversation."""
        messages: list[Message] = []
        for item in self.items:
            if item["type"] == "message":
                text = item["content"][0]["text"]
                messages.append({"role": "assistant", "content": text})
            else:
                add_call(messages, item["call_id"], item["name"], item["arguments"])
        return messages

    def _begin_message(self) -> Iterator[Event]:
        item = {"id": _name("msg"), "type": "message", "role": "assistant", "content": []}
        yield from self._begin(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"].append(part)
        yield self._said("content_part.added", part=dict(part))

    def _begin_call(self, start: CallStart) -> Iterator[Event]:
        item = {"id": _name("fc"), "type": "function_call", "call_id": start.call_id}
        yield from self._begin({**item, "name": start.name, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append({**item, "status": "in_progress"})
        self._is_open = True
        yield self._whole("output_item.added")

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._said("output_text.done", text=part["text"], logprobs=[])
            yield self._said("content_part.done", part=dict(part))
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            yield self._told("function_call_arguments.done", **given)
        yield self._whole("output_item.done")

    def _whole(self, kind: str) -> Event:
        item = self.items[-1]
        shown = (
            {**item, "content": [dict(p) for p in item["content"]]} if "content" in item else item
        )
        return kind, {"output_index": len(self.items) - 1, "item": dict(shown)}

    def _told(self, kind: str, **content: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return kind, {**place, **content}

    def _said(self, kind: str, **content: Any) -> Event:
        return self._told(kind, content_index=0, **content)


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
