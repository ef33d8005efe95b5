"""Classes of one's own: loaded, checked by contract, and driven over the whole ports."""

from pathlib import Path
from typing import Any

import pytest

from ostinato.cache.eviction import BlockShares
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.config import EngineConfig
from ostinato.labs.course import lab_of
from ostinato.plugins import child
from ostinato.plugins.contracts import LetterCache, failure_of
from ostinato.plugins.loading import load_plugin
from ostinato.plugins.plugged import check_plugin, index_factory, policy_factory

PARTS = {"index": (1, "HashIndex"), "eviction_policy": (3, "Policy"), "order": (5, "Ranking")}
"""By setting the lab whose solution has a class of the small port, and the class."""


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a good file with a change, and names a class of it."""

    def write(setting: str, old: str = "", new: str = "", name: str = "") -> str:
        number, class_name = PARTS[setting]
        good, path = lab_of(number).solution, tmp_path / "own.py"
        assert old in good
        path.write_text(good.replace(old, new) if old else good)
        return f"{path}:{name or class_name}"

    return write


# --- loading ---


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nowhere.py:Map", "there is no file"),
        ("no_such_module:Map", "cannot be imported"),
        (":Map", "must be FILE.py:Class"),
        ("x.py:", "must be FILE.py:Class"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(value: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_plugin("index", value)


def test_a_file_that_raises_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError in line 2"):
        load_plugin("index", f"{path}:Map")
    path.write_text("def f(:\n")
    with pytest.raises(ConfigError, match="SyntaxError in line 1"):
        load_plugin("index", f"{path}:Map")


def test_a_missing_class_is_refused_with_those_that_are_there(write):
    with pytest.raises(ConfigError, match=r"defines no Tree; its classes: .*HashIndex"):
        load_plugin("index", write("index", name="Tree"))


# --- contracts ---


@pytest.mark.parametrize("number", [1, 2, 3, pytest.param(4, marks=pytest.mark.nightly), 5])
def test_the_solutions_of_labs_pass_the_contract(number: int, tmp_path: Path):
    """What is checked by a lab is what the engine requires."""
    lab = lab_of(number)
    path = tmp_path / f"{lab.name}.py"
    path.write_text(lab.solution)
    option, value = lab.serve.format(file=path).split()[-2:]
    assert failure_of(option[2:].replace("-", "_"), value) == ""


@pytest.mark.parametrize(
    ("setting", "old", "new", "words"),
    [
        ("index", "block_digest(parent, ", "block_digest(ROOT, ", "are cached"),
        ("index", "return match", "return []", "2 tokens in whole blocks are cached"),
        ("index", "return match", "return match[::-1]", "Requests so far"),
        ("index", "return match", "return match + [99]", "for other tokens"),
        ("index", "del self.blocks[self.chain(tokens)[-1]]", "pass", "for other tokens"),
        ("index", "match = []", "match = [1 / 0]", "ZeroDivisionError"),
        ("eviction_policy", "if entry.is_leaf", "if not entry.is_leaf", "no evictable leaf"),
        ("eviction_policy", "del self.queue[entry]", "pass", "no evictable leaf"),
        ("order", "return num_tokens - num_cached", "return None", "rank raises TypeError"),
    ],
)
def test_a_broken_class_is_refused_with_its_counterexample(
    setting: str, old: str, new: str, words: str, write
):
    assert words in failure_of(setting, write(setting, old, new))


def test_a_class_that_does_not_return_is_refused(write, monkeypatch: pytest.MonkeyPatch):
    """In a process of its own, with the line of the loop."""
    monkeypatch.setattr(child, "CONTRACT_S", 1.0)
    value = write("index", "match = []", "\n        while True: pass")
    with pytest.raises(ConfigError, match="it does not return; it was in match, line"):
        check_plugin("index", value)


# --- while it serves ---


def test_a_map_that_lies_while_it_serves_costs_hits_and_gives_no_wrong_one(write):
    """Rule 2: a match ends before the first block that is not the continuation."""
    value = write("index", "return match", "return [9] if len(tokens) > 6 else match")
    cache = LetterCache(12, make_index=index_factory(value))
    assert [cache.serve(prompt) for prompt in ("ABABAB", "ABABAB", "ABABABAB")] == [0, 4, 0]
    index: Any = cache.manager.index
    assert index.faults.num_faults == 1
    cache.manager.check()


def test_an_evictor_that_raises_is_answered_for(write):
    """Rule 3: the engine goes on, with what was released longest ago."""
    value = write("eviction_policy", "return next(", "raise RuntimeError\n        return next(")
    policy: Any = policy_factory(value)(4, lambda: 0.0)
    cache = LetterCache(4, shares=BlockShares(policy))
    for prompt in ("ABABAB", "BBBBBB", "AAAAAA"):
        cache.serve(prompt)
    assert policy.faults.num_faults > 0
    cache.manager.check()


def test_a_failed_step_takes_back_what_it_told_a_map(write):
    """Law 5, over the small port."""
    cache = LetterCache(8, make_index=index_factory(write("index")))
    cache.serve("ABAB")
    table = cache.begin("ABABAB")
    cache.end(table, 6)
    manager = cache.manager
    key = table.key.copy()
    key.append(ord("B"))
    key.append(ord("B"))
    admitted, _ = manager.admit(key, manager.match(key))
    manager.publish(admitted, 8)
    manager.fail()
    manager.check()
    assert manager.match(key).num_shared_tokens == 6


# --- settings ---


def test_a_trace_cannot_be_recorded_of_what_a_plug_in_decides(write):
    """Nor can a trace name a plug-in: its header knows the built-in names alone."""
    with pytest.raises(ConfigError, match="a trace cannot be replayed"):
        EngineConfig.of("tiny-shakespeare", {"index": write("index"), "record_trace": "x.jsonl"})
    config = EngineConfig.of("tiny-shakespeare", {"index": write("index")})
    assert config.cache(8).index == "radix"
    with pytest.raises(ConfigError, match="must be one of"):
        EngineConfig.of("tiny-shakespeare", {"index": "radox"})
