"""Explains a request of an engine.

The history of the cache knows what was admitted and lost; the engine adds the tokenizer, and the
output adds tokens that the history was told not to keep.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ostinato.core.tokens import pack_tokens
from ostinato.engine.engine import Engine
from ostinato.engine.image_prompts import decode_prompt
from ostinato.engine.load_note import LoadNote
from ostinato.engine.outputs import RequestOutput
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation, MissReason, PromptSpan, SpanOutcome
from ostinato.tiers.port import LoadFault

_PLACES = {"remote": "remote server"}

_REASONS = {
    LoadFault.CHECKSUM: MissReason.CHECKSUM,
    LoadFault.DEADLINE: MissReason.TOO_SLOW,
}


def explain_request(
    engine: Engine,
    request: RequestOutput | str,
    administrator: bool,
    cache_salt: str | None = None,
) -> Explanation:
    """Explain which tokens of a request's prompt hit, and why the others missed.

    Args:
        engine: The engine that served it.
        request: Its output, or its name.
        administrator: Whether other tenants may be mentioned.
        cache_salt: Of the tenant that asks, which sees its own requests only; None sees all.

    Raises:
        RequestError: It is not remembered, or not the tenant's.
    """
    tokenizer = engine.loaded.tokenizer
    decode = None
    if tokenizer is not None:
        spell = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

        def decode(ids: list[int]) -> str:
            return decode_prompt(ids, spell, engine.loaded.vision)

    name = request if isinstance(request, str) else request.request_id
    prompt = b""
    if not isinstance(request, str):
        prompt = pack_tokens(request.prompt_token_ids).tobytes()
    tenant = None if cache_salt is None else cache_salt.encode()
    viewer = Viewer(administrator, decode, prompt, tenant, engine.adapters.names)
    found = explain(engine.cache.history, name, viewer)
    note = None if engine.tiers is None else engine.tiers.note_of(name)
    return found if note is None else with_load(found, note)


def with_load(explanation: Explanation, note: LoadNote) -> Explanation:
    """Return an explanation that also tells what a tier had."""
    parts = [(*part, True) for part in note.loaded]
    if note.found > note.end:
        parts.append((note.tier, note.end, note.found, False))
    spans = list(explanation.spans)
    for tier, start, stop, is_loaded in parts:
        told = _loaded(tier) if is_loaded else _not_loaded(tier, note)
        spans = [cut for span in spans for cut in _told_between(span, start, stop, told)]
    return replace(explanation, spans=tuple(spans))


def _loaded(tier: str) -> PromptSpan:
    return PromptSpan(0, 0, SpanOutcome.LOADED, setting=_PLACES.get(tier, tier))


def _not_loaded(tier: str, note: LoadNote) -> PromptSpan:
    tier = _PLACES.get(tier, tier)
    if note.is_cheaper_to_compute:
        return PromptSpan(0, 0, SpanOutcome.COMPUTED, MissReason.CHEAPER, setting=tier)
    fault = LoadFault.MISSING if note.fault is None else note.fault
    reason = _REASONS.get(fault, MissReason.UNREADABLE)
    return PromptSpan(0, 0, SpanOutcome.COMPUTED, reason, setting=tier)


def _told_between(
    span: PromptSpan, start: int, stop: int, told: PromptSpan
) -> Iterator[PromptSpan]:
    """Cut a span at both ends of a part, and tell of the part what became of it.

    What was computed was not loaded, and the other way round; the last token always is computed.
    """
    first, last = max(start, span.start), min(stop, span.stop)
    was_computed = told.outcome is SpanOutcome.COMPUTED
    fits = was_computed == (span.outcome is SpanOutcome.COMPUTED)
    if first >= last or not fits or span.reason is MissReason.LAST_TOKEN:
        yield span
        return
    for one in (
        replace(span, stop=first), replace(told, start=first, stop=last), replace(span, start=last)
    ):  # fmt: skip
        if one.num_tokens:
            yield one
