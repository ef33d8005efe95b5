"""A request whose grammar is dear ends by itself; nothing else of its step waits for long."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from ostinato import LLM, SamplingParams, StructuredOutputs
from ostinato.engine.grammar import grammar_constraints
from ostinato.engine.grammar.grammar import GrammarCompiler
from ostinato.engine.grammar.grammar_constraints import ADVANCE_TOKENS, GrammarBudget
from ostinato.engine.text.detokenizer import TokenTable
from ostinato.errors import ConfigError, InvalidSamplingParams, StepFailed
from tests.support.engines import assert_idle
from tests.support.models.checkpoints import Checkpoints

AMBIGUOUS = 'start: s\ns: s s | "a" | "b"'
"""Of n letters there are as many derivations as binary trees: the parser follows all."""


@pytest.fixture(scope="module")
def scribe(checkpoints: Checkpoints) -> Iterator[LLM]:
    """Lend a random Llama whose grammars have a millisecond a token."""
    path = str(checkpoints.path("llama"))
    llm = LLM(path, dtype="float64", block_size=4, num_blocks=600, max_grammar_ms=1)
    yield llm
    assert_idle(llm.engine)


def begun(llm: LLM, **form: Any) -> Any:
    """Return a constraint in its first state."""
    return GrammarCompiler(llm.engine.loaded).compile(StructuredOutputs(**form), "")


def ids_of(llm: LLM, letters: str) -> list[int | None]:
    table = TokenTable(llm.engine.loaded.require_tokenizer())
    return [table.id_of(letter) for letter in letters]


def test_an_ambiguous_grammar_ends_its_own_request(scribe: LLM, monkeypatch: pytest.MonkeyPatch):
    """With less in advance, so that the test is short; its neighbour has all that it wants."""
    monkeypatch.setattr(grammar_constraints, "ADVANCE_TOKENS", 20)
    params = [
        SamplingParams(
            max_tokens=1_500,
            ignore_eos=True,
            structured_outputs=StructuredOutputs(grammar=AMBIGUOUS),
        ),
        SamplingParams(
            max_tokens=20, ignore_eos=True, structured_outputs=StructuredOutputs(regex="[ab]*")
        ),
    ]
    with pytest.raises(StepFailed, match=r"1 of 2 requests failed: .*max_grammar_ms=1") as info:
        scribe.generate(["Once", "upon"], params, use_tqdm=False)
    costly, fine = info.value.outputs
    assert costly.has_own_error and not fine.error
    assert len(fine.outputs[0].token_ids) == 20


def test_a_budget_is_that_of_the_request_and_its_continuations(scribe: LLM):
    """Each mask takes 3 ms by this clock: alone that is too much, and for two together."""
    for num_copies in (1, 2):
        ticks = count()
        budget = GrammarBudget(2, lambda ticks=ticks: next(ticks) * 0.003)  # type: ignore[misc]
        first = begun(scribe, regex="[ab]*").begin(budget)
        copies = [first, *(first.copy() for _ in range(1, num_copies))]
        [letter] = ids_of(scribe, "a")
        num_tokens = 0
        while not first.error:
            for each in copies:
                assert each.mask().any()
                each.advance(letter)
                num_tokens += 1
        # 6 ms of each token are spent, and 2 earned.
        assert num_tokens == pytest.approx(ADVANCE_TOKENS * 2 / 4, abs=num_copies)
        assert all(not each.mask().any() and "max_grammar_ms=2" in each.error for each in copies)


def test_a_search_that_backtracks_ends_its_request(scribe: LLM):
    """Each further letter doubles the ways to divide the text."""
    constraint = begun(scribe, choice=["ab"], after="(?:a|aa)+[cd]$")
    [letter] = ids_of(scribe, "a")
    for _ in range(300):
        assert constraint.mask().any()
        constraint.advance(letter)
        if constraint.error:
            break
    assert "takes more than 50 ms" in constraint.error or "max_grammar_ms" in constraint.error
    assert not constraint.mask().any() and not constraint.is_complete


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(InvalidSamplingParams, match=r"after='x+.*at most 1000 characters"):
        StructuredOutputs(choice=["a"], after="x" * 1_001)
    with pytest.raises(ConfigError, match="max_grammar_ms=0"):
        LLM(num_blocks=64, max_grammar_ms=0)
