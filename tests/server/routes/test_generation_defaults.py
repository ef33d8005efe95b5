"""Over HTTP, what a request leaves out samples as the model's generation config says."""

from typing import Any

import httpx
import pytest

from tests.support.servers.prefix_probe import ENDPOINTS, GENERATING


def ask(http: httpx.Client, path: str, **more: Any) -> Any:
    """Ask without a temperature, unless it is given."""
    endpoint = ENDPOINTS[path]
    body = {**endpoint.body("ROMEO:"), "seed": 5, endpoint.limit: 24}
    del body["temperature"]
    answer = http.post(path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", GENERATING)
def test_a_temperature_that_is_left_out_is_the_models(http: httpx.Client, path: str):
    """The embedded model says 0.8; null is left out, and 1.0, OpenAI's own default, is not."""
    text = ENDPOINTS[path].text
    own = text(ask(http, path))
    assert own == text(ask(http, path, temperature=0.8))
    assert own == text(ask(http, path, temperature=None))
    assert own != text(ask(http, path, temperature=1.0))


def test_a_response_echoes_what_it_sampled_with(http: httpx.Client):
    assert ask(http, "/v1/responses")["temperature"] == 0.8
    assert ask(http, "/v1/responses", temperature=0.1)["temperature"] == 0.1


def test_the_list_of_models_says_what_applies(http: httpx.Client):
    [card, _] = http.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == {"temperature": 0.8, "max_tokens": 256}
