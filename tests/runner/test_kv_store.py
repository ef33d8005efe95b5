"""Where do keys and values live? A slot gives back what was put there, and nothing else."""

import pytest
import torch

from ostinato.core.errors import ConfigError
from ostinato.runner.kv_store import KVSpec, KVStore, LayerKV
from ostinato.runner.plain_store import PlainKVStore

SPEC = KVSpec((LayerKV(2, 3, 5), LayerKV(1, 4, 4, sliding_window=8)))


def filled_store() -> KVStore:
    """Four blocks of two slots; slot s of layer l holds 100 l + s."""
    store = PlainKVStore(SPEC, num_blocks=4, block_size=2, dtype=torch.float32)
    slots = torch.arange(8)
    for index, layer in enumerate(SPEC.layers):
        content = (100 * index + slots).float()[:, None, None]
        keys = content.expand(8, layer.num_kv_heads, layer.key_dim)
        values = -content.expand(8, layer.num_kv_heads, layer.value_dim)
        store.write(index, keys, values, slots)
    return store


def content(store: KVStore, layer: int) -> list[float]:
    """What the slots of a layer hold, given that each is uniform."""
    keys, values = store.read(layer, torch.arange(8))
    assert (keys == keys[:, :1, :1]).all() and (values == -keys[:, :1, :1]).all()
    return keys[:, 0, 0].tolist()


def test_what_is_written_to_a_slot_is_read_from_it_in_its_own_layer_only():
    store = filled_store()

    store.write(1, torch.full((1, 1, 4), 7.0), torch.full((1, 1, 4), -7.0), torch.tensor([5]))

    assert content(store, 0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert content(store, 1) == [100, 101, 102, 103, 104, 7, 106, 107]


def test_keys_come_in_the_strides_that_models_give_them():
    """A model's keys are (heads, tokens, dim) seen from the side."""
    store = PlainKVStore(SPEC, num_blocks=2, block_size=2, dtype=torch.float32)
    keys, values = torch.randn(2, 3, 3).transpose(0, 1), torch.randn(2, 3, 5).transpose(0, 1)

    store.write(0, keys, values, torch.tensor([3, 0, 2]))

    found = store.read(0, torch.tensor([3, 0, 2]))
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


def test_gathered_blocks_follow_the_tables_and_are_the_callers_own():
    store = filled_store()

    keys, values = store.gather(0, torch.tensor([[3, 0], [1, 1]]))

    assert keys.shape == (2, 4, 2, 3) and values.shape == (2, 4, 2, 5)
    assert keys[:, :, 0, 0].tolist() == [[6, 7, 0, 1], [2, 3, 2, 3]]
    keys.fill_(-1)
    assert content(store, 0) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_block_that_pads_tables_is_zero_and_is_no_block_of_the_pool():
    store = filled_store()

    keys, values = store.gather(0, torch.tensor([[store.zero_block]]))

    assert store.zero_block == 4
    assert not keys.any() and not values.any()


def test_copies_read_all_sources_before_any_target_is_written():
    """0 to 1 and 1 to 0: the two change places."""
    store = filled_store()

    store.copy(0, torch.tensor([0, 1, 6]), torch.tensor([1, 0, 3]))

    assert content(store, 0) == [1, 0, 2, 6, 4, 5, 6, 7]
    assert content(store, 1) == [100, 101, 102, 103, 104, 105, 106, 107]


def test_zeroed_slots_are_forgotten_in_all_layers():
    store = filled_store()

    store.zero(torch.tensor([2, 7]))

    assert content(store, 0) == [0, 1, 0, 3, 4, 5, 6, 0]
    assert content(store, 1) == [100, 101, 0, 103, 104, 105, 106, 0]


def test_values_are_rounded_to_the_stores_dtype():
    store = PlainKVStore(SPEC, num_blocks=1, block_size=1, dtype=torch.bfloat16)
    third = torch.full((1, 1, 4), 1 / 3)

    store.write(1, third, third, torch.tensor([0]))

    assert store.read(1, torch.tensor([0]))[0][0, 0, 0].item() == third.bfloat16()[0, 0, 0].item()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, 192), (torch.float32, 96), (torch.bfloat16, 48)]
)
def test_bytes_per_token_are_heads_times_key_and_value_sizes_over_all_layers(
    dtype: torch.dtype, expected: int
):
    """2 × (3 + 5) + 1 × (4 + 4) = 24 elements."""
    assert SPEC.bytes_per_token(dtype) == expected
    assert PlainKVStore(SPEC, 4, 2, dtype).num_bytes == 8 * expected


def test_a_store_larger_than_memory_is_refused_with_the_numbers():
    """2**50 blocks of 2 slots of 96 bytes, and the one that pads."""
    with pytest.raises(ConfigError) as refusal:
        PlainKVStore(SPEC, 2**50, 2, torch.float32)

    message = str(refusal.value)
    assert f"{(2**50 + 1) * 2 * 96:,} bytes" in message
    assert f"num_blocks={2**50}" in message and "bytes are available" in message
    assert "kv_cache_memory" in message


def test_a_store_that_is_zeroed_whole_is_zero_to_its_last_slot():
    """More slots than are looked at in one go, and content at both ends of each look."""
    store = PlainKVStore(KVSpec((LayerKV(1, 1, 1),)), 5000, 2, torch.float32)
    written = torch.tensor([0, 4095, 4096, 8191, 8192, 9999])
    ones = torch.ones(len(written), 1, 1)
    store.write(0, ones, ones, written)

    store.zero(torch.arange(10_000))

    assert not any(rows.any() for rows in store.read(0, torch.arange(10_000)))
