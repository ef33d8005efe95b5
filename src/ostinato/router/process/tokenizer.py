"""The workers' tokenizer in the router's process: Hugging Face files, without transformers.

In a conversation only the new turns are tokenized (``incremental_tokenizer``). A tokenizer for
which its assumption does not hold costs hits, but no correctness: workers tokenize for themselves.
"""

import contextlib
import json
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ostinato.core.errors import ConfigError
from ostinato.router.process.incremental_tokenizer import Beginning, IncrementalTokenizer
from ostinato.router.process.routing_fields import (
    MAX_PROMPT_CHARACTERS,
    RoutingFields,
    check_length,
)

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class LocalTokenizer:
    """Turns prompts into the token ids that the workers will see. For any thread."""

    def __init__(self, name: str, max_characters: int = MAX_PROMPT_CHARACTERS) -> None:
        """Load a tokenizer.

        Args:
            name: A folder, a ``tokenizer.json``, the name of the bundled model, or a hub name.
            max_characters: Maximum characters of a prompt, with its template.

        Raises:
            ConfigError: There is no tokenizer there.
        """
        folder = _folder_of(name)
        self._max_characters = max_characters
        try:
            tokenizer = Tokenizer.from_file(str(folder / _FILES[0]))
            config = _json_of(folder / _FILES[1])
            self._template = _template_of(folder, config)
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"tokenizer={name!r}: cannot be read: {error}") from error
        self._variables = {k: _content(config.get(k)) for k in ("bos_token", "eos_token")}
        self._texts = IncrementalTokenizer(tokenizer)

    def begin(self, prompt: RoutingFields) -> Beginning:
        """Render a prompt, if it has messages, and look up how much of it is known.

        Raises:
            PromptTooLong: It has too many characters.
        """
        is_rendered = prompt.messages is not None
        text = self._rendered(prompt) if is_rendered else prompt.text or ""
        check_length(len(text), self._max_characters)
        return self._texts.begin(text, add_special=not is_rendered)  # templates write theirs

    def finish(self, beginning: Beginning) -> "array[int]":
        """Return the tokens of the whole prompt."""
        return self._texts.finish(beginning)

    def _rendered(self, prompt: RoutingFields) -> str:
        if self._template is None:
            return "".join(f"{turn['content']}\n" for turn in prompt.messages or ())
        turns = [_with_read_arguments(turn) for turn in prompt.messages or ()]
        variables = {**prompt.template, "messages": turns, "tools": prompt.tools or None}
        variables.setdefault("add_generation_prompt", True)
        return self._template.render(**self._variables, **variables)


def _with_read_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn with the arguments of its calls as objects, as templates expect."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    read = []
    for call in calls:
        function = dict(call.get("function") or {})
        with contextlib.suppress(TypeError, ValueError):
            function["arguments"] = json.loads(function["arguments"])
        read.append({**call, "function": function})
    return {**turn, "tool_calls": read}


def _folder_of(name: str) -> Path:
    """Return the folder of a tokenizer, downloaded from the hub if necessary."""
    path = Path(name)
    if path.is_file():
        return path.parent
    if path.is_dir():
        return path
    bundled = Path(__file__).parents[2] / "models" / name
    if bundled.is_dir():
        return bundled
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:
        raise ConfigError(
            f"tokenizer={name!r}: neither a folder, nor available on the hub: {error}"
        ) from error


def _json_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _template_of(folder: Path, config: dict[str, Any]) -> jinja2.Template | None:
    path = folder / _FILES[2]
    source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {each["name"]: each["template"] for each in source}
        source = named.get("default")
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=_now)
    return environment.from_string(source)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _content(token: Any) -> str:
    """Return the text of a special token, a string or an object in JSON."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
