"""The keys file: hashes alone, read and written whole, and clear about what is wrong with it."""

import json
import stat

import pytest

from ostinato.core.errors import ConfigError
from ostinato.server.access.keys import KEY_PREFIX, add_key, hash_key, read_keys
from ostinato.settings import TenantShare


def test_a_key_is_printed_once_and_its_hash_is_kept(tmp_path):
    """The file is of no use to call the server with, and only its owner can read it."""
    path = tmp_path / "keys.json"
    key = add_key(path, "acme", quota=40, guaranteed=8)
    text = path.read_text()
    assert key.startswith(KEY_PREFIX) and len(key) > 50
    assert key not in text and key[len(KEY_PREFIX) :] not in text
    assert hash_key(key) in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_keys(path)
    assert keys.owner_of(key) == "acme"
    assert keys.owner_of(key + "x") is None
    assert keys.tenant_shares() == {keys.salt_of("acme"): TenantShare(8, 40)}


def test_a_second_key_keeps_the_first_and_what_was_set(tmp_path):
    path = tmp_path / "keys.json"
    first = add_key(path, "acme", priority=3, public=["manual"])
    other = add_key(path, "other")
    second = add_key(path, "acme", max_requests=2)
    keys = read_keys(path)
    assert [keys.owner_of(key) for key in (first, second, other)] == ["acme", "acme", "other"]
    entry = keys.tenants["acme"]
    assert (entry.priority, entry.public, entry.max_requests) == (3, ["manual"], 2)


def test_a_salt_hangs_on_the_secret_and_the_name(tmp_path):
    """It is the same after a restart, and another server's is another."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        add_key(tmp_path / folder / "keys.json", "acme")
    one, two = (read_keys(tmp_path / folder / "keys.json") for folder in ("a", "b"))
    assert one.salt_of("acme") == read_keys(tmp_path / "a" / "keys.json").salt_of("acme")
    assert len({one.salt_of("acme"), one.salt_of("acme2"), two.salt_of("acme")}) == 3


SECRET = "s" * 32
HASH = hash_key("x")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "the file: Invalid JSON"),
        ("[]", "should be an object"),
        ({}, "secret: Field required"),
        ({"secret": "short"}, "secret: String should have at least 32"),
        ({"secret": SECRET, "tenant": {}}, "tenant: Extra inputs"),
        ({"secret": SECRET, "tenants": {"": {}}}, "1 to 200 printable"),
        ({"secret": SECRET, "tenants": {"a": {"keys": ["sk-plain"]}}}, "64 hexadecimal digits"),
        ({"secret": SECRET, "tenants": {"a": {"quota": "many"}}}, "tenants.a.quota"),
        (
            {"secret": SECRET, "tenants": {"a": {"quota": 2, "guaranteed": 3}}},
            "guaranteed=3 is above quota=2",
        ),
        (
            {"secret": SECRET, "tenants": {"a": {"keys": [HASH]}, "b": {"keys": [HASH]}}},
            "have the same key",
        ),
    ],
)
def test_a_broken_file_is_refused_with_the_place_and_without_its_secrets(tmp_path, content, says):
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match="keys file") as refusal:
        read_keys(path)
    assert says in str(refusal.value)
    for hidden in (SECRET, HASH, "sk-plain"):
        assert hidden not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
        read_keys(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        add_key(tmp_path / "no folder" / "keys.json", "acme")


def test_a_tenant_or_a_setting_that_cannot_be_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "keys.json"
    add_key(path, "acme")
    before = path.read_text()
    for tenant, changes in (("", {}), ("a\nb", {}), ("acme", {"quota": 0})):
        with pytest.raises(ConfigError):
            add_key(path, tenant, **changes)
    with pytest.raises(ConfigError, match="guaranteed"):
        add_key(path, "acme", quota=1, guaranteed=2)
    assert path.read_text() == before
