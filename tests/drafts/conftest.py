"""Digests have the same secrets in every process here, so that places never coincide."""

import random

import numpy as np
import pytest

from ostinato.drafts import ngrams


@pytest.fixture(autouse=True)
def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which texts share a place of a table is a matter of chance elsewhere."""
    draw = random.Random(0)
    factors = tuple(draw.getrandbits(64) | 1 for _ in ngrams._FACTORS)
    ones = [sum(factors[:count]) for count in range(len(factors) + 1)]
    monkeypatch.setattr(ngrams, "_FACTORS", factors)
    monkeypatch.setattr(ngrams, "_ONES", ones)
    monkeypatch.setattr(ngrams, "_NUMPY_FACTORS", np.array(factors, dtype=np.uint64))
    monkeypatch.setattr(ngrams, "_MIX", draw.getrandbits(64) | 1)
