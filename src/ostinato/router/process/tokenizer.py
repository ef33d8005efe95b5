r"""The workers' tokenizer in the router's process: Hugging Face files, without transformers.

Text after a special token has the same tokens in every prompt, so prompts are split there, and
known pieces are not tokenized again: in a conversation, only the new turns are::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    └────── known from the turn before ──────┘└─── new ───┘

Of a long piece that was extended, such as the prompt of a completion, only the end is tokenized
(``known_texts``). A tokenizer for which this does not hold costs hits, but no correctness: workers
tokenize for themselves.
"""

import contextlib
import json
import re
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ostinato.core.errors import ConfigError
from ostinato.router.process.incremental_tokenizer import CHUNK, Beginning, IncrementalTokenizer
from ostinato.router.process.routing_fields import (
    MAX_PROMPT_CHARACTERS,
    RoutingFields,
    check_length,
)

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_MAX_KNOWN_CHARACTERS = 32_000_000


@dataclass(frozen=True, slots=True)
class _Piece:
    """A special token and the text up to the next one; ids of a known one."""

    text: str
    add_special: bool
    ids: "array[int] | None" = None
    beginning: Beginning | None = None

    @property
    def num_left(self) -> int:
        if self.ids is not None:
            return 0
        return len(self.text) if self.beginning is None else self.beginning.num_left


@dataclass(frozen=True, slots=True)
class PartlyTokenized:
    """A prompt of which some pieces are known."""

    pieces: list[_Piece]

    @property
    def num_left(self) -> int:
        """Characters that are not tokenized yet."""
        return sum(piece.num_left for piece in self.pieces)


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
            self._tokenizer = Tokenizer.from_file(str(folder / _FILES[0]))
            config = _json_of(folder / _FILES[1])
            self._template = _template_of(folder, config)
        except Exception as error:  # the library raises nothing more precise
            raise ConfigError(f"tokenizer={name!r}: cannot be read: {error}") from error
        self._variables = {k: _content(config.get(k)) for k in ("bos_token", "eos_token")}
        added = self._tokenizer.get_added_tokens_decoder().values()
        marks = [t.content for t in added if not t.normalized and not t.rstrip and t.content]
        marks.sort(key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._texts = IncrementalTokenizer(self._tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._num_known_characters = 0
        self._guard = threading.Lock()

    def begin(self, prompt: RoutingFields) -> PartlyTokenized:
        """Render a prompt and look up its known pieces; without a template, those of its text.

        Raises:
            PromptTooLong: It has too many characters.
        """
        is_rendered = prompt.messages is not None
        text = self._rendered(prompt) if is_rendered else prompt.text or ""
        check_length(len(text), self._max_characters)
        pieces, start, mark = list[_Piece](), 0, ""
        for match in self._marks.finditer(text):
            pieces += self._piece(mark, text[start : match.start()], is_rendered)
            start, mark = match.end(), match[0]
        pieces += self._piece(mark, text[start:], is_rendered)
        return PartlyTokenized(pieces)

    def finish(self, partly: PartlyTokenized) -> "array[int]":
        """Return the tokens of the whole prompt."""
        tokens = array("I")
        for piece in partly.pieces:
            tokens.extend(self._tokens(piece))
        return tokens

    def _rendered(self, prompt: RoutingFields) -> str:
        if self._template is None:
            return "".join(f"{turn['content']}\n" for turn in prompt.messages or ())
        turns = [_with_read_arguments(turn) for turn in prompt.messages or ()]
        variables = {**prompt.template, "messages": turns, "tools": prompt.tools or None}
        variables.setdefault("add_generation_prompt", True)
        return self._template.render(**self._variables, **variables)

    def _piece(self, mark: str, text: str, is_rendered: bool) -> list[_Piece]:
        """Return the piece of a special token and the text after it; none if it has no tokens."""
        add_special = not mark and not is_rendered  # rendered templates contain theirs
        text = mark + text
        if not text and not add_special:
            return []
        name = _name(text, add_special)
        with self._guard:
            ids = self._known.get(name)
            if ids is not None:
                self._known.move_to_end(name)
        if ids is None and len(text) >= 2 * CHUNK:
            return [_Piece(text, add_special, beginning=self._texts.begin(text, add_special))]
        return [_Piece(text, add_special, ids)]

    def _tokens(self, piece: _Piece) -> "array[int]":
        if piece.ids is not None:
            return piece.ids
        if piece.beginning is not None:
            return self._texts.finish(piece.beginning)
        encoding = self._tokenizer.encode(piece.text, add_special_tokens=piece.add_special)
        ids = array("I", encoding.ids)
        with self._guard:
            self._remember(_name(piece.text, piece.add_special), ids)
        return ids

    def _remember(self, name: str, ids: "array[int]") -> None:
        if self._known.get(name) is None:
            self._num_known_characters += len(name)
        self._known[name] = ids
        while self._num_known_characters > _MAX_KNOWN_CHARACTERS:
            oldest, _ = self._known.popitem(last=False)
            self._num_known_characters -= len(oldest)


def _name(text: str, add_special: bool) -> str:
    return ("+" if add_special else "-") + text


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
