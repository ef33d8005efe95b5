"""No tenant learns from the cache what another tenant sent.

The same attacker runs against a server with keys, and against one whose tenants all have the same
salt: there it recovers the secret, so the tests above it are known to be able to fail.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ostinato.core.identity import Identity, ImageSpan
from ostinato.runner.model_loader import load_model
from ostinato.server.access.callers import KeyedCallers
from ostinato.server.access.keys import KeysFile
from tests.engine.scoring.conftest import MakeHeaded, headed
from tests.server.keyed import Keyed, keyed_server
from tests.support.cache.cache_views import prefix_key
from tests.support.cache.tiny_cache import tiny_cache
from tests.support.servers.prefix_probe import ENDPOINTS, JUDGE, MODEL, Endpoint, Send, recover

__all__ = ["headed"]

KNOWN = "The safe behind the painting opens with the word "
WORD = "owl"
LETTERS = "abelnorstw"
SECRET = KNOWN + WORD + ", my dear, and tell it to no one."

Serve = Callable[[str], Keyed]

AT_EVERY_ENDPOINT = pytest.mark.parametrize(
    ("keyed", "path"), [(each.model, path) for path, each in ENDPOINTS.items()], indirect=["keyed"]
)


def endpoints_of(model: str) -> dict[str, Endpoint]:
    """Return the endpoints of a model, by path."""
    return {path: each for path, each in ENDPOINTS.items() if each.model == model}


CHAT_ENDPOINTS = endpoints_of(MODEL)


@pytest.fixture(scope="module")
def judge(headed: MakeHeaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with one class whose tokens are letters."""
    letters = load_model(MODEL).require_tokenizer()
    path = tmp_path_factory.mktemp("judge") / "model"
    changes = {"vocab_size": len(letters), "max_position_embeddings": 1024}
    shutil.copytree(headed("qwen3", 1, **changes), path)
    letters.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def serve(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Serve a model to a victim and an attacker, who may both begin with what is public."""
    public, paths = {"public": ["*"]}, {JUDGE: str(judge)}
    with ExitStack() as servers:

        @cache
        def served(name: str) -> Keyed:
            folder, tenants = (
                tmp_path_factory.mktemp("keys"),
                {"victim": public, "attacker": public},
            )
            model = paths.get(name, name)
            return servers.enter_context(keyed_server(folder, tenants, model=model, name=name))

        yield served


@pytest.fixture
def keyed(serve: Serve, request: pytest.FixtureRequest) -> Iterator[Keyed]:
    """Lend a server with a cold cache; the bundled model's, unless a test names another."""
    shared = serve(getattr(request, "param", MODEL))
    shared.administer("/admin/reset", {})
    yield shared
    for known in shared.administer("/admin/public", method="GET")["public"]:
        shared.administer(f"/admin/public/{known['name']}/unpublish", {})


@pytest.fixture
def open_house(keyed: Keyed, monkeypatch: pytest.MonkeyPatch) -> Keyed:
    """The same server with isolation switched off: every tenant has the same salt."""
    monkeypatch.setattr(KeysFile, "salt_of", lambda self, tenant: "")
    return keyed


def sender(keyed: Keyed, tenant: str) -> Send:
    """Return a tenant's access."""

    def send(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = keyed.ask(tenant, path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


def num_computed(keyed: Keyed) -> int:
    """Prompt tokens that went through the model since the start."""
    return keyed.state.llm.engine.scheduler_stats.computed_prompt_tokens


def looks_empty(keyed: Keyed, endpoint: Endpoint, text: str) -> bool:
    """Whether nothing of a text is cached for the attacker: by what it is told, and by its cost."""
    before = num_computed(keyed)
    answer = endpoint.ask(sender(keyed, "attacker"), text, **endpoint.writes_not)
    computed = num_computed(keyed) - before
    return endpoint.cached(answer) == 0 and computed == endpoint.total(answer)


# --- with isolation --------------------------------------------------------------------------


@AT_EVERY_ENDPOINT
def test_the_victim_s_exact_prompt_costs_the_attacker_what_it_costs_on_an_empty_cache(
    keyed: Keyed, path: str
):
    """Prompt, answer and the partial last block, whichever way the victim sent them.

    Every route probes for the secret, and each for another of its parts: all pairs are tried of
    the victim's route, the attacker's route and the text.
    """
    endpoint, victim = ENDPOINTS[path], sender(keyed, "victim")
    answer = endpoint.ask(victim, SECRET, max_tokens=24)
    whole = SECRET + endpoint.text(answer)
    num_cached = endpoint.total(answer) - endpoint.num_recomputed
    assert endpoint.probe(victim, SECRET) == num_cached, "it is cached"
    texts = (SECRET, whole, whole + "?", SECRET[:-1], KNOWN)
    for place, probe in enumerate(
        endpoints_of(endpoint.model).values(), list(ENDPOINTS).index(path)
    ):
        for text in {SECRET, texts[place % len(texts)]}:
            assert looks_empty(keyed, probe, text), (probe.path, text)
    assert endpoint.probe(victim, SECRET) == num_cached, "and still is"


@pytest.mark.one_case_in(3)
@AT_EVERY_ENDPOINT
def test_the_attacker_recovers_nothing(keyed: Keyed, path: str):
    endpoint = ENDPOINTS[path]
    endpoint.ask(sender(keyed, "victim"), SECRET)
    assert recover(sender(keyed, "attacker"), endpoint, KNOWN, LETTERS, len(WORD)) == ""


COUNTED = {
    "/tokenize": lambda text: {"prompt": text},
    "/v1/messages/count_tokens": lambda text: {
        "model": MODEL, "messages": [{"role": "user", "content": text}],
    },
}  # fmt: skip
"""Routes that tokenize a text and compute nothing, with the body that sends it."""


def num_tokenized(keyed: Keyed, path: str, text: str) -> int:
    """Have a text of the attacker tokenized; returns how many bytes went through the tokenizer."""
    texts, send = keyed.state.llm.engine.texts, sender(keyed, "attacker")
    assert texts is not None
    before = texts.num_tokenized_bytes
    if path in COUNTED:
        send(path, COUNTED[path](text))
    else:
        ENDPOINTS[path].ask(send, text, **ENDPOINTS[path].writes_not)
    return texts.num_tokenized_bytes - before


def all_tokenized(keyed: Keyed, text: str) -> dict[str, int]:
    """Have a text of the attacker tokenized on every route; returns how many bytes each took."""
    return {path: num_tokenized(keyed, path, text) for path in (*CHAT_ENDPOINTS, *COUNTED)}


def test_the_victim_s_exact_text_is_tokenized_anew_for_the_attacker(keyed: Keyed):
    """A text that is known with its tokens takes less time, so one tenant's is not another's."""
    text = SECRET + "<eos>" + SECRET
    alone = all_tokenized(keyed, text)
    for sent in CHAT_ENDPOINTS.values():
        sent.ask(sender(keyed, "victim"), text)
    assert all_tokenized(keyed, text) == alone


def test_without_salts_a_text_that_the_victim_sent_is_not_tokenized_again(open_house: Keyed):
    """So the test above can fail."""
    text = SECRET + "<eos>" + SECRET
    alone = all_tokenized(open_house, text)
    for sent in CHAT_ENDPOINTS.values():
        sent.ask(sender(open_house, "victim"), text)
    again = all_tokenized(open_house, text)
    scoring = {"/v1/embeddings", "/v1/choose"}  # their texts are tokenized anew, known or not
    assert all(again[path] < alone[path] for path in alone if path not in scoring)


def test_behind_a_public_prefix_only_the_prefix_is_found(keyed: Keyed):
    """The head was published for both; whether the victim ever used it does not show."""
    endpoint = ENDPOINTS["/v1/completions"]
    manual = "This is the manual of the safe. Read it with care before you turn the dial. "
    attacker, victim = sender(keyed, "attacker"), sender(keyed, "victim")
    head = keyed.administer("/admin/public/manual", {"prompt": manual}, method="PUT")["num_tokens"]
    before = endpoint.probe(attacker, manual + SECRET)
    endpoint.ask(victim, manual + SECRET, max_tokens=24)
    assert endpoint.probe(victim, manual + SECRET) == len(manual + SECRET) - 1
    assert endpoint.probe(attacker, manual + SECRET) == before == head
    assert recover(attacker, endpoint, manual + KNOWN, LETTERS, len(WORD)) == ""


def test_what_the_victim_leased_or_narrowed_is_no_more_to_be_found(keyed: Keyed):
    endpoint, victim = ENDPOINTS["/v1/completions"], sender(keyed, "victim")
    endpoint.ask(victim, SECRET, prompt_cache_retention="24h")
    endpoint.ask(victim, SECRET, cache_salt="vault")
    assert looks_empty(keyed, endpoint, SECRET)
    narrowed = endpoint.ask(
        sender(keyed, "attacker"), SECRET, cache_salt="vault", cache={"write": False}
    )
    assert endpoint.cached(narrowed) == 0
    for lease in keyed.administer("/admin/leases", method="GET")["leases"]:
        keyed.administer(f"/admin/leases/{lease['lease_id']}", method="DELETE")


def test_an_explanation_tells_of_no_other_tenant(keyed: Keyed):
    """Why a probe missed is said in the same words, whether or not the victim sent it before."""
    endpoint, attacker = ENDPOINTS["/v1/completions"], sender(keyed, "attacker")

    def explained() -> dict[str, Any]:
        name = endpoint.ask(attacker, SECRET, cache={"write": False})["id"]
        answer = keyed.ask("attacker", f"/v1/explain/{name}", method="GET").json()
        return {key: value for key, value in answer.items() if key not in ("id", "request")}

    before = explained()
    theirs = endpoint.ask(sender(keyed, "victim"), SECRET)["id"]
    after = explained()
    assert str(after).count("cmpl-") == str(before).count("cmpl-")
    assert after["num_cached_tokens"] == before["num_cached_tokens"] == 0
    assert [s["reason"] for s in after["spans"]] == [s["reason"] for s in before["spans"]]
    assert keyed.ask("attacker", f"/v1/explain/{theirs}", method="GET").status_code == 404
    assert keyed.ask("victim", f"/v1/explain/{theirs}", method="GET").status_code == 200


def test_other_endpoints_say_the_same_before_and_after(keyed: Keyed):
    """Endpoints that compute no prompt: their responses do not depend on the cache."""
    asked: dict[str, dict] = {
        "/tokenize": {"prompt": SECRET},
        "/detokenize": {"tokens": [1, 2, 3]},
        "/v1/messages/count_tokens": ENDPOINTS["/v1/messages"].body(SECRET),
        "/v1/responses/input_tokens": {"model": MODEL, "input": SECRET},
    }
    attacker = sender(keyed, "attacker")
    before = {path: attacker(path, body) for path, body in asked.items()}
    ENDPOINTS["/v1/completions"].ask(sender(keyed, "victim"), SECRET, max_tokens=24)
    assert {path: attacker(path, body) for path, body in asked.items()} == before


def test_no_endpoint_was_forgotten(keyed: Keyed):
    """A route that takes a body is probed above, or known to compute nothing, or administers."""
    described = keyed.ask("ops", "/openapi.json", method="GET").json()["paths"]
    posts = {path for path, methods in described.items() if "post" in methods or "put" in methods}
    harmless = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    harmless |= {"/v1/responses/{response_id}/cancel", "/v1/responses/input_tokens"}
    administers = {path for path in posts if path.startswith("/admin/")} | {"/reset_prefix_cache"}
    administers |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    left = posts - administers - harmless
    assert left <= set(ENDPOINTS), f"not probed: {left - set(ENDPOINTS)}"


# --- with isolation switched off -------------------------------------------------------------


@pytest.mark.one_case_in(3)
@AT_EVERY_ENDPOINT
def test_without_salts_the_same_attacker_recovers_the_secret(open_house: Keyed, path: str):
    """So the tests above can fail."""
    assert isinstance(open_house.state.callers, KeyedCallers)
    endpoint = ENDPOINTS[path]
    endpoint.ask(sender(open_house, "victim"), SECRET)
    attacker = sender(open_house, "attacker")
    assert recover(attacker, endpoint, KNOWN, LETTERS, len(WORD)) == WORD
    assert not looks_empty(open_house, endpoint, SECRET)


# --- kinds of entries that no endpoint makes -------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"images": [ImageSpan(b"a face", 2, 3)]},
        {"adapter": b"fine-tuned"},
        {"base": Identity(tenant=b"\xffmanual"), "start": 8},
    ],
    ids=["text", "image", "adapter", "behind a public prefix"],
)
def test_no_kind_of_entry_is_found_under_another_salt(index: str, how: dict):
    """Whole blocks, a sealed tail and what is being computed right now (single flight)."""
    cache = tiny_cache(24, index=index)
    images = how.get("images", ())
    identity = {name: value for name, value in how.items() if name != "images"}
    num_public = 0
    if "base" in identity:
        num_public = 8
        cache.serve("ABCDEFGH", tenant=b"\xffmanual")
        cache.prefix_cache.admin.publish(prefix_key("ABCDEFGH", tenant=b"\xffmanual"))
    text = "ABCDEFGHIJKLMNOPQR"
    cache.serve(text, tenant=b"victim", images=images, **identity)
    cache.admit("running", text + "STUVWXYZ", tenant=b"victim", images=images, **identity)
    for length in range(1, len(text) + 8):
        probe = (text + "STUVWXYZ")[:length]
        if (images and length < 5) or ("base" in identity and length <= 8):
            continue
        found = cache.match(probe, images, tenant=b"attacker", **identity).num_tokens
        assert found == num_public, probe
    assert cache.match(text + "S", images, tenant=b"victim", **identity).num_tokens == len(text)
    cache.finish("running")
