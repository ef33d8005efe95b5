"""``ostinato replay``: computes logged answers again, and compares their tokens."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli.output.streaming import note
from ostinato.core.errors import ConfigError, RequestError
from ostinato.core.setting import setting_fields
from ostinato.engine.requests.sampling_params import SamplingParams
from ostinato.engine.settings.settings import COMPUTING, EngineSettings

if TYPE_CHECKING:
    from ostinato import LLM, AsyncLLM, RequestOutput

_SETTINGS = tuple(
    name
    for name, each in setting_fields(EngineSettings).items()
    if each.metadata["setting"].group == COMPUTING
)
"""Settings of an engine that tokens depend on."""


def replay_record(llm: "AsyncLLM", params: SamplingParams) -> dict[str, object]:
    """Return what an answer depends on besides its prompt, as JSON has it."""
    engine = llm.engine
    return {
        "weights": engine.loaded.fingerprint.hex(),
        "settings": {name: getattr(engine.config, name) for name in _SETTINGS},
        "sampling": dict(_given(params)),
    }


def _given(params: SamplingParams) -> Iterator[tuple[str, object]]:
    for each in fields(params):
        value = getattr(params, each.name)
        factory = each.default_factory
        if value != (each.default if factory is MISSING else factory()):
            yield each.name, list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class _Answer:
    """A logged answer: one result of ``ostinato generate --json``."""

    model: str
    prompt: list[int]
    tokens: list[list[int]]
    weights: str
    settings: Mapping[str, Any]
    sampling: SamplingParams

    @classmethod
    def of(cls, entry: Any, where: str) -> "_Answer":
        try:
            record = entry["replay"]
            sampling = SamplingParams(**record["sampling"])
            outputs = sorted(entry["outputs"], key=lambda output: output["index"])
            tokens = [[int(token) for token in output["token_ids"]] for output in outputs]
            prompt = [int(token) for token in entry["prompt_token_ids"]]
            if sampling.seed is None and not sampling.greedy:
                raise ValueError("it has no seed")
            if len(tokens) != sampling.n:
                raise ValueError(f"it has {len(tokens)} continuations of {sampling.n}")
            settings = {name: record["settings"][name] for name in _SETTINGS}
            return cls(entry["model"], prompt, tokens, record["weights"], settings, sampling)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"{where} cannot be replayed ({error!r}): it must be what "
                "'ostinato generate --json' of this version printed, without --lora"
            ) from error


def run(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results of 'ostinato generate --json', one after the other."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Use this model in place of the one that was logged."),
    ] = None,
) -> None:
    """Compute logged answers again, and compare their tokens.

    The weights must have the digest that was logged, and settings and seed are the logged ones.
    Answers that were computed with --portable-bits are the same on every processor. Exits with code
    1 if any differs.

    Try: ostinato generate "ROMEO:" --seed 1 --json > log.json; ostinato replay log.json
    """
    answers = enumerate((answer for file in files for answer in _read(file)), 1)
    num_different = 0
    for (name, settings), group in groupby(
        list(answers), lambda each: (model or each[1].model, each[1].settings)
    ):
        with _opened(name, settings) as llm:
            for number, answer in group:
                difference = _difference(llm, answer)
                num_different += difference is not None
                typer.echo(f"answer {number}: {difference or _same(answer)}")
    if num_different:
        raise typer.Exit(1)


def _same(answer: _Answer) -> str:
    return f"the same {sum(map(len, answer.tokens)):,} tokens"


def _read(file: Path) -> Iterator[_Answer]:
    """Read JSON values that follow each other."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file}: {error}: give a file of 'ostinato generate --json'") from error
    decoder, number = json.JSONDecoder(), 0
    while text:
        number += 1
        where = f"{file}, answer {number}"
        try:
            entry, end = decoder.raw_decode(text)
        except ValueError as error:
            raise RequestError(f"{where} is no JSON: {error}") from error
        yield _Answer.of(entry, where)
        text = text[end:].lstrip()
    if not number:
        raise RequestError(f"{file} is empty: give a file of 'ostinato generate --json'")


def _opened(model: str, settings: Mapping[str, Any]) -> "LLM":
    from ostinato import LLM

    if not settings["portable_bits"]:
        note("Without --portable-bits, another processor may compute other tokens.")
    return LLM(model, **settings)


def _difference(llm: "LLM", answer: _Answer) -> str | None:
    """Return what differs; None if all tokens are the same."""
    weights = llm.engine.loaded.fingerprint.hex()
    if weights != answer.weights:
        raise ConfigError(
            f"the log needs weights {answer.weights[:16]}, and these are {weights[:16]}: "
            "give the same checkpoint as --model"
        )
    [output] = llm.generate([answer.prompt], answer.sampling, use_tqdm=False)
    return _first_difference(output, answer.tokens)


def _first_difference(output: "RequestOutput", logged: list[list[int]]) -> str | None:
    for completion, expected in zip(output.outputs, logged, strict=True):
        tokens = list(completion.token_ids)
        if tokens != expected:
            same = zip(tokens, expected, strict=False)
            place = next((i for i, (one, other) in enumerate(same) if one != other), None)
            at = min(len(tokens), len(expected)) if place is None else place
            return f"differs from token {at} on, in continuation {completion.index}"
    return None
