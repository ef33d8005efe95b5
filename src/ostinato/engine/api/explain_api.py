"""Explains a request of an engine.

The cache's history has what was admitted and evicted; the engine adds the tokenizer and what tiers
had, and the output adds the tokens if the history does not keep them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ostinato.core.tokens import pack_tokens
from ostinato.engine.ledger.continuation import DroppedReasoning, TurnReport
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.image_prompts import decode_prompt
from ostinato.engine.requests.outputs import RequestOutput
from ostinato.engine.tiers.load_note import LoadNote
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation, MissReason, PromptSpan, SpanOutcome
from ostinato.tiers.port import LoadFault

_PLACES = {"remote": "remote server"}

MAX_CHANCE_TOKENS = 2
"""Tokens that dropped reasoning and what stands in its place may begin with alike."""

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
        request: Its output, or its id.
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
    explanation = explain(engine.cache.history, name, viewer)
    prepared = engine.rebase.rows_used_by(name)
    explanation = replace(explanation, wait=engine.waits.wait_of(name), num_prepared=prepared)
    report = None if engine.prompts.turns is None else engine.prompts.turns.reports.of(name)
    explanation = explanation if report is None else with_turns(explanation, report)
    note = None if engine.tiers is None else engine.tiers.note_of(name)
    return explanation if note is None else with_load(explanation, note)


def with_turns(explanation: Explanation, report: TurnReport) -> Explanation:
    """Return an explanation with what the ledger put back, and what the template dropped."""
    spans = tuple(_dropped(span, report.dropped) for span in explanation.spans)
    return replace(
        explanation,
        spans=spans,
        num_restored_turns=report.num_restored,
        num_restored_tokens=report.num_restored_tokens,
    )


def _dropped(span: PromptSpan, dropped: Sequence[DroppedReasoning]) -> PromptSpan:
    """Name the reasoning that the template dropped where a span begins, if it did."""
    here = [drop for drop in dropped if 0 <= span.start - drop.place <= MAX_CHANCE_TOKENS]
    if span.reason not in (MissReason.NEVER_SEEN, MissReason.DIFFERS) or not here:
        return span
    drop = here[-1]
    num = f"{drop.num_tokens:,} token{'s' * (drop.num_tokens != 1)}"
    cause = f"the reasoning of message {drop.message}: {num} from token {drop.place:,} on"
    return replace(span, reason=MissReason.TEMPLATE_DROPPED, setting=cause)


def with_load(explanation: Explanation, note: LoadNote) -> Explanation:
    """Return an explanation with the spans that a tier had."""
    parts = [
        PromptSpan(start, stop, SpanOutcome.LOADED, setting=_PLACES.get(tier, tier))
        for tier, start, stop in note.loaded
    ]
    if note.tier_end > note.end:
        parts.append(_not_loaded(note))
    spans = list(explanation.spans)
    for part in parts:
        spans = [cut for span in spans for cut in _replaced(span, part)]
    return replace(explanation, spans=tuple(spans))


def _not_loaded(note: LoadNote) -> PromptSpan:
    fault = LoadFault.MISSING if note.fault is None else note.fault
    reason = _REASONS.get(fault, MissReason.UNREADABLE)
    if note.is_cheaper_to_compute:
        reason = MissReason.CHEAPER
    tier = _PLACES.get(note.tier, note.tier)
    return PromptSpan(note.end, note.tier_end, SpanOutcome.COMPUTED, reason, setting=tier)


def _replaced(span: PromptSpan, part: PromptSpan) -> list[PromptSpan]:
    """Replace a span where a part overlaps it, if both were computed or neither.

    The last token is always computed, and keeps its reason.
    """
    first, last = max(part.start, span.start), min(part.stop, span.stop)
    computed = SpanOutcome.COMPUTED
    is_mixed = (span.outcome is computed) != (part.outcome is computed)
    if first >= last or is_mixed or span.reason is MissReason.LAST_TOKEN:
        return [span]
    cut = replace(part, start=first, stop=last)
    spans = replace(span, stop=first), cut, replace(span, start=last)
    return [one for one in spans if one.num_tokens]
