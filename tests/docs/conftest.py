"""A server for the pages that speak to one, set up by the README's own command."""

import re
import shlex
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.cli.terminal import Terminal
from tests.docs.reading import ROOT, code_blocks
from tests.support.models.model_pool import POOL, pooled_models, use_pool
from tests.support.servers.servers import serving

__all__ = ["pooled_models", "use_pool"]

ADDRESS = re.compile(r"http://127\.0\.0\.1:(8000|8765)\b")
"""What the pages say; the server of the tests listens on whichever port is free."""


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """Serve in this process what the README's command would serve in its own."""
    blocks = code_blocks(ROOT / "README.md", "bash")
    command = next(b.text.strip() for b in blocks if b.text.startswith("ostinato serve"))
    with mock.patch("ostinato.server.lifecycle.run_server") as run_server:
        done = Terminal().run(*shlex.split(command)[1:], "--port", "0")
    assert done.exit_code == 0, done.output
    state = run_server.call_args.args[0]
    POOL.keep_lent()
    with serving(state) as url:
        yield url
    state.llm.shutdown()


def address_filled_in(text: str, request: pytest.FixtureRequest) -> str:
    """Return a snippet that speaks to a server that runs, if it speaks to one at all."""
    if not ADDRESS.search(text):
        return text
    address: str = request.getfixturevalue("server_address")
    return ADDRESS.sub(address, text)
