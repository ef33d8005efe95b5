"""The choice of an attention backend, and the reason that is reported for it."""

import re
import subprocess
import sys
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
from ostinato.runner import attention_choice as choice
from ostinato.runner.attention.native_backend import NativeAttention
from ostinato.runner.attention.torch_backend import TorchAttention
from ostinato.runner.attention_choice import AttentionCase, attention_in_use, choose_attention
from ostinato.runner.gpu import availability
from ostinato.runner.gpu.availability import INTERPRETER_VARIABLE
from ostinato.runner.gpu.backend import TritonAttention
from ostinato.runner.kv.kv_store import KVSpec, LayerKV
from ostinato.runner.native.library import library
from tests.support.instruction_sets import needs_library, no_library
from tests.support.triton import needs_triton

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


def test_where_the_library_is_not_expected_nothing_is_said(caplog: pytest.LogCaptureFixture):
    case = replace(ORDINARY, dtype=torch.float64)
    assert isinstance(choose_attention("auto", case), TorchAttention)
    assert not caplog.messages


ON_GPU = replace(ORDINARY, device=torch.device("cuda", 0))


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)


@needs_triton
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_kernels_in_triton_compute_on_a_gpu(name: Any):
    backend = choose_attention(name, ON_GPU, "never")
    assert backend == TritonAttention("never") and attention_in_use(name, ON_GPU) == "triton"


def test_without_triton_torch_computes_on_a_gpu_and_it_is_said_once(
    no_triton: None, caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        assert isinstance(choose_attention("auto", ON_GPU), TorchAttention)
    assert attention_in_use("auto", ON_GPU) == "torch"

    [message] = caplog.messages
    assert "pip install 'ostinato[gpu]'" in message and "plain torch" in message


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_triton_by_name_is_refused_where_it_is_missing_before_the_weights_are_read(
    device: str, no_triton: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_file, "load_model", None)
    with pytest.raises(ConfigError, match=r"attention='triton' .* pip install 'ostinato\[gpu\]'"):
        Engine(EngineConfig.of("tiny-shakespeare", {"attention": "triton", "device": device}))


@needs_triton
def test_triton_on_a_cpu_is_its_interpreter_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(INTERPRETER_VARIABLE, "1")
    assert isinstance(choose_attention("triton", ORDINARY), TritonAttention)

    monkeypatch.delenv(INTERPRETER_VARIABLE)
    with pytest.raises(ConfigError, match=r"computes on a GPU: set device='cuda'"):
        choose_attention("triton", ORDINARY)


@needs_triton
@pytest.mark.parametrize(
    ("reason", "changed"),
    {
        "dtype is float64, and the kernels support": {"dtype": torch.float64},
        "kv_cache_dtype is float64": {"kv_dtype": torch.float64},
        "heads of 512 elements, and 256 is the maximum": {"spec": KVSpec((LayerKV(2, 512, 64),))},
        "must be multiples of 4: set kv_cache_dtype": {
            "spec": KVSpec((LayerKV(2, 66, 64),)),
            "kv_dtype": torch.int8,
        },
    }.items(),
)
def test_what_kernels_do_not_support_is_refused_by_name_and_else_torch(
    reason: str, changed: dict[str, Any]
):
    case = replace(ON_GPU, **changed)
    assert isinstance(choose_attention("auto", case), TorchAttention)
    with pytest.raises(ConfigError, match=reason):
        choose_attention("triton", case)


def test_the_room_of_kernels_loads_no_triton_before_a_step():
    program = "import sys, ostinato.runner.gpu.backend; print('triton.language' in sys.modules)"
    code = f"import builtins\nimport ostinato.runner.model_runner\n{program}"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.split() == ["False"]


def test_no_other_room_names_kernels_or_their_compiler():
    """The setting's value is all that the rest of the package knows, but what chooses."""
    package = Path(availability.__file__).parents[2]
    room = package / "runner/gpu"
    for path in package.rglob("*.py"):
        if not path.is_relative_to(room):
            text = path.read_text()
            assert not re.search(r"\b(import|from) triton|find_spec\(.triton|tl\.dot|@triton", text)
            if path.name not in ("attention_choice.py", "select_forward.py"):
                assert "runner.gpu" not in text, path


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
