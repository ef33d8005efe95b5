"""Opens a GGUF file and checks that it can be loaded.

A GGUF file has config, tokenizer, chat template and weights. ``transformers`` reads all of them,
and converts quantized weights to the compute dtype.
"""

import functools
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ostinato.errors import BrokenCheckpoint, ModelNotFound, UnsupportedModel

_MAGIC = b"GGUF"
_ROPE_SCALING = "gpt-oss.rope.scaling."
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


def first_part(path: Path) -> Path:
    """Return the first file of a split model, which has its config; any other path as it is."""
    part = _PART.search(path.name)
    return (
        path if part is None else path.with_name(_PART.sub(rf"-00001-of-{part[2]}.gguf", path.name))
    )


def parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a model, of which the first is given.

    Raises:
        BrokenCheckpoint: One of them is missing.
    """
    part = _PART.search(path.name)
    if part is None:
        return (path,)
    files = tuple(
        path.with_name(_PART.sub(f"-{index:05}-of-{part[2]}.gguf", path.name))
        for index in range(1, int(part[2]) + 1)
    )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BrokenCheckpoint(
            f"{path.parent}: {len(missing)} of the {len(files)} parts of a split model are "
            f"missing: {', '.join(missing[:3])}"
        )
    return files


@contextmanager
def open_gguf(path: Path) -> Iterator[None]:
    """Check a GGUF file, and make ``transformers`` parse it once instead of three times.

    It creates a reader for each of config, weights and tokenizer, and a map of tensor names for
    each module: many seconds of Python for a vocabulary of 50,000. It also shows a progress bar.

    Raises:
        BrokenCheckpoint: It is not a GGUF file, or is truncated.
        UnsupportedModel: Its RoPE is scaled by a method that is not supported.

    Effects: within the context, readers of the ``gguf`` package for the same path are shared.
    """
    from transformers import modeling_gguf_pytorch_utils

    with ExitStack() as replaced:
        for module, name, value in (
            (gguf, "GGUFReader", functools.cache(_Reader)),
            (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
            (modeling_gguf_pytorch_utils, "tqdm", lambda items, **_: items),
        ):
            replaced.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        _check_content(path, _read(path, gguf.GGUFReader))
        yield


class _Reader(gguf.GGUFReader):
    """Reads a model of one or several files.

    Its base takes ten seconds for a vocabulary of 150,000. Here a word costs one slice of a plain
    array, in place of a dozen views of a ``memmap``.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        # transformers takes the length of a name for the value of these.
        scaled = [name for name in self.fields if name.startswith(_ROPE_SCALING)]
        self.rope_scaling = {
            name.removeprefix(_ROPE_SCALING): self.fields.pop(name).contents() for name in scaled
        }
        self.tensors: Any = [_Located(tensor, Path(path)) for tensor in self.tensors]
        files = parts(Path(path)) if Path(path) == first_part(Path(path)) else ()
        for file in files[1:]:
            self.tensors += _Reader(str(file)).tensors

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        """Return a field's size, parts, the places of its values among them, and types."""
        kinds = gguf.GGUFValueType
        if kinds(raw_type) != kinds.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count = kinds(int(head[0][0])), int(head[1][0])
        first, start = len(head), orig_offs + 12
        if count and kind == kinds.STRING:
            values, end = self._words(start, count)
            lengths = [head[1]] * count  # which nothing reads
            parts = [part for both in zip(lengths, values, strict=True) for part in both]
            places = range(first + 1, first + 2 * count, 2)
        elif count and kind in self.gguf_scalar_to_np:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            if len(numbers) != count:
                raise ValueError(f"an array of {count} numbers ends beyond the file")
            parts = [numbers[index : index + 1] for index in range(count)]
            places, end = range(first, first + count), start + numbers.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, head + parts, list(places), [kinds.ARRAY, kind]

    def _words(self, start: int, count: int) -> tuple[list[Any], int]:
        """Return the bytes of strings that follow each other, and where they end."""
        data, words = self.data, []
        memory = memoryview(data)
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", memory, start)
            start += 8 + length
            words.append(data[start - length : start])
        if start > len(data):
            raise ValueError(f"an array of {count} strings ends beyond the file")
        return words, start


class _Located:
    """A tensor of a reader, and its file."""

    def __init__(self, tensor: Any, path: Path) -> None:
        self.path = path
        for name, value in tensor._asdict().items():
            setattr(self, name, value)


def fields_of(path: Path) -> Mapping[str, Any]:
    """Return the fields of a GGUF file's header, by name; outside of ``open_gguf``, too.

    Raises:
        BrokenCheckpoint: It is not a GGUF file, or is truncated.
    """
    fields: Mapping[str, Any] = _read(path, _Reader).fields
    return fields


def _read(path: Path, make_reader: Callable[[str], Any]) -> Any:
    """Parse a file's header and check that its tensors are there."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise BrokenCheckpoint(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    try:
        return make_reader(str(path))
    except Exception as error:  # numpy and struct may raise anything beyond a file's end
        raise BrokenCheckpoint(
            f"{path} ({path.stat().st_size:,} bytes) is not a complete GGUF file: {error}; "
            "fetch it again"
        ) from error


def _check_content(path: Path, reader: Any) -> None:
    """Refuse what would be ignored, and a part without the others."""
    count = reader.get_field("split.count")
    num_files = len(parts(path))
    if count is not None and count.contents() > 1 and count.contents() != num_files:
        raise UnsupportedModel(
            f"{path} is one of {count.contents()} parts of a split model: name them "
            f"MODEL-00001-of-{count.contents():05}.gguf and so on, side by side"
        )
    if (method := _rope_scaling(reader)) is not None:
        raise UnsupportedModel(
            f"{path} scales its RoPE by {method!r}, which is not read from GGUF files: use the "
            "checkpoint in safetensors"
        )


def architecture_of(reader: Any) -> str:
    """Return the architecture that a file names."""
    return str(reader.get_field("general.architecture").contents())


_OF_GPT_OSS = {
    "intermediate_size": "expert_feed_forward_length",
    "head_dim": "attention.key_length",
}
_OF_QWEN = {"moe_intermediate_size": "expert_feed_forward_length"}
_ROPE_OF_GPT_OSS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
}


def correct_config(config: Any, path: Path) -> None:
    """Set what ``transformers`` leaves out of a file's config, or reads wrong: RoPE of gpt-oss."""
    reader: Any = gguf.GGUFReader(str(path))
    prefix = architecture_of(reader)

    def read(names: Mapping[str, str]) -> dict[str, Any]:
        fields = {own: reader.get_field(f"{prefix}.{name}") for own, name in names.items()}
        return {own: field.contents() for own, field in fields.items() if field is not None}

    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        vars(config).update(read(_OF_QWEN))
    if config.model_type == "gpt_oss":
        vars(config).update(read(_OF_GPT_OSS))
        theta = {"rope_theta": config.rope_parameters["rope_theta"]}
        own = reader.rope_scaling
        scaling = {name: own[key] for key, name in _ROPE_OF_GPT_OSS.items() if key in own}
        # The file leaves out that dimensions are not rounded.
        published = type(config)().rope_parameters if scaling else {"rope_type": "default"}
        config.rope_parameters = {**published, **scaling, **theta}


def _rope_scaling(reader: Any) -> str | None:
    """Return how frequencies are scaled, other than by a tensor of factors; None if not at all."""
    for name, field in reader.fields.items():
        if name.endswith("rope.scaling.type") and field.contents() != "none":
            return str(field.contents())
    names = (tensor.name for tensor in reader.tensors)
    return next((name for name in names if name.startswith("rope_factors")), None)
