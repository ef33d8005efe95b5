"""Who computes attention, and is it said why?"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.core.errors import ConfigError
from ostinato.engine.loop.engine import Engine
from ostinato.engine.settings import setup as engine_file
from ostinato.engine.settings.config import EngineConfig
from ostinato.runner.attention import choice
from ostinato.runner.attention.choice import AttentionCase, choose_attention
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.kv.kv_store import KVSpec, LayerKV
from ostinato.runner.native.library import library
from ostinato.runner.native.store import TOKEN_GROUP
from ostinato.runner.settings import NATIVE_BLOCK
from tests.support.instruction_sets import needs_library, no_library

ORDINARY = AttentionCase(
    KVSpec((LayerKV(2, 64, 64),)), torch.bfloat16, torch.bfloat16, 16, torch.device("cpu")
)
UNKNOWN = {
    "block_size=24 must be a multiple of 16": {"block_size": 24},
    "kv_cache_dtype is float64": {"kv_dtype": torch.float64},
    "layer 0 has keys of 5 elements": {"spec": KVSpec((LayerKV(2, 5, 64),))},
}

__all__ = ["no_library"]


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    choice.log_once.cache_clear()
    yield
    choice.log_once.cache_clear()


@needs_library
@pytest.mark.parametrize("name", ["auto", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_library_computes_where_it_can(name: Any, dtype: torch.dtype):
    found = choose_attention(name, replace(ORDINARY, dtype=dtype), "never")

    assert isinstance(found, NativeAttention) and found.read_once == "never"


def test_torch_computes_if_it_is_asked_for_by_name():
    assert isinstance(choose_attention("torch", ORDINARY), TorchAttention)


@pytest.mark.parametrize(("reason", "changed"), UNKNOWN.items())
def test_torch_computes_what_the_library_does_not_know_and_it_is_said_once(
    reason: str, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    case = replace(ORDINARY, **changed)

    for _ in range(2):
        assert isinstance(choose_attention("auto", case), TorchAttention)

    [said] = caplog.messages
    assert reason in said and "plain torch" in said


@pytest.mark.parametrize("changed", [{"dtype": torch.float64}, {"device": torch.device("cuda", 0)}])
def test_where_the_library_is_not_expected_nothing_is_said(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    assert isinstance(choose_attention("auto", replace(ORDINARY, **changed)), TorchAttention)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("reason", "changed"),
    {
        **UNKNOWN,
        "dtype is float64, and the library supports float32, bfloat16, float16: set dtype": {
            "dtype": torch.float64
        },
        "device='cuda:0', and the library computes on a CPU": {"device": torch.device("cuda", 0)},
    }.items(),
)
def test_a_library_that_cannot_is_refused_if_it_is_asked_for(reason: str, changed: dict[str, Any]):
    with pytest.raises(ConfigError, match="attention='native' is unavailable") as refusal:
        choose_attention("native", replace(ORDINARY, **changed))

    assert reason in str(refusal.value) and "attention='auto'" in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [{"block_size": 8}, {"device": "cuda:0"}, {"dtype": "float64"}, {"kv_cache_dtype": "float64"}],
)
def test_what_the_library_can_never_do_is_refused_before_anything_is_loaded(settings):
    """Not even the model has to be there."""
    [name] = settings
    with pytest.raises(ConfigError, match=f"attention='native' is unavailable: {name}"):
        EngineConfig.of("nowhere", {"attention": "native", **settings})
    EngineConfig.of("nowhere", {"attention": "auto", **settings})
    assert NATIVE_BLOCK == TOKEN_GROUP


def test_without_a_library_it_is_refused_before_the_weights_are_read(
    no_library: None, monkeypatch: pytest.MonkeyPatch
):
    def read(*_args: object, **_settings: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(engine_file, "load_model", read)
    with pytest.raises(ConfigError, match="no native library"):
        Engine(EngineConfig.of("tiny-shakespeare", {"attention": "native"}))


def test_without_a_library_torch_computes_and_it_is_said_once(
    no_library: None, caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        assert isinstance(choose_attention("auto", ORDINARY), TorchAttention)

    [said] = caplog.messages
    assert "no native library (the package was built without a C++ compiler)" in said
    assert "native/compile.py" in said


def test_without_a_library_it_is_refused_if_it_is_asked_for(no_library: None):
    with pytest.raises(ConfigError, match="no native library"):
        choose_attention("native", ORDINARY)


def test_a_file_that_is_no_library_is_none(
    tmp_path: Path, no_library: None, caplog: pytest.LogCaptureFixture
):
    """And the reason is the loader's own."""
    (tmp_path / "libostinato_native.so").write_text("this is no library")

    assert library() is None
    assert "libostinato_native.so" in caplog.text and "built without" not in caplog.text
