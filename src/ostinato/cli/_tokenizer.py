"""How does a command get a model's tokenizer without its weights?"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ostinato.core.errors import BrokenCheckpoint, MissingTokenizer, RequestError
from ostinato.lab.explain_log import Tokenizer
from ostinato.lab.request_log import render_plainly
from ostinato.lab.word_tokens import word_tokenizer

ModelOfTokens = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Whose tokens and template: the embedded model, a checkpoint directory, or a name "
        "on the Hugging Face hub; else tokens are words.",
    ),
]


def load_tokenizer(model: str | None) -> Tokenizer:
    """Return what turns a log's requests into a model's tokens; into words if none is named.

    Raises:
        ModelNotFound: There is no such model.
        MissingTokenizer: It has no tokenizer.
    """
    if model is None:
        return word_tokenizer()
    tokenizer = model_tokenizer(model)

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
        return list(ids)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def render(body: Mapping[str, Any]) -> str:
        if "messages" not in body or not getattr(tokenizer, "chat_template", None):
            return render_plainly(body)
        try:
            return str(
                tokenizer.apply_chat_template(
                    body["messages"],
                    tools=body.get("tools"),
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template may raise whatever its author liked
            raise RequestError(f"the chat template refuses a request: {error}") from error

    return Tokenizer(encode, render, decode)


def model_tokenizer(model: str) -> Any:
    """Load a model's tokenizer, of ``transformers``.

    Raises:
        ModelNotFound: There is no such model.
        MissingTokenizer: It has no tokenizer, or a damaged one.
    """
    from ostinato.runner.model_loader import load_tokenizer
    from ostinato.runner.resolve import resolve_model

    path = resolve_model(model)
    try:
        tokenizer = load_tokenizer(path)
    except BrokenCheckpoint as error:
        raise MissingTokenizer(f"{model}: no tokenizer loads from {path}: {error}") from error
    if tokenizer is None:
        raise MissingTokenizer(f"{model}: there are no files of a tokenizer in {path}")
    return tokenizer
