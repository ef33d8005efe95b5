"""Mistakes of lab 6: the kind that the check names, and the change that plants it."""

PLANTED = {
    "scores-not-scaled": ("scores = q @ k.T / np.sqrt(q.shape[1])", "scores = q @ k.T"),
    "softmax-overflows": (
        "largest = scores.max(axis=1, keepdims=True)",
        "largest = np.zeros((len(scores), 1))",
    ),
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
    "weights-exchanged": (
        "one, two = np.exp(lse - largest), np.exp(others - largest)",
        "two, one = np.exp(lse - largest), np.exp(others - largest)",
    ),
    "merge-overflows": (
        "largest = np.maximum(lse, others)",
        "largest = np.zeros_like(lse)",
    ),
    "merged-log-sum-exp-wrong": (
        "total[:, None], largest + np.log(total)",
        "total[:, None], largest",
    ),
    "nothing-is-shared": (
        "        follow(list(range(len(tables))), 0)\n",
        "        for member in range(len(tables)):\n            follow([member], 0)\n",
    ),
    "only-some-are-shared": (
        "        for group in groups.values():\n            follow(group, end)\n",
        "        for group in groups.values():\n            for member in group:\n"
        "                follow([member], end)\n",
    ),
    "block-not-read": (
        "        for group in groups.values():\n            follow(group, end)\n",
        "        for group in groups.values():\n            if len(group) > 1:\n"
        "                follow(group, end)\n",
    ),
    "block-read-twice": ("follow(group, end)", "follow(group, max(0, end - 1))"),
    "block-of-another": (
        "while len({tuple(tables[m][end : end + 1]) for m in members}) == 1:",
        "while len({len(tables[m]) > end for m in members}) == 1:",
    ),
    "reads-past-the-end": (
        "num_keys = min(len(blocks) * size, min(lengths[m] for m in members) - run.first * size)",
        "num_keys = len(blocks) * size",
    ),
    "attention-wrong": ("merge(out[members], lse[members], *part)", "part"),
    "not-read-once": (
        "        num_read += len(blocks)\n",
        "        num_read += len(blocks) * len(members)\n",
    ),
}
