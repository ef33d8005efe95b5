"""Keys at the door, and what each tenant may do behind it."""

import json

import httpx
import pytest

from ostinato.core.errors import ConfigError
from ostinato.server.access.callers import Caller, Limits
from ostinato.server.access.keys import add_key
from ostinato.server.access.rate_limit import RateLimit
from ostinato.server.errors import ApiError
from tests.server.keyed import MODEL, Keyed, keyed_server

PROMPT = "Shall I compare thee to a summer's day? Thou art more lovely and more temperate. "


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """Serve tenants, one of them with limits."""
    limits = {"max_requests": 2, "tokens_per_minute": 100}
    with keyed_server(tmp_path_factory.mktemp("keys"), {"small": limits}) as server:
        yield server


def test_a_key_is_taken_from_either_header(keyed: Keyed):
    """As OpenAI's clients send it, and as Anthropic's do."""
    key = keyed.keys["ann"]
    for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{keyed.url}/health").status_code == 200, "health asks for no key"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sk-ostinato-guess"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"x-api-key": "café".encode("latin-1").decode("latin-1")},
    ],
)
def test_a_call_without_a_key_gets_a_401_in_openai_s_shape(keyed: Keyed, headers: dict):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for path, method in (("/v1/completions", "POST"), ("/admin/stats", "GET")):
        answer = httpx.request(method, keyed.url + path, headers=encoded, json={})
        assert answer.status_code == 401, answer.text
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_tenant_may_not_administer(keyed: Keyed):
    for path in ("/admin/stats", "/admin/heaviest", "/admin/leases", "/admin/public"):
        answer = keyed.ask("ann", path, method="GET")
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
    for path in ("/admin/reset", "/admin/erase", "/admin/prewarm", "/admin/keys/reload"):
        assert keyed.ask("ann", path, {"prompt": "x"}).status_code in (400, 403)
    assert keyed.ask("ann", "/admin/reset", {}).status_code == 403


def test_a_tenant_alone_finds_what_it_sent(keyed: Keyed):
    assert keyed.num_cached("ann", PROMPT) == 0
    assert keyed.num_cached("ann", PROMPT) > 0
    assert keyed.num_cached("bob", PROMPT) == 0
    assert keyed.num_cached("ann", PROMPT, cache_salt="team") == 0


def test_a_salt_that_somebody_guessed_opens_nothing(keyed: Keyed):
    """Not even the other's own, with whatever separators."""
    keyed.complete("ann", PROMPT + "My secret is 1234.")
    salt = keyed.state.callers.named("ann").salt
    for guess in (salt, f"\x1f{salt}", f"{salt}\x1f", "ann"):
        assert keyed.num_cached("bob", PROMPT + "My secret is 1234.", cache_salt=guess) == 0


def test_who_used_up_the_tokens_of_a_minute_is_told_when_to_come_again(keyed: Keyed):
    first = keyed.ask("small", "/v1/completions", {"model": MODEL, "prompt": [5] * 160})
    assert first.status_code == 200, "the bucket was full"
    second = keyed.ask("small", "/v1/completions", {"model": MODEL, "prompt": "x"})
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert 30 <= int(second.headers["retry-after"]) <= 60
    assert keyed.ask("ann", "/v1/completions", {"model": MODEL, "prompt": "x"}).status_code == 200


def test_new_keys_count_from_the_next_request_on(keyed: Keyed):
    """And a file that is broken meanwhile leaves the old ones in force."""
    before = keyed.path.read_text()
    key = add_key(keyed.path, "new")
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 401
    assert keyed.administer("/admin/keys/reload")["num_tenants"] == 5
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
    keyed.path.write_text("{")
    assert keyed.ask("ops", "/admin/keys/reload").status_code == 400
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
    quota = json.loads(before)
    quota["tenants"]["ann"]["quota"] = 7
    keyed.path.write_text(json.dumps(quota))
    answer = keyed.ask("ops", "/admin/keys/reload")
    assert answer.status_code == 400 and "restart" in answer.json()["error"]["message"]
    keyed.path.write_text(before)
    keyed.administer("/admin/keys/reload")
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 401


def test_a_quota_of_the_file_is_the_cache_s(tmp_path):
    """Eight blocks of 16: of what a tenant leaves behind, no more stays; salts do not help it."""
    with keyed_server(tmp_path, {"small": {"quota": 8}}) as keyed:
        for number in range(4):
            keyed.complete("small", [number + 3] * 100, cache_salt=str(number))
        assert keyed.state.llm.engine.cache.manager.pool.num_evictable == 8


def test_a_server_with_a_broken_keys_file_does_not_start(tmp_path):
    (tmp_path / "keys.json").write_text("{}")
    with pytest.raises(ConfigError, match="secret"), keyed_server(tmp_path):
        pass


# --- the limit, with a clock of its own -----------------------------------------------------


def limit_at(now: list[float]) -> RateLimit:
    return RateLimit(lambda: now[0])


def test_continuations_under_way_are_counted_and_let_out():
    limit, caller = limit_at([0.0]), Caller("t", "s", limits=Limits(max_requests=2))
    limit.enter(caller, 2)
    with pytest.raises(ApiError, match="2 of 2") as refusal:
        limit.enter(caller, 1)
    assert (refusal.value.status, refusal.value.headers["Retry-After"]) == (429, "1")
    limit.leave(caller, 2)
    limit.enter(caller, 1)
    with pytest.raises(ApiError) as never:
        limit.enter(caller, 3)
    assert never.value.status == 400


def test_a_bucket_in_debt_is_paid_by_the_minute():
    """600 a minute are 10 a second: 605 used tokens are paid back after one second."""
    now = [0.0]
    limit, caller = limit_at(now), Caller("t", "s", limits=Limits(tokens_per_minute=600))
    limit.enter(caller, 1)
    limit.charge(caller, 605)
    with pytest.raises(ApiError) as refusal:
        limit.enter(caller, 1)
    assert refusal.value.headers["Retry-After"] == "1"
    now[0] = 0.4
    with pytest.raises(ApiError):
        limit.enter(caller, 1)
    now[0] = 1.0
    limit.enter(caller, 1)


def test_a_tenant_without_limits_is_not_metered():
    limit, caller = limit_at([0.0]), Caller("t", "s")
    for _ in range(1000):
        limit.enter(caller, 100)
    limit.charge(caller, 10**9)
    limit.enter(caller, 1)
