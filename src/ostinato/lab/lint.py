"""What breaks the prefixes of these requests, and what would mending it save?

Requests are grouped by template. For each group the remedies are tried on the real cache, best
first, each on top of those before it; what saves nothing is not reported::

    group 1 ─► as sent: 41,000 tokens computed
               timestamp mended: 9,000      ◄ a finding, 32,000 tokens
               + user mended: 8,100         ◄ a finding, 900 tokens
               + white space mended: 8,100    nothing saved: no finding
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from ostinato.lab.explain_log import Tokenizer
from ostinato.lab.lint_messages import message_remedies
from ostinato.lab.lint_remedies import Remedy, remedies_for
from ostinato.lab.lint_replay import Replayed, replay
from ostinato.lab.lint_templates import Group, group_requests
from ostinato.lab.request_log import LoggedRequest

LEAST_SAVING = 0.01
"""Share of a group's prompt tokens that a remedy must save: moving things about costs and saves
a few tokens by chance."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks prefixes, with what mending it saves on top of the findings before.

    Attributes:
        kind: What it is.
        group: First words of the template.
        num_requests: Requests of the template.
        where: Words before the place, if it is one.
        examples: Some of what changes there.
        advice: What to do.
        saved_tokens: Prompt tokens that the model would not have computed.
        saved_tokens_per_hour: The same by the log's time.
        before: Hit ratio without it, and with the findings before it mended.
        after: Hit ratio with it.
        behind: Kinds of the findings of the same template that are mended before.
    """

    kind: str
    group: str
    num_requests: int
    where: str
    examples: tuple[str, ...]
    advice: str
    saved_tokens: int
    saved_tokens_per_hour: float
    before: float
    after: float
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LintReport:
    """What a log's requests could save.

    Attributes:
        findings: The most saving first.
        num_requests: Requests of the log.
        num_groups: Templates.
        hours: Time that the log covers; an hour if it has no times.
        has_times: Whether it has.
        prompt_tokens: Of all requests.
        computed_tokens: As they were sent.
        mended_tokens: With all findings mended.
    """

    findings: tuple[Finding, ...]
    num_requests: int
    num_groups: int
    hours: float
    has_times: bool
    prompt_tokens: int
    computed_tokens: int
    mended_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return it in plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A group's requests with some remedies applied, and what they compute."""

    remedies: tuple[Remedy, ...]
    result: Replayed


def lint(
    requests: Sequence[LoggedRequest],
    tokenizer: Tokenizer,
    block_size: int = 16,
    progress: Callable[[int], None] | None = None,
) -> LintReport:
    """Find what breaks prefixes early.

    Args:
        requests: In the order in which they came.
        tokenizer: Of the model that they were sent to.
        block_size: Of the cache.
        progress: Is told of requests: some at a time when they were put into a group, and once
            more when all remedies of their group were tried.

    Cost: for each group at most a replay per pair of remedies that change something.
    """
    hours, has_times = _hours(requests)
    findings: list[Finding] = []
    prompts = computed = mended = 0
    tell = progress or (lambda _count: None)
    groups = group_requests(requests, tell)
    for group in groups:
        trials = _mend(group, tokenizer, block_size)
        findings += _findings(group, trials, hours)
        prompts += trials[0].result.prompt_tokens
        computed += trials[0].result.computed_tokens
        mended += trials[-1].result.computed_tokens
        tell(len(group.requests))
    findings.sort(key=lambda finding: -finding.saved_tokens)
    return LintReport(
        tuple(findings), len(requests), len(groups), hours, has_times, prompts, computed, mended
    )


def _mend(group: Group, tokenizer: Tokenizer, block_size: int) -> list[_Trial]:
    """Apply the best remedy, then the best on top of it, while one saves enough."""

    def attempt(chosen: tuple[Remedy, ...]) -> _Trial:
        requests = list(group.requests)
        for remedy in known:  # in their own order, whichever was chosen first
            if remedy in chosen and remedy.rewrite is not None:
                requests = remedy.rewrite(requests)
        keep_seams = any(remedy.rewrite is None for remedy in chosen)
        return _Trial(chosen, replay(requests, tokenizer, block_size, keep_seams))

    known = [*remedies_for(group), *message_remedies(group)] if len(group.requests) > 1 else []
    trials = [attempt(())]
    left = [remedy for remedy in known if _changes(remedy, group, known)]
    least = LEAST_SAVING * trials[0].result.prompt_tokens
    while left:
        best = min(
            (attempt((*trials[-1].remedies, remedy)) for remedy in left),
            key=lambda trial: trial.result.computed_tokens,
        )
        if trials[-1].result.computed_tokens - best.result.computed_tokens <= least:
            break
        trials.append(best)
        left.remove(best.remedies[-1])
    return trials


def _changes(remedy: Remedy, group: Group, known: Sequence[Remedy]) -> bool:
    """Whether a remedy changes any request, as it was sent or behind the other remedies."""
    if remedy.rewrite is None:
        return True
    requests = list(group.requests)
    if not _are_same(remedy.rewrite(requests), requests):
        return True
    for other in known:
        if other is remedy:
            return not _are_same(remedy.rewrite(requests), requests)
        if other.rewrite is not None:
            requests = other.rewrite(requests)
    return False


def _are_same(mine: Sequence[LoggedRequest], theirs: Sequence[LoggedRequest]) -> bool:
    """Whether bodies are written alike; equal objects may have their keys in another order."""
    return all(
        a.body is b.body or json.dumps(a.body) == json.dumps(b.body)
        for a, b in zip(mine, theirs, strict=True)
    )


def _findings(group: Group, trials: Sequence[_Trial], hours: float) -> list[Finding]:
    findings = []
    for before, after in pairwise(trials):
        remedy = after.remedies[-1]
        saved = before.result.computed_tokens - after.result.computed_tokens
        findings.append(
            Finding(
                remedy.kind,
                group.title,
                len(group.requests),
                remedy.where,
                remedy.examples,
                remedy.advice,
                saved,
                saved / hours,
                before.result.hit_ratio,
                after.result.hit_ratio,
                tuple(remedy.kind for remedy in before.remedies),
            )
        )
    return findings


def _hours(requests: Sequence[LoggedRequest]) -> tuple[float, bool]:
    """Return the time that a log covers, an hour if it does not say or is a single moment."""
    times = [request.at_s for request in requests if request.at_s is not None]
    span = max(times, default=0.0) - min(times, default=0.0)
    return (span / 3600, True) if span > 0 else (1.0, False)
