"""Reports what a tokenizer's chat template loses of earlier turns; see ``ostinato.templates``."""

import hashlib
from functools import lru_cache, partial
from typing import Any

from ostinato.engine.prompts.chat import render_text
from ostinato.templates.probe import Probe
from ostinato.templates.report import TemplateReport

_REPORTS: dict[str, TemplateReport] = {}
"""By digest: a template is rendered once in a process, however many engines load it."""


def report_template(tokenizer: Any, takes_images: bool = False) -> TemplateReport | None:
    """Return what the template of a tokenizer loses; None without a template.

    Cost: some 100 renderings, 50 ms; nothing for a template and tokenizer that were seen before.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    digest = _digest(tokenizer, takes_images)
    if digest not in _REPORTS:
        probe = Probe(
            str(template), partial(render_text, tokenizer), _encoder(tokenizer), takes_images
        )
        _REPORTS[digest] = probe.report(digest)
    return _REPORTS[digest]


def _encoder(tokenizer: Any) -> Any:
    """Return a function from text to ids that tokenizes each text once."""

    @lru_cache(maxsize=256)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def _digest(tokenizer: Any, takes_images: bool) -> str:
    """Return a digest of what a report depends on."""
    known = hashlib.sha256(str(tokenizer.chat_template).encode())
    for part in (
        len(tokenizer),
        type(tokenizer).__name__,
        tokenizer.special_tokens_map,
        takes_images,
    ):
        known.update(f"\0{part}".encode())
    sample = "The same prefix, another suffix: 42 rivers, and <tool_call> or </think>."
    known.update(str(tokenizer(sample, add_special_tokens=False)["input_ids"]).encode())
    return known.hexdigest()
