"""Which settings of a server are refused before anything is loaded."""

import socket

import pytest

from ostinato.core.errors import ConfigError
from ostinato.server.config import ServerConfig
from ostinato.server.lifecycle import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_without_keys_a_server_may_listen_on_loopback(host: str):
    assert ServerConfig(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "example.com"])
def test_without_keys_a_server_listens_nowhere_else(host: str):
    with pytest.raises(ConfigError, match="give a keys_file"):
        ServerConfig(host=host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 70000},
        {"max_requests": 0},
        {"max_n": 0},
        {"max_body_bytes": 0},
        {"drain_timeout_s": -1.0},
        {"drain_timeout_s": float("nan")},
        {"model_names": ()},
        {"model_names": ("",)},
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, object]):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}="):
        ServerConfig(**wrong)


def test_answers_are_sent_at_once():
    """With Nagle's algorithm on, each answer would wait 40 ms for an acknowledgement."""
    with listen(ServerConfig(port=0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
