"""Whatever happens, an explanation covers its prompt and agrees with what was counted."""

from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import SpanOutcome
from tests.support.tiny_scheduler import tiny_scheduler

PROMPTS = st.text("AB", min_size=1, max_size=14)
REQUESTS = st.tuples(
    PROMPTS,
    st.sampled_from(["", "ann", "bob"]),
    st.integers(1, 4),
    st.sampled_from([{}, {}, {"cache_read": False}, {"cache_write": False}, {"n": 2}]),
)
EVENTS = st.lists(
    st.one_of(REQUESTS, st.sampled_from(["step", "step", "fail", "preempt", "reset", "erase"])),
    max_size=30,
)


@given(
    EVENTS,
    st.sampled_from(["radix", "hash"]),
    st.integers(6, 12),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([None, 4]),
    st.booleans(),
)
def test_explanations_cover_prompts_and_agree_with_what_was_counted(
    events, index, num_blocks, keep, chunk, seal_tails
):
    """Two letters, a few blocks, tenants, preemption, failure, reset, erasure."""
    tiny = tiny_scheduler(
        num_blocks,
        index=index,
        keep_explanations=keep,
        max_chunk_tokens=chunk,
        seal_tails=seal_tails,
    )
    count = 0
    for event in events:
        if isinstance(event, tuple):
            prompt, tenant, max_tokens, how = event
            tiny.add(f"request-{count}", prompt, tenant=tenant, max_tokens=max_tokens, **how)
            count += 1
        elif event == "preempt":
            tiny.preempt_all()
        elif event == "reset":
            tiny.reset()
        elif event == "erase":
            tiny.run()
            tiny.cache.admin.erase(b"ann")
        elif tiny.scheduler.has_work:
            tiny.failing_step() if event == "fail" else tiny.step()
        tiny.cache.history.check()
        agree(tiny)
    tiny.run()
    agree(tiny)


def agree(tiny) -> None:
    history = tiny.cache.history
    for record in list(history.records()):
        if not record.is_first:
            continue
        sequence = tiny.sequences[record.name]
        for administrator in (False, True):
            explanation = explain(history, record.name, Viewer(administrator, str))
            edges = [0, *(s.stop for s in explanation.spans)]
            assert [s.start for s in explanation.spans] == edges[:-1]
            assert edges == sorted(set(edges)) and edges[-1] == sequence.num_prompt_tokens
            hits = sequence.num_shared_tokens + sequence.num_copied_tokens
            assert explanation.num_cached_tokens == hits
            assert explanation.num_copied_tokens == sequence.num_copied_tokens
            for span in explanation.spans:
                assert (span.reason is None) == (span.outcome is not SpanOutcome.COMPUTED)
            others = {v.name for v in history.records() if v.identity != record.identity}
            assert not others & {s.request for s in explanation.spans}
