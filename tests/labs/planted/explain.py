"""Mistakes of lab 8: the kind that the check names, and the change that plants it."""

PLANTED = {
    "not-the-nearest": ("if count and count >= longest:", "if count:"),
    "oldest-of-equals": ("if count and count >= longest:", "if count and count > longest:"),
    "near-without-a-token": ("if count and count >= longest:", "if count >= longest:"),
    "nearest-missed": ("best, longest = each, count", "longest = count"),
    "eviction-not-seen": ("edge = min(max(start, near.num_kept), stop)", "edge = stop"),
    "evicted-although-cached": ("edge = min(max(start, near.num_kept), stop)", "edge = start"),
    "span-too-wide": ("edge = min(max(start, near.num_kept), stop)", "edge = near.num_kept"),
    "known-tokens-left-out": ('        Span(edge, stop, "evicted", near.name),\n', ""),
    "difference-not-seen": ('"differs" if differs else "never seen"', '"never seen"'),
    "differs-from-nothing": ('"differs" if differs else "never seen"', '"differs"'),
    "request-not-named": ('seen", near.name)', 'seen")'),
    "empty-span-left": ("if span.start >= span.stop:", "if span.start > span.stop:"),
    "neighbours-not-joined": (
        "if last is not None and",
        "if last is not None and not span.start and",
    ),
    "joined-across-requests": (
        "(last.reason, last.other) == (span.reason, span.other)",
        "last.reason == span.reason",
    ),
    "tokens-lost-in-merging": ("joined[-1] = replace(last, stop=span.stop)", "pass"),
    "does-not-sum": ("[*spans, new_span(elsewhere, size, rest)]", "spans"),
    "gap": ('    spans.append(Span(known, elsewhere, "other tenant"))\n', ""),
    "overlap": ("new_span(elsewhere,", "new_span(num_hit,"),
    "hits-do-not-agree": ('spans = [Span(0, num_hit, "hit")]', "spans = []\n    num_hit = 0"),
    "tells-of-another-tenant": ("[each for each in earlier if each.tenant == tenant]", "earlier"),
    "last-token": ('size, "last token")', 'size, "evicted")'),
    "known-explained-as-new": (
        "spans += known_spans(num_hit, max(stop, num_hit), near)",
        'spans.append(Span(num_hit, max(stop, num_hit), "never seen"))',
    ),
    "other-tenant-not-seen": ('elsewhere, "other tenant")', 'elsewhere, "never seen")'),
}
