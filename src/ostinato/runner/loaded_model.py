"""A model that is ready to be served, and what is known of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ostinato.errors import MissingTokenizer
from ostinato.runner.forward.quantized import Quantization
from ostinato.runner.forward.weight_refs import ModelSize
from ostinato.runner.heads import ModelHead
from ostinato.runner.images.vision import Vision
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.loading.model_support import LengthLimit
from ostinato.runner.loading.pretrained import TOKENIZER_FILES
from ostinato.runner.model_call import LaterCall, ModelCall
from ostinato.runner.select_forward import ChosenForward, Forward
from ostinato.runner.states.store import StateSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to be served.

    Attributes:
        name: As the user gave it.
        path: Directory of the checkpoint, or its GGUF file.
        call: Calls the model, which is in evaluation mode, with our attention.
        config: Its config.
        tokenizer: Its tokenizer; None if the checkpoint has none.
        eos_token_ids: Ids that end a text.
        length_limit: Maximum tokens of a sequence, and why.
        vocab_size: Number of ids.
        dtype: Compute dtype.
        device: Device of the model.
        fingerprint: SHA-256 over config and weights, and the name of their quantization.
        kv_spec: KV per token of each layer.
        state_spec: States of the layers that have one.
        forward: How steps are computed, and why not faster.
        size: How large the model is.
        mapped_bytes: Bytes of weights that are mapped from the cache folder; the kernel counts them
            as free.
        quantization: Quantization of the linear layers; None if they are not quantized.
        head: What its last layer gives.
        vision: The image encoder; None if only text is served.
        why_no_images: Why only text is served; empty if images are.
    """

    name: str
    path: Path
    call: ModelCall | LaterCall
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    length_limit: LengthLimit
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    fingerprint: bytes
    kv_spec: KVSpec
    state_spec: StateSpec
    forward: ChosenForward
    size: ModelSize
    mapped_bytes: int = 0
    quantization: Quantization | None = None
    head: ModelHead = ModelHead()
    vision: Vision | None = None
    why_no_images: str = ""

    @property
    def model(self) -> "PreTrainedModel":
        """The model; after a start with packed weights, the first use builds it in seconds."""
        return self.call.model

    @property
    def num_outputs(self) -> int:
        """Rows of the head: ids, or classes."""
        return self.head.num_rows if self.head.kind != "tokens" else self.vocab_size

    @property
    def weight_format(self) -> str:
        """The format of the weights, such as ``bfloat16`` or ``int8 in groups of 128``."""
        return str(self.quantization or self.dtype).removeprefix("torch.")

    @property
    def fused(self) -> Forward | None:
        """Computes steps in place of the model; None if the model computes them itself."""
        return self.forward.fused

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return self.length_limit.num_tokens

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            MissingTokenizer: The checkpoint has none.
        """
        if self.tokenizer is None:
            raise MissingTokenizer(
                f"this model has no tokenizer (none of {', '.join(TOKENIZER_FILES)} is beside its "
                "weights): give prompts as token ids and set detokenize=False"
            )
        return self.tokenizer
