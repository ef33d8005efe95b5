"""Clients written for vLLM's server find the fields and routes that they expect."""

import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ostinato import AsyncLLM
from ostinato.server.config import ServerConfig
from ostinato.server.state import ServerState
from tests.server.keyed import keyed_server
from tests.support.servers.servers import events_of, serving

MODEL = "tiny-shakespeare"
TEXT = {"model": MODEL, "prompt": "To be", "max_tokens": 6, "temperature": 0}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Who's there?"}],
    "max_tokens": 6,
    "temperature": 0,
}
ROUTES = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        return [json.loads(data) for data in events_of(response) if data != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_chunk_counts_the_tokens_so_far(http: httpx.Client, path: str, body: dict[str, Any]):
    """What guidellm reads: ``stream_options.continuous_usage_stats``."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(http, path, {**body, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[0] >= 1 and counts[-1] == 6


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_has_a_chunk_for_as_many_tokens_as_it_asks_for(http: httpx.Client, path, body):
    """Of six tokens, with five for a chunk, the first comes alone and the others together.

    A reader that is late, on a busy machine, finds all of them at once.
    """
    asked = {**body, "return_token_ids": True, "stream_interval": 5}
    choices = [chunk["choices"][0] for chunk in chunks(http, path, asked)]
    lengths = [len(choice["token_ids"]) for choice in choices if choice.get("token_ids")]
    assert lengths in ([1, 5], [6])
    refused = http.post(path, json={**asked, "stream_interval": 0})
    assert refused.status_code == 400 and "stream_interval" in refused.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_token_ids_come_along(http: httpx.Client, path: str, body: dict[str, Any]):
    """Whole, they are those of the stream put together."""
    asked = {**body, "return_token_ids": True}
    whole = http.post(path, json=asked).json()
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == 6
    streamed = [i for c in chunks(http, path, asked) for i in c["choices"][0].get("token_ids", [])]
    assert streamed == ids
    prompt = {**whole, **whole["choices"][0]}["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_log_probabilities_of_the_prompt(http: httpx.Client, path: str, body: dict[str, Any]):
    answer = http.post(path, json={**body, "prompt_logprobs": 1}).json()
    positions = {**answer, **answer["choices"][0]}["prompt_logprobs"]
    assert positions[0] is None
    assert len(positions) == answer["usage"]["prompt_tokens"]
    assert {"logprob", "rank", "decoded_token"} == set(next(iter(positions[1].values())))
    refused = http.post(path, json={**body, "prompt_logprobs": 1, "stream": True})
    assert refused.status_code == 400


def test_forms_may_have_their_old_names(http: httpx.Client):
    asked = {**TEXT, "guided_choice": ["Ay, my lord", "Nay, sir"], "max_tokens": 20}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] in (
        "Ay, my lord",
        "Nay, sir",
    )
    asked = {**TEXT, "guided_regex": "x", "structured_outputs": {"regex": "y"}}
    error = http.post("/v1/completions", json=asked).json()["error"]
    assert "guided_regex" in error["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_words_and_tokens_can_be_left_out(http: httpx.Client, path: str, body: dict[str, Any]):
    """Each letter of the plain answer is forbidden, then another one alone is allowed."""
    asked = {**body, "return_token_ids": True}
    plain = http.post(path, json=asked).json()["choices"][0]["token_ids"]
    letters = [http.post("/detokenize", json={"tokens": [i]}).json()["prompt"] for i in plain]
    words = [letter for letter in set(letters) if letter.strip()]
    other = http.post(path, json={**asked, "bad_words": words}).json()["choices"][0]["token_ids"]
    forbidden = {i for i, letter in zip(plain, letters, strict=True) if letter.strip()}
    assert not forbidden & set(other)
    only = http.post(path, json={**asked, "allowed_token_ids": plain[:1]}).json()
    assert set(only["choices"][0]["token_ids"]) == set(plain[:1])


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_defaults_that_clients_spell_out_are_taken(http: httpx.Client, path, body):
    """They ask for what is done anyway, or for a record."""
    spelt = {"best_of": 1, "metadata": {"run": "7"}, "safety_identifier": "ann", "user": "bob"}
    assert http.post(path, json={**body, **spelt}).status_code == 200
    error = http.post(path, json={**body, "best_of": 2}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "best_of")


def test_the_chat_template_reads_variables(http: httpx.Client):
    """Unknown ones change nothing; arguments of its application are refused."""
    plain = http.post("/v1/chat/completions", json=CHAT).json()
    asked = {**CHAT, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    told = http.post("/v1/chat/completions", json=asked).json()
    assert told["choices"][0]["message"] == plain["choices"][0]["message"]
    asked = {**CHAT, "chat_template_kwargs": {"tokenize": False}}
    error = http.post("/v1/chat/completions", json=asked).json()["error"]
    assert "'tokenize' is not a variable" in error["message"]


def test_the_last_message_is_continued_on_request(http: httpx.Client):
    """Its turn is left open: a prompt of fewer tokens than with a new turn."""
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Nay, answer"}]
    both = {**CHAT, "messages": begun, "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=both).status_code == 400
    asked = {**both, "add_generation_prompt": False, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=asked).json()
    text = http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert text.endswith("Nay, answer")


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_long_prompt_is_cut_on_request(http: httpx.Client, path: str, body: dict[str, Any]):
    """Its last tokens stay, of a text and of a conversation; 0 leaves no prompt."""
    asked = {**body, "return_token_ids": True}
    whole, cut = (
        http.post(path, json={**asked, **more}).json()
        for more in ({}, {"truncate_prompt_tokens": 3})
    )
    ids = [{**answer, **answer["choices"][0]}["prompt_token_ids"] for answer in (whole, cut)]
    assert ids[1] == ids[0][-3:] and cut["usage"]["prompt_tokens"] == 3
    refused = http.post(path, json={**asked, "truncate_prompt_tokens": 0})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


def test_the_end_of_a_text_that_no_model_holds_is_found_cheaply(
    http: httpx.Client, state: ServerState, monkeypatch: pytest.MonkeyPatch
):
    """Two megabytes, of which a few thousand letters are tokenized."""
    tokenizer = state.llm.engine.loaded.require_tokenizer()
    lengths: list[int] = []
    encode = type(tokenizer).__call__

    def counted(self: Any, text: Any, *args: Any, **settings: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, *args, **settings)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    asked = {**TEXT, "prompt": "To be " * 350_000, "truncate_prompt_tokens": 8}
    answer = http.post("/v1/completions", json={**asked, "return_token_ids": True}).json()
    assert (
        http.post("/detokenize", json={"tokens": answer["choices"][0]["prompt_token_ids"]}).json()[
            "prompt"
        ]
        == "e To be "
    )
    assert sum(lengths) < 100_000


def test_tokens_of_texts_and_conversations(http: httpx.Client, state: ServerState):
    """As the routes of answers compute them, with vLLM's options."""
    text = http.post("/tokenize", json={"prompt": "To be", "return_token_strs": True}).json()
    assert text["token_strs"] == list("To be") and text["count"] == 5
    assert text["max_model_len"] == state.llm.max_model_len
    assert http.post("/detokenize", json={"tokens": text["tokens"]}).json() == {"prompt": "To be"}
    assert http.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert http.post("/tokenize", json={}).json()["error"]["code"] == "invalid_value"
    plain = http.post("/tokenize", json={"prompt": "To be", "add_special_tokens": False}).json()
    assert plain["tokens"] == text["tokens"][-5:] and plain["token_strs"] is None
    said = {"messages": CHAT["messages"]}
    chat = http.post("/tokenize", json=said).json()["count"]
    answer = http.post("/v1/chat/completions", json=CHAT).json()
    assert chat == answer["usage"]["prompt_tokens"]
    tool = {"type": "function", "function": {"name": "look"}}
    for more, is_longer in (
        ({"add_generation_prompt": False}, False),
        ({"tools": [tool]}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
    ):
        count = http.post("/tokenize", json={**said, **more}).json()["count"]
        assert count == chat if is_longer is None else (count > chat) == is_longer
    refused = http.post("/tokenize", json={**said, "add_special_tokens": True})
    assert "for texts" in refused.json()["error"]["message"]


def test_the_page_of_the_api_loads_nothing(http: httpx.Client):
    page = http.get("/docs")
    assert "POST /v1/chat/completions" in page.text and "continue_final_message" in page.text
    assert "<script" not in page.text and "//" not in page.text.replace("<!doctype", "")


def test_small_routes_answer_as_vllms_do(http: httpx.Client):
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/server_info").json()["engine_config"]["block_size"] == 16
    assert http.post("/reset_prefix_cache").status_code == 200


def test_load_and_settings_are_for_administrators(tmp_path: Path):
    with keyed_server(tmp_path) as server:
        for path, method in (("/load", "GET"), ("/server_info", "GET")):
            assert server.ask("ann", path, method=method).status_code == 403
            assert server.ask("ops", path, method=method).status_code == 200
        assert server.ask("ann", "/reset_prefix_cache").status_code == 403
        salt = server.state.callers.named("ann").salt
        assert salt not in server.ask("ops", "/server_info", method="GET").text


def test_pages_of_allowed_origins_may_call(state: ServerState):
    """Without keys too, and no others."""
    config = ServerConfig(model_names=(MODEL,), allowed_origins=("https://app.example",))
    with serving(ServerState(state.llm, config)) as url:
        for origin, status in (("https://app.example", 200), ("https://evil.example", 403)):
            answer = httpx.post(f"{url}/v1/completions", json=TEXT, headers={"Origin": origin})
            assert answer.status_code == status
            allowed = answer.headers.get("access-control-allow-origin")
            assert (allowed == origin) == (status == 200)


def test_tls_with_a_key_and_a_certificate(tmp_path: Path):
    """The official client speaks to it when it trusts the certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate}"
    subprocess.run(
        ["openssl", *command.split(), "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    llm = AsyncLLM(MODEL, num_blocks=64)
    config = ServerConfig(
        model_names=(MODEL,), tls_key_file=str(key), tls_certificate_file=str(certificate)
    )
    context = ssl.create_default_context(cafile=str(certificate))
    try:
        with serving(ServerState(llm, config)) as url:
            assert url.startswith("https://")
            with openai.OpenAI(
                base_url=f"{url}/v1", api_key="none", http_client=httpx.Client(verify=context)
            ) as client:
                assert client.completions.create(**TEXT).choices[0].text
    finally:
        llm.shutdown()
