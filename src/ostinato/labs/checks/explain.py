"""Checks of lab 8: reasons, and spans that sum to the prompt."""

from itertools import product
from typing import Any

from ostinato.labs.mistakes import (
    CheckList,
    Mistake,
    Story,
    expect_list,
    expect_type,
    letters,
    texts,
    tokens,
)
from ostinato.observe.prompt_diff import num_alike

CHECKS = CheckList()


def _history(earlier: list[Any]) -> list[str]:
    if not earlier:
        return ["no request before it"]
    return [
        f"{one.name}{f' (tenant {one.tenant})' if one.tenant else ''}: "
        f"{letters(one.tokens)}, {one.num_kept} tokens still cached"
        for one in earlier
    ]


def _drawn(prompt: str, spans: list[Any]) -> list[str]:
    """Draw spans below the prompt's letters."""
    lines = [f"prompt  {prompt}"]
    for span in spans[:6]:
        mark = " " * span.start + "^" * max(0, span.stop - span.start)
        about = f" ({span.other})" if span.other else ""
        lines.append(
            f"        {mark:{len(prompt)}}  {span.reason}{about} {span.start}..{span.stop}"
        )
    return lines


@CHECKS.add("The nearest prompt", 1)
def check_nearest(lab: Any, story: Story) -> None:
    """The longest common prefix; the newest of equals; none without a token."""
    known = {"one": "ABCX", "two": "ABCDEX", "three": "ABCDEY", "four": "ABZ"}
    earlier = [lab.Earlier(name, tokens(text), 4) for name, text in known.items()]
    for prompt, right in (("ABCDEFG", "three"), ("ABCW", "three"), ("ABZW", "four"), ("QRS", None)):
        call = story.begin(f"nearest({prompt})", *_history(earlier))
        near = lab.nearest(tokens(prompt), earlier)
        expect_type(near, (lab.Earlier, type(None)), call, "an Earlier, or None")
        name = None if near is None else near.name
        picture = [*story[:-1], f"{call}  ->  {name}, not {right}"]
        if name == right:
            continue
        if right is None:
            what = "A prompt that shares no token is near."
            raise Mistake("near-without-a-token", what, picture)
        if name is None:
            raise Mistake("nearest-missed", "A request shares tokens, and none is named.", picture)
        chosen = num_alike(prompt, letters(near.tokens))
        longest = max(num_alike(prompt, text) for text in known.values())
        if chosen == longest:
            what = "Of two that share as much, the older one is named."
            raise Mistake("oldest-of-equals", what, picture, "The newest is the likeliest.")
        what = "Another request has a longer prefix in common."
        raise Mistake("not-the-nearest", what, picture)


@CHECKS.add("Known, and not found", 2)
def check_known(lab: Any, story: Story) -> None:
    """Cut at what was still cached."""
    for start, stop, kept in product(range(0, 5, 2), (4, 8), range(0, 10, 2)):
        if start > stop:
            continue
        near = lab.Earlier("one", tokens("ABCDEFGH"), kept)
        call = story.begin(f"known_spans({start}, {stop}), {kept} tokens still cached")
        spans = expect_list(lab.known_spans(start, stop, near), lab.Span, call)
        reasons = ["?"] * stop
        for span in spans:
            for at in range(max(0, span.start), min(stop, span.stop)):
                reasons[at] = span.reason
        right = ["block boundary" if at < kept else "evicted" for at in range(stop)]
        picture = [call, *_drawn("ABCDEFGH", spans)]
        if any(span.stop > stop or span.start < start for span in spans if span.start < span.stop):
            what = "A span leaves the tokens that it was to explain."
            raise Mistake("span-too-wide", what, picture)
        for at in range(start, stop):
            if reasons[at] == right[at]:
                continue
            if reasons[at] == "?":
                raise Mistake("known-tokens-left-out", f"Token {at} has no reason.", picture)
            if right[at] == "evicted":
                what = f"Token {at} was evicted, and is explained as a block boundary."
                raise Mistake("eviction-not-seen", what, picture)
            what = f"Token {at} is still cached, and is explained as evicted."
            raise Mistake("evicted-although-cached", what, picture)
        if any(span.other != "one" for span in spans if span.start < span.stop):
            raise Mistake("request-not-named", "Whose tokens they were is missing.", picture)


@CHECKS.add("New tokens", 3)
def check_new(lab: Any, story: Story) -> None:
    """Differs, or never seen."""
    near = lab.Earlier("one", tokens("ABCD"), 4)
    for start, which, right in ((2, near, ("differs", "one")), (4, near, ("never seen", "one")),
                                (0, None, ("never seen", ""))):  # fmt: skip
        call = story.begin(f"new_span({start}, 6, {'one: ABCD' if which else 'None'})")
        span = expect_type(lab.new_span(start, 6, which), lab.Span, call)
        picture = [f"{call}  ->  {span.reason} {span.other}", f"not {' '.join(right)}"]
        if (span.start, span.stop) != (start, 6):
            raise Mistake("span-too-wide", "The span is not the one that was asked for.", picture)
        if span.reason != right[0]:
            kind = "difference-not-seen" if right[0] == "differs" else "differs-from-nothing"
            what = "The nearest request " + ("goes on" if start == 2 else "ends before, or is none")
            raise Mistake(kind, what + ": the reason is another.", picture)
        if span.other != right[1]:
            raise Mistake("request-not-named", "The nearest request is not named.", picture)


@CHECKS.add("Spans that sum to the prompt", 4)
def check_merged(lab: Any, story: Story) -> None:
    """No empty span, no two neighbours alike, all tokens covered."""
    spans = [lab.Span(0, 0, "hit"), lab.Span(0, 2, "hit"), lab.Span(2, 4, "hit"),
             lab.Span(4, 4, "evicted", "one"), lab.Span(4, 5, "evicted", "two"),
             lab.Span(5, 6, "evicted", "one")]  # fmt: skip
    result = expect_list(lab.merged(spans), lab.Span, "merged(spans)")
    shown = [f"{s.start}..{s.stop} {s.reason} {s.other}" for s in result]
    picture = ["hit 0..0, 0..2, 2..4; evicted 4..4 one, 4..5 two, 5..6 one", "->", *shown]
    if any(span.start >= span.stop for span in result):
        raise Mistake("empty-span-left", "A span without a token is left.", picture)
    if sum(span.stop - span.start for span in result) != 6:
        raise Mistake("tokens-lost-in-merging", "The spans no longer cover the 6 tokens.", picture)
    if len(result) == 2:
        what = "Neighbours that are about different requests are joined."
        raise Mistake("joined-across-requests", what, picture)
    if len(result) != 3:
        what = "Neighbours with one reason and one request are not joined."
        raise Mistake("neighbours-not-joined", what, picture)


@CHECKS.add("Whole explanations", 1, 2, 3, 4, 5)
def check_explain(lab: Any, story: Story) -> None:
    """Every short prompt, after a few histories, against reasons token by token."""
    histories = [
        [], [("one", "AB", 2, "")], [("one", "ABAB", 2, "")], [("one", "ABBA", 4, "")],
        [("one", "ABAB", 4, "t")], [("one", "AB", 2, ""), ("two", "ABAB", 4, "t")],
        [("one", "ABAA", 4, ""), ("two", "AB", 2, "")],
    ]  # fmt: skip
    for history, prompt in product(histories, texts(5, shortest=2)):
        earlier = [lab.Earlier(name, tokens(t), kept, who) for name, t, kept, who in history]
        longest = max([min(kept, num_alike(prompt, t)) for _, t, kept, who in history if not who],
                   default=0)  # fmt: skip
        for num_hit in sorted({0, min(longest, len(prompt) - 1) // 2 * 2}):
            call = story.begin(f"explain({prompt}, {num_hit} hit)", *_history(earlier))
            spans = expect_list(lab.explain(tokens(prompt), num_hit, earlier), lab.Span, call)
            _check_sum(prompt, spans, story[:-1])
            _check_reasons(prompt, num_hit, history, spans, story[:-1])


def _check_sum(prompt: str, spans: list[Any], history: list[str]) -> None:
    picture, at = [*history, *_drawn(prompt, spans)], 0
    for span in spans:
        if span.start > at:
            what = f"Tokens {at}..{span.start} have no reason."
            raise Mistake("gap", what, picture, "Spans have to sum to the prompt (law 10).")
        if span.start < at:
            what = f"Tokens {span.start}..{at} have two reasons."
            raise Mistake("overlap", what, picture, "Spans have to sum to the prompt (law 10).")
        at = span.stop
    if at != len(prompt):
        what = f"The spans end at token {at}, and the prompt has {len(prompt)}."
        raise Mistake("does-not-sum", what, picture, "Spans have to sum to the prompt (law 10).")


def _check_reasons(
    prompt: str, num_hit: int, history: list[tuple[str, str, int, str]], spans: list[Any],
    lines: list[str],
) -> None:  # fmt: skip
    reasons = [span.reason for span in spans for _ in range(span.start, span.stop)]
    own = max([num_alike(prompt, t) for _, t, _, who in history if not who], default=0)
    others = max([num_alike(prompt, t) for _, t, _, who in history if who], default=0)
    picture = [*lines, f"{num_hit} tokens hit", *_drawn(prompt, spans)]
    if any((reason == "hit") != (at < num_hit) for at, reason in enumerate(reasons)):
        what = f"{num_hit} tokens hit, and {reasons.count('hit')} are explained as hits."
        raise Mistake("hits-do-not-agree", what, picture)
    if any(span.other for span in spans if span.reason == "other tenant") or any(
        who and span.other == name for name, _, _, who in history for span in spans
    ):
        what = "Another tenant's request is named."
        raise Mistake("tells-of-another-tenant", what, picture, "A name is already too much.")
    whole = own >= len(prompt) or num_hit == len(prompt) - 1
    if whole != (reasons[-1] == "last token"):
        which = (
            "tokens before the last one hit" if num_hit == len(prompt) - 1 else "tokens are known"
        )
        what = f"All {which}: the last is computed because it is the last (law 4)."
        if not whole:
            what = "The last token differs or is new, and is explained as the last token."
        raise Mistake("last-token", what, picture)
    known = max(own, num_hit)
    for at in range(num_hit, len(prompt) - whole):
        if at < known and reasons[at] not in ("evicted", "block boundary"):
            what = f"Token {at} was known to this tenant, and is explained as {reasons[at]!r}."
            raise Mistake("known-explained-as-new", what, picture)
        if known <= at < others and reasons[at] != "other tenant":
            what = f"Token {at} is known to another tenant alone."
            raise Mistake("other-tenant-not-seen", what, picture)
        if at >= max(known, others) and reasons[at] not in ("differs", "never seen"):
            what = f"Token {at} is new, and is explained as {reasons[at]!r}."
            raise Mistake("new-explained-as-known", what, picture)
