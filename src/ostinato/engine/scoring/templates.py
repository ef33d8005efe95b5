"""Writes a query and a document as one prompt: the query first, so that documents share it."""

from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.errors import ConfigError, RequestError

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of requests that give none: that of Qwen3-Reranker and Qwen3-Embedding."""

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n"
    "<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker, after its model card; Apache License 2.0."""


class PairTemplate:
    """A template with ``query``, ``document`` and ``instruction``."""

    def __init__(self, text: str) -> None:
        """Compile it.

        Raises:
            ConfigError: It is no Jinja, or does not name both texts.
        """
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        try:
            self._template = environment.from_string(text)
            shown = self._template.render(query="\0q", document="\0d", instruction="\0i")
        except jinja2.TemplateError as error:
            raise ConfigError(f"score_template: {error}") from error
        if "\0q" not in shown or "\0d" not in shown:
            raise ConfigError("score_template: must name both query and document")

    @classmethod
    def named(cls, name: str) -> "PairTemplate | None":
        """Return a template by the setting; None writes pairs as the tokenizer does.

        Raises:
            ConfigError: There is no such file, or it is no template.
        """
        if name == "pair":
            return None
        if name == "qwen3":
            return cls(QWEN3_RERANKER)
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"score_template={name!r}: must be 'auto', 'pair', 'qwen3' or a file of Jinja "
                f"({error})"
            ) from error
        return cls(text)

    def write(self, query: str, document: str, instruction: str) -> str:
        """Return the prompt of a pair.

        Raises:
            RequestError: The template refuses.
        """
        try:
            return self._template.render(query=query, document=document, instruction=instruction)
        except jinja2.TemplateError as error:
            raise RequestError(f"the score template refuses the pair: {error}") from error
