"""Tests of kernels need Triton, which extra ``gpu`` brings; no test needs a GPU."""

from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed: pip install 'ostinato[gpu]'"
)
