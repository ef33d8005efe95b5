"""Turns an answer into the items of a response and the events of its stream.

::

    output_item.added
      content_part.added ─► output_text.delta ... ─► output_text.done ─► content_part.done
      or: content_part.added ─► reasoning_text.delta ... ─► reasoning_text.done ─► content_part.done
      or: function_call_arguments.delta ... ─► function_call_arguments.done
      or: custom_tool_call_input.delta ─► custom_tool_call_input.done     (all of it at once)
    output_item.done
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ostinato.protocol.conversation import Turns
from ostinato.protocol.response_tools import CallTarget, read_input
from ostinato.server.answers.answer_parser import (
    ArgumentsPiece,
    CallStart,
    Piece,
    ReasoningPiece,
    TextPiece,
)

Event = tuple[str, dict[str, Any]]
"""An event: its type without ``response.``, and its fields."""


class ItemWriter:
    """Turns the pieces of one answer into items.

    Attributes:
        items: Items so far; the last one gets its text when it ends.
        turns: Those that have ended, as messages of the conversation.
    """

    def __init__(
        self,
        targets: Mapping[str, CallTarget] = MappingProxyType({}),
        sealed_name: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Start without items.

        Args:
            targets: The tools behind functions, by the names that the model writes.
            sealed_name: Returns the encrypted content of reasoning; None if there is none.
        """
        self._targets, self._sealed_name = targets, sealed_name
        self.turns = Turns()
        self._called = ""  # the function of the open call, as the model wrote it
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._written: list[str] = []  # text of the last item, joined when it ends

    def take(self, piece: Piece, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add a piece with its log-probabilities, and yield its events."""
        match piece:
            case TextPiece():
                if not self._is_open or self.items[-1]["type"] != "message":
                    yield from self._begin_text("message")
                self._written.append(piece.text)
                self.items[-1]["content"][0]["logprobs"] += logprobs
                yield self._part_event(
                    "output_text.delta", delta=piece.text, logprobs=list(logprobs)
                )
            case ReasoningPiece():
                if not self._is_open or self.items[-1]["type"] != "reasoning":
                    yield from self._begin_text("reasoning")
                self._written.append(piece.text)
                yield self._part_event("reasoning_text.delta", delta=piece.text)
            case CallStart():
                yield from self._begin_call(piece)
            case ArgumentsPiece():
                self._written.append(piece.text)
                if self.items[-1]["type"] == "function_call":
                    yield self._item_event("function_call_arguments.delta", delta=piece.text)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """End the answer, which may be truncated; an empty answer is an empty text."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self._close("incomplete" if is_cut else "completed")

    def _begin_call(self, call: CallStart) -> Iterator[Event]:
        target = self._targets.get(call.name, CallTarget(call.name))
        kind, prefix = ("custom_tool_call", "ctc") if target.is_custom else ("function_call", "fc")
        item = {"id": _name(prefix), "type": kind, "call_id": call.call_id, "name": target.name}
        if target.namespace is not None:
            item["namespace"] = target.namespace
        yield from self._begin({**item, ("input" if target.is_custom else "arguments"): ""})
        self._called = call.name

    def _begin_text(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {"id": _name("msg"), "type": kind, "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if kind == "reasoning":
            item = {"id": _name("rs"), "type": kind, "summary": []}
            if (sealed := self._sealed_name()) is not None:
                item["encrypted_content"] = sealed
            part = {"type": "reasoning_text", "text": ""}
        else:
            part["logprobs"] = []
        yield from self._begin({**item, "content": []})
        self.items[-1]["content"].append(part)
        yield self._part_event("content_part.added", part=_copy(part))

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append({**item, "status": "in_progress"})
        self._is_open = True
        yield self._whole_item("output_item.added")

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = status
        text, self._written = "".join(self._written), []
        match item["type"]:
            case "reasoning":
                self.turns.think(text)
            case "message":
                self.turns.say("assistant", text)
            case _:
                self.turns.call(item["call_id"], self._called, text)
        if "content" in item:
            part = item["content"][0]
            part["text"] = text
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._part_event(f"{part['type']}.done", text=part["text"], **more)
            yield self._part_event("content_part.done", part=_copy(part))
        else:
            yield from self._close_call(item, text)
        yield self._whole_item("output_item.done")

    def _close_call(self, item: dict[str, Any], arguments: str) -> Iterator[Event]:
        if item["type"] == "custom_tool_call":
            item["input"] = read_input(arguments)
            yield self._item_event("custom_tool_call_input.delta", delta=item["input"])
            yield self._item_event("custom_tool_call_input.done", input=item["input"])
        else:
            item["arguments"] = arguments
            given = {"name": item["name"], "arguments": arguments}
            yield self._item_event("function_call_arguments.done", **given)

    def _whole_item(self, kind: str) -> Event:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [_copy(part) for part in item["content"]]
        return kind, {"output_index": len(self.items) - 1, "item": item}

    def _item_event(self, kind: str, **content: Any) -> Event:
        location = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return kind, {**location, **content}

    def _part_event(self, kind: str, **content: Any) -> Event:
        return self._item_event(kind, content_index=0, **content)


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a part; the original still grows."""
    more = {"logprobs": list(part["logprobs"])} if "logprobs" in part else {}
    return {**part, **more}


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
