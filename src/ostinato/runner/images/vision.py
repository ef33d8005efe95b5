"""Turns an image into rows of the model's input.

A model for images and text has an encoder, which turns an image into as many vectors as the image
has tokens; they replace these tokens' embeddings. The encoder is taken out of the model, which is
then a text model for everything else::

    pixels ─► image processor ─► encoder ─► (num_tokens, width)
                                                   │
    ids ─► embedding ─► (num_tokens, width) ◄──────┘  rows of placeholders ─► layers

Some encoders (Qwen3-VL) give each token more vectors, which are added to the outputs of the first
layers (deepstack, arXiv 2406.04334); they are stored beside the first::

    (num_tokens, (1 + num_later) * width)
"""

import copy
import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ostinato.errors import RequestError, UnsupportedModel
from ostinato.runner.images.vision_families import FAMILIES, ImageGrid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pixels = npt.NDArray[np.uint8]

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_TRIED_SIZE = 56
"""Height and width of the image that each encoder is tested with."""


class Vision:
    """A model's image encoder, and the layout of its images.

    Attributes:
        family: What differs between families.
        placeholder_id: Token for a vector of an image.
        token_ids: All tokens of an image.
        settings: SHA-256 over all that a vector depends on besides pixels and weights.
        sees_ahead: Whether an image's tokens see later tokens of the image.
    """

    def __init__(
        self,
        encoder: nn.Module,
        embedding: nn.Module,
        processor: Any,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Take an encoder from ``take_encoder``, and the model's embedding."""
        config = cast(Any, encoder.config)
        self.family = FAMILIES[config.model_type]
        if self.family.row_ends and tokenizer is None:
            raise UnsupportedModel("the checkpoint has no tokenizer to write the rows of images")
        self._encoder, self._embedding, self._processor = encoder, embedding, processor
        self._config = config
        self._encoding = threading.Lock()
        self.sees_ahead = self.family.sees_ahead(config.get_text_config())
        self.placeholder_id: int = config.image_token_id
        self.settings = hashlib.sha256(processor.to_json_string().encode()).digest()
        self._row_ends: list[int] = []
        self._spelling: tuple[str, str] | None = None
        if tokenizer is not None:
            self._row_ends = list(tokenizer.convert_tokens_to_ids(list(self.family.row_ends)))
            if self.family.spelling is not None:
                self._spelling = self.family.spelling(config, tokenizer)
        self.token_ids = frozenset((self.placeholder_id, *self._row_ends))

    def grid(self, height: int, width: int) -> ImageGrid:
        """Return the layout of an image of some size.

        Raises:
            RequestError: The model does not support images of this shape.
        """
        try:
            return self.family.grid(self._config, self._processor, height, width)
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"an image of {width} x {height} pixels: {error}") from error

    def spelled(self, text: str) -> str:
        """Return a text with the family's own name of an image replaced by placeholder tokens."""
        return text if self._spelling is None else text.replace(*self._spelling)

    def tokens(self, grid: ImageGrid) -> npt.NDArray[np.uint32]:
        """Return the tokens of an image, shape (grid.num_tokens,)."""
        written = np.full((grid.rows, grid.columns), self.placeholder_id, dtype=np.uint32)
        if self._row_ends:
            written[:, -1], written[-1, -1] = self._row_ends
        return written.reshape(-1)

    @torch.inference_mode()
    def encode(self, pixels: Pixels) -> Tensor:
        """Return an image's vectors, shape (num_tokens, (1 + num_later) * width).

        Thread-safe; encodes one image at a time.

        Args:
            pixels: RGB, shape (height, width, 3).
        """
        with self._encoding:
            vectors = self._encoded(pixels)
        tokens = self.tokens(self.grid(*pixels.shape[:2]))
        is_vector = tokens == self.placeholder_id
        if len(vectors) != is_vector.sum():
            raise UnsupportedModel(
                f"the encoder gives {len(vectors)} vectors for {is_vector.sum()} placeholder tokens"
            )
        if is_vector.all():
            return vectors
        written = self.embed(torch.from_numpy(tokens.astype(np.int64)).to(vectors.device))
        written[torch.from_numpy(is_vector).to(vectors.device)] = vectors
        return written

    def _encoded(self, pixels: Pixels) -> Tensor:
        """Run processor and encoder."""
        processed = self._processor(
            images=[pixels],
            return_tensors="pt",
            input_data_format="channels_last",
            **self.family.options(self._config),
        )
        weight = next(self._encoder.parameters())
        inputs = {name: processed[name].to(weight.device) for name in self.family.inputs}
        inputs["pixel_values"] = inputs["pixel_values"].to(weight.dtype)
        output = cast(Any, self._encoder).get_image_features(**inputs, return_dict=True)
        later = getattr(output, "deepstack_features", None) or ()
        rows = [_one_image(vectors) for vectors in (output.pooler_output, *later)]
        return torch.cat(rows, dim=-1) if later else rows[0]

    def embed(self, ids: Tensor) -> Tensor:
        """Return a copy of the embeddings of tokens, shape (num_tokens, width)."""
        return cast(Tensor, self._embedding(ids[None])[0]).clone()

    def replace_weights(self, other: "Vision") -> None:
        """Load the weights of another encoder of the same model."""
        with self._encoding:
            self._encoder.load_state_dict(other._encoder.state_dict())


def take_encoder(model: "PreTrainedModel") -> nn.Module | None:
    """Take the encoder out of a model for images and text.

    Returns:
        The model's base without its language model; None if images of this type are not served.

    Effects: the model keeps its language model and head; text calls no encoder, of sound neither.
    """
    base, encoder = model.base_model, None
    if parts := encoder_parts(model):
        encoder = copy.copy(base)
        encoder._modules = parts
        encoder.config = copy.deepcopy(base.config)
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    for name, child in list(base.named_children()):
        has_text = child is decoder or embedding in child.modules()
        if name in parts or (isinstance(child, transformers.PreTrainedModel) and not has_text):
            setattr(base, name, None)
    return encoder


def encoder_parts(model: "PreTrainedModel") -> dict[str, nn.Module | None]:
    """Return the modules of a model's base that encode images, by name; empty for none."""
    modules, family = model.base_model._modules, FAMILIES.get(model.config.model_type)
    parts = {} if family is None else {name: modules.get(name) for name in family.parts}
    return {} if None in parts.values() else parts


def load_vision(
    path: Path,
    encoder: nn.Module,
    model: "PreTrainedModel",
    tokenizer: PreTrainedTokenizerBase | None,
) -> Vision:
    """Set up an encoder, and test it.

    Raises:
        UnsupportedModel: The checkpoint's images cannot be served.
    """
    if not any((path / name).exists() for name in _PROCESSOR_FILES):
        raise UnsupportedModel(f"the checkpoint has no {' or '.join(_PROCESSOR_FILES)}")
    for part in encoder.children():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation("sdpa")
    try:
        processor: Any = transformers.AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False
        )
        vision = Vision(encoder, model.get_input_embeddings(), processor, tokenizer)
        vision.encode(np.full((_TRIED_SIZE, _TRIED_SIZE, 3), 127, dtype=np.uint8))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an unsupported encoder may raise anything
        raise UnsupportedModel(f"{type(error).__name__}: {error}") from error
    return vision


def _one_image(vectors: Any) -> Tensor:
    """Return an image's vectors, shape (num_vectors, width), from the output of any family."""
    if isinstance(vectors, (list, tuple)):
        return cast(Tensor, vectors[0])
    return cast(Tensor, vectors.flatten(0, -2))
