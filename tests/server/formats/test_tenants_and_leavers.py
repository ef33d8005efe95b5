"""Keys, tenants and disconnects, in the APIs of OpenAI and Anthropic."""

from typing import Any

import anthropic
import httpx
import openai
import pytest

from ostinato.server.state import ServerState
from tests.server.keyed import MODEL, Keyed, keyed_server
from tests.support.servers.prefix_probe import ENDPOINTS

LINE = "Shall I compare thee to a summer's day? "


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory):
    """Serve the embedded model to two tenants."""
    with keyed_server(tmp_path_factory.mktemp("keys")) as server:
        yield server


def openai_of(keyed: Keyed, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=keyed.keys[tenant], max_retries=0)


def claude_of(keyed: Keyed, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=keyed.url, api_key=key, max_retries=0)


def test_a_remembered_response_is_its_tenants_own(keyed: Keyed):
    """Another tenant can neither read nor continue nor delete it, and learns nothing of it."""
    asked: Any = {"model": MODEL, "input": LINE, "max_output_tokens": 4}
    with openai_of(keyed, "ann") as ann, openai_of(keyed, "bob") as bob:
        response = ann.responses.create(**asked)
        messages = []
        for name in (response.id, "resp_of_nobody"):
            for attempt in (
                lambda name=name: bob.responses.retrieve(name),
                lambda name=name: bob.responses.delete(name),
                lambda name=name: bob.responses.create(**asked, previous_response_id=name),
            ):
                with pytest.raises(openai.NotFoundError) as refusal:
                    attempt()
                messages.append(str(refusal.value).replace(name, "NAME"))
        assert messages[:3] == messages[3:], "a name of another's looks like no name at all"
        assert ann.responses.retrieve(response.id).id == response.id


def test_erasing_a_tenant_erases_what_is_remembered_of_it(keyed: Keyed):
    asked: Any = {"model": MODEL, "input": LINE, "max_output_tokens": 4}
    with openai_of(keyed, "ann") as ann, openai_of(keyed, "bob") as bob:
        gone, stays = ann.responses.create(**asked), bob.responses.create(**asked)
        narrow = ann.responses.create(**asked, extra_body={"cache_salt": "x"})
        receipt = keyed.administer("/admin/erase", {"tenant": "ann"})

        assert receipt["num_responses"] >= 2
        for name in (gone.id, narrow.id):
            with pytest.raises(openai.NotFoundError):
                ann.responses.retrieve(name)
        assert bob.responses.retrieve(stays.id).id == stays.id


def test_a_call_without_a_key_is_told_so_in_anthropics_shape(keyed: Keyed):
    with claude_of(keyed, "sk-guess") as claude, pytest.raises(anthropic.AuthenticationError) as no:
        claude.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "?"}]
        )
    body: Any = no.value.body
    assert body["error"]["type"] == "authentication_error"


def test_the_embedded_model_cannot_be_made_to_call(keyed: Keyed):
    """It has no braces; a call that insists is refused, and nothing of it runs."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with openai_of(keyed, "ann") as client, pytest.raises(openai.BadRequestError, match="begin it"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Well?"}],
            tools=[tool],
            tool_choice="required",
        )


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {}),
        ("/v1/responses", {}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
)
def test_a_reader_that_goes_away_frees_everything(
    url: str, scribe: tuple[str, ServerState], path: str, more: dict[str, Any]
):
    """In the middle of a stream; the fixture asserts that nothing runs afterwards."""
    body = {
        **ENDPOINTS[path].body("Well?"),
        ENDPOINTS[path].limit: 3000,
        "model": "scribe",
        "stream": True,
        "structured_outputs": {"regex": "[ab]{3000}"},
        **more,
    }
    remembered = len(scribe[1].responses)
    with httpx.stream("POST", url + path, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
    assert len(scribe[1].responses) == remembered
