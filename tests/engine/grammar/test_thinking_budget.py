"""A thinking budget as a constraint; tokens are letters, marks, and parts of marks."""

from typing import Any

import numpy as np
import pytest

from ostinato.engine.grammar.thinking_budget import ThinkingBudget, ThinkingConstraint
from ostinato.errors import InvalidSamplingParams

TOKENS = ["<think>", "</think>", " ", "a", "b", "</", "think", ">", "<"]
ONE_MARK, THREE_TOKENS = (1,), (5, 6, 7)


class Table:
    """The texts of these tokens."""

    def text(self, token_id: int) -> str:
        return TOKENS[token_id]


class OnlyLetters:
    """Another constraint: letters alone, from its third token on."""

    error, is_complete = "", False

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens

    @property
    def allows_all(self) -> bool:
        return self.num_tokens < 3

    def copy(self) -> "OnlyLetters":
        return OnlyLetters(self.num_tokens)

    def mask(self) -> Any:
        allowed = [3, 4] if self.num_tokens >= 3 else range(len(TOKENS))
        bits = np.isin(np.arange(32), [*allowed])
        return np.packbits(bits, bitorder="little")

    def advance(self, token_id: int) -> None:
        self.num_tokens += 1


def begin(num_tokens: int, ids: tuple[int, ...] = ONE_MARK, other: Any = None, **more: Any) -> Any:
    return ThinkingConstraint(ThinkingBudget(num_tokens, **more), ids, Table(), 4, other)


def write(constraint: ThinkingConstraint, tokens: list[str]) -> ThinkingConstraint:
    for token in tokens:
        constraint.advance(TOKENS.index(token))
    return constraint


def allowed(constraint: ThinkingConstraint) -> list[str] | None:
    """Return the tokens that may come next; None for all."""
    bits = np.unpackbits(constraint.mask(), bitorder="little")[: len(TOKENS)]
    assert constraint.allows_all == bool(bits.all())
    return None if bits.all() else [TOKENS[place] for place in np.flatnonzero(bits)]


def test_the_mark_is_forced_after_so_many_tokens_and_once():
    budget = write(begin(2), ["<think>", "a"])
    assert allowed(budget) is None
    assert allowed(write(budget, ["b"])) == ["</think>"]
    assert allowed(write(budget, ["</think>"])) is None
    assert allowed(write(budget, ["<think>", "a", "a", "a"])) is None


def test_a_mark_of_several_tokens_is_forced_to_its_end():
    budget = write(begin(1, THREE_TOKENS, opening=None), ["a"])
    for token in ("</", "think", ">"):
        assert allowed(budget) == [token]
        write(budget, [token])
    assert allowed(budget) is None


def test_reasoning_that_ends_by_itself_is_not_ended_again():
    """Also where its mark is written with other tokens than the forced one."""
    assert allowed(write(begin(4), ["<think>", "a", "</", "think", ">", "a", "a", "a"])) is None


def test_an_answer_without_reasoning_has_no_bound():
    """White space may precede the opening mark, and a mark of several tokens begins as well."""
    assert allowed(write(begin(1), ["a", "<think>", "a", "a"])) is None
    assert allowed(write(begin(1), [" ", " ", "<think>", "a"])) == ["</think>"]
    assert allowed(write(begin(1), ["<", "think", ">", "a"])) == ["</think>"]


def test_a_budget_of_nothing_forces_the_mark_at_once():
    assert allowed(begin(0, opening=None)) == ["</think>"]
    assert allowed(begin(0)) is None
    assert allowed(write(begin(0), ["<think>"])) == ["</think>"]


def test_forks_count_each_for_itself():
    budget = write(begin(2), ["<think>", "a"])
    fork = budget.copy()
    write(budget, ["a"])
    assert (allowed(budget), allowed(fork)) == (["</think>"], None)


def test_another_constraint_sees_every_token_and_binds_the_answer():
    """A grammar behind the reasoning begins where the forced mark ends; copies are independent."""
    budget = write(begin(1, other=OnlyLetters()), ["<think>", "a"])
    fork = budget.copy()
    assert allowed(budget) == ["</think>"]
    assert allowed(write(budget, ["</think>"])) == ["a", "b"]
    assert allowed(fork) == ["</think>"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_tokens": -1}, "num_tokens=-1: must be an integer, at least 0"),
        ({"num_tokens": True}, "num_tokens=True"),
        ({"num_tokens": 1, "closing": ""}, "closing='': must be a text of 1 to 256"),
        ({"num_tokens": 1, "opening": "x" * 257}, "thinking_budget.opening="),
        ({"num_tokens": 1, "closing": None}, "thinking_budget.closing=None"),
    ],
)
def test_a_wrong_budget_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(InvalidSamplingParams, match=message):
        ThinkingBudget(**given)
