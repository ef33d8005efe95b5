"""What is known of the routers and experts of ``transformers``, as data.

Experts have one interface there (``transformers.integrations.moe``), which says how their weights
are laid out; only what is between the two products is a class's own. Routers are known by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN, SIGMOID_OF_CHOSEN, SPARSE_MIXER = range(5)
"""``ost_scores``."""

SILU, GELU_TANH, RELU_SQUARED, CLAMPED = 0, 2, 4, 5
"""``ost_activation``."""


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """How routers of a class choose.

    Attributes:
        scores: How logits become scores.
        scores_of: Attribute with the name of another way, see ``SCORES``; empty if there is none.
        divides: Whether weights are divided by their sum, or the attribute that says so.
        rounds: Whether weights are rounded to the dtype of the hidden states.
        is_float32: Whether logits are computed in float32.
        correction: Name of the vector that is added to scores for the choice alone; empty if there
            is none, or the block hands it to the router.
        group_best: Number of experts that a group is judged by; 0 if there are no groups.
        epsilon: What is added to the sum of weights.
        linear: Name of the linear layer that computes logits; empty for a weight of the router.
    """

    scores: int = SOFTMAX
    scores_of: str = ""
    divides: bool | str = True
    rounds: bool = False
    is_float32: bool = False
    correction: str = ""
    group_best: int = 0
    epsilon: float = 0.0
    linear: str = ""


_CORRECTION = "e_score_correction_bias"
_QWEN = RouterFamily(divides="norm_topk_prob", rounds=True)
_OF_CHOSEN = RouterFamily(SOFTMAX_OF_CHOSEN, divides=False, rounds=True)
_DEEPSEEK = RouterFamily(
    SIGMOID,
    divides="norm_topk_prob",
    is_float32=True,
    correction=_CORRECTION,
    group_best=2,
    epsilon=1e-20,
)

_FAMILIES: tuple[tuple[RouterFamily, str], ...] = (
    (_QWEN, "FlexOlmo Mellum Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen4ExpText"),
    (_QWEN, "Qwen3OmniMoeThinkerText"),
    (RouterFamily(rounds=True), "Qwen3_5Moe Qwen3VLMoeText"),
    (RouterFamily(is_float32=True, linear="wg"), "HunYuanMoEV1Gate"),
    (RouterFamily(), "MiniMax Mixtral"),
    (RouterFamily(divides=False, rounds=True), "Jamba"),
    (_OF_CHOSEN, "AriaText GptOss GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared"),
    (replace(_QWEN, scores_of="expert_selection_fn"), "Cohere2Moe"),
    (replace(_OF_CHOSEN, scores=SPARSE_MIXER), "Phimoe"),
    (
        RouterFamily(divides=False, is_float32=True, group_best=1),
        "DeepseekOcr2Text DeepseekV2 UnlimitedOcrText",
    ),
    (replace(_QWEN, group_best=2, epsilon=1e-20), "Mistral4"),
    (RouterFamily(is_float32=True, group_best=2, epsilon=1e-20), "MistralLarge4Text"),
    (
        _DEEPSEEK,
        "AXK1 BailingHybrid Beam DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Glm4Moe "
        "Glm4MoeLite Glm4vMoeText Glm5NextText GlmMoeDsa HYV4 KimiLinear MiMoV2Flash NemotronH "
        "SolarOpen",
    ),
    (RouterFamily(SIGMOID), "MiniMaxM2"),
    (RouterFamily(SIGMOID, correction=_CORRECTION), "MiniMaxM3VL Step3p7"),
    (RouterFamily(SIGMOID, rounds=True, correction=_CORRECTION), "Laguna"),
    (replace(_QWEN, scores=SIGMOID, epsilon=1e-6), "Lfm2Moe"),
    (RouterFamily(SIGMOID, epsilon=1e-20, linear="gate"), "AfmoeTokenChoiceRouter"),
    (RouterFamily(SIGMOID, is_float32=True, epsilon=1e-20), "HYV3"),
    (RouterFamily(SIGMOID, divides="norm_topk_prob", is_float32=True), "Flint"),
    (replace(_DEEPSEEK, scores=SIGMOID_OF_CHOSEN, group_best=0, epsilon=0.0), "Kolibri1"),
    (
        RouterFamily(rounds=True, is_float32=True, correction=f"moe_statics.{_CORRECTION}"),
        "Ernie4_5_Moe Ernie4_5_VLMoeMoe",
    ),
)
ROUTERS: Mapping[str, RouterFamily] = {
    (name if name.endswith(("Gate", "Router")) else f"{name}TopKRouter").lower(): family
    for family, names in _FAMILIES
    for name in names.split()
}
"""Routers by the name of their class, in small letters: some are ``TopkRouter``."""

SCORES: Mapping[str, int] = {"softmax": SOFTMAX_OF_CHOSEN, "sigmoid": SIGMOID_OF_CHOSEN}
"""Ways to choose by logits, by the name that configs have for them."""

_ACTIVATIONS: Mapping[str, int] = {
    "torch.nn.functional.silu": SILU,
    "torch.nn.modules.activation.SiLU": SILU,
    "transformers.activations.SiLUActivation": SILU,
    "transformers.activations.GELUTanh": GELU_TANH,
    "transformers.activations.ReLUSquaredActivation": RELU_SQUARED,
}
"""By the names of functions and classes: to import those of transformers takes seconds."""

_CLAMPED: Mapping[str, tuple[str, str]] = {
    "GptOssExperts": ("alpha", "limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
}
"""Experts with clamped gates: the attributes of the factor, and of where they are clamped."""


@dataclass(frozen=True, slots=True)
class Gating:
    """What is between the two products of experts.

    Attributes:
        activation: ``ost_activation``.
        alpha: Its factor, if it is clamped.
        limit: Where it is clamped.
    """

    activation: int
    alpha: float = 1.0
    limit: float = 0.0


def gating_of(experts: Any) -> Gating | None:
    """Return what is between the products of experts of ``transformers``; None if not known."""
    own, act = _name_of(type(experts)._apply_gate), getattr(experts, "act_fn", None)
    if experts.has_gate and own != "transformers.integrations.moe._default_apply_gate":
        if (names := _CLAMPED.get(type(experts).__name__)) is None:
            return None
        alpha, limit = (float(getattr(experts, name)) for name in names)
        return Gating(CLAMPED, alpha, limit)
    activation = _ACTIVATIONS.get(_name_of(act if isinstance(act, FunctionType) else type(act)))
    if activation is None or experts.has_gate == (activation == RELU_SQUARED):
        return None
    return Gating(activation)


def _name_of(known: Any) -> str:
    return f"{known.__module__}.{known.__qualname__}"
