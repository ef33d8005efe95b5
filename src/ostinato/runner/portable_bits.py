"""Logits with the same bits on every processor, or the reason why there are none.

Integers are added in any order, floats of norms, gates and softmax in one that does not depend on
the width of vectors, and angles come from additions and products of doubles: so a model whose
weights, keys and values are codes computes the same with every instruction set of x86-64 and ARM.
"""

import logging
from collections.abc import Iterator

import torch

from ostinato.errors import ConfigError
from ostinato.runner.attention_choice import AttentionCase, why_torch
from ostinato.runner.forward.embedding_and_rope import STATIC_ROPE
from ostinato.runner.forward.fused import FusedForward
from ostinato.runner.forward.quantized import QuantizedWeight
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.native.library import Isa, current_isa, library, use_isa
from ostinato.runner.settings import AttentionName

logger = logging.getLogger("ostinato")


_REPLACED = {Isa.AMX: Isa.AVX512_BF16, Isa.NEON_BF16: Isa.NEON_I8MM}
"""Instruction sets that round in a way of their own, and the largest ones that do not."""


def use_portable_kernels() -> None:
    """Leave AMX unused, which multiplies codes in bfloat16, and ARM's products of bfloat16.

    Effects: on the whole process.
    """
    native = library()
    if native is None or (isa := current_isa(native)) not in _REPLACED:
        return
    other = _REPLACED[isa]
    use_isa(native, other)
    logger.info("portable_bits: %s in place of %s, in the whole process", other.name, isa.name)


def check_portable(loaded: LoadedModel, name: AttentionName, case: AttentionCase) -> None:
    """Refuse a model that computes something of its own on each processor.

    Args:
        loaded: The model.
        name: The setting ``attention``.
        case: What attention is computed on.

    Raises:
        ConfigError: With the first reason, and the setting that helps.
    """
    if (reason := next(_reasons(loaded, name, case), None)) is not None:
        raise ConfigError(f"portable_bits=True: {reason}; or set portable_bits=False")


def _reasons(loaded: LoadedModel, name: AttentionName, case: AttentionCase) -> Iterator[str]:
    if (hindrance := why_torch(name, case)) is not None or library() is None:
        yield f"attention is computed by torch ({hindrance or 'there is no native library'})"
    if case.kv_dtype != torch.int8:
        yield f"keys and values are in {_name(case.kv_dtype)}: set kv_cache_dtype='int8'"
    if loaded.dtype not in (torch.float32, torch.bfloat16):
        yield f"the model computes in {_name(loaded.dtype)}: set dtype='float32' or 'bfloat16'"
    if isinstance(loaded.fused, FusedForward) and loaded.fused.decoder.has_states:
        yield "layers with a state give a token other bits in a prompt than in a step of its own"
    elif not isinstance(loaded.fused, FusedForward) or not loaded.fused.promises_bits:
        yield f"not all of the model is fused ({loaded.forward.reason})"
    else:
        yield from _reasons_of(loaded.fused)
    if getattr(loaded.config.get_text_config(), "final_logit_softcapping", None) is not None:
        yield "logits are capped by a tanh of torch (final_logit_softcapping)"


def _reasons_of(fused: FusedForward) -> Iterator[str]:
    decoder = fused.decoder
    products = [*decoder.projections(), decoder.head]
    if not all(isinstance(each.weight, QuantizedWeight) for each in products):
        yield "weights are no codes: set quantization, to 'int8' or another"
    kinds = getattr(decoder.rotary, "rope_type", "default")
    if not STATIC_ROPE.issuperset(kinds.values() if isinstance(kinds, dict) else (kinds,)):
        yield f"RoPE of type {kinds} depends on the length of the text"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
