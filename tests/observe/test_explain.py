"""Every reason of a miss is named, without a tensor: law 10 on the scheduler alone.

The public interfaces are tested in ``tests/engine/api/test_explain.py``; adapters and images are
asked here.
"""

from dataclasses import replace

import pytest

from ostinato.assembly import build_cache
from ostinato.core.errors import RequestError
from ostinato.core.identity import Identity, ImageSpan, PrefixKey
from ostinato.observe.explain import Viewer, explain
from ostinato.observe.explanation import Explanation, SpanOutcome
from ostinato.settings import PrefixCacheConfig, TenantShare, WindowConfig
from tests.support.cache.tiny_scheduler import TinyScheduler, make_request, tiny_scheduler


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def told(tiny: TinyScheduler, name: str, administrator: bool = False) -> Explanation:
    """An explanation that agrees with what was counted, whatever else is asserted of it."""
    explanation = explain(tiny.cache.history, name, Viewer(administrator, decode))
    assert explanation.spans[0].start == 0
    for before, after in zip(explanation.spans, explanation.spans[1:], strict=False):
        assert before.stop == after.start
    assert all(span.num_tokens > 0 for span in explanation.spans)
    shared, copied = tiny.hits(name)
    assert (explanation.num_cached_tokens, explanation.num_copied_tokens) == (
        shared + copied,
        copied,
    )
    return explanation


def picture(explanation: Explanation) -> str:
    """``"0-3 hit, 4-5 copied, 6-7 differs first"``."""
    return ", ".join(
        " ".join(
            [f"{s.start}-{s.stop - 1}", s.reason or s.outcome] + ([s.request] if s.request else [])
        )
        for s in explanation.spans
    )


def served(tiny: TinyScheduler, **prompts: str) -> None:
    """Serve prompts one after another."""
    for name, prompt in prompts.items():
        tiny.serve(name, prompt)


def test_the_first_prompt_was_never_seen(tiny):
    served(tiny, first="ABCDEFGH")
    assert picture(told(tiny, "first")) == "0-7 never seen"


def test_a_prompt_that_parts_in_the_middle_of_a_block(tiny):
    """ABCD hits, EF is copied, XY differs; both sides stand above a caret."""
    served(tiny, first="ABCDEFGHIJ", second="ABCDEFXYIJ")
    explanation = told(tiny, "second")
    assert picture(explanation) == "0-3 hit, 4-5 copied, 6-9 differs first"
    assert explanation.difference is not None
    assert explanation.difference.lines == (
        "      first  ABCDEFGHIJa",
        "this prompt  ABCDEFXYIJ",
        "                   ^ token 6 in line 1, column 7",
    )
    assert explanation.difference.num_alike_after == 2


def test_a_prompt_that_goes_on_where_another_ends(tiny):
    """The answer's only token was sampled and never computed."""
    served(tiny, first="ABCDEF", second="ABCDEFaXYZ")
    assert picture(told(tiny, "second")) == (
        "0-3 hit, 4-5 copied, 6-6 never computed first, 7-9 never seen first"
    )


def test_the_last_token_is_always_computed(tiny):
    served(tiny, first="ABCDEFGH", second="ABCDEFGH")
    assert picture(told(tiny, "second")) == "0-3 hit, 4-6 copied, 7-7 last token"


def test_an_evicted_prompt_knows_when_by_whom_and_how_long_unused(index):
    """A pool of four blocks: the second prompt takes all of them."""
    tiny = tiny_scheduler(num_blocks=4, index=index)
    served(tiny, first="ABCDEFGHIJKLMNO", second="0123456789!?+-*/", third="ABCDEFGHIJKLMNO")
    [lost, last] = told(tiny, "third").spans
    assert (lost.reason, lost.request, lost.by) == ("evicted", "first", "second")
    assert (lost.idle_s, lost.ago_s) == (0.0, 1.0)
    assert (lost.start, lost.stop, last.reason) == (0, 14, "last token")
    assert lost.sentence == (
        "computed for first, and evicted for second 1 s earlier, 0 ms after their last use"
    )


def test_of_a_prompt_whose_tail_was_evicted_the_head_hits(index):
    tiny = tiny_scheduler(num_blocks=5, index=index)
    served(tiny, first="ABCDEFGHIJKLMNOP", second="012345", third="ABCDEFGHIJKLMNOPQ")
    assert picture(told(tiny, "third")).startswith("0-11 hit, 12-15 evicted first")


def test_a_reset_is_told_from_an_eviction(tiny):
    served(tiny, first="ABCDEFGH")
    tiny.reset()
    served(tiny, second="ABCDEFGH")
    assert picture(told(tiny, "second")) == "0-6 removed first, 7-7 last token"


def test_what_another_holds_in_a_block_that_is_not_full_is_in_flight(tiny):
    """EF lies in a private block until the first one ends and seals it."""
    tiny.add("first", "ABCDEF", max_tokens=8)
    tiny.step()
    served(tiny, second="ABCDEFXY")
    assert picture(told(tiny, "second")) == "0-3 hit, 4-5 in flight first, 6-7 differs first"


def test_who_shares_a_step_was_waited_for(tiny):
    tiny.add("first", "ABCDEFGHI")
    served(tiny, second="ABCDEFGHX")
    assert picture(told(tiny, "second")) == "0-7 waited first, 8-8 differs first"


def test_who_waits_for_a_long_prompt_says_for_how_much(index):
    """ABCD was cached before; the rest is computed in chunks while the third one waits."""
    tiny = tiny_scheduler(index=index, max_chunk_tokens=4)
    served(tiny, before="ABCDX")
    tiny.add("first", "ABCDEFGHIJKLMNOP")
    tiny.step()
    served(tiny, second="ABCDEFGHIJKLMNOP!")
    assert picture(told(tiny, "second")) == "0-7 hit, 8-15 waited first, 16-16 differs first"


def test_a_tail_that_is_not_sealed_ends_at_the_block_boundary(index):
    tiny = tiny_scheduler(index=index, seal_tails=False)
    served(tiny, first="ABCDEF", second="ABCDEFXY")
    assert picture(told(tiny, "second")) == "0-3 hit, 4-5 block boundary first, 6-7 differs first"


def test_another_adapter_shares_nothing(tiny):
    for name in ("first", "second"):
        request = make_request(name, "ABCDEFGHXY")
        tiny.add_request(replace(request, identity=Identity(adapter=name.encode())))
        tiny.run()
    assert picture(told(tiny, "second")) == "0-8 other adapter first, 9-9 last token"


def test_another_image_shares_what_comes_before_it(tiny):
    tiny.serve("cat", "ABCDE####F", images=(ImageSpan(b"cat", 5, 4),))
    tiny.serve("dog", "ABCDE####F", images=(ImageSpan(b"dog", 5, 4),))
    assert picture(told(tiny, "dog")) == "0-3 hit, 4-4 copied, 5-8 other image cat, 9-9 last token"


def test_new_weights_share_nothing_with_the_old_ones(tiny):
    served(tiny, first="ABCDEFGH")
    tiny.cache.admin.new_epoch()
    served(tiny, second="ABCDEFGH")
    # What was computed before is forgotten at once, so that nothing of it is cached any more.
    assert picture(told(tiny, "second")) == "0-6 other weights first, 7-7 last token"


def test_another_tenant_is_mentioned_to_administrators_alone_and_never_by_name(tiny):
    tiny.serve("anns", "ABCDEFGHIJ", tenant="ann")
    tiny.serve("bobs", "ABCDEFGHIJ", tenant="bob")
    assert picture(told(tiny, "bobs")) == "0-9 never seen"
    explanation = told(tiny, "bobs", administrator=True)
    assert picture(explanation) == "0-8 other tenant, 9-9 last token"
    assert "ann" not in str(explanation) + str(explanation.as_dict())


def test_who_was_evicted_for_another_tenant_does_not_learn_for_whom(index):
    tiny = tiny_scheduler(num_blocks=4, index=index)
    tiny.serve("bobs", "ABCDEFGHIJKLMNO", tenant="bob")
    tiny.serve("anns", "0123456789!?+-*/", tenant="ann")
    tiny.serve("again", "ABCDEFGHIJKLMNO", tenant="bob")
    assert told(tiny, "again").spans[0].by is None
    assert "anns" not in str(told(tiny, "again"))
    lost = told(tiny, "again", administrator=True).spans[0]
    assert (lost.reason, lost.by) == ("evicted", "a request of another tenant")


@pytest.mark.parametrize(
    ("how", "setting"),
    [({"cache_read": False}, "cache_read=False"), ({"prompt_logprobs": 0}, "prompt_logprobs=0")],
)
def test_who_may_not_read_is_told_which_setting_says_so(tiny, how, setting):
    served(tiny, first="ABCDEFGH")
    tiny.serve("second", "ABCDEFGH", **how)
    [span] = told(tiny, "second").spans
    assert (span.reason, span.setting, span.num_tokens) == ("switched off", setting, 8)


def test_without_a_cache_everything_is_switched_off():
    tiny = tiny_scheduler(enable_prefix_caching=False)
    served(tiny, first="ABCDEFGH", second="ABCDEFGH")
    [span] = told(tiny, "second").spans
    assert span.setting == "enable_prefix_caching=False"


def test_what_was_not_to_be_kept_is_not_compared_with(tiny):
    """It is never found or named, and its own explanation says why it is silent."""
    tiny.serve("secret", "ABCDEFGH", cache_write=False)
    served(tiny, second="ABCDEFXY")
    assert picture(told(tiny, "second")) == "0-3 not written secret, 4-7 never seen"
    assert picture(told(tiny, "secret")) == "0-7 not kept"
    prompt = make_request("", "ABCDEFGH").prompt_token_ids.tobytes()
    again = explain(tiny.cache.history, "secret", Viewer(prompt=prompt))
    assert picture(again) == "0-7 never seen"


def test_a_request_that_did_not_write_is_a_cause_of_its_own(tiny):
    """And not the difference to an unrelated prompt; while it runs, each token is known."""
    served(tiny, unrelated="QRSTUVWX")
    tiny.serve("secret", "ABCDEFGHIJ", cache_write=False)
    served(tiny, second="ABCDEFGHIJ")
    explanation = told(tiny, "second")
    assert picture(explanation) == "0-7 not written secret, 8-9 never seen"
    assert explanation.spans[0].setting == "cache_write=False"
    assert "kept out of the cache (cache_write=False)" in str(explanation)
    served(tiny, stranger="ABCDxxxx")
    assert "not written" not in picture(told(tiny, "stranger")), "second has written ABCD"


def test_what_did_not_write_is_told_to_its_own_tenant_alone(tiny):
    tiny.serve("secret", "ABCDEFGHIJ", cache_write=False, tenant="ann")
    tiny.serve("bobs", "ABCDEFGHIJ", tenant="bob")
    assert picture(told(tiny, "bobs")) == "0-9 never seen"


def test_a_loss_to_its_own_quota_says_so(index):
    """Others' blocks were free to take, but ann keeps two at most."""
    tiny = tiny_scheduler(
        index=index, tenant_shares={b"ann": TenantShare(quota=2)}, seal_tails=False
    )
    for name, prompt in (("first", "ABCDEFGH"), ("second", "QRSTUVWX"), ("again", "ABCDEFGH")):
        tiny.serve(name, prompt, tenant="ann")
    explanation = told(tiny, "again")
    assert explanation.spans[0].setting == "quota"
    assert "evicted for second because its tenant is at its own quota" in str(explanation)


def test_a_failed_step_computed_nothing(tiny):
    tiny.add("first", "ABCDEFGH")
    tiny.failing_step()
    served(tiny, second="ABCDEFGH")
    assert picture(told(tiny, "second")) == "0-6 never computed first, 7-7 last token"


def test_a_preempted_request_is_explained_as_it_was_first_admitted(tiny):
    served(tiny, first="ABCDEFGH")
    tiny.add("second", "ABCDEFXYZ", max_tokens=4)
    tiny.step()
    before = picture(told(tiny, "second"))
    tiny.preempt_all()
    tiny.run()
    assert picture(told(tiny, "second")) == before == "0-3 hit, 4-5 copied, 6-8 differs first"


def test_what_a_window_lost_was_evicted():
    """The time is unknown, so nothing is said of it."""
    tiny = tiny_scheduler(num_blocks=32, windows=(WindowConfig(5, 4),))
    served(tiny, first="ABCDEFGHIJKL", second="012345678901", third="abcdefghijkl")
    served(tiny, fourth="ABCDEFGHIJKLM")
    explanation = told(tiny, "fourth")
    assert explanation.reasons[0] == "evicted"
    assert explanation.spans[-2].ago_s is None


def test_the_memory_has_its_bounds_and_says_so():
    tiny = tiny_scheduler(keep_explanations=2)
    served(tiny, first="ABCDEFGH", second="ijklmnop", third="qrstuvwx", fourth="ABCDEFGHI")
    assert len(tiny.cache.history) == 2
    with pytest.raises(RequestError, match=r"last 2 \(keep_explanations\)"):
        told(tiny, "first")
    explanation = told(tiny, "fourth")
    assert picture(explanation) == "0-7 hit, 8-8 last token", "whose hits they are is forgotten"
    assert "2 earlier ones are no longer remembered" in str(explanation)


def test_long_prompts_are_bounded_by_their_tokens():
    """65,536 of them at least, and four times as many as the pool holds."""
    cache = build_cache(PrefixCacheConfig(num_blocks=8192, block_size=4))
    manager, history = cache.manager, cache.history
    for number in range(6):
        key = PrefixKey(Identity(), [number] * 30_000)
        table, _ = manager.admit(key, manager.match(key)) or (None, ())
        assert table is not None
        manager.publish(table, len(key))
        manager.commit()
        manager.release(table, len(key))
        history.check()
    assert len(history) == 4 * 4 * 8192 // 30_000


def test_without_a_memory_nothing_is_explained_and_nothing_kept():
    tiny = tiny_scheduler(keep_explanations=0)
    served(tiny, first="ABCDEFGH")
    with pytest.raises(RequestError, match="keep_explanations=0"):
        explain(tiny.cache.history, "first")
    assert len(tiny.cache.history) == 0


def test_an_unknown_request_is_refused_by_name():
    with pytest.raises(RequestError, match="'nobody' is not remembered"):
        explain(tiny_scheduler().cache.history, "nobody")


def test_the_page_and_the_values_say_the_same():
    tiny = tiny_scheduler()
    served(tiny, first="ABCDEFGHIJ", second="ABCDEFXYIJ")
    explanation = told(tiny, "second")
    values = explanation.as_dict()
    assert values["num_cached_tokens"] == 6
    assert [s["sentence"] for s in values["spans"]] == [s.sentence for s in explanation.spans]
    for span in explanation.spans:
        assert span.sentence in str(explanation)
    assert {s.outcome for s in explanation.spans} == {
        SpanOutcome.HIT,
        SpanOutcome.COPIED,
        SpanOutcome.COMPUTED,
    }


def test_behind_a_public_head_no_tenant_learns_who_computed_it(tiny):
    """Two tenants begin with one published prefix and arrive in one step."""
    publisher = Identity(tenant=b"\0head")
    request = make_request("publisher", "ABCDEFGH?")
    tiny.add_request(replace(request, identity=publisher))
    tiny.run()
    key = PrefixKey(publisher, list(map(ord, "ABCDEFGH")))
    tiny.cache.admin.publish(key)
    for name in ("anns", "bobs"):
        request = make_request(name, "ABCDEFGHxyz")
        identity = Identity(tenant=name.encode(), base=publisher, start=8)
        tiny.add_request(replace(request, identity=identity))
    tiny.run()
    assert picture(told(tiny, "bobs")) == "0-7 hit, 8-10 never seen"
    assert "anns" not in str(told(tiny, "bobs", administrator=True))
    tiny.serve("plain", "ABCDEFGHxyz", tenant="bobs")
    assert told(tiny, "plain").reasons == ("other public prefix", "last token")
