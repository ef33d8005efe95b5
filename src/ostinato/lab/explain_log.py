"""Why did each request of a log miss, or each of a recorded run?

Both are put to the real cache; no model runs. A log of requests is served one after the other,
with its own times; a recording is replayed on the real scheduler, step by step.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from ostinato.assembly import build_cache
from ostinato.core.config import CacheConfig
from ostinato.core.errors import PromptTooLong
from ostinato.core.identity import Identity, PrefixKey
from ostinato.core.request import RequestContext
from ostinato.lab.recording import Recording
from ostinato.lab.replay import Replay
from ostinato.lab.request_log import Encode, LoggedRequest, Render, fields_of_body
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation
from ostinato.observe.prompt_diff import Decode


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What turns requests into tokens and back.

    Attributes:
        encode: From text to ids.
        render: From a body to text.
        decode: From ids to text; None shows no text.
    """

    encode: Encode
    render: Render
    decode: Decode | None = None


def explain_log(
    requests: Sequence[LoggedRequest],
    tokenizer: Tokenizer,
    config: CacheConfig,
    lines: Collection[int] | None = None,
) -> Iterator[Explanation]:
    """Serve a log's requests one after the other, and explain each when it was admitted.

    Args:
        requests: In order; those without a time come a second apart.
        tokenizer: Of the model that they were sent to.
        config: Of the cache.
        lines: Of the requests that are wanted; the others are served alone. None wants all.

    Raises:
        PromptTooLong: A prompt does not fit the cache.

    Cost: of each that is explained a comparison with all that are remembered.
    """
    now_s = 0.0
    cache = build_cache(config, lambda: now_s)
    manager = cache.manager
    for request in requests:
        now_s = now_s + 1 if request.at_s is None else max(now_s, request.at_s)
        tokens = tokenizer.encode(tokenizer.render(request.body))
        if not tokens:
            continue
        key = PrefixKey(Identity(tenant=request.tenant.encode()), tokens)
        name = f"line {request.line}"
        context = RequestContext(name, fields=fields_of_body(request.body))
        admitted = manager.admit(key, manager.match(key), context=context)
        if admitted is None:
            raise PromptTooLong(
                f"line {request.line}: the prompt has {len(tokens)} tokens, and the cache "
                f"{config.num_slots}: raise num_blocks"
            )
        table, _ = admitted
        if lines is None or request.line in lines:
            asker = Viewer(administrator=True, decode=tokenizer.decode)
            yield explain(cache.history, name, asker)
        manager.publish(table, len(key))
        manager.commit([table])
        manager.release(table, len(key))


def explain_recording(recording: Recording) -> list[Explanation]:
    """Replay a recorded run, and explain every request that was admitted.

    Tokens are pseudonyms there, so that differences have a place and no text.
    """
    most = max(1, 4 * len(recording.added))
    header = recording.header
    cache = replace(header.cache, keep_explanations=most)
    header = msgspec.structs.replace(header, cache=cache)
    replay = Replay(replace(recording, header=header))
    done = replay.run()
    chronicle, asker = replay.cache.history, Viewer(administrator=True)
    names = [str(request.number) for request in done if request.replayed is not None]
    known = [name for name in names if chronicle.record_of(name) is not None]
    return [_named(explain(chronicle, name, asker)) for name in known]


def _named(explanation: Explanation) -> Explanation:
    """Call requests by more than their number."""

    def name(number: str | None) -> str | None:
        return f"request {number}" if number is not None and number.isdigit() else number

    stretches = tuple(
        replace(stretch, request=name(stretch.request), by=name(stretch.by))
        for stretch in explanation.stretches
    )
    whose = name(explanation.request_id) or ""
    return replace(explanation, request_id=whose, stretches=stretches)
