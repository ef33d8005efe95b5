"""Bytes of KV per token, per sequence and in all.

From a config alone::

    2 (K and V) x layers x KV heads x head_dim x bytes per value

summed over layers, which may differ. Three things make it non-linear:

* a *window*: an engine that frees tokens outside it keeps at most its size;
* a *latent*: one vector per token, unless the engine stores the expanded heads;
* a *state*: a constant amount per sequence, from the first token on.

Blocks are not rounded up here: a sequence of 1,000 tokens fills 63 blocks of 16, and the
last one only by half.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ostinato.core.errors import ConfigError
from ostinato.lab.size.kv_config import Config, language_part
from ostinato.lab.size.kv_layers import Layer, layer_plan

DTYPE_BITS: Mapping[str, int] = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8": 8,
    "int8": 8,
    "fp4": 4,
    "int4": 4,
}
"""KV formats and the bits of one value. ``int8`` adds a scale for each token and head, as the
engine keeps it; scales of the other formats, which other engines keep, are not counted."""

_INT8_SCALE_BYTES = 4

_OTHER_DTYPES: Mapping[str, str] = {
    "double": "float64",
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayerGroup:
    """Layers with equal KV.

    Attributes:
        layer: KV of one of them.
        num_layers: Number of layers.
        token_bytes: KV of one token in all of them.
        expanded_bytes: The same for an engine that stores the expanded heads of latent attention;
            None if there are none, or the config does not define them.
        state_bytes: State of one sequence in all of them.
    """

    layer: Layer
    num_layers: int
    token_bytes: int
    expanded_bytes: int | None
    state_bytes: int

    @property
    def window_bytes(self) -> int | None:
        """Maximum KV of a sequence if only the window is kept; None without a window."""
        window = self.layer.window_tokens
        return None if window is None else window * self.token_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """How memory grows with the length of a sequence, for one way of keeping KV.

    Attributes:
        growth: For each group of layers the bytes per token, and after how many tokens they
            stop growing; None if they never do.
        state_bytes: Fixed bytes per sequence.
    """

    growth: tuple[tuple[int, int | None], ...]
    state_bytes: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers, as long as it is inside every window."""
        return sum(token_bytes for token_bytes, _ in self.growth)

    def tokens_bytes(self, num_tokens: int) -> int:
        """KV of the tokens of one sequence, without states."""
        return sum(
            token_bytes * (num_tokens if window is None else min(num_tokens, window))
            for token_bytes, window in self.growth
        )

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV and state of one sequence."""
        return self.tokens_bytes(num_tokens) + self.state_bytes

    def sequences_within(self, memory_bytes: int, num_tokens: int) -> int | None:
        """Sequences of this length that fit; None if they take no memory."""
        sequence_bytes = self.sequence_bytes(num_tokens)
        return memory_bytes // sequence_bytes if sequence_bytes else None

    def longest_within(self, memory_bytes: int) -> int | None:
        """Tokens of the longest single sequence that fits; None if unlimited."""
        left = memory_bytes - self.state_bytes
        if left < 0:
            return 0
        reached = 0
        for end in sorted({window for _, window in self.growth if window is not None}):
            if self.tokens_bytes(end) > left:
                break
            reached = end
        slope = self.tokens_bytes(reached + 1) - self.tokens_bytes(reached)
        return reached + (left - self.tokens_bytes(reached)) // slope if slope else None


@dataclass(frozen=True, slots=True)
class KVBytes:
    """The KV and states of a model.

    Attributes:
        model_type: The config's own name for the family.
        dtype: Format of the KV.
        groups: Layers that keep the same, in the order in which they first appear.
        notes: Assumptions made in reading the config.
    """

    model_type: str
    dtype: str
    groups: tuple[KVLayerGroup, ...]
    notes: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model, those without KV included."""
        return sum(group.num_layers for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """KV of one token in all layers."""
        return self.whole.token_bytes

    @property
    def state_bytes(self) -> int:
        """State of one sequence in all layers."""
        return sum(group.state_bytes for group in self.groups)

    @property
    def whole(self) -> Footprint:
        """For an engine that keeps the KV of every token."""
        return self._footprint((group.token_bytes, None) for group in self.groups)

    @property
    def windowed(self) -> Footprint | None:
        """For an engine that frees tokens outside windows; None if no layer has one."""
        windows = [group.layer.window_tokens for group in self.groups]
        if all(window is None for window in windows):
            return None
        token_bytes = [group.token_bytes for group in self.groups]
        return self._footprint(zip(token_bytes, windows, strict=True))

    @property
    def expanded(self) -> Footprint | None:
        """For an engine that stores the expanded heads of latents; None if there are none."""
        if all(group.expanded_bytes is None for group in self.groups):
            return None
        return self._footprint(
            (group.token_bytes if group.expanded_bytes is None else group.expanded_bytes, None)
            for group in self.groups
        )

    def _footprint(self, growth: Iterable[tuple[int, int | None]]) -> Footprint:
        return Footprint(tuple(growth), self.state_bytes)


def kv_bytes(config: Config, dtype: str = "auto") -> KVBytes:
    """Size a model's KV from its config alone.

    Args:
        config: ``config.json``, parsed.
        dtype: Format of the KV; ``auto`` takes the config's, or that of its quantisation.

    Raises:
        ConfigError: A value of the config is wrong, or the dtype is unknown.
        UnsupportedModel: The config is incomplete, or the size of the model's cache is unknown.
    """
    plan = layer_plan(config)
    model_dtype, model_notes = _model_dtype(language_part(config))
    kv_dtype, kv_notes = _kv_dtype(config, dtype, model_dtype)
    bits = DTYPE_BITS[kv_dtype]
    # A quantised KV cache leaves states in the model's own dtype.
    state_bits = bits if bits >= 16 else DTYPE_BITS[model_dtype]
    counts = Counter(plan.layers)  # in the order in which they first appear
    groups = tuple(_group(layer, n, kv_dtype, state_bits) for layer, n in counts.items())
    notes = plan.notes + (kv_notes or (model_notes if dtype == "auto" else ()))
    return KVBytes(plan.model_type, kv_dtype, groups, notes)


def known_dtype(name: object) -> str:
    """Return the canonical name of a dtype.

    Raises:
        ConfigError: It is unknown.
    """
    short = str(name).removeprefix("torch.").lower()
    short = _OTHER_DTYPES.get(short, short)
    if short not in DTYPE_BITS:
        raise ConfigError(f"dtype={name!r}: must be one of auto, {', '.join(DTYPE_BITS)}")
    return short


def _model_dtype(part: Config) -> tuple[str, tuple[str, ...]]:
    """Return the config's dtype; by default torch's."""
    written = part.get("dtype") or part.get("torch_dtype")
    if written is None or written == "auto":
        return "float32", ("The config names no dtype: float32 is assumed.",)
    return known_dtype(written), ()


def _kv_dtype(config: Config, dtype: str, model_dtype: str) -> tuple[str, tuple[str, ...]]:
    """Choose the KV format: the requested one, the quantisation's, or the model's own."""
    if dtype != "auto":
        return known_dtype(dtype), ()
    quantisation = config.get("quantization_config")
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, Mapping) else None
    if not isinstance(scheme, Mapping):
        return model_dtype, ()
    kind = {"float": "fp", "int": "int"}.get(str(scheme.get("type")), "?")
    name = f"{kind}{scheme.get('num_bits')}"
    if name not in DTYPE_BITS:
        raise ConfigError(f"kv_cache_scheme={dict(scheme)!r}: unknown; name a --dtype instead")
    return name, (f"quantization_config.kv_cache_scheme keeps the KV in {name}.",)


def _group(layer: Layer, num_layers: int, kv_dtype: str, state_bits: int) -> KVLayerGroup:
    """Convert numbers of values to bytes."""
    expanded = layer.whole_heads_values
    bits = DTYPE_BITS[kv_dtype]
    scale_bytes = _INT8_SCALE_BYTES if kv_dtype == "int8" else 0
    # A latent vector has one scale; so have the key and the value of each head.
    num_scales = (2 * layer.num_kv_heads or 1) if layer.values_per_token else 0
    kept = _bytes(layer.values_per_token, bits) + num_scales * scale_bytes
    if expanded is not None:
        expanded = _bytes(expanded, bits) + 2 * layer.num_heads * scale_bytes
    state_bytes = 0
    if layer.state is not None:
        state_bytes = _bytes(layer.state.num_values, state_bits)
        state_bytes += layer.state.num_float32 * _FLOAT32_BYTES
    return KVLayerGroup(
        layer=layer,
        num_layers=num_layers,
        token_bytes=num_layers * kept,
        expanded_bytes=None if expanded is None else num_layers * expanded,
        state_bytes=num_layers * state_bytes,
    )


def _bytes(num_values: int, bits: int) -> int:
    """Round up to whole bytes, layer by layer."""
    return -(-num_values * bits // 8)
