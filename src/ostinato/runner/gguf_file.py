"""Opens a GGUF file and checks that it can be loaded.

A GGUF file has config, tokenizer, chat template and weights. ``transformers`` reads all of them,
and converts quantized weights to the compute dtype.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ostinato.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel

_MAGIC = b"GGUF"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def find_gguf(directory: Path) -> Path:
    """Return the only GGUF file of a directory without safetensors, or else the directory.

    Raises:
        ModelNotFound: There are several files to choose from.
    """
    files = sorted(directory.glob("*.gguf"))
    if not files or any(directory.glob("*.safetensors")):
        return directory
    if len(files) > 1 and not _PART.search(files[0].name):
        names = ", ".join(file.name for file in files[:4])
        raise ModelNotFound(
            f"{directory} holds {len(files)} GGUF files ({names}): give the path of one of them"
        )
    return files[0]


@contextmanager
def open_gguf(path: Path) -> Iterator[None]:
    """Check a GGUF file, and make ``transformers`` parse it once instead of three times.

    It creates a reader for each of config, weights and tokenizer, and a map of tensor names for
    each module: many seconds of Python for a vocabulary of 50,000. It also shows a progress bar.

    Raises:
        BrokenCheckpoint: It is not a GGUF file, or is truncated.
        UnsupportedModel: It is one part of several, or ``transformers`` would ignore some of it.

    Effects: within the context, readers of the ``gguf`` package for the same path are shared.
    """
    from transformers import modeling_gguf_pytorch_utils

    _check_name(path)
    with ExitStack() as replaced:
        for module, name, value in (
            (gguf, "GGUFReader", functools.cache(_Reader)),
            (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
            (modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
        ):
            replaced.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        _check_content(path, _read(path))
        yield


class _Reader(gguf.GGUFReader):
    """Reads a file twice as fast: a slice of a plain array costs half of that of a ``memmap``."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)


def _read(path: Path) -> Any:
    """Parse a file's header and check that its tensors are there."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise BrokenCheckpoint(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    try:
        return gguf.GGUFReader(str(path))
    except Exception as error:  # numpy and struct may raise anything beyond a file's end
        raise BrokenCheckpoint(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete GGUF file: {error}; "
            "fetch it again"
        ) from error


def _check_name(path: Path) -> None:
    part = _PART.search(path.name)
    if part is not None and int(part[2]) > 1:
        raise UnsupportedModel(
            f"{path} is part {int(part[1])} of {int(part[2])} of a split model: join the parts "
            "with `llama-gguf-split --merge` and give the joined file"
        )


def _check_content(path: Path, reader: Any) -> None:
    """Refuse what the reader of ``transformers`` would silently ignore."""
    count = reader.get_field("split.count")
    if count is not None and count.contents() > 1:
        raise UnsupportedModel(
            f"{path} is one of {count.contents()} parts of a split model: join them with "
            "`llama-gguf-split --merge` and give the joined file"
        )
    if reader.get_field("general.architecture").contents() != "gpt-oss" and _scales_rope(reader):
        raise UnsupportedModel(
            f"{path} scales its RoPE for long contexts, which transformers does not read from GGUF "
            "files: use the checkpoint in safetensors"
        )


def _scales_rope(reader: Any) -> bool:
    """Return whether frequencies are scaled, by a tensor of factors or by a named method."""
    methods = [field for name, field in reader.fields.items() if name.endswith("rope.scaling.type")]
    return any(tensor.name.startswith("rope_f") for tensor in reader.tensors) or any(
        method.contents() != "none" for method in methods
    )
