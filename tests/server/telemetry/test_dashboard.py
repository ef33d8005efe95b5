"""The Grafana dashboard keeps to Grafana's own types, and its queries to PromQL's grammar.

That the metrics and labels in it exist is checked against a live server in ``test_metrics``.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

import ostinato.server

VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$instance": "all"}


@pytest.fixture
def board() -> dict[str, Any]:
    path = Path(ostinato.server.__file__).parent / "dashboards" / "ostinato.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def unknown_to_grafana(board: dict[str, Any]) -> list[str]:
    """Read a dashboard into Grafana's types and write it again; returns what did not come back."""
    plugins.register_default_plugins()
    read = Dashboard.from_json(copy.deepcopy(board))
    return list(lost(board, json.loads(JSONEncoder().encode(read)), ""))


def lost(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from lost(old, new, f"{path}[{place}]")
    elif before != after:
        yield path


def test_grafana_s_types_hold_all_of_the_dashboard(board: dict[str, Any]):
    """And would say what they do not hold: a misspelt key of a panel's options, for one."""
    assert unknown_to_grafana(board) == []

    board["panels"][1]["options"]["reduceOption"] = {"calcs": ["lastNotNull"]}
    assert unknown_to_grafana(board) == [".panels[1].options.reduceOption"]


def test_every_query_is_promql(board: dict[str, Any]):
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            assert "$" not in query, f"{panel['title']}: an unknown variable in {query}"
            promql_parser.parse(query)
    with pytest.raises(ValueError, match="unclosed"):
        promql_parser.parse("sum(rate(x[5m])")
