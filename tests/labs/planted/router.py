"""Mistakes of lab 7: the kind that the check names, and the change that plants it."""

PLANTED = {
    "computes-nothing": (
        "max(1, num_tokens - worker.cached - worker.expected)",
        "num_tokens - worker.cached - worker.expected",
    ),
    "expected-ignored": ("- worker.cached - worker.expected)", "- worker.cached)"),
    "hits-ignored": ("max(1, num_tokens - worker.cached - worker.expected)", "num_tokens"),
    "compute-wrong": ("cached - worker.expected)", "cached - 2 * worker.expected)"),
    "share-below-zero": ("max(0.0, worker.recent - mean)", "worker.recent - mean"),
    "mean-not-subtracted": ("max(0.0, worker.recent - mean)", "worker.recent"),
    "share-wrong": ("/ len(workers)", "/ 2 / len(workers)"),
    "load-ignored": ("return worker.queued + to_compute", "return to_compute"),
    "hits-not-scored": ("+ to_compute(num_tokens, worker) + above", "+ num_tokens + above"),
    "hot-worker-ignored": (" + above_share(worker, workers) / 4", ""),
    "score-falls": ("return worker.queued + to_compute", "return -worker.queued + to_compute"),
    "score-wrong": ("above_share(worker, workers) / 4", "above_share(worker, workers)"),
    "highest-score": ("return min(", "return max("),
    "ties-not-spread": (", workers), workers[at].recent)", ", workers))"),
    "chooses-by-load-alone": (
        "(score(num_tokens, workers[at], workers), workers[at].recent)",
        "workers[at].queued",
    ),
    "wrong-type": ("        return min(\n", "        return workers[0].name or min(\n"),
    "no-such-worker": ("        return min(\n", "        return 1 + min(\n"),
    "choice-has-effects": (
        "places = range",
        "workers[0].queued += num_tokens\n        places = range",
    ),
    "reason-does-not-add-up": ("num_tokens - to_compute(num_tokens, worker)", "worker.cached"),
    "reason-unclear": ("to compute, {queued} queued", "to compute"),
}
