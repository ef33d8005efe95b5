"""Finds tool lists that break prefixes."""

from collections.abc import Sequence
from dataclasses import replace

from ostinato.lab.lint_rewrites import common_order, with_prompt, with_tail
from ostinato.lab.logged_prompt import Tool
from ostinato.lab.request_log import LoggedRequest


def sort_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """List tools in one order; lists that never contradict each other stay."""
    order = _places(requests)
    return [
        _with_tools(r, sorted(r.prompt.tools, key=lambda tool: order[tool.name])) for r in requests
    ]


def unite_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send every tool that any request of the group has, in one order if they came in one."""
    known: dict[str, Tool] = {}
    for request in requests:
        for tool in request.prompt.tools:
            known.setdefault(tool.name, tool)
    every = {name: known[name] for name in _places(requests)}

    def united(tools: Sequence[Tool]) -> list[Tool]:
        mine = {tool.name: tool for tool in tools}
        if list(mine) == [name for name in every if name in mine]:
            return [mine.get(name, tool) for name, tool in every.items()]
        rest = [tool for name, tool in every.items() if name not in mine]
        return [*mine.values(), *rest]  # their order is another remedy's

    return [_with_tools(r, united(r.prompt.tools)) if r.prompt.tools else r for r in requests]


def settle_tools(requests: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Send each tool as first seen; its current text goes to the end of the last message."""
    first: dict[str, Tool] = {}
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


def _with_tools(request: LoggedRequest, tools: Sequence[Tool]) -> LoggedRequest:
    return with_prompt(request, replace(request.prompt, tools=tuple(tools)))
