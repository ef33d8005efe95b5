"""What is known of the routers and experts of ``transformers``, as data.

Experts have one interface there (``transformers.integrations.moe``), which says how their weights
are laid out; only what is between the two products is a class's own. Routers are known by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2
"""``ost_scores``."""

SILU, GELU_TANH, CLAMPED = 0, 2, 5
"""``ost_activation``."""


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """How routers of a class choose.

    Attributes:
        scores: How logits become scores.
        divides: Whether weights are divided by their sum, or the attribute that says so.
        rounds: Whether weights are rounded to the dtype of the hidden states.
        is_float32: Whether logits are computed in float32.
        correction: Name of the vector that is added to scores for the choice alone; empty if there
            is none.
        is_correction_given: Whether the block hands that vector to the router.
        group_best: Number of experts that a group is judged by; 0 if there are no groups.
        epsilon: What is added to the sum of weights.
        floor: The attribute that is the least sum of weights; empty if there is none.
    """

    scores: int = SOFTMAX
    divides: bool | str = True
    rounds: bool = False
    is_float32: bool = False
    correction: str = ""
    is_correction_given: bool = False
    group_best: int = 0
    epsilon: float = 0.0
    floor: str = ""


_QWEN = RouterFamily(divides="norm_topk_prob", rounds=True)
_OF_CHOSEN = RouterFamily(SOFTMAX_OF_CHOSEN, divides=False, rounds=True)
_DEEPSEEK = RouterFamily(
    SIGMOID,
    divides="norm_topk_prob",
    is_float32=True,
    correction="e_score_correction_bias",
    group_best=2,
    epsilon=1e-20,
)

_FAMILIES: tuple[tuple[RouterFamily, str], ...] = (
    (_QWEN, "FlexOlmo Mellum Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen4ExpText"),
    (RouterFamily(rounds=True), "Qwen3_5Moe Qwen3VLMoeText"),
    (RouterFamily(), "MiniMax Mixtral"),
    (_OF_CHOSEN, "GptOss GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared"),
    (RouterFamily(divides=False, is_float32=True, group_best=1), "DeepseekV2"),
    (
        _DEEPSEEK,
        "AXK1 BailingHybrid DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Glm4Moe "
        "Glm4MoeLite Glm4vMoeText Glm5NextText GlmMoeDsa HYV4 KimiLinear MiMoV2Flash NemotronH "
        "SolarOpen",
    ),
    (RouterFamily(SIGMOID, is_correction_given=True), "MiniMaxM2"),
    (
        RouterFamily(
            rounds=True,
            is_float32=True,
            correction="moe_statics.e_score_correction_bias",
            floor="norm_min",
        ),
        "Ernie4_5_Moe Ernie4_5_VLMoeMoe",
    ),
)
ROUTERS: Mapping[str, RouterFamily] = {
    f"{name}TopKRouter".lower(): family for family, names in _FAMILIES for name in names.split()
}
"""Routers by the name of their class, in small letters: some are ``TopkRouter``."""

_ACTIVATIONS: Mapping[str, int] = {
    "torch.nn.modules.activation.SiLU": SILU,
    "transformers.activations.SiLUActivation": SILU,
    "transformers.activations.GELUTanh": GELU_TANH,
}
"""By the names of classes: to import those of transformers takes seconds."""


def activation_of(experts: Any) -> int | None:
    """Return what is between the products of experts; None if it is not known."""
    if _name_of(type(experts)._apply_gate) == "transformers.integrations.moe._default_apply_gate":
        return _ACTIVATIONS.get(_name_of(type(experts.act_fn)))
    return CLAMPED if type(experts).__name__ == "GptOssExperts" else None


def _name_of(known: Any) -> str:
    return f"{known.__module__}.{known.__qualname__}"
