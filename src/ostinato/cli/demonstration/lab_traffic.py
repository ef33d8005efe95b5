"""The demo's calls, sent to a running server of a lab; then its hits beside the built-in ones."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from ostinato.cli.demonstration.demo_waves import calls
from ostinato.core.errors import ConfigError

OUTPUT_TOKENS = 4
_TRIES, _PAUSE_S = 100, 0.1


def prompts(num_calls: int, num_prefixes: int) -> list[str]:
    """Return the demo's calls; with several prefixes, each comes half as often as the one before.

    So a small pool has to choose what to keep.
    """
    return [
        call if not scene else f"SCENE {scene}.\n{call}"
        for call, scene in zip(calls(num_calls), _scenes(num_prefixes), strict=False)
    ]


def _scenes(num_prefixes: int) -> Iterator[int]:
    """Walk prefix numbers without end, each half as often as the one before, by turns."""
    number = 0
    while True:
        number += 1
        trailing_zeros = (number & -number).bit_length() - 1
        yield trailing_zeros if trailing_zeros < num_prefixes else number % num_prefixes


def send(url: str, texts: list[str], at_once: int, watch: Callable[[int], None]) -> None:
    """Send prompts to a server, some at a time, and wait for all answers.

    Raises:
        ConfigError: No server answers there, or it refuses.
    """
    try:
        with httpx.Client(base_url=url, timeout=600) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": model, "max_tokens": OUTPUT_TOKENS, "temperature": 0}

            def call(text: str) -> None:
                client.post("/v1/completions", json=body | {"prompt": text}).raise_for_status()

            with ThreadPoolExecutor(at_once) as threads:
                for number, _ in enumerate(threads.map(call, texts), 1):
                    watch(number)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"url={url!r}: no server of a lab answers there ({error}): start `ostinato serve` in "
            "another shell, and leave it running"
        ) from error


def hits(url: str) -> dict[str, Any] | None:
    """Return a server's hits with its plug-in and with the built-in parts; None without one."""
    with httpx.Client(base_url=url, timeout=60) as client:
        state = client.get("/ui/state").raise_for_status().json()
        for _ in range(_TRIES):
            plugged: dict[str, Any] | None = state["plugged"]
            num_requests = state.get("totals", {}).get("requests", 0)  # a router has no totals
            if plugged is None or plugged["requests"] >= num_requests:
                return plugged
            time.sleep(_PAUSE_S)
            state = client.get("/ui/state").raise_for_status().json()
        return plugged
