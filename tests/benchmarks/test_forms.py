"""The benchmark of forms: its output depends only on its seed."""

import random

from benchmarks import forms


def test_the_same_seed_writes_as_many_tokens():
    counts = []
    for _ in range(2):
        rng = random.Random(4)
        compiler = forms.make_compiler(2_000, rng)
        figures = {
            name: forms.measure(compiler, form, 2_000, rng) for name, form in forms.FORMS.items()
        }
        assert all(value >= 0 for row in figures.values() for value in row.values())
        counts.append({name: row["tokens"] for name, row in figures.items()})
    assert counts[0] == counts[1]
    assert 1 <= counts[0]["choice of 3"] <= len("perhaps") and counts[0]["schema"] > 20
