"""What the figure of memory per request shows is what ``ostinato size`` computes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ostinato.lab.size.kv_bytes import kv_bytes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "window_memory.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("window_memory", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["window_memory"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", ["Gemma 3 4B", "Mistral 7B v0.1"])
def test_a_running_request_holds_what_its_windows_say(script: ModuleType, shape: str):
    """To the block: a window that ends within one keeps all of it, and so does the last token."""
    config = script.SHAPES[shape]
    sized = kv_bytes(config)
    assert sized.windowed is not None

    for held in script.measure(config, [1_000, 4_096, 10_001, 20_000]):
        whole = sized.whole.tokens_bytes(held.num_tokens)
        windowed = sized.windowed.tokens_bytes(held.num_tokens)
        block = sized.token_bytes * script.BLOCK_SIZE
        assert whole <= held.whole_bytes < whole + block
        assert windowed - block <= held.windowed_bytes < windowed + 2 * block
    assert held.windowed_bytes < 0.4 * held.whole_bytes
