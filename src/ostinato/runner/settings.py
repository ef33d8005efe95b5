"""The values of the runner's settings."""

from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "float64", "int8"]
AttentionName = Literal["auto", "native", "triton", "torch"]
ReadOnce = Literal["auto", "always", "never"]
ForwardName = Literal["auto", "packed", "plain"]
QuantizationName = Literal["int8", "int4", "w8a8", "w4a8"]
ActivationName = Literal["auto", "int8", "float"]

MAX_LORA_RANK = 512
"""Highest rank of an adapter, ``OST_MAX_LORA_RANK`` of the native library."""

GROUP_STEP = 32
"""Group sizes of quantized weights are a multiple of this."""

NATIVE_BLOCK = 16
"""The native library needs blocks of a multiple of this many tokens."""
