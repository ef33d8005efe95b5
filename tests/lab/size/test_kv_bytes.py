"""The bytes of KV that a model keeps, from its config alone."""

from typing import Any

import pytest

from ostinato.core.errors import ConfigError
from ostinato.lab.size.kv_bytes import KVBytes, kv_bytes

from . import known_configs


def kinds(size: KVBytes) -> list[tuple[int, str, int | None]]:
    """Number, kind and window of each group of layers."""
    return [(g.num_layers, str(g.layer.kind), g.layer.window_tokens) for g in size.groups]


@pytest.mark.parametrize(
    ("name", "config", "token_bytes"),
    [
        ("Llama 2 7B", known_configs.LLAMA_2_7B, 524_288),
        ("Llama 3 8B", known_configs.LLAMA_3_8B, 131_072),
        ("Mistral 7B", known_configs.MISTRAL_7B, 131_072),
        ("GPT-2 small, float32", known_configs.GPT2, 73_728),
        ("Gemma 2 2B", known_configs.GEMMA_2_2B, 106_496),
        ("Gemma 3 1B", known_configs.GEMMA_3_1B, 26_624),
        ("Gemma 3 4B", known_configs.GEMMA_3_4B, 139_264),
        ("Gemma 3n E4B", known_configs.GEMMA_3N_E4B, 40_960),
        ("DeepSeek-V3", known_configs.DEEPSEEK_V3, 70_272),
        ("Qwen3.6-27B", known_configs.HYBRID_27B, 65_536),
        ("Qwen3.6-35B-A3B", known_configs.HYBRID_35B_A3B, 20_480),
    ],
)
def test_a_token_of_a_known_model_takes(name: str, config: dict[str, Any], token_bytes: int):
    """Figures from the models' papers and cards, or 2 x layers x KV heads x size by hand."""
    assert kv_bytes(config).token_bytes == token_bytes


FALCON_7B = known_configs.decoder(
    "falcon", 32, 71, 71, 4544, multi_query=True, new_decoder_architecture=False
)
FALCON_40B = known_configs.decoder(
    "falcon", 60, 128, 8, 8192, multi_query=True, new_decoder_architecture=True
)
STARCODER = {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40}
DBRX = {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}} | {
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
}
CHATGLM = {"model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2} | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 28,
}


class TestKindsOfAttention:
    """Multi-head, grouped-query, multi-query, latent."""

    @pytest.mark.parametrize(
        ("num_kv_heads", "kind"), [(32, "multi-head"), (8, "grouped-query"), (1, "multi-query")]
    )
    def test_the_number_of_kv_heads_names_the_kind(self, num_kv_heads: int, kind: str):
        size = kv_bytes(known_configs.LLAMA_2_7B | {"num_key_value_heads": num_kv_heads})

        assert kinds(size) == [(32, kind, None)]
        assert size.token_bytes == num_kv_heads * 16_384

    def test_llama_1_leaves_its_kv_heads_out_and_has_as_many_as_query_heads(self):
        """The key came with Llama 2; ``null`` and a missing key mean the same here."""
        without = {k: v for k, v in known_configs.LLAMA_2_7B.items() if k != "num_key_value_heads"}

        assert kv_bytes(without).token_bytes == 524_288
        assert kv_bytes(without | {"num_key_value_heads": None}).token_bytes == 524_288

    @pytest.mark.parametrize(
        ("config", "token_values"),
        [
            (FALCON_7B, 2 * 32 * 1 * 64),
            (FALCON_40B, 2 * 60 * 8 * 64),
            (STARCODER, 2 * 40 * 1 * 128),
            (STARCODER | {"multi_query": False}, 2 * 40 * 48 * 128),
            (DBRX, 2 * 40 * 8 * 128),
            (CHATGLM, 2 * 28 * 2 * 128),
            (CHATGLM | {"multi_query_attention": False}, 2 * 28 * 32 * 128),
        ],
    )
    def test_a_family_says_its_kv_heads_in_its_own_way(
        self, config: dict[str, Any], token_values: int
    ):
        """Only Falcon's "new decoder architecture" means its key; StarCoder and ChatGLM have a
        switch, and DBRX nests the number."""
        assert kv_bytes(config, "bfloat16").token_bytes == 2 * token_values

    def test_a_latent_is_one_vector_for_all_heads_and_may_be_expanded(self):
        """512 + 64 numbers per layer, or 128 heads of 192 for K and 128 for V."""
        size = kv_bytes(known_configs.DEEPSEEK_V3)

        assert kinds(size) == [(61, "latent", None)]
        assert size.expanded is not None
        assert size.expanded.token_bytes == 61 * 128 * (192 + 128) * 2

    def test_plain_attention_has_nothing_to_expand_and_no_window(self):
        size = kv_bytes(known_configs.LLAMA_3_8B)
        assert (size.expanded, size.windowed) == (None, None)


MISTRAL_WITHOUT_THE_KEY = {
    key: value for key, value in known_configs.MISTRAL_7B.items() if key != "sliding_window"
}
LLAMA_4 = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}


def qwen(family: str, uses_window: bool) -> dict[str, Any]:
    """Return a config of Qwen's with a window, which is on or off."""
    switch = {"use_sliding_window": uses_window, "sliding_window": 1000, "max_window_layers": 28}
    return known_configs.LLAMA_3_8B | {"model_type": family, **switch}


class TestWindows:
    """Layers that look back so far and no further."""

    def test_mistral_keeps_at_most_its_window(self):
        size = kv_bytes(known_configs.MISTRAL_7B)

        assert kinds(size) == [(32, "grouped-query", 4096)]
        assert size.groups[0].window_bytes == 4096 * 131_072
        assert size.windowed is not None
        assert size.windowed.sequence_bytes(4096) == 4096 * 131_072
        assert size.windowed.sequence_bytes(32_000) == 4096 * 131_072
        assert size.whole.sequence_bytes(32_000) == 32_000 * 131_072

    @pytest.mark.parametrize(
        ("config", "groups"),
        [
            (known_configs.MISTRAL_7B | {"sliding_window": None}, [(32, "grouped-query", None)]),
            (MISTRAL_WITHOUT_THE_KEY, [(32, "grouped-query", 4096)]),
            (known_configs.GEMMA_2_2B, [(13, "grouped-query", 4096), (13, "grouped-query", None)]),
            (known_configs.GEMMA_3_4B, [(29, "grouped-query", 1024), (5, "grouped-query", None)]),
            (known_configs.GEMMA_3_1B, [(22, "multi-query", 512), (4, "multi-query", None)]),
            (qwen("qwen2", True), [(28, "grouped-query", None), (4, "grouped-query", 1000)]),
            (qwen("qwen2", False), [(32, "grouped-query", None)]),
            (qwen("qwen3", False), [(32, "grouped-query", None)]),
            (qwen("qwen2_moe", False), [(32, "grouped-query", None)]),
            (qwen("qwen3_moe", False), [(32, "grouped-query", None)]),
            (LLAMA_4, [(36, "grouped-query", 8192), (12, "grouped-query", None)]),
        ],
    )
    def test_a_family_slides_in_the_layers_that_it_says(
        self, config: dict[str, Any], groups: list[tuple[int, str, int | None]]
    ):
        """Later Mistrals set the window to ``null``; without the key their class has one. Every
        second layer of Gemma 2 slides and five of six of Gemma 3's, whether or not the config
        writes ``sliding_window_pattern``. Qwen writes a window down and leaves it off. Llama 4
        attends in chunks where it has rotary positions."""
        assert kinds(kv_bytes(config)) == groups

    def test_the_longest_sequence_grows_past_the_windows_on_its_full_layers_alone(self):
        """Gemma 3 4B: what 29 windows leave of 1 GiB goes to five layers, 20,480 B a token."""
        size = kv_bytes(known_configs.GEMMA_3_4B)
        memory = 2**30
        assert size.windowed is not None

        longest = size.windowed.longest_within(memory)
        assert longest is not None
        assert longest == (memory - 1024 * 29 * 4096) // (5 * 4096)
        assert size.windowed.sequence_bytes(longest) <= memory
        assert size.windowed.sequence_bytes(longest + 1) > memory


class TestLayersWithoutKV:
    """States instead of KV, or another layer's KV."""

    def test_only_one_layer_in_four_of_a_hybrid_keeps_kv(self):
        """The state of the others is constant: convolution in bfloat16, recurrence in float32."""
        size = kv_bytes(known_configs.HYBRID_27B)
        convolution = (2 * 16 * 128 + 32 * 128) * 4
        recurrence = 32 * 128 * 128

        assert kinds(size) == [(48, "state", None), (16, "grouped-query", None)]
        assert size.state_bytes == 48 * (2 * convolution + 4 * recurrence)
        assert size.whole.sequence_bytes(1000) == 1000 * 65_536 + size.state_bytes

    def test_the_interval_and_the_list_of_layer_types_say_the_same(self):
        listed = known_configs.HYBRID_35B_A3B["text_config"]
        assert isinstance(listed, dict)
        by_interval = {k: v for k, v in listed.items() if k != "layer_types"}

        assert kv_bytes(by_interval | {"full_attention_interval": 4}) == kv_bytes(listed)

    def test_mamba_keeps_no_kv_so_its_length_is_no_matter(self):
        """Of 1 GiB only the states matter; they are the same for one token and a million."""
        size = kv_bytes({"model_type": "mamba2", "dtype": "bfloat16"})

        assert size.token_bytes == 0
        assert size.whole.sequence_bytes(1) == size.whole.sequence_bytes(10**6) == size.state_bytes
        assert size.whole.longest_within(2**30) is None
        assert size.whole.longest_within(1000) == 0
        assert size.whole.sequences_within(2**30, 1000) == 2**30 // size.state_bytes

    def test_nemotron_h_spells_its_layers_in_letters(self):
        """M for Mamba, * for attention, - for a layer that keeps nothing at all."""
        size = kv_bytes({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"})

        assert kinds(size) == [
            (2, "state", None),
            (2, "no attention", None),
            (1, "grouped-query", None),
        ]

    def test_gemma_4_s_full_layers_have_wider_and_fewer_heads(self):
        """The form of the hub's config, and the one that ``transformers`` saves."""
        written = {
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 6,
        }
        saved = {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "per_layer_config": {"5": {"head_dim": 512, "num_key_value_heads": 1}},
        }
        expected = 2 * (5 * 4 * 256 + 1 * 512) * 2

        assert kv_bytes(written, "bfloat16").token_bytes == expected
        assert kv_bytes(saved, "bfloat16").token_bytes == expected


class TestDtypes:
    """What one number takes."""

    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [
            ("float64", 64),
            ("float32", 32),
            ("bfloat16", 16),
            ("bf16", 16),
            ("torch.float16", 16),
            ("fp8", 8),
            ("fp8_e4m3", 8),
            ("int4", 4),
        ],
    )
    def test_bytes_follow_the_dtype(self, dtype: str, bits: int):
        assert kv_bytes(known_configs.LLAMA_2_7B, dtype).token_bytes == 524_288 * bits // 16

    def test_int8_adds_a_scale_for_the_key_and_the_value_of_each_head(self):
        """32 layers of 32 heads of 128: 132 bytes instead of 256, 1.94 times the tokens."""
        assert kv_bytes(known_configs.LLAMA_2_7B, "int8").token_bytes == 32 * 2 * 32 * (128 + 4)

    def test_a_config_without_a_dtype_is_taken_for_float32_and_says_so(self):
        size = kv_bytes(known_configs.GPT2)

        assert size.dtype == "float32"
        assert any("no dtype" in note for note in size.notes)
        assert kv_bytes(known_configs.GPT2, "float32").notes == ()

    def test_a_quantised_kv_cache_is_read_from_the_quantisation(self):
        """As compressed-tensors and ModelOpt write it; weights in 4 bits change nothing."""
        scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "modelopt"}

        size = kv_bytes(known_configs.LLAMA_2_7B | {"quantization_config": scheme})
        assert (size.dtype, size.token_bytes) == ("fp8", 262_144)
        assert any("kv_cache_scheme" in note for note in size.notes)
        weights_only = {"bits": 4, "quant_method": "gptq"}
        size = kv_bytes(known_configs.LLAMA_2_7B | {"quantization_config": weights_only})
        assert (size.dtype, size.token_bytes) == ("float16", 524_288)

    def test_a_quantised_kv_cache_leaves_states_as_they_are(self):
        assert (
            kv_bytes(known_configs.HYBRID_27B, "fp8").state_bytes
            == kv_bytes(known_configs.HYBRID_27B).state_bytes
        )
        assert kv_bytes(known_configs.HYBRID_27B, "fp8").token_bytes == 65_536 // 2

    def test_an_unknown_dtype_is_refused_with_the_known_ones(self):
        with pytest.raises(ConfigError, match=r"float12.*bfloat16"):
            kv_bytes(known_configs.LLAMA_2_7B, "float12")


class TestMemory:
    """What fits."""

    def test_196_608_tokens_of_llama_3_fit_into_24_gib(self):
        whole = kv_bytes(known_configs.LLAMA_3_8B).whole

        assert whole.longest_within(24 * 2**30) == 196_608
        assert whole.sequences_within(24 * 2**30, 1000) == 196
        assert whole.sequences_within(100, 1000) == 0

    def test_a_state_is_paid_before_the_first_token(self):
        size = kv_bytes(known_configs.HYBRID_27B)

        assert size.whole.longest_within(size.state_bytes + 3 * size.token_bytes) == 3
        assert size.whole.longest_within(size.state_bytes - 1) == 0


def test_a_bare_language_part_inside_another_model_has_its_own_family_s_defaults():
    """LLaVA's file names the language model and nothing of its shape."""
    llava = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32_064},
        "torch_dtype": "float16",
    }
    assert kv_bytes(llava).token_bytes == 524_288


def test_equal_values_under_two_spellings_are_no_contradiction():
    """GLM's remote code writes both ``num_layers`` and ``num_hidden_layers``."""
    assert kv_bytes(known_configs.LLAMA_3_8B | {"num_layers": 32}).token_bytes == 131_072
