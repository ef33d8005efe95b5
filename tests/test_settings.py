"""A setting is stated once: its field's docstring, default and range are all that there is."""

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_origin

import pytest
import typer

from ostinato.cli import app
from ostinato.cli.options.setting_options import former_options
from ostinato.cli.options.setting_texts import (
    about,
    help_line,
    is_bytes,
    option_names,
    setting_texts,
    write_exactly,
)
from ostinato.core.config import CacheConfig, SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.core.setting import check_settings, choices_of, setting_fields, value_types
from ostinato.engine.settings.config import EngineConfig
from ostinato.engine.settings.settings import EngineSettings
from ostinato.former_names import old_names_of
from ostinato.images.media import MediaLimits
from ostinato.router.policy import RouterConfig
from ostinato.router.process.config import FleetConfig
from ostinato.server.config import ListenerConfig, ServerConfig
from ostinato.settings import PrefixCacheConfig, StateConfig, WindowConfig
from tests.cli.terminal import Terminal, terminal, unwrapped

__all__ = ["terminal"]

SOURCE = Path(__file__).parents[1] / "src/ostinato"
PUBLIC = {EngineSettings: "serve", ServerConfig: "serve", FleetConfig: "route"}
"""The settings that users give, and the command that has them as options."""
PARTS = (CacheConfig, PrefixCacheConfig, SchedulerConfig, MediaLimits, ListenerConfig, RouterConfig)
"""The rooms' own, of which the public ones consist."""
ALL = (*PUBLIC, *PARTS, StateConfig, WindowConfig)
WITHOUT_OPTION = {"model", "tenant_shares", "record_trace"}
"""An argument, what the keys file says of each tenant, and what a running server starts."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+[a-z](?![\w-])")
EACH = [(kind, name) for kind in PUBLIC for name in setting_fields(kind)]


def options_of(command: str) -> dict[str, Any]:
    """Return the options of a command by their first spelling."""
    click_command: Any = typer.main.get_command(app)
    return {option.opts[0]: option for option in click_command.commands[command].params}


OPTIONS = {command: options_of(command) for command in ("serve", "route", "chat", "generate")}


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_field_is_a_setting_with_a_docstring(kind: type):
    given_by_the_engine = {"windows", "states", "tenant_shares"}
    plain = {field.name for field in fields(kind)} - setting_fields(kind).keys()
    assert plain <= given_by_the_engine
    assert [name for name, text in setting_texts(kind).items() if not text.endswith(".")] == []


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_the_command_line_has_the_name_default_and_help_of_the_field(kind: type, name: str):
    field = setting_fields(kind)[name]
    if name in WITHOUT_OPTION:
        assert not about(field).group
        return
    option = OPTIONS[PUBLIC[kind]][option_names(field)[0]]
    assert option.name == name and help_line(kind, name).rstrip(".") in option.help
    if option.default is not None:
        factory: Any = field.default_factory
        default = factory() if field.default is MISSING else field.default
        in_words = write_exactly(default) if is_bytes(field) else default
        assert option.default == ("{}" if in_words == {} else in_words)
    if about(field).options:
        assert list in value_types(field.type) or any(map(is_collection, value_types(field.type)))


def is_collection(kind: Any) -> bool:
    return str(kind).startswith(("tuple", "collections.abc.Sequence"))


def test_no_option_of_a_command_with_settings_is_stated_elsewhere():
    """But for what a server does at the start, which no config keeps."""
    known = {name for kind in PUBLIC for name in setting_fields(kind)}
    at_the_start = {"model", "api_key", "prewarm", "lora_modules", "help"}
    for command in ("serve", "route"):
        shown = {o.name for o in OPTIONS[command].values() if not o.hidden}
        assert shown <= known | at_the_start, shown - known


def test_every_setting_of_a_part_is_a_setting_of_the_whole():
    """Nothing that cache, scheduler and images can do is out of an engine's reach."""
    for part in (CacheConfig, PrefixCacheConfig, SchedulerConfig, MediaLimits):
        derived = {"reserved_blocks"}  # of max_model_len
        assert setting_fields(part).keys() - derived <= setting_fields(EngineSettings).keys()
    for whole in (ServerConfig, FleetConfig):
        assert setting_fields(ListenerConfig).keys() <= setting_fields(whole).keys()
    assert setting_fields(RouterConfig).keys() <= setting_fields(FleetConfig).keys()


def test_settings_of_the_rooms_have_no_other_default_than_those_of_the_engine():
    """Who embeds a room meets what the docs say, but for what the engine knows better.

    A room by itself plans by tokens in order of arrival and evicts by LRU, so that a replay is
    the same on every machine; lengths and numbers of blocks follow from model and memory.
    """
    other = {"order", "max_step_ms", "eviction_policy", "max_model_len", "keep_event_batches"}
    for part in (PrefixCacheConfig, SchedulerConfig, MediaLimits):
        for name, field in setting_fields(part).items():
            whole = setting_fields(EngineSettings).get(name)
            if whole is not None and name not in other and field.default is not MISSING:
                assert field.default == whole.default, name


def test_no_docstring_of_a_setting_is_written_twice():
    """In the modules of settings and of the command line, where help texts used to be copied."""
    own = {text for kind in ALL for text in setting_texts(kind).values() if len(text) > 30}
    modules = {Path(inspect.getfile(kind)) for kind in ALL}
    paths = {*modules, *SOURCE.glob("cli/**/*.py"), *SOURCE.glob("engine/settings/*.py")}
    source = " ".join(" ".join(path.read_text().split()) for path in paths)
    assert {text: n for text in own if (n := source.count(f'"{text}')) > 1} == {}


def test_no_name_stands_for_two_settings():
    """A name that two rooms use has one docstring, or says the same of another server."""
    of_each_process = {"tokenizer"}  # of the model, and of a router's workers
    texts: dict[str, set[type]] = {}
    for kind in PUBLIC:
        for name, field in setting_fields(kind).items():
            texts.setdefault(name, set()).add(field.metadata.get("origin", kind))
    shared = {name for name, kinds in texts.items() if len(kinds) > 1} - of_each_process
    assert shared <= setting_fields(ListenerConfig).keys()


WRONG: dict[Any, tuple[Any, ...]] = {
    bool: (None, 1, "yes"),
    int: (1.5, True, "1", float("nan")),
    float: ("1", True, float("nan"), None),
    str: (5, b"x", ["x"]),
}


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_name(kind: Any, name: str):
    field = setting_fields(kind)[name]
    types, rule = value_types(field.type), about(field)
    wrong: list[Any] = list(next((WRONG[one] for one in (bool, int, float) if one in types), ()))
    if str in types:
        wrong = [5, b"x", ["x"]]
    if any(get_origin(one) is Mapping for one in types):
        wrong = [5, "{}", ["image"]]
    if choices_of(field):
        wrong = ["nothing of the kind", ["auto"]]
    if rule.minimum is not None:
        wrong.append(rule.minimum - 1)
    if rule.above is not None:
        wrong += [rule.above, rule.above - 1]
    if rule.maximum is not None:
        wrong.append(rule.maximum + 1)
    for value in wrong:
        if value is None and type(None) in types:
            continue
        with pytest.raises(ConfigError, match=f"^{name}=") as refused:
            check_settings(with_value(kind, name, value))
        assert "must be " in str(refused.value) and rule.hint in str(refused.value)


def with_value(kind: Any, name: str, value: object) -> Any:
    """Return settings of which one is changed, unchecked."""
    config = kind()
    object.__setattr__(config, name, value)
    return config


def test_bounds_are_allowed():
    for kind, name in EACH:
        rule = about(setting_fields(kind)[name])
        for bound in (rule.minimum, rule.maximum):
            if bound is not None:
                check_settings(with_value(kind, name, bound))


def test_messages_say_what_else_to_do():
    with pytest.raises(ConfigError) as refused:
        PrefixCacheConfig(8, ghost_share=0)
    assert str(refused.value) == (
        "ghost_share=0: must be a number above 0 and at most 1; ghost_blocks=0 makes no estimates"
    )
    with pytest.raises(ConfigError) as refused:
        EngineConfig(quantization="int2")
    assert str(refused.value) == (
        "quantization='int2': must be one of int8, int4, w8a8, w4a8, or None; a checkpoint that "
        "came quantized is loaded as its config says"
    )


def test_a_former_name_is_accepted_with_a_warning():
    with pytest.warns(DeprecationWarning, match="policy is now eviction_policy") as warned:
        config = PrefixCacheConfig(8, policy="reuse_hazard")  # type: ignore[call-arg]
    assert config.eviction_policy == "reuse_hazard" and Path(warned[0].filename) == Path(__file__)
    with pytest.warns(DeprecationWarning, match="for one release"):
        assert config.policy == "reuse_hazard"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="policy is the former name of eviction_policy"):
        PrefixCacheConfig(8, policy="reuse_hazard", eviction_policy="reuse_hazard")  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace(config, block_size=8).eviction_policy == "reuse_hazard"


def test_every_class_with_a_former_name_accepts_it():
    for kind in (*ALL, EngineConfig):
        for old in old_names_of(kind):
            assert isinstance(getattr(kind, old, None), property), f"{kind.__name__}.{old}"


FORMER = [
    (command, spelling, name)
    for kind, command in PUBLIC.items()
    for name, field in setting_fields(kind).items()
    for spellings in former_options(field)
    for spelling in spellings.split("/")
]


@pytest.mark.parametrize(("command", "spelling", "name"), FORMER)
def test_a_former_option_is_hidden_and_still_there(command: str, spelling: str, name: str):
    known = [
        option
        for option in OPTIONS[command].values()
        if spelling in (*option.opts, *option.secondary_opts)
    ]
    assert [(option.hidden, option.name) for option in known] == [(True, f"former_{name}")]


def test_the_changelog_names_the_former_options():
    root = SOURCE.parents[1]
    changes = (root / "CHANGELOG.md").read_text()
    changes += "".join(path.read_text() for path in (root / "changelog.d").glob("*.md"))
    named = set(re.findall(r"`(--[a-z-]+)`", changes))
    assert {spelling for _, spelling, _ in FORMER} <= named


def test_messages_name_options_by_their_present_names():
    """What an error or a help text tells a user to set, there is."""
    click_app: Any = typer.main.get_command(app)
    shown = {"--help", *shown_options(click_app)}
    pip = SOURCE / "runner/checkpoints/fetched_models.py"
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py") if path != pip}
    unknown = {
        f"{path.name}: {name}"
        for path, text in texts.items()
        for name in OPTION.findall(re.sub(r"old_options=\(.*?\)", "", text))
        if name not in shown
    }
    assert unknown == set()


def shown_options(command: Any) -> Iterator[str]:
    """Walk the spellings of all options that a help page names, below a command."""
    for option in command.params:
        if not option.hidden or option.name.startswith("no_"):
            yield from (*option.opts, *option.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from shown_options(below)


def test_a_former_option_works_and_warns_once(terminal: Terminal):
    """The value comes to the same setting; under both names, it is refused."""
    result = terminal.run("route", "--max-body", "lots")
    warning, error = result.stderr.splitlines()
    assert result.exit_code == 2
    assert (
        warning == "--max-body is now --max-body-bytes; the former name is accepted for one release"
    )
    assert error.startswith("error: max_body_bytes='lots': must be an amount above 0")
    error = terminal.refuse("serve", "--weight-cache-bytes", "lots")
    assert error.startswith("error: weight_cache_bytes='lots': must be an amount, such as")
    both = terminal.refuse("route", "--max-body", "1MiB", "--max-body-bytes", "2MiB")
    assert both == "error: --max-body is the former name of --max-body-bytes: give one of them"


def test_a_switch_that_is_on_may_be_turned_off(terminal: Terminal):
    """``--no-NAME`` is in the help of the switch, so that it takes no column of its own."""
    assert "--no-keep-tokens turns it off." in unwrapped(
        Terminal(columns=200).show("chat", "--help")
    )
    for off in ("--no-enable-prefix-caching", "--no-cache"):
        result = terminal.run("serve", "/no/such/model", off, "--kv-disk", "folder")
        assert "enable_prefix_caching=False: nothing is cached" in result.stderr
