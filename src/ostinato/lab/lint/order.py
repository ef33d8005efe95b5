"""Finds shuffled tools, examples, documents and call ids."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ostinato.lab.lint.rewrites import common_order, with_messages, with_prompt, with_tail
from ostinato.lab.log.logged_prompt import Block, LoggedTool, Message
from ostinato.lab.log.request_log import LoggedRequest

MIN_LETTERS = 30
"""Minimum characters of a document; shorter pieces recur by chance."""

_TAG = re.compile(r"<(\w+)\b[^<>]*>")
_GAPS = re.compile(r"\n\s*\n|\n-{3,}\n")
_LINE_ENDS = re.compile(r"\n+")
_COMMA = re.compile(r"[\s,]*")
_JSON = json.JSONDecoder()

_NUMBER = re.compile(
    r"^(\s*(?:<\w+[^>]*?\b(?:index|number|no|n)=[\"']?|\[|\(|#*\s*(?:document|doc|source|passage|"
    r"chunk|result|context|example)\s*[#:]?\s*)?)(\d+)(?=[\"'\]).: \n>])(.*)$",
    re.DOTALL | re.IGNORECASE,
)
"""What a document begins with if documents are numbered."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a message: its text around its number, and the white space after it."""

    before: str
    number: str
    rest: str
    end: str

    @property
    def key(self) -> tuple[str, str]:
        return self.before, self.rest


def sort_examples(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Sort recurring pairs of question and answer by first appearance."""
    orders: dict[tuple[str, ...], tuple[str, ...]] = {}
    fixed = []
    for request in requests:
        messages = request.prompt.messages
        pairs = _pairs(messages)
        texts = {"\0".join(message.text for message in pair): pair for pair in pairs}
        if len(pairs) > 1 and len(texts) == len(pairs):
            order = orders.setdefault(tuple(sorted(texts)), tuple(texts))
            start = request.prompt.num_leading
            moved = [message for text in order for message in texts[text]]
            messages = (*messages[:start], *moved, *messages[start + len(moved) :])
        fixed.append(with_messages(request, messages))
    return fixed


def _pairs(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Return the pairs of user and assistant between the system messages and the last one."""
    start = next((i for i, m in enumerate(messages) if m.role not in ("system", "")), 0)
    pairs = []
    while start + 2 < len(messages):
        pair = messages[start : start + 2]
        if [message.role for message in pair] != ["user", "assistant"]:
            break
        pairs.append(pair)
        start += 2
    return pairs


def sort_documents(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Sort recurring documents with contradicting orders into one, message by message."""
    cut = [_pieces(message) for request in requests for message in request.prompt.messages]
    keys = [[piece.key for piece in pieces] for pieces in dict.fromkeys(map(tuple, cut))]
    counts = Counter(key for row_keys in keys for key in set(row_keys))
    recurring = {k for k, count in counts.items() if count > 1 and len(k[1]) >= MIN_LETTERS}
    lists = dict.fromkeys(tuple(key for key in row_keys if key in recurring) for row_keys in keys)
    places = {key: place for place, key in enumerate(common_order(list(lists)))}
    pieces_of = iter(cut)
    return [
        with_messages(r, [_sorted(m, next(pieces_of), places) for m in r.prompt.messages])
        for r in requests
    ]


def _pieces(message: Message) -> list[_Piece]:
    """Cut a message into what may be documents: its blocks, or the pieces of its only one."""
    texts = [block.text for block in message.blocks if block.kind == "text"]
    if message.role == "assistant" or len(texts) != len(message.blocks):
        return []
    if len(texts) == 1:
        texts = _cut(texts[0])
    elif len(texts) == 2:  # documents in one block, the question in the other
        texts = [*_cut(texts[0]), texts[1]]
    return _numbered([(text.rstrip(), text[len(text.rstrip()) :]) for text in texts])


def _numbered(texts: Sequence[tuple[str, str]]) -> list[_Piece]:
    """Take the numbers out of pieces that are numbered one after the other."""
    matches = [_NUMBER.match(text) for text, _ in texts]
    numbers = [int(match[2]) for match in matches if match]
    is_counted = len(numbers) > 1 and all(b == a + 1 for a, b in pairwise(numbers))
    return [
        _Piece(m[1], m[2], m[3], end) if m and is_counted else _Piece("", "", text, end)
        for m, (text, end) in zip(matches, texts, strict=True)
    ]


def _cut(text: str) -> list[str]:
    """Cut a text at its tags, else at the items of a JSON list, between paragraphs or lines."""
    for edges in (_tag_edges, _item_edges, _paragraph_edges, _line_edges):
        places = [0, *edges(text), len(text)]
        pieces = [text[a:b] for a, b in pairwise(places) if a < b]
        if sum(len(piece) >= MIN_LETTERS for piece in pieces) > 1:
            return pieces
    return [text]


def _line_edges(text: str) -> list[int]:
    return [gap.end() for gap in _LINE_ENDS.finditer(text)]


def _paragraph_edges(text: str) -> list[int]:
    """Return where paragraphs end; a heading stays with what it is above."""
    ends = [gap.end() for gap in _GAPS.finditer(text)]
    return [end for start, end in pairwise([0, *ends]) if not text.startswith("#", start)]


def _item_edges(text: str) -> list[int]:
    """Return where the items of the first list of JSON objects begin and end."""
    at, edges = text.find("[{") + 1, list[int]()
    while at and text.startswith("{", at):
        try:
            end = _JSON.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            break
        edges += [at, end]
        comma = _COMMA.match(text, end)
        at = comma.end() if comma else end
    return edges


def _tag_edges(text: str) -> list[int]:
    """Return where the tagged parts of a text begin and end; a tag around them all is opened."""
    edges, at, unclosed = list[int](), 0, set[str]()
    for tag in _TAG.finditer(text):
        name = tag[1]
        if tag.start() < at or name in unclosed:
            continue
        close = f"</{name}>"
        end = text.find(close, tag.end())
        if end < 0:
            unclosed.add(name)
            continue
        inner = _TAG.match(text[tag.end() : tag.end() + 200].lstrip())
        if inner is not None and text.count(f"</{inner[1]}>", tag.end(), end) > 1:
            at = tag.end()
            continue
        at = end + len(close)
        edges += [tag.start(), at]
    return edges


def _sorted(
    message: Message, pieces: Sequence[_Piece], places: dict[tuple[str, str], int]
) -> Message:
    """Put the documents of a message into one order; numbers and white space stay in place."""
    movable = [i for i, piece in enumerate(pieces) if piece.key in places]
    order = sorted(movable, key=lambda i: places[pieces[i].key])
    if order == movable:
        return message
    moved = list(pieces)
    for place, source in zip(movable, order, strict=True):
        there = pieces[place]
        moved[place] = replace(pieces[source], number=there.number, end=there.end)
    texts = [piece.before + piece.number + piece.rest + piece.end for piece in moved]
    if len(texts) == len(message.blocks):
        blocks = [replace(b, text=t) for b, t in zip(message.blocks, texts, strict=True)]
        return replace(message, blocks=tuple(blocks))
    last = message.blocks[1:]
    joined = "".join(texts[: len(texts) - len(last)])
    return replace(message, blocks=(replace(message.blocks[0], text=joined), *last))


def keep_call_ids(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Give earlier tool calls the ids under which they were seen first."""
    first: dict[tuple[int, str], str] = {}
    return [
        with_messages(request, _with_first_ids(request.prompt.messages, first.setdefault))
        for request in requests
    ]


def _with_first_ids(
    messages: Sequence[Message], known: Callable[[tuple[int, str], str], str]
) -> list[Message]:
    """Rename ids: a call is known by all that was said before it."""
    chain, names, renamed = 0, dict[str, str](), []
    for message in messages:
        blocks = list[Block]()
        for block in message.blocks:
            if block.kind == "call" and block.call_id:
                names[block.call_id] = known((chain, block.text), block.call_id)
                block = replace(block, call_id=names[block.call_id])
            blocks.append(block)
            chain = hash((chain, message.role, block.text))
        call_id = names.get(message.call_id, message.call_id)
        renamed.append(replace(message, blocks=tuple(blocks), call_id=call_id))
    return renamed


def sort_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """List tools in one order; lists that never contradict each other stay."""
    order = _places(requests)
    return [
        _with_tools(r, sorted(r.prompt.tools, key=lambda tool: order[tool.name])) for r in requests
    ]


def unite_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send every tool that any request of the group has, in one order if they came in one."""
    known: dict[str, LoggedTool] = {}
    for request in requests:
        for tool in request.prompt.tools:
            known.setdefault(tool.name, tool)
    every = {name: known[name] for name in _places(requests)}

    def united(tools: Sequence[LoggedTool]) -> list[LoggedTool]:
        by_name = {tool.name: tool for tool in tools}
        if list(by_name) == [name for name in every if name in by_name]:
            return [by_name.get(name, tool) for name, tool in every.items()]
        rest = [tool for name, tool in every.items() if name not in by_name]
        return [*by_name.values(), *rest]  # their order is another remedy's

    return [_with_tools(r, united(r.prompt.tools)) if r.prompt.tools else r for r in requests]


def settle_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send each tool as first seen; its current text goes to the end of the last message."""
    first: dict[str, LoggedTool] = {}
    fixed = []
    for request in requests:
        tools = request.prompt.tools
        settled = [first.setdefault(tool.name, tool) for tool in tools]
        changed = [t.text for t, known in zip(tools, settled, strict=True) if t.text != known.text]
        fixed.append(with_tail(_with_tools(request, settled), changed) if changed else request)
    return fixed


def _places(requests: Sequence[LoggedRequest]) -> dict[str, int]:
    """Number the tools of a group in one order."""
    lists = dict.fromkeys(tuple(tool.name for tool in r.prompt.tools) for r in requests)
    return {name: place for place, name in enumerate(common_order(list(lists)))}


def _with_tools(request: LoggedRequest, tools: Sequence[LoggedTool]) -> LoggedRequest:
    return with_prompt(request, replace(request.prompt, tools=tuple(tools)))
