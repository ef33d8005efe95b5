"""A server for the pages that speak to one, begun with the README's own command."""

import shlex
from collections.abc import Iterator

import pytest

from tests.docs.reading import ROOT, code_blocks
from tests.support.served_process import served

ADDRESS = "http://127.0.0.1:8000"
"""What the pages say; the server of the tests listens on whichever port is free."""


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """Run what the README says begins a server."""
    blocks = code_blocks(ROOT / "README.md", "bash")
    [command] = {b.text.strip() for b in blocks if b.text.startswith("ostinato serve")}
    with served(*shlex.split(command)[2:]) as server:
        yield server.url


def address_filled_in(text: str, request: pytest.FixtureRequest) -> str:
    """Return a snippet that speaks to a server that runs, if it speaks to one at all."""
    if ADDRESS not in text:
        return text
    address: str = request.getfixturevalue("server_address")
    return text.replace(ADDRESS, address)
