"""Mistakes of lab 6: the kind that the check names, and the change that plants it."""

PLANTED = {
    "scores-not-scaled": ("scores = q @ k.T / np.sqrt(q.shape[1])", "scores = q @ k.T"),
    "softmax-overflows": ("scores.max(axis=1, keepdims=True)", "np.zeros((len(scores), 1))"),
    "largest-forgotten": ("(largest + np.log(total))[:, 0]", "np.log(total)[:, 0]"),
    "weights-not-normalised": (
        "    weights = np.exp(scores - largest)\n    total = weights.sum(axis=1, keepdims=True)\n"
        "    return weights @ v / total,",
        "    weights = np.exp(scores)\n    total = weights.sum(axis=1, keepdims=True)\n"
        "    largest = 0 * total\n    return weights @ v,",
    ),
    "wrong-shape": ("(largest + np.log(total))[:, 0]", "(largest + np.log(total))"),
    "log-sum-exp-wrong": ("(largest + np.log(total))[:, 0]", "(largest + np.log2(total))[:, 0]"),
    "merged-by-halves": (
        "one, two = np.exp(lse - largest), np.exp(others - largest)",
        "one, two = np.ones_like(lse), np.ones_like(lse)",
    ),
    "weights-exchanged": ("one, two = np.exp", "two, one = np.exp"),
    "merge-overflows": ("np.maximum(lse, others)", "np.zeros_like(lse)"),
    "merged-log-sum-exp-wrong": ("largest + np.log(total)\n", "largest\n"),
    "nothing-is-shared": (
        "follow(list(range(len(tables))), 0)",
        "for member in range(len(tables)):\n            follow([member], 0)",
    ),
    "only-some-are-shared": (
        "follow(group, end)",
        "for member in group:\n                follow([member], end)",
    ),
    "block-not-read": ("follow(group, end)", "len(group) > 1 and follow(group, end)"),
    "block-read-twice": ("follow(group, end)", "follow(group, max(0, end - 1))"),
    "block-of-another": ("tuple(tables[m][end : end + 1])", "len(tables[m]) > end"),
    "reads-past-the-end": (
        "min(len(blocks) * size, min(lengths[m] for m in members) - run.first * size)",
        "len(blocks) * size",
    ),
    "attention-wrong": ("merge(out[members], lse[members], *part)", "part"),
    "not-read-once": ("num_read += len(blocks)", "num_read += len(blocks) * len(members)"),
}
