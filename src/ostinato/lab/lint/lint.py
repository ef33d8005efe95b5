"""Finds what breaks prefixes, and what each fix saves.

Requests are grouped by template. For each group the fixes are tried on the real cache, best first,
each on top of those before it; one that saves nothing is not reported::

    group 1 ─► as sent: 41,000 tokens computed
               timestamp fixed: 9,000       ◄ a finding, 32,000 tokens
               + user fixed: 8,100          ◄ a finding, 900 tokens
               + white space fixed: 8,100     nothing saved: no finding
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ostinato.lab.lint.breakpoints import compare_breakpoints
from ostinato.lab.lint.history import compare_drift
from ostinato.lab.lint.remedies import remedies_for
from ostinato.lab.lint.replay import MIN_SAVING, Comparison, Replayed, replay
from ostinato.lab.lint.rewrites import Remedy
from ostinato.lab.lint.rules import VolatileRule
from ostinato.lab.lint.templates import Group, group_requests
from ostinato.lab.log.request_log import LoggedRequest
from ostinato.lab.replay.explain_log import Tokenizer

WAYS_OF_WRITING = ("white_space", "json_keys")
"""Kinds of findings after which the texts of a template can be aligned."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that breaks prefixes, and what its fix saves on top of earlier findings.

    Attributes:
        kind: Kind of finding.
        group: First words of the template.
        num_requests: Requests of the template.
        where: The field, or the words before the place, if it is one.
        examples: Some of the values there.
        advice: What to do.
        saved_tokens: Prompt tokens that would not be computed.
        saved_tokens_per_hour: The same by the log's time.
        before: Hit ratio with only earlier findings fixed.
        after: Hit ratio with this one fixed as well.
        fixed_before: Kinds of the findings of the same template that are fixed before.
        rules: Rules with which ``ostinato serve --stabilise`` fixes it; may be empty.
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
    fixed_before: tuple[str, ...] = ()
    rules: tuple[VolatileRule, ...] = ()


@dataclass(frozen=True, slots=True)
class LintReport:
    """The savings possible in a log.

    Attributes:
        findings: Findings, largest savings first.
        num_requests: Requests of the log.
        num_groups: Templates.
        hours: Time that the log covers; an hour if it has no times.
        has_times: Whether it has times.
        prompt_tokens: Prompt tokens of all requests.
        computed_tokens: Computed tokens as sent, on a cache that keeps every prefix.
        fixed_tokens: The same with all findings fixed, except ``cache_control`` and ``drift``,
            which do not matter to that cache.
    """

    findings: tuple[Finding, ...]
    num_requests: int
    num_groups: int
    hours: float
    has_times: bool
    prompt_tokens: int
    computed_tokens: int
    fixed_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that hit as sent."""
        return 1 - self.computed_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A group's requests with some fixes applied, and their computed tokens."""

    remedies: tuple[Remedy, ...]
    requests: tuple[LoggedRequest, ...]
    result: Replayed


def lint(
    requests: Sequence[LoggedRequest],
    tokenizer: Tokenizer,
    block_size: int = 16,
    progress: Callable[[int], None] | None = None,
) -> LintReport:
    """Find what breaks prefixes early.

    Args:
        requests: Requests in order of arrival.
        tokenizer: Tokenizer of their model.
        block_size: Block size of the cache.
        progress: Called with a number of requests: when they were put into a group, and again
            when all remedies of their group were tried.

    Cost: for each group at most a replay per pair of remedies that change something.
    """
    hours, has_times = _hours(requests)
    findings: list[Finding] = []
    prompts = computed = fixed = 0
    report = progress or (lambda _count: None)
    groups = group_requests(requests, report)
    for group in groups:
        trials = _fix(group, tokenizer, block_size)
        findings += _findings(group, trials, tokenizer, hours)
        prompts += trials[0].result.prompt_tokens
        computed += trials[0].result.computed_tokens
        fixed += trials[-1].result.computed_tokens
        report(len(group.requests))
    if (drift := compare_drift(requests, block_size)).matters:
        findings.append(_finding("conversations", drift, (), hours))
    findings.sort(key=lambda finding: -finding.saved_tokens)
    return LintReport(
        tuple(findings), len(requests), len(groups), hours, has_times, prompts, computed, fixed
    )


def _fix(group: Group, tokenizer: Tokenizer, block_size: int) -> list[_Trial]:
    """Apply the best remedy, then the best on top of it, while one saves enough."""

    def attempt(chosen: tuple[Remedy, ...]) -> _Trial:
        requests = list(group.requests)
        for remedy in known:  # in list order, whichever was chosen first
            if remedy in chosen and remedy.rewrite is not None:
                requests = remedy.rewrite(requests)
        keep_seams = any(remedy.rewrite is None for remedy in chosen)
        result = replay(requests, tokenizer, block_size, keep_seams)
        return _Trial(chosen, tuple(requests), result)

    known = remedies_for(group) if len(group.requests) > 1 else []
    trials = [attempt(())]
    left = _that_change(known, group.requests)
    min_saving = MIN_SAVING * trials[0].result.prompt_tokens
    while left:
        best = min(
            (attempt((*trials[-1].remedies, remedy)) for remedy in left),
            key=lambda trial: trial.result.computed_tokens,
        )
        if trials[-1].result.computed_tokens - best.result.computed_tokens <= min_saving:
            best = _best_pair(attempt, trials[-1], left)
            if trials[-1].result.computed_tokens - best.result.computed_tokens <= min_saving:
                break
            trials.append(attempt(best.remedies[:-1]))
        trials.append(best)
        left = [remedy for remedy in left if remedy not in best.remedies]
    return trials


def _best_pair(
    attempt: Callable[[tuple[Remedy, ...]], _Trial], trial: _Trial, left: Sequence[Remedy]
) -> _Trial:
    """Return the best trial with two more remedies; the trial itself if there is none.

    What changes in a template may be out of reach until its texts are written in one way.
    """
    pairs = [
        (*trial.remedies, first, second)
        for first in left
        for second in left
        if first.kind in WAYS_OF_WRITING and second.kind != first.kind
    ]
    trials = map(attempt, pairs)
    return min(trials, key=lambda each: each.result.computed_tokens, default=trial)


def _that_change(known: Sequence[Remedy], requests: list[LoggedRequest]) -> list[Remedy]:
    """Return the remedies that change a request, as it was sent or after those before them."""
    changing, fixed = [], requests
    for remedy in known:
        if remedy.rewrite is None:
            changing.append(remedy)
            continue
        on_top = remedy.rewrite(fixed)
        if on_top != fixed or (fixed is not requests and remedy.rewrite(requests) != requests):
            changing.append(remedy)
            fixed = on_top
    return changing


def _findings(
    group: Group, trials: Sequence[_Trial], tokenizer: Tokenizer, hours: float
) -> list[Finding]:
    """Report each fix of a group, and its breakpoints once everything else is fixed."""
    num_requests, last = len(group.requests), trials[-1]
    fixes = [
        (Comparison(after.remedies[-1], num_requests, before.result, after.result), before.remedies)
        for before, after in pairwise(trials)
    ]
    marks = compare_breakpoints(last.requests, tokenizer)
    if marks is not None and num_requests > 1 and marks.matters:
        fixes.append((marks, last.remedies))
    return [_finding(group.title, fix, fixed, hours) for fix, fixed in fixes]


def _finding(title: str, fix: Comparison, fixed: Sequence[Remedy], hours: float) -> Finding:
    remedy = fix.remedy
    return Finding(
        remedy.kind,
        title,
        fix.num_requests,
        remedy.where,
        remedy.examples,
        remedy.advice,
        fix.saved_tokens,
        fix.saved_tokens / hours,
        fix.before.hit_ratio,
        fix.after.hit_ratio,
        tuple(remedy.kind for remedy in fixed),
        remedy.rules,
    )


def _hours(requests: Sequence[LoggedRequest]) -> tuple[float, bool]:
    """Return the time that a log covers; an hour if it has no times, or all are the same."""
    times = [request.at_s for request in requests if request.at_s is not None]
    span = max(times, default=0.0) - min(times, default=0.0)
    return (span / 3600, True) if span > 0 else (1.0, False)
