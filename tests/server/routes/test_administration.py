"""What an operator does over HTTP, on a real server with keys."""

import random
from array import array

import httpx
import pytest

from ostinato.core.tokens import pack_tokens
from ostinato.observe.introspection import cached_blocks
from ostinato.server.telemetry.observer import salt_label
from tests.server.keyed import MODEL, Keyed, keyed_server
from tests.support.servers.memory_search import reachable, search

PROMPT = "O, she doth teach the torches to burn bright! It seems she hangs upon the cheek of night."


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Serve two tenants that may begin with what is public; a third may not."""
    public = {"public": ["*"]}
    folder = tmp_path_factory.mktemp("admin")
    with keyed_server(folder, {"ann": public, "bob": public, "eve": {}}) as server:
        yield server


@pytest.fixture
def keyed(shared: Keyed):
    """Lend the server with a cold cache."""
    for known in shared.administer("/admin/public", method="GET")["public"]:
        shared.administer(f"/admin/public/{known['name']}/unpublish", {})
    shared.administer("/admin/reset", {})
    yield shared
    shared.administer("/admin/reset", {})


def refusal(keyed: Keyed, path: str, body: object = None, method: str = "POST") -> tuple[int, str]:
    """Return status and message of what the administrator is refused."""
    answer = keyed.ask("ops", path, body, method)
    return answer.status_code, answer.json()["error"]["message"]


def num_traces(root: object, tokens: list[int]) -> int:
    """Count the places where a run of tokens lies, packed."""
    run = pack_tokens(tokens).tobytes()
    kinds = (bytes, bytearray, array)
    return sum(isinstance(thing, kinds) and run in bytes(thing) for thing in reachable(root))


def test_a_prewarmed_prompt_is_found_by_its_tenant_alone(keyed: Keyed):
    warmed = keyed.administer("/admin/prewarm", {"prompt": PROMPT, "tenant": "ann"})
    assert warmed["num_computed_tokens"] == warmed["num_tokens"] > 20
    again = keyed.administer("/admin/prewarm", {"prompt": PROMPT, "tenant": "ann"})
    assert again["num_computed_tokens"] == 1
    assert keyed.num_cached("ann", PROMPT) == warmed["num_tokens"] - 1
    assert keyed.num_cached("bob", PROMPT) == 0
    messages = [{"role": "user", "content": "x" * 40}]
    keyed.administer("/admin/prewarm", {"messages": messages, "tenant": "ann"})
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    usage = keyed.ask("ann", "/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_lease_is_accepted_clipped_or_rejected_and_says_why(keyed: Keyed):
    wish = {"prompt": [7] * 64, "tenant": "ann"}
    rejected = keyed.administer("/admin/leases", wish)
    assert rejected["status"] == "rejected" and "send it as a prompt first" in rejected["reason"]
    keyed.complete("ann", [7] * 33)
    clipped = keyed.administer("/admin/leases", {**wish, "ttl_s": 60})
    assert (clipped["status"], clipped["num_tokens"]) == ("clipped", 32)
    assert "only 2 of 4 blocks" in clipped["reason"] and clipped["expires_in_s"] == 60
    accepted = keyed.administer("/admin/leases", {**wish, "prompt": [7] * 32})
    assert accepted["status"] == "accepted" and accepted["expires_in_s"] is None

    listed = keyed.administer("/admin/leases", method="GET")["leases"]
    assert [(one["tenant"], one["num_tokens"]) for one in listed] == [("ann", 32), ("ann", 32)]
    assert 0 < listed[0]["expires_in_s"] <= 60 and listed[1]["expires_in_s"] is None
    for lease in (clipped, accepted):
        assert keyed.administer(f"/admin/leases/{lease['lease_id']}", method="DELETE")["released"]
    status, message = refusal(keyed, f"/admin/leases/{accepted['lease_id']}", method="DELETE")
    assert status == 404 and "no such lease" in message


def test_tenants_share_what_is_public_and_nothing_behind_it(keyed: Keyed):
    head = [11] * 40
    published = keyed.administer("/admin/public/manual", {"prompt": head}, method="PUT")
    assert published == {"name": "manual", "num_tokens": 32}
    tail = list(range(20, 60))
    cached = [keyed.num_cached(who, head + tail) for who in ("ann", "bob", "ann", "eve")]
    assert cached == [32, 32, 79, 0]
    assert keyed.administer("/admin/public", method="GET")["public"] == [
        {"name": "manual", "num_tokens": 32, "is_held": True}
    ]
    rows = keyed.administer("/admin/heaviest", method="GET")["prefixes"]
    assert rows[0]["public"] == "manual" and rows[0]["num_hits"] == 3
    behind = {row["tenant"] for row in rows if row["behind"] == "manual"}
    assert behind == {"ann", "bob"}

    status, message = refusal(keyed, "/admin/public/manual", {"prompt": tail}, "PUT")
    assert status == 400 and "public already" in message
    assert refusal(keyed, "/admin/public/x", {"prompt": head, "tenant": "ann"}, "PUT")[0] == 400
    assert refusal(keyed, "/admin/public/other/unpublish", {})[0] == 400
    gone = keyed.administer("/admin/public/manual/unpublish", {})
    assert gone["num_blocks"] >= 2 + 2 * 2
    assert keyed.num_cached("ann", head + tail) == 0


def test_what_is_too_long_to_be_held_is_not_published(keyed: Keyed):
    status, message = refusal(keyed, "/admin/public/all", {"prompt": [5] * 20000}, "PUT")
    assert status in (400, 409), message
    assert keyed.administer("/admin/public", method="GET")["public"] == []


def test_the_heaviest_prefixes_name_their_beginning_and_owner(keyed: Keyed):
    for _ in range(3):
        keyed.complete("ann", PROMPT)
    keyed.complete("bob", "A plague on both your houses! They have made worms' meat of me.")
    rows = keyed.administer("/admin/heaviest?most=5", method="GET")["prefixes"]
    assert rows[0]["tenant"] == "ann" and PROMPT.startswith(rows[0]["head"][:30])
    assert rows[0]["num_hits"] == 2 and rows[0]["saved_tokens"] == 2 * rows[0]["own_tokens"]
    of_bob = keyed.administer("/admin/heaviest?tenant=bob", method="GET")["prefixes"]
    assert {row["tenant"] for row in of_bob} == {"bob"}
    for salt in (keyed.state.callers.named(name).salt for name in ("ann", "bob")):
        assert salt not in keyed.ask("ops", "/admin/heaviest", method="GET").text
    assert refusal(keyed, "/admin/heaviest?most=0", method="GET")[0] == 400
    assert refusal(keyed, "/admin/heaviest?tenant=nobody", method="GET")[0] == 404


def test_statistics_name_tenants_and_no_salt(keyed: Keyed):
    keyed.complete("ann", PROMPT)
    answer = keyed.ask("ops", "/admin/stats", method="GET")
    stats = answer.json()
    assert stats["tenants"]["ann"]["query_tokens"] > 0
    known = {"ann", "bob", "eve", "ops", "public manual"}
    assert set(stats["tenants"]) <= known, "each by its name, and no salt"
    assert stats["compute_path"]["attention"] in ("native", "torch")
    assert stats["template"]["append_only"] and stats["template"]["summary"] == ""
    assert stats["blocks"]["evictable"] > 0 and stats["num_running"] == 0
    assert keyed.state.callers.named("ann").salt not in answer.text


def test_erasing_a_tenant_leaves_nothing_of_it_in_the_whole_server(keyed: Keyed):
    """Cache, statistics, usage, metrics, limits: neither its salt's blocks nor its tokens."""
    secret = random.Random(5).choices(range(68), k=50)
    keyed.complete("eve", secret, max_tokens=4, user="eve's user")
    keyed.complete("eve", secret, cache_salt="team")
    keyed.administer("/admin/leases", {"prompt": secret[:32], "tenant": "eve"})
    salt = keyed.state.callers.named("eve").salt
    heart = keyed.state.llm.engine.cache
    assert search(heart, salt.encode()).salts and num_traces(heart, secret[:16])

    receipt = keyed.administer("/admin/erase", {"tenant": "eve"})

    assert receipt["num_blocks"] >= 6 and receipt["num_leases"] == 1
    assert receipt["num_zeroed_slots"] > 0 and "tenant_usage" in receipt["noted_by"]
    assert search(heart, salt.encode()).salts == 0
    assert num_traces(keyed.state.llm, secret[:16]) == num_traces(keyed.state, secret[16:32]) == 0
    assert "eve" not in keyed.state.usage.accounts
    assert keyed.num_cached("eve", secret) == 0
    status, _ = refusal(keyed, "/admin/erase", {"tenant": "nobody"})
    assert status == 404


def test_erasing_what_a_client_narrowed_leaves_the_rest_of_the_tenant(keyed: Keyed):
    keyed.complete("ann", [21] * 40)
    keyed.complete("ann", [21] * 40, cache_salt="team")
    keyed.administer("/admin/erase", {"tenant": "ann", "cache_salt": "team"})
    assert keyed.num_cached("ann", [21] * 40) == 39
    assert keyed.num_cached("ann", [21] * 40, cache_salt="team") == 0


def test_what_must_not_be_written_leaves_nothing(keyed: Keyed):
    """``cache: {"write": false}``: not a block, not a token, not a digest in the heart."""
    secret = random.Random(6).choices(range(68), k=48)  # it was never sent before
    keyed.complete("ann", secret, max_tokens=3, cache={"write": False})
    heart = keyed.state.llm.engine.cache
    assert list(cached_blocks(heart.manager.index)) == []
    assert num_traces(keyed.state.llm, secret[:16]) == 0
    assert keyed.num_cached("ann", secret) == 0, "this one writes"
    assert num_traces(heart, secret[:16]) > 0, "the search can find it"
    assert keyed.num_cached("ann", secret, cache={"read": False}) == 0
    assert keyed.num_cached("ann", secret) == 47


def test_a_reset_forgets_everything(keyed: Keyed):
    keyed.complete("ann", PROMPT)
    assert keyed.administer("/admin/reset", {}) == {"reset": True}
    assert keyed.num_cached("ann", PROMPT) == 0


def test_nothing_is_recorded_without_a_folder_for_it(keyed: Keyed):
    status, message = refusal(keyed, "/admin/record/start", {"name": "trace.jsonl"})
    assert status == 409 and "--traces-folder" in message
    assert refusal(keyed, "/admin/record/stop")[0] == 409
    assert refusal(keyed, "/admin/record/start", {"name": "../../etc/passwd"})[0] == 400


def test_bodies_that_cannot_be_are_refused_by_name(keyed: Keyed):
    for path, body, about in (
        ("/admin/prewarm", {"tenant": "ann"}, "prompt"),
        ("/admin/prewarm", {"prompt": "x", "messages": [], "tenant": "ann"}, "messages"),
        ("/admin/prewarm", {"prompt": "", "tenant": "ann"}, "prompt"),
        ("/admin/leases", {"prompt": "x", "tenant": "ann", "ttl_s": 0}, "ttl_s"),
        ("/admin/leases", {"prompt": "x", "tenant": "ann", "ttl": 1}, "ttl"),
        ("/admin/erase", {"tenant": 5}, "tenant"),
        ("/admin/leases", {"prompt": [-1], "tenant": "ann"}, "token"),
    ):
        status, message = refusal(keyed, path, body)
        assert status == 400 and about in message, message


# --- without keys ---------------------------------------------------------------------------


def test_without_keys_this_machine_administers_and_a_foreign_page_does_not(url: str):
    """Any page in a browser on this machine reaches loopback; it tells where it is from."""
    assert httpx.get(f"{url}/admin/stats").status_code == 200
    assert httpx.get(f"{url}/admin/stats", headers={"Origin": url}).status_code == 200
    for headers in ({"Origin": "https://example.com"}, {"Host": "rebound.example.com"}):
        answer = httpx.post(f"{url}/admin/reset", headers=headers, json={})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "foreign_host"


def test_without_keys_salts_stand_for_tenants(url: str):
    body = {"prompt": [31] * 40, "cache_salt": "mine"}
    assert httpx.post(f"{url}/admin/prewarm", json=body).json()["num_computed_tokens"] == 40
    rows = httpx.get(f"{url}/admin/heaviest").json()["prefixes"]
    assert salt_label("mine") in {row["tenant"] for row in rows}
    erased = httpx.post(f"{url}/admin/erase", json={"cache_salt": "mine"}).json()
    assert erased["num_blocks"] == 3
    assert httpx.post(f"{url}/admin/erase", json={"tenant": "ann"}).status_code == 404
    assert httpx.post(f"{url}/admin/keys/reload").status_code == 409
