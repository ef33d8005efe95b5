"""A decision in words and numbers."""

from ostinato.router.decision import Candidate, Decision, WorkerState

_KNOWN = {
    WorkerState.EXACT: "exact",
    WorkerState.DEGRADED: "events were missed",
    WorkerState.GUESSED: "guessed",
}


def explain(decision: Decision) -> str:
    """Say why a request went where it went, with all that could have served it as a table."""
    lines = [
        f"{decision.worker} by {decision.policy}: {decision.reason}",
        f"{decision.num_tokens:,} prompt tokens, {decision.expected_cached_tokens:,} expected to "
        f"be cached ({_KNOWN[decision.state]}), {decision.tokens_to_compute:,} to compute",
    ]
    if decision.follows is not None:
        lines.append(f"waits for request {decision.follows}, which computes the same prefix")
    width = max(len("worker"), *(len(each.worker) for each in decision.candidates))
    lines.append(
        f"{'worker':{width}}  {'cached':>9} {'sent':>9} {'compute':>9} {'queued':>9} {'score':>11}"
    )
    return "\n".join(lines + [_row(each, width) for each in decision.candidates])


def _row(each: Candidate, width: int) -> str:
    return (
        f"{each.worker:{width}}  {each.cached_tokens:>9,} {each.expected_tokens:>9,} "
        f"{each.tokens_to_compute:>9,} {each.load_tokens:>9,} {each.score:>11.4g}  "
        f"{_KNOWN[each.state]}"
    )
