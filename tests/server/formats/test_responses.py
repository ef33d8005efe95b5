"""``/v1/responses``, as the official client sees it."""

import json
from typing import Any

import httpx
import openai
import pytest

from ostinato.server.response_store import ResponseStore, StoredResponse
from ostinato.server.state import ServerState
from tests.server.formats.conftest import CITIES, says
from tests.server.formats.conftest import WEATHER_CALL as CALL

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather.",
    "parameters": CITIES,
}


def ask(client: openai.OpenAI, asked: Any = "How is the weather in Paris?", **settings: Any) -> Any:
    settings = {"model": "scribe", "max_output_tokens": 200, **settings}
    return client.responses.create(input=asked, **settings)


def test_a_response_has_the_familiar_shape(client: openai.OpenAI):
    response = ask(
        client, instructions="Be kind.", metadata={"a": "b"}, extra_body=says("Very well.")
    )

    assert response.id.startswith("resp_") and response.object == "response"
    assert (response.status, response.error, response.output_text) == (
        "completed",
        None,
        "Very well.",
    )
    [item] = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_cut_response_is_incomplete(client: openai.OpenAI):
    response = ask(client, max_output_tokens=3, extra_body=says("Very well, sir."))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_events_come_in_order_and_add_up(client: openai.OpenAI):
    stream = ask(client, tools=[WEATHER], stream=True, extra_body=says(f"I look.\n{CALL}"))
    events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    brief = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]

    assert brief == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == "I look."
    assert final.output[1].arguments == '{"city": "Oslo"}' and final.output[1].status == "completed"


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI):
    with client.responses.stream(
        model="scribe",
        input="How is the weather?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()

    [call] = final.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Paris", "Oslo")


def test_the_helper_survives_a_stream_that_is_cut_off(client: openai.OpenAI):
    with client.responses.stream(
        model="scribe", input="Well?", max_output_tokens=3, extra_body=says("Very well, sir.")
    ) as stream:
        last = list(stream)[-1]

    assert last.type == "response.incomplete"
    final = last.response
    assert final.incomplete_details is not None
    assert "Very well, sir.".startswith(final.output_text)


def test_log_probabilities_are_included_on_request(client: openai.OpenAI):
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    part = ask(client, **asked, max_output_tokens=4).output[0].content[0]
    assert len(part.logprobs) == 4 and len(part.logprobs[0].top_logprobs) == 2
    done = [e for e in ask(client, **asked, max_output_tokens=4, stream=True)
            if e.type == "response.output_text.done"]  # fmt: skip
    assert [entry.logprob for entry in done[0].logprobs] == [e.logprob for e in part.logprobs]
    with pytest.raises(openai.BadRequestError, match="give both"):
        ask(client, top_logprobs=2)


def test_what_was_asked_can_be_listed(client: openai.OpenAI):
    """Newest first, page by page; there is nothing to cancel."""
    said = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    response = ask(client, asked=said, extra_body=says("Well."))
    listed = list(client.responses.input_items.list(response.id, limit=2))
    assert [item.content[0].text for item in listed] == ["three", "two", "one"]
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(response.id)
    for call in (client.responses.input_items.list, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call("resp_x")


def test_a_schema_is_kept(client: openai.OpenAI):
    wanted = {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"], "strict": True}
    response = ask(client, text={"format": wanted})
    assert json.loads(response.output_text)["city"] in ("Paris", "Oslo")
    assert response.text.format.name == "w"


def test_calls_and_results_go_round_by_hand(client: openai.OpenAI):
    """The client sends everything along, in the items that it was given."""
    first = ask(client, tools=[WEATHER], store=False, extra_body=says(f"I look.\n{CALL}"))
    call = first.output[1]
    asked = [
        {"role": "user", "content": "How is the weather in Paris?"},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."},
    ]
    second = ask(client, asked, tools=[WEATHER], max_output_tokens=3)
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * first.usage.input_tokens


def test_calls_and_results_go_round_by_name(client: openai.OpenAI):
    """The server remembers; the prompt is the same as if all had been sent along."""
    first = ask(client, tools=[WEATHER], extra_body=says(CALL))
    call = first.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
    second = ask(
        client,
        [result],
        tools=[WEATHER],
        previous_response_id=first.id,
        extra_body=says("It snows."),
    )
    third = ask(client, "And now?", tools=[WEATHER], previous_response_id=second.id)
    by_hand = ask(
        client,
        [
            {"role": "user", "content": "How is the weather in Paris?"},
            call,
            result,
            {"role": "assistant", "content": "It snows."},
            {"role": "user", "content": "And now?"},
        ],
        tools=[WEATHER],
    )
    assert second.previous_response_id == first.id
    assert by_hand.usage.input_tokens == third.usage.input_tokens
    assert by_hand.usage.input_tokens_details.cached_tokens >= third.usage.input_tokens - 1


def test_responses_can_be_read_and_deleted(client: openai.OpenAI):
    response = ask(client, extra_body=says("Well."))
    assert client.responses.retrieve(response.id).output_text == "Well."

    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="response not found"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as refusal:
        ask(client, previous_response_id=response.id)
    assert refusal.value.param == "previous_response_id"


@pytest.mark.parametrize(
    "settings", [{"store": False}, {"extra_body": {"cache": {"write": False}}}]
)
def test_what_is_not_to_be_stored_is_not(
    client: openai.OpenAI, scribe: tuple[str, ServerState], settings: Any
):
    before = len(scribe[1].responses)
    response = ask(client, **{**settings, "max_output_tokens": 2})
    assert response.store is False and len(scribe[1].responses) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tools offers nothing"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"temperature": 9e99, "max_output_tokens": 0}, "max_output_tokens"),
        ({"asked": []}, "input is empty"),
        ({"asked": [{"type": "reasoning", "id": "r", "summary": []}]}, "has only reasoning"),
        ({"store": True, "extra_body": {"cache": {"write": False}}}, "store=true"),
    ],
)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, settings, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, **settings)


def test_erasing_a_salt_erases_its_responses(client: openai.OpenAI, url: str):
    """What was cached under another salt stays."""
    gone = ask(client, extra_body=says("One.", cache_salt="x"))
    stays = ask(client, extra_body=says("Two.", cache_salt="y"))

    receipt = httpx.post(f"{url}/admin/erase", json={"cache_salt": "x"}).json()

    assert receipt["num_responses"] == 1 and receipt["num_blocks"] > 0
    assert client.responses.retrieve(stays.id).output_text == "Two."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


def stored(name: str, salt: str, text: str = "", tools: str = "") -> StoredResponse:
    return StoredResponse(salt, {"id": name, "tools": tools}, ({"content": text},), ({"id": name},))


def test_the_store_is_bounded_and_apart_for_each_tenant():
    """The oldest of a tenant go first, and those of the largest tenant when memory is short."""
    store = ResponseStore(max_per_tenant=2, max_bytes=1750)
    for number in range(3):
        store.put("a", stored(f"r{number}", "a", "x" * 100))
    store.put("b", stored("r0", "b\x1fnarrow"))

    assert [store.get("a", f"r{number}") is not None for number in range(3)] == [False, True, True]
    assert store.get("b", "r0") == stored("r0", "b\x1fnarrow") and store.get("b", "r1") is None
    assert not store.delete("b", "r2") and store.delete("a", "r1")
    store.put("b", stored("long", "b\x1fnarrow", "x" * 1500))
    assert store.get("a", "r2") is not None and store.get("b", "r0") is None
    assert (store.erase("b"), store.erase("a")) == (1, 1)
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_tenant_that_stores_much_evicts_its_own_responses():
    """Nine requests with different tools of 7.5 MB; another tenant's conversation stays."""
    store = ResponseStore()
    store.put("bob", stored("mine", "bob", "To be"))
    for number in range(9):
        store.put("ann", stored(f"r{number}", "ann", tools=f"{number}" * 7_500_000))
    assert store.get("bob", "mine") is not None
    assert store.get("ann", "r0") is None and store.get("ann", "r8") is not None


def test_tools_and_messages_of_several_responses_are_stored_once():
    """A tool list of 100 kB in each turn, and the first turn's text in all later ones."""
    store, tools = ResponseStore(), "t" * 100_000
    messages: list[dict[str, str]] = []
    for number in range(10):
        messages.append({"content": f"{number}" * 10_000})
        body = {"id": f"r{number}", "tools": tools}
        store.put("ann", StoredResponse("ann", body, tuple(messages), ()))
    assert 200_000 < store.num_bytes < 210_000
    last = store.get("ann", "r9")
    assert last is not None and last.messages == tuple(messages) and last.body["tools"] == tools
    for number in range(10):
        store.delete("ann", f"r{number}")
    assert store.num_bytes == 0
