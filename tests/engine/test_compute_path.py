"""An engine says at load how steps are computed, and what keeps them from being faster."""

import logging
from typing import Any

import pytest

from ostinato.core.errors import ConfigError
from ostinato.runner.compute_path import ComputePath
from ostinato.runner.native.library import Isa, best_isa, library
from tests.support.engines import MakeLLM
from tests.support.instruction_sets import isa_in_use, needs_library, no_library

__all__ = ["no_library"]


def path_of(make_llm: MakeLLM, family: str = "llama", **settings: Any) -> ComputePath:
    settings = {"dtype": "float32", "block_size": 16, "num_blocks": 16, **settings}
    return make_llm(family, **settings).engine.compute_path


@needs_library
def test_the_fastest_path_is_said_in_one_line_and_has_no_reasons(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
):
    native = library()
    assert native is not None
    caplog.set_level(logging.INFO, "ostinato")

    with isa_in_use(best_isa(native)):
        path = path_of(make_llm)

    best = best_isa(native).name.lower()
    assert str(path) == f"float32 on cpu, instruction set {best}, native attention, fused forward"
    assert f"computes in {path};" in caplog.text
    assert path.why_not_faster == ""


@needs_library
def test_a_smaller_instruction_set_names_the_variable_that_chose_it(make_llm: MakeLLM):
    native = library()
    assert native is not None
    if (best := best_isa(native)) == Isa.GENERIC:
        pytest.skip("this processor has no other")

    with isa_in_use(Isa.GENERIC):
        path = path_of(make_llm)

    assert path.instruction_set == "generic"
    assert path.why_not_faster == f"generic in place of {best.name.lower()}, see OSTINATO_ISA"


@needs_library
@pytest.mark.parametrize(
    ("settings", "attention", "forward", "reason"),
    [
        ({"attention": "torch"}, "torch", "fused", "attention in torch: attention='torch' is set"),
        ({"block_size": 8}, "torch", "fused", "block_size=8 must be a multiple of 16"),
        ({"forward": "plain"}, "native", "plain", "forward='plain' is set"),
        ({"forward": "packed"}, "native", "packed", "forward='packed' is set"),
        ({"dtype": "float64"}, "torch", "plain", "float64 weights are not packed"),
        ({"family": "gpt2"}, "native", "packed", "GPT2LMHeadModel is not fused"),
    ],
)
def test_every_step_back_has_its_reason(settings, attention, forward, reason, make_llm: MakeLLM):
    path = path_of(make_llm, **settings)

    assert (path.attention, path.forward) == (attention, forward)
    assert reason in path.why_not_faster


def test_without_a_library_it_is_said_how_to_get_it(no_library: None, make_llm: MakeLLM):
    path = path_of(make_llm)

    assert (path.instruction_set, path.attention) == ("none", "torch")
    assert "no native library" in path.why_not_faster
    assert "native/compile.py" in path.why_not_faster


@needs_library
def test_an_unknown_instruction_set_is_refused_before_the_weights_are_read(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
):
    def read(*_args: object, **_settings: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("ostinato.engine.settings.setup.load_model", read)
    monkeypatch.setenv("OSTINATO_ISA", "avx3")
    library.cache_clear()
    try:
        with pytest.raises(ConfigError, match="OSTINATO_ISA=avx3: this machine runs generic"):
            path_of(make_llm)
    finally:
        library.cache_clear()
