"""Logged requests, read and written."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import BrokenTrace
from ostinato.lab.log.request_log import (
    Conversations,
    LoggedRequest,
    parse_requests,
    render_plainly,
)

SAID = [{"role": "user", "content": "Who comes?"}]
CHAT = {"model": "m", "messages": SAID}
ANTHROPIC = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": SAID}


def parse_request(record: bytes | str, number: int) -> LoggedRequest:
    """Read a record that holds one request."""
    [request] = parse_requests(record, number)
    return Conversations().complete(request)


def read(record: Any) -> LoggedRequest:
    return parse_request(json.dumps(record).encode(), 1)


def rendered(record: Any) -> str:
    return render_plainly(read(record))


def refused(record: Any) -> str:
    with pytest.raises(BrokenTrace) as error:
        read(record)
    return str(error.value)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path
