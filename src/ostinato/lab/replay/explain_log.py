"""Explains the misses of each request of a log or of a recorded run.

Both run through the real cache, without a model. The requests of a log run one at a time, at their
times; a recording is replayed on the real scheduler, step by step.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from ostinato.assembly import build_cache
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.errors import PromptTooLong
from ostinato.lab.log.request_log import Encode, LoggedRequest, Render
from ostinato.lab.replay.replay import Replay
from ostinato.lab.traces.recording import Recording
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation, MissReason, PromptSpan
from ostinato.observe.prompt_diff import Decode
from ostinato.settings import PrefixCacheConfig


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Functions that turn requests into tokens and back.

    Attributes:
        encode: From text to ids.
        render: From a request to text.
        decode: From ids to text; None without text.
    """

    encode: Encode
    render: Render
    decode: Decode | None = None


def explain_log(
    requests: Iterable[LoggedRequest],
    tokenizer: Tokenizer,
    config: PrefixCacheConfig,
    lines: Collection[int] | None = None,
) -> Iterator[Explanation]:
    """Run a log's requests one after another, and explain them at admission.

    Requests without a time are a second apart. ``lines`` are those of the requests to explain; None
    explains all.

    Raises:
        PromptTooLong: A prompt does not fit the cache.

    Cost: each explanation compares the prompt with all remembered ones.
    """
    now_s = 0.0
    cache = build_cache(config, lambda: now_s)
    manager = cache.manager
    for request in requests:
        now_s = now_s + 1 if request.at_s is None else max(now_s, request.at_s)
        tokens = tokenizer.encode(tokenizer.render(request))
        if not tokens:
            continue
        key = PrefixKey(identity_of(request), tokens)
        if len(tokens) > config.num_slots:
            raise PromptTooLong(
                f"line {request.line}: the prompt has {len(tokens)} tokens, and the cache "
                f"{config.num_slots}: raise num_blocks"
            )
        name = f"line {request.line}"
        context = RequestContext(name, prompt_sections=request.prompt.fields())
        admitted = manager.admit(key, manager.match(key), context=context)
        assert admitted is not None, "nothing else holds a block"
        table, _ = admitted
        if lines is None or request.line in lines:
            viewer = Viewer(administrator=True, decode=tokenizer.decode)
            yield _of_models(explain(cache.history, name, viewer))
        manager.publish(table, len(key))
        manager.commit()
        manager.release(table, len(key))


def identity_of(request: LoggedRequest) -> Identity:
    """Return the identity of a request: its tenant and model."""
    return Identity(weights=request.model.encode(), tenant=request.tenant.encode())


def _of_models(explanation: Explanation) -> Explanation:
    """Name other weights another model, as they are in a log."""

    def renamed(span: PromptSpan) -> PromptSpan:
        is_other = span.reason is MissReason.OTHER_WEIGHTS
        return replace(span, reason=MissReason.OTHER_MODEL) if is_other else span

    return replace(explanation, spans=tuple(map(renamed, explanation.spans)))


def explain_recording(recording: Recording) -> list[Explanation]:
    """Replay a recorded run, and explain every request that was admitted.

    Its tokens are pseudonyms: a difference has a position, but no text.
    """
    max_records = max(1, 4 * len(recording.added))
    header = recording.header
    cache = replace(header.cache, keep_explanations=max_records)
    header = msgspec.structs.replace(header, cache=cache)
    replay = Replay(replace(recording, header=header))
    done = replay.run()
    history, viewer = replay.cache.history, Viewer(administrator=True)
    names = [str(request.number) for request in done if request.replayed is not None]
    known = [name for name in names if history.record_of(name) is not None]
    return [_named(explain(history, name, viewer)) for name in known]


def _named(explanation: Explanation) -> Explanation:
    """Write request ids as ``request 7`` instead of the bare number."""

    def name(number: str | None) -> str | None:
        return f"request {number}" if number is not None and number.isdigit() else number

    spans = tuple(
        replace(span, request=name(span.request), by=name(span.by)) for span in explanation.spans
    )
    other_request = name(explanation.request_id) or ""
    return replace(explanation, request_id=other_request, spans=spans)
