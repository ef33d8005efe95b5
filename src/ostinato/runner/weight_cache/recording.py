"""Writes an entry while a model is packed.

Each packed weight is written while the next one is packed, and then used as it is mapped from the
file: a first start keeps no more memory of its own than a second one.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ostinato.runner.block_embedding import BlockEmbedding
from ostinato.runner.forward.packing import Layers, Pack, names_of
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loading.pretrained import save_tokenizer
from ostinato.runner.loading.weight_source import WeightSource
from ostinato.runner.native.packed import PackedWeight
from ostinato.runner.weight_cache.entry import NAMES_BETWEEN, ROPE_FACTORS, EntryWriter, Record
from ostinato.runner.weight_cache.folder import make_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("ostinato")

MIN_BYTES = 2**26
"""Smaller checkpoints are packed in a moment."""

_SHAPES = "shapes"


class WeightRecorder:
    """Writes a model's packed weights; what fails is logged, and has no other effect.

    Attributes:
        num_bytes: Bytes of the files, as ``Entry.num_bytes``; 0 if nothing is mapped from them.
    """

    def __init__(self) -> None:
        """Write nothing, until it begins."""
        self._writer: EntryWriter | None = None
        self._packed: dict[str, PackedWeight] = {}
        self._weights: dict[str, Record] = {}
        self._blocks: dict[str, str] = {}
        self._embedding: nn.Module | None = None
        self._moved: list[Tensor] = []
        self._is_in_use = False
        self._thread: ThreadPoolExecutor | None = None
        self._written: Future[None] | None = None
        self.num_bytes = 0

    def begin(self, num_bytes: int, max_bytes: int) -> None:
        """Create an entry's files, where packed weights are to be kept.

        Args:
            num_bytes: Bytes of the checkpoint.
            max_bytes: Limit of the cache folder; 0 keeps nothing.
        """
        if max_bytes <= 0 or num_bytes < MIN_BYTES:
            return
        try:
            reason = make_room(num_bytes, max_bytes)
            if reason is None:
                self._writer = EntryWriter(max_bytes)
                self._thread = ThreadPoolExecutor(1, "ostinato-weights")
                return
        except OSError as error:
            reason = str(error)
        logger.info("packed weights are not kept: %s", reason)

    @property
    def packed_names(self) -> dict[int, str]:
        """Names of what was packed, by the ids of the packed weights."""
        return {id(weight): name for name, weight in self._packed.items()}

    @property
    def is_writing(self) -> bool:
        """Whether all that was packed so far is in the files."""
        return self._writer is not None

    @property
    def is_complete(self) -> bool:
        """Whether all weights of a model are in the files: one that is read as a whole has none."""
        return self._writer is not None and _SHAPES in self._writer.index

    def recorded(self, pack: Pack, names: Mapping[int, str]) -> Pack:
        """Return what packs likewise, and writes what it packs."""

        def packed(layers: Layers, is_head: bool) -> PackedWeight:
            name = NAMES_BETWEEN.join(names_of(layers, names))  # packing replaces what names them
            weight = pack(layers, is_head)
            self.keep(name, weight)
            return weight

        return packed

    def keep(self, name: str, weight: PackedWeight) -> None:
        """Write a packed weight, and map it, on a thread that writes one at a time.

        Effects: waits for the one before it. No program may point to a weight before ``wait``.
        """
        self._on_thread(lambda: self._keep(name, weight))

    def _on_thread(self, write: Callable[[], None]) -> None:
        self.wait()
        if self._thread is not None and self._writer is not None:
            self._written = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until all that was packed is written and mapped."""
        if self._written is not None:
            self._written.result()

    def _keep(self, name: str, weight: PackedWeight) -> None:
        mapped = {
            part: self._add(f"{name}/{part}", tensor) for part, tensor in weight.memory().items()
        }
        if self._writer is not None:
            self._packed[name], self._weights[name] = weight, _record_of(weight)
            weight.use_memory(mapped)

    def add_embedding(self, model: "PreTrainedModel") -> None:
        """Write the embedding, the largest weight that is not packed, and map it, likewise."""
        embedding = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embedding)
        if isinstance(embedding, BlockEmbedding):
            self._blocks[f"{name}.weight"] = embedding.kind
        self._embedding = embedding
        self._on_thread(
            lambda: _move(embedding, self._add(f"{name}.weight", _memory_of(embedding)))
        )

    def add_encoder(self, model: "PreTrainedModel") -> None:
        """Write the weights of its encoder, the only ones that were read, and map them."""
        for name, weight in model.named_parameters():
            if self._writer is not None and not weight.is_meta:
                weight.data = self._add(name, weight.data)
                self._moved.append(weight)

    def add_others(self, model: "PreTrainedModel", source: WeightSource, is_fused: bool) -> None:
        """Write the weights that are neither packed nor embeddings.

        Args:
            model: Complete.
            source: Names its weights.
            is_fused: Whether programs point to its weights, which then stay where they are.
        """
        self._is_in_use = is_fused
        weights: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
        weights |= dict(model.named_buffers())
        for name in source.shapes:
            weight = weights.get(name)
            if self._writer is not None and weight is not None and name not in self._writer:
                mapped = self._add(name, weight.data)
                if not is_fused and self._writer is not None:
                    weight.data = mapped
                    self._moved.append(weight)
        if self._writer is not None:
            factors = source.rope_factors
            self._writer.index |= {
                "blocks": self._blocks,
                "weights": self._weights,
                _SHAPES: {name: list(shape) for name, shape in source.shapes.items()},
                ROPE_FACTORS: None if factors is None else factors.tolist(),
            }

    def publish(
        self,
        key: str,
        index: Record,
        config: PreTrainedConfig | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Make the entry visible.

        Args:
            key: Its name.
            index: What else a second start has to know.
            config: Saved with the weights, since a GGUF file takes seconds to parse; None if the
                checkpoint has a file of it.
            tokenizer: Likewise.
        """
        writer = self._writer
        if writer is None:
            return
        try:
            if config is not None:
                config.save_pretrained(writer.folder)
            if tokenizer is not None:
                save_tokenizer(tokenizer, writer.folder)
            writer.index |= index
            self._writer = None
            writer.publish(key)
        except Exception as error:  # code of any tokenizer
            logger.info("packed weights are not kept: %s", error)
            writer.discard()

    def discard(self) -> None:
        """Delete the files of a load that failed, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._drop()

    def _add(self, name: str, tensor: Tensor) -> Tensor:
        if self._writer is None:
            return tensor
        try:
            mapped = self._writer.add(name, tensor)
            self.num_bytes = self._writer.num_bytes
            return mapped
        except OSError as error:
            self._fail(error)
            return tensor

    def _fail(self, error: Exception) -> None:
        """Delete the files, whose disk space would be in use as long as they are mapped."""
        logger.info("packed weights are not kept: %s", error)
        self._drop()
        self._restore()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _restore(self) -> None:
        """Take what was mapped into memory of this process."""
        if self._is_in_use:
            return
        for weight in self._packed.values():
            weight.use_memory({part: t.clone() for part, t in weight.memory().items()})
        if self._embedding is not None:
            _move(self._embedding, _memory_of(self._embedding).clone())
        for parameter in self._moved:
            parameter.data = parameter.data.clone()
        self._packed.clear()
        self.num_bytes = 0


def _record_of(weight: PackedWeight) -> Record:
    """Describe a packed weight, without its memory."""
    record: Record = {
        "shape": [weight.num_rows, weight.num_columns],
        "parts": list(weight.memory()),
    }
    if isinstance(weight, QuantizedWeight):
        record["format"] = dataclasses.astuple(weight.format)
        record["activations"] = dataclasses.astuple(weight.activations)
        record["is_in_blocks"] = weight.is_in_blocks
    return record


def _memory_of(embedding: nn.Module) -> Tensor:
    if isinstance(embedding, BlockEmbedding):
        return torch.from_numpy(embedding.blocks)
    return cast(nn.Parameter, embedding.weight).data


def _move(embedding: nn.Module, memory: Tensor) -> None:
    if isinstance(embedding, BlockEmbedding):
        embedding.blocks = memory.numpy()
    else:
        cast(nn.Parameter, embedding.weight).data = memory
