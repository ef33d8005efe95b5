"""Parameters counted from a config are those of the model."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ostinato.errors import UnsupportedModel
from ostinato.lab.size.kv_families import FAMILIES
from ostinato.lab.size.weights import count_weights
from tests.lab.size import known_configs as known

pytestmark = pytest.mark.one_case_in(3)

# Billions of parameters: in all, and of those active per token. Counts of active ones by their
# makers' own rule: with the input embedding (Qwen, DeepSeek, Mistral) or without it (OpenAI).
PUBLISHED = [
    ("LLAMA_3_1_8B", 8.03, None, False),
    ("LLAMA_3_1_70B", 70.55, None, False),
    ("LLAMA_3_1_405B", 405.85, None, False),
    ("QWEN3_32B", 32.8, None, False),
    ("QWEN3_30B_A3B", 30.5, 3.3, True),
    ("QWEN3_235B_A22B", 235, 22, True),
    ("MIXTRAL_8X7B", 46.7, 12.9, True),
    ("GPT_OSS_20B", 20.9, 3.6, False),
    ("GPT_OSS_120B", 116.8, 5.1, False),
    ("GEMMA_3_27B", 27.0, None, False),
    ("DEEPSEEK_V3", 671, 37, True),
]

WITH_POSITIONS = {"gpt2", "opt"}
DENSE_BUILT = {"apertus", "arcee", "bloom", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4"}
DENSE_BUILT |= {
    "gemma", "gemma2", "gemma3", "glm", "glm4", "gpt2", "gpt_neo", "gpt_neox", "granite",
}  # fmt: skip
DENSE_BUILT |= {"helium", "internlm3", "llama", "minicpm3", "mistral", "mpt", "olmo", "olmo2"}
DENSE_BUILT |= {"olmo3", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"}
DENSE_BUILT |= {"stablelm", "starcoder2"}
EXPERTS_BUILT = {"deepseek_v3", "ernie4_5_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "llama4"}
EXPERTS_BUILT |= {"minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"}


@pytest.mark.parametrize(("name", "total", "active", "with_embedding"), PUBLISHED)
def test_known_models_have_as_many_parameters_as_their_makers_say(
    name, total, active, with_embedding
):
    weights = count_weights(getattr(known, name))
    assert weights.total / 1e9 == pytest.approx(total, rel=0.005)
    if active is not None:
        counted = weights.active + (weights.embedding if with_embedding else 0)
        assert counted / 1e9 == pytest.approx(active, rel=0.02)


def default_config(family: str):
    """Return the family's language model in its default size."""
    text = f"{family}_text"
    return CONFIG_MAPPING[text if text in CONFIG_MAPPING else family]()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(DENSE_BUILT | EXPERTS_BUILT))
def test_a_family_is_counted_as_transformers_builds_it(family):
    """On the meta device; norms, biases and learned positions are left out."""
    assert family in FAMILIES
    config = default_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    counted = count_weights(config.to_dict()).total
    assert counted == pytest.approx(built, rel=0.015 if family in WITH_POSITIONS else 0.004)


@pytest.mark.parametrize("family", ["qwen3_5", "jamba", "gemma3n", "falcon"])
def test_a_family_whose_matrices_are_not_known_is_refused_with_a_way_out(family):
    with pytest.raises(UnsupportedModel, match="give --prefill-rate and --step-ms, or --measure"):
        count_weights(default_config(family).to_dict())


def test_a_config_without_its_inner_width_is_refused_by_the_name_of_the_key():
    config = {**known.LLAMA_3_8B, "vocab_size": 10}
    with pytest.raises(UnsupportedModel, match="intermediate_size"):
        count_weights(config)
