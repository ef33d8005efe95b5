"""A server with keys for tests: an administrator, two tenants, and whatever a test adds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ostinato.server.access.keys import add_key
from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import open_state
from ostinato.server.state import ServerState
from tests.support.servers.servers import await_idle, serving

MODEL = "tiny-shakespeare"


@dataclass(frozen=True)
class Keyed:
    """A running server with keys.

    Attributes:
        state: Of the server.
        url: Its address.
        path: The keys file.
        keys: By tenant.
    """

    state: ServerState
    url: str
    path: Path
    keys: dict[str, str]

    def client(self, tenant: str) -> httpx.Client:
        """Return a client that sends a tenant's key."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def ask(self, tenant: str, path: str, body: object = None, method: str = "POST"):
        """Send one request as a tenant, and return the response."""
        with self.client(tenant) as client:
            return client.request(method, path, json=body)

    def complete(self, tenant: str, prompt, max_tokens: int = 1, **body) -> dict:
        """Continue a prompt, and return the answer."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **body}
        answer = self.ask(tenant, "/v1/completions", {"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def num_cached(self, tenant: str, prompt, **body) -> int:
        """Continue a prompt, and return how many of its tokens were cached."""
        usage = self.complete(tenant, prompt, **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def administer(self, path: str, body: object = None, method: str = "POST") -> dict:
        """Send one request as the administrator, and return what it brought."""
        answer = self.ask("ops", path, body, method)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def keyed_server(
    folder: Path,
    tenants: dict[str, dict] | None = None,
    traces: Path | None = None,
    server: dict[str, Any] | None = None,
    model: str = MODEL,
    name: str = MODEL,
    **settings,
) -> Iterator[Keyed]:
    """Serve a model to tenants; ``ops`` administers. Idle when the test is over."""
    path = folder / "keys.json"
    tenants = {"ops": {"administers": True}, "ann": {}, "bob": {}, **(tenants or {})}
    keys = {name: add_key(path, name, **changes) for name, changes in tenants.items()}
    config = ServerConfig(
        model_names=(name,),
        keys_file=str(path),
        traces_folder=traces and str(traces),
        **(server or {}),
    )
    state = open_state(model, {"dtype": "float32", "num_blocks": 512, **settings}, config)
    try:
        with serving(state) as url:
            yield Keyed(state, url, path, keys)
        await_idle(state.llm)
    finally:
        state.llm.shutdown()
