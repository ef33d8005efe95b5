"""Checks that a model can be served correctly.

The rules here are checked on a config, before gigabytes are read; models that pass are then tried
by the probe. The rules are about prefixes: the keys and values of a token must depend only on the
tokens up to it, or they cannot be shared.

==============================  ==========================================================
refused                         why
==============================  ==========================================================
encoder-decoder                 every token sees the encoder's output, which is no prefix
encoders (BERT)                 every token sees the later ones
chunked attention (Llama 4)     a window does not determine which tokens are seen
bidirectional attention         a token's keys change when tokens follow
states of unknown kinds (RWKV)  see ``states.recurrences`` for those that are known
no attention interface (ALiBi)  the attention cannot be replaced by one that reads blocks
unknown kinds of RoPE           frequencies might depend on the length of the call
==============================  ==========================================================

Models for images and text serve text with their language model; for images, see ``vision``.

Long RoPE changes every frequency once a call exceeds a certain length, so that earlier keys would
have to be computed again; up to it, it is plain RoPE. Such models are served up to that length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig

from ostinato.errors import UnsupportedModel
from ostinato.runner.attention.registration import ATTENTION_NAME
from ostinato.runner.heads import HeadedClass, ModelHead
from ostinato.runner.images.vision_families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED_TOKENS = 2**31
"""The limit if a config has none."""

_ATTENDING_LAYERS = {"full_attention", "sliding_attention", "attention"}
_STATE_LAYERS = {"linear_attention", "mamba", "conv", "hybrid"}
_KNOWN_LAYERS = frozenset({*_ATTENDING_LAYERS, *_STATE_LAYERS, "mlp", "moe"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Maximum length of a sequence.

    Attributes:
        num_tokens: Maximum tokens, prompt and output together.
        reason: The setting of the config behind it.
    """

    num_tokens: int
    reason: str


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what cannot be served, by the config alone.

    Raises:
        UnsupportedModel: With the reason.
    """
    kind = config.model_type
    try:
        text_config = config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel(f"{kind} holds several text models: {error}") from error
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind} is an encoder-decoder; only decoders are served")
    masked = transformers.AutoModelForMaskedLM._model_mapping
    if type(config) in masked and not getattr(text_config, "is_decoder", False):
        raise UnsupportedModel(
            f"{kind} is a bidirectional encoder: each token sees the later ones, so no prefix can "
            "be shared; serve it with sentence-transformers or text-embeddings-inference, or take "
            "an embedder or reranker that is a decoder, such as Qwen3-Embedding or Qwen3-Reranker"
        )
    # Gemma 4 says "vision" where only the tokens of an image do so.
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise UnsupportedModel(
            f"{kind} lets tokens see later ones (use_bidirectional_attention), so keys change "
            "when tokens follow and no prefix can be shared"
        )
    unknown = set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise UnsupportedModel(
            f"{kind} has layers of type {', '.join(sorted(map(str, unknown)))}; served are "
            f"{', '.join(sorted(_KNOWN_LAYERS))}: others see tokens that no sliding window "
            "describes, or carry a state of an unknown kind"
        )
    for rope in _ropes(text_config):
        if rope["rope_type"] not in _STATIC_ROPE | {"dynamic", "longrope"}:
            raise UnsupportedModel(
                f"{kind} has RoPE of type {rope['rope_type']!r}, of which Ostinato does not "
                "know whether it depends on the length of a call"
            )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that builds a config's model with its head, used as an auto class.

    Raises:
        UnsupportedModel: There is none.
    """
    classes: list[Any] = [
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
    ]
    if config.model_type in FAMILIES:
        classes.reverse()  # the first would leave out the image encoder
    for auto in classes:
        if type(config) in auto._model_mapping:
            head = ModelHead.of(config)
            return auto if head.kind == "tokens" else HeadedClass(auto, head)
    raise UnsupportedModel(f"transformers has no causal language model of type {config.model_type}")


def check_attention_interface(config: PreTrainedConfig) -> "PreTrainedModel":
    """Refuse models whose class cannot be built with our attention.

    Returns:
        The model without memory for its weights.

    Raises:
        UnsupportedModel: There is no causal language model of that type, or its attention cannot
            be replaced.
    """
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = auto_class(config).from_config(
                config, attn_implementation=ATTENTION_NAME
            )
            return model.eval()
    except KeyError as error:
        raise UnsupportedModel(
            f"{config.model_type} does not call its attention through the interface of "
            "transformers, so it cannot be replaced by one that reads blocks"
        ) from error
    except UnsupportedModel:
        raise
    except Exception as error:  # a config that a model class cannot use may raise anything
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UnsupportedModel(
            f"{config.model_type} cannot be built as a causal language model: {reason}"
        ) from error


def length_limit(config: PreTrainedConfig) -> LengthLimit:
    """Return the length of a sequence up to which the model is correct."""
    text_config = config.get_text_config()
    limit = LengthLimit(UNLIMITED_TOKENS, "no limit in the config")
    for name in _LENGTH_NAMES:
        length = getattr(text_config, name, None)
        if isinstance(length, int) and length > 0:
            limit = LengthLimit(length, f"{name}={length}")
            break
    for rope in _ropes(text_config):
        original = rope.get("original_max_position_embeddings") or getattr(
            text_config, "original_max_position_embeddings", None
        )
        if rope["rope_type"] == "longrope" and original and original < limit.num_tokens:
            reason = f"longrope changes all frequencies beyond {original} tokens"
            limit = LengthLimit(int(original), reason)
    return limit


def _ropes(text_config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the RoPE settings of a config: one, or one per type of layer."""
    settings = getattr(text_config, "rope_parameters", None)
    if not isinstance(settings, Mapping):
        return
    if "rope_type" in settings:
        yield settings
        return
    for setting in settings.values():
        if isinstance(setting, Mapping) and "rope_type" in setting:
            yield setting
