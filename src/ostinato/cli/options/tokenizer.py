"""Loads a model's tokenizer without its weights."""

from contextlib import nullcontext
from typing import Annotated, Any

import typer

from ostinato.errors import BrokenCheckpoint, MissingTokenizer, RequestError
from ostinato.lab.log.request_log import LoggedRequest, render_plainly
from ostinato.lab.replay.explain_log import Tokenizer
from ostinato.lab.replay.word_tokens import word_tokenizer

TokenizerModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model whose tokenizer and chat template to use: the bundled one, a checkpoint "
        "directory, or a name on the Hugging Face hub. Without it, tokens are words.",
    ),
]
IgnoredFields = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        help="Field of the log that does not change the prompt, at any depth; may be repeated.",
    ),
]


def load_tokenizer(model: str | None) -> Tokenizer:
    """Return the tokenizer for a log: a model's, or words without one.

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

    template = str(getattr(tokenizer, "chat_template", None) or "")

    def render(request: LoggedRequest) -> str:
        body = request.body
        if "messages" not in body or not template:
            return render_plainly(request)
        prompt, before = request.prompt, [request.prompt.settings]
        if "tools" not in template or "tool_calls" not in template:  # it would drop them
            before += [tool.text for tool in prompt.tools]
            body = {"messages": [{"role": m.role, "content": m.text} for m in prompt.messages]}
        try:
            text = tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # a template may raise any exception
            raise RequestError(
                f"line {request.line}: the chat template of {model} refuses it: {error}"
            ) from error
        return "\n".join([*filter(None, before), str(text)])

    return Tokenizer(encode, render, decode)


def model_tokenizer(model: str) -> Any:
    """Load a model's tokenizer, of ``transformers``.

    Raises:
        ModelNotFound: There is no such model.
        MissingTokenizer: It has no tokenizer, or a damaged one.
    """
    from ostinato.runner.checkpoints.gguf_file import open_gguf
    from ostinato.runner.checkpoints.model_resolver import resolve_model
    from ostinato.runner.loading.pretrained import load_tokenizer

    path = resolve_model(model)
    try:
        with open_gguf(path) if path.is_file() else nullcontext():
            tokenizer = load_tokenizer(path)
    except BrokenCheckpoint as error:
        raise MissingTokenizer(
            f"{model}: the tokenizer in {path} cannot be loaded: {error}"
        ) from error
    if tokenizer is None:
        raise MissingTokenizer(f"{model}: there are no tokenizer files in {path}")
    return tokenizer
