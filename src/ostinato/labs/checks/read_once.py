"""Checks of lab 6: attention in parts, against plain softmax over everything."""

from itertools import product
from typing import Any

import numpy as np

from ostinato.labs.mistakes import CheckList, Mistake, Story, expect_type
from ostinato.labs.real_layer import Floats, attend_alone, softmax

CHECKS = CheckList()

Parts = tuple[Floats, Floats]
"""What is read, and the log-sum-exp."""


def _numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape, scale=scale)


def _read(call: str, function: Any, *arguments: Any) -> Parts:
    """Return what a function returns without NumPy's warnings; require a pair of arrays."""
    with np.errstate(all="ignore"):
        value = function(*arguments)
    expect_type(value, tuple, call, "a pair: what is read, and the log-sum-exp")
    for one in value[:2]:
        expect_type(one, np.ndarray, call, "two arrays")
    return value[0], value[1]


def _differ(got: Floats, right: Floats) -> bool:
    is_bad = got.shape != right.shape or not np.all(np.isfinite(got))
    return is_bad or bool(np.abs(got - right).max() > 1e-9)


def _agree(got: Parts, right: Parts) -> bool:
    return not (_differ(got[0], right[0]) or _differ(got[1], right[1]))


def _row(name: str, values: Floats) -> str:
    return f"{name:9}{np.array2string(np.ravel(values)[:4], precision=4)}"


def _rows(got: Parts, right: Parts) -> list[str]:
    """Draw what is read and the log-sum-exp, each above what it should be."""
    pairs = zip(("read", "lse"), got, right, strict=True)
    return [row for name, one, other in pairs for row in (_row(name, one), _row("not", other))]


@CHECKS.add("Softmax over a part", 1)
def check_partial(lab: Any, story: Story) -> None:
    """One query, one key; then two; then scores that overflow."""
    for num_queries, num_keys, dim in ((1, 1, 1), (1, 2, 1), (1, 2, 4), (3, 5, 4)):
        q, k = _numbers(num_queries, dim, seed=1), _numbers(num_keys, dim, seed=2)
        v = _numbers(num_keys, dim, seed=3)
        call = story.begin(f"partial, {num_queries} queries, {num_keys} keys, dim {dim}")
        _name_partial(call, _read(call, lab.partial, q, k, v), q, k, v)
    q, k, v = np.full((1, 4), 50.0), np.full((2, 4), 50.0), _numbers(2, 4)
    got, right = _read("partial with scores of 5,000", lab.partial, q, k, v), softmax(q, k, v)
    if not _agree(got, right):
        what = "Large scores overflow: np.exp is called before the largest is subtracted."
        picture = ["scores of 5,000", *_rows(got, right)]
        raise Mistake("softmax-overflows", what, picture, "NaN in one layer is NaN in the answer.")


def _name_partial(call: str, got: Parts, q: Floats, k: Floats, v: Floats) -> None:
    """Raise the mistake that explains a wrong result."""
    right = softmax(q, k, v)
    if _agree(got, right):
        return
    picture, root = [call, *_rows(got, right)], np.sqrt(q.shape[1])
    shapes = [one.shape for one in (*got, *right)]
    if shapes[:2] != shapes[2:]:
        what = "The shapes are {} and {}, not {} and {}.".format(*shapes)
        raise Mistake("wrong-shape", what, picture)
    if q.shape[1] > 1 and not _differ(got[0], softmax(q * root, k, v)[0]):
        raise Mistake("scores-not-scaled", "Scores are not divided by sqrt(dim).", picture)
    if not _differ(got[0], np.exp(q @ k.T / root) @ v):
        what = "The weighted sum is not divided by the sum of the weights."
        raise Mistake("weights-not-normalised", what, picture)
    if not _differ(got[0], right[0]):
        if not _differ(got[1] + (q @ k.T / root).max(axis=1), right[1]):
            what = "The largest score is subtracted, and not added to the log-sum-exp again."
            raise Mistake("largest-forgotten", what, picture, "A merge would weigh wrongly.")
        what = "What is read is right; the log-sum-exp is not."
        raise Mistake("log-sum-exp-wrong", what, picture)
    raise Mistake("softmax-wrong", "The weights are not those of a softmax over the keys.", picture)


@CHECKS.add("Merging two parts", 1, 2)
def check_merge(lab: Any, story: Story) -> None:
    """Every cut of five keys, also where one part outweighs the other."""
    equal = np.ones(2)
    for scale, cut in product((1.0, 12.0), range(1, 5)):
        q, k = _numbers(2, 4, seed=4, scale=scale), _numbers(5, 4, seed=5, scale=scale)
        v = _numbers(5, 4)
        one, two = softmax(q, k[:cut], v[:cut]), softmax(q, k[cut:], v[cut:])
        call = story.begin(f"merge of keys 0..{cut} and {cut}..5")
        got, right = _read(call, lab.merge, *one, *two), softmax(q, k, v)
        if _agree(got, right):
            continue
        picture = [call, *_rows(got, right)]
        exchanged = np.exp(two[1]), np.exp(one[1])
        weights = (equal, equal), exchanged, (cut * equal, (5 - cut) * equal)
        for (kind, what), (weight, other) in zip(_WRONG_WEIGHTS.items(), weights, strict=True):
            if not _differ(got[0], _mean(one[0], weight, two[0], other)):
                raise Mistake(kind, what, picture)
        if not _differ(got[0], right[0]):
            raise Mistake("merged-log-sum-exp-wrong", "The merged log-sum-exp is wrong.", picture,
                          "The next merge would weigh wrongly.")  # fmt: skip
        raise Mistake("merge-wrong", "The merged result is not attention over all keys.", picture)
    _check_far(lab)


_WRONG_WEIGHTS = {
    "merged-by-halves": "Both parts weigh the same, whatever their scores.",
    "weights-exchanged": "Each part has the other one's weight.",
    "merged-by-length": "Parts weigh by their number of keys.",
}


def _mean(one: Floats, weight: Floats, two: Floats, other: Floats) -> Floats:
    """Return the weighted mean of what two parts read, by query."""
    mean: Floats = (one * weight[:, None] + two * other[:, None]) / (weight + other)[:, None]
    return mean


def _check_far(lab: Any) -> None:
    """A log-sum-exp of 5,000, and one of minus infinity: nothing was read so far."""
    one, two = np.ones((1, 2)), np.full((1, 2), 3.0)
    out, _ = _read("merge", lab.merge, one, np.array([5000.0]), two, np.array([4000.0]))
    new, _ = _read("merge", lab.merge, 0 * one, np.array([-np.inf]), two, np.array([1.0]))
    if _differ(out, one):
        picture = ["log-sum-exp 5,000 and 4,000", _row("read", out), _row("not", one)]
        what = "Large sums overflow: np.exp is called before the larger one is subtracted."
        raise Mistake("merge-overflows", what, picture)
    if _differ(new, two):
        picture = ["merge with a part of no keys (log-sum-exp -inf)", _row("read", new),
                   _row("not", two)]  # fmt: skip
        raise Mistake("empty-part-counts", "A part without keys changes the result.", picture)


@CHECKS.add("The plan", 3)
def check_plan(lab: Any, story: Story) -> None:
    """All pairs and triples of short tables, against a count of distinct prefixes."""
    shapes = [[1], [2], [1, 3], [1, 4], [2, 3], [1, 3, 5], [1, 3, 6]]
    shares = any(len(run.members) > 1 for run in lab.plan([[1], [1]]))
    for count in (1, 2, 3):
        for chosen in product(shapes, repeat=count):
            tables = [list(table) for table in chosen]
            story[:] = [f"plan({tables})"]
            runs = lab.plan([table[:] for table in tables])
            expect_type(runs, list, story[0], "a list of Run")
            for run in runs:
                expect_type(run, lab.Run, story[0], "a list of Run")
            _check_runs(tables, runs, shares)


def _check_runs(tables: list[list[int]], runs: list[Any], shares: bool) -> None:
    picture = [f"tables {tables}"]
    for run in runs[:6]:
        picture.append(f"run of {run.members}, blocks {run.blocks}, first {run.first}")
    read: dict[tuple[int, int], int] = {}
    for run in runs:
        for member, (at, block) in product(run.members, enumerate(run.blocks, run.first)):
            if at >= len(tables[member]) or tables[member][at] != block:
                what = "A run reads a block for a sequence that has another one at that place."
                raise Mistake("block-of-another", what, picture, "Wrong keys: law 3.")
            read[member, at] = read.get((member, at), 0) + 1
    for member, table in enumerate(tables):
        for at in range(len(table)):
            if read.get((member, at), 0) > 1:
                what = "A sequence reads a block twice: its keys weigh double."
                raise Mistake("block-read-twice", what, picture)
            if not read.get((member, at)):
                what = f"Block {table[at]} of sequence {member} is in no run."
                raise Mistake("block-not-read", what, picture, "The answer forgets these tokens.")
    prefixes = {tuple(table[: at + 1]) for table in tables for at in range(len(table))}
    num_read = sum(len(run.blocks) for run in runs)
    if num_read > len(prefixes):
        kind = "only-some-are-shared" if shares else "nothing-is-shared"
        what = f"{num_read} blocks are read, and {len(prefixes)} would do."
        raise Mistake(kind, what, picture, "Sharing memory is not yet sharing work (law 2).")


@CHECKS.add("Attention by runs", 1, 2, 3, 4)
def check_attend(lab: Any, story: Story) -> None:
    """Against attention of each sequence alone; unused slots hold NaN."""
    size = 2
    cases = [([[0]], [2]), ([[0]], [1]), ([[0, 1], [0, 2]], [4, 4]), ([[0, 1], [0, 2]], [3, 4]),
             ([[0, 1, 3], [0, 1, 4], [0, 2]], [6, 5, 3]), ([[0], [0, 1]], [2, 4])]  # fmt: skip
    for tables, lengths in cases:
        call = story.begin(f"attend, tables {tables}, lengths {lengths}")
        q = _numbers(len(tables), 4, seed=7)
        k, v = _numbers(5, size, 4, seed=8), _numbers(5, size, 4, seed=9)
        used = {
            (t[at // size], at % size)
            for t, n in zip(tables, lengths, strict=True)
            for at in range(n)
        }
        for block, slot in product(range(5), range(size)):
            if (block, slot) not in used:
                k[block, slot] = v[block, slot] = np.nan
        with np.errstate(all="ignore"):
            answer = lab.attend(q, tables, lengths, k, v)
        expect_type(answer, tuple, call, "what is read, and a number of blocks")
        out, num_read = answer
        expect_type(out, np.ndarray, call, "an array and a number")
        expect_type(num_read, (int, np.integer), call, "an array and a number")
        _check_read(call, tables, lengths, (q, k, v), out, int(num_read))


def _check_read(
    call: str, tables: list[list[int]], lengths: list[int], data: tuple[Floats, Floats, Floats],
    out: Floats, num_read: int,
) -> None:  # fmt: skip
    q, k, v = data
    right = attend_alone(q, tables, lengths, k, v)
    picture = [call, _row("read", out), _row("not", right), f"blocks read: {num_read}"]
    if np.isnan(out).any():
        what = "Slots behind the end of a sequence are read: they hold anything, here NaN."
        raise Mistake("reads-past-the-end", what, picture)
    if _differ(out, right):
        what = "What is read is not what each sequence reads alone."
        raise Mistake("attention-wrong", what, picture, "Law 7: the output does not change.")
    prefixes = {tuple(table[: at + 1]) for table in tables for at in range(len(table))}
    if num_read != len(prefixes):
        what = f"{num_read} blocks are read, and {len(prefixes)} are there to be read once."
        raise Mistake("not-read-once", what, picture)
