"""A slot of the KV store returns the rows written to it; invalid slots are refused."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.core.errors import ConfigError
from ostinato.runner.kv.block_copies import DeviceCopies
from ostinato.runner.kv.kv_codes import decode, encode
from ostinato.runner.kv.kv_store import KVSpec, KVStore, LayerKV, StoreShape
from ostinato.runner.kv.plain_store import PlainKVStore
from ostinato.runner.native.library import library
from ostinato.runner.native.store import NativeKVStore
from tests.support.instruction_sets import ISAS, isa_in_use

SPEC = KVSpec((LayerKV(2, 4, 5), LayerKV(1, 6, 4, sliding_window=8)))
SIZE = 16
NUM_SLOTS = 4 * SIZE
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]

NewStore = Callable[..., KVStore]


def native_store(shape: StoreShape) -> NativeKVStore:
    native = library()
    if native is None:
        pytest.skip("the native library is not built")
    return NativeKVStore(native, shape)


@pytest.fixture(params=[None, *ISAS], ids=lambda isa: "plain" if isa is None else isa.name.lower())
def new_store(request: pytest.FixtureRequest) -> Iterator[NewStore]:
    """Every store keeps the contract, the native one on every instruction set."""
    if request.param is None:
        yield lambda *arguments: PlainKVStore(StoreShape(*arguments))
        return
    with isa_in_use(request.param):
        yield lambda *arguments: native_store(StoreShape(*arguments))


def filled_store(new_store: NewStore, dtype: torch.dtype = torch.float32) -> KVStore:
    """Four blocks of sixteen slots; slot s of layer l holds 100 l + s."""
    store = new_store(SPEC, 4, SIZE, dtype)
    slots = torch.arange(NUM_SLOTS)
    for index, layer in enumerate(SPEC.layers):
        content = (100 * index + slots).float()[:, None, None]
        keys = content.expand(NUM_SLOTS, layer.num_kv_heads, layer.key_dim)
        values = -content.expand(NUM_SLOTS, layer.num_kv_heads, layer.value_dim)
        store.write(index, keys, values, slots)
    return store


def content(store: KVStore, layer: int) -> list[float]:
    """What the slots of a layer hold, given that each is uniform."""
    keys, values = store.read(layer, torch.arange(NUM_SLOTS))
    assert (keys == keys[:, :1, :1]).all() and (values == -keys[:, :1, :1]).all()
    return keys[:, 0, 0].round(decimals=4).tolist()  # codes of 127 times a scale


def kept(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a store of that format keeps them."""
    return decode(encode(rows)) if dtype == torch.int8 else rows.to(dtype)


def counted(base: int, **changed: float) -> list[float]:
    """What ``content`` says of a filled store but for some slots, ``s7=1.0``."""
    expected = [float(base + slot) for slot in range(NUM_SLOTS)]
    for slot, value in changed.items():
        expected[int(slot[1:])] = value
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_to_a_slot_is_read_from_it_in_its_own_layer_only(
    new_store: NewStore, dtype: torch.dtype
):
    store = filled_store(new_store, dtype)

    store.write(1, torch.full((1, 1, 6), 7.0), torch.full((1, 1, 4), -7.0), torch.tensor([21]))

    assert content(store, 0) == counted(0)
    assert content(store, 1) == counted(100, s21=7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_has_a_place_of_its_own(new_store: NewStore, dtype: torch.dtype):
    """Written in one order and read in another, each slot, head and element keeps its own."""
    store = new_store(SPEC, 4, SIZE, dtype)
    draw = torch.Generator().manual_seed(0)
    for layer, layer_kv in enumerate(SPEC.layers):
        keys, values = (
            torch.randn(NUM_SLOTS, layer_kv.num_kv_heads, dim, generator=draw)
            for dim in (layer_kv.key_dim, layer_kv.value_dim)
        )
        where, order = (torch.randperm(NUM_SLOTS, generator=draw) for _ in range(2))
        for part in torch.arange(NUM_SLOTS).split((1, 20, 43)):
            store.write(layer, keys[part], values[part], where[part])

        found = store.read(layer, where[order])
        assert torch.equal(found[0], kept(keys[order], dtype))
        assert torch.equal(found[1], kept(values[order], dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exported_blocks_hold_the_same_wherever_they_are_imported(new_store: NewStore, dtype):
    """All layers of a block after another, neighbours or not; other blocks stay as they are."""
    store, other = filled_store(new_store, dtype), new_store(SPEC, 4, SIZE, dtype)
    payload = memoryview(bytearray(3 * store.block_bytes))

    store.export_blocks([3, 0, 1], payload)
    other.import_blocks([1, 2, 0], payload)

    for layer, base in enumerate((0, 100)):
        full = content(store, layer)
        expected = full[SIZE : 2 * SIZE] + full[3 * SIZE :] + full[:SIZE] + [0.0] * SIZE
        assert content(other, layer) == expected, base


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_copied_to_and_from_a_device_as_by_the_store_itself(dtype: torch.dtype):
    """The path of other devices, on a CPU: the same bytes, in the same order."""
    store, other = (PlainKVStore(StoreShape(SPEC, 4, SIZE, dtype)) for _ in range(2))
    for layer, kept_of in enumerate(SPEC.layers):
        keys, values = (
            torch.randn(NUM_SLOTS, kept_of.num_kv_heads, dim)
            for dim in (kept_of.key_dim, kept_of.value_dim)
        )
        store.write(layer, keys, values, torch.arange(NUM_SLOTS))
    by_store = store.new_buffer(3 * store.block_bytes)
    store.export_blocks([3, 0, 1], by_store)

    by_torch = DeviceCopies(store).new_buffer(3 * store.block_bytes)
    DeviceCopies(store).export_blocks([3, 0, 1], by_torch)
    DeviceCopies(other).import_blocks([1, 2, 0], by_torch)

    assert by_torch == by_store
    other.export_blocks([1, 2, 0], by_torch)
    assert by_torch == by_store


def test_keys_come_in_the_strides_that_models_give_them(new_store: NewStore):
    """A model's keys are (heads, tokens, dim) seen from the side."""
    store = new_store(SPEC, 2, SIZE, torch.float32)
    keys, values = torch.randn(2, 3, 4).transpose(0, 1), torch.randn(2, 3, 5).transpose(0, 1)

    store.write(0, keys, values, torch.tensor([3, 0, 20]))

    found = store.read(0, torch.tensor([3, 0, 20]))
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


def test_gathered_blocks_follow_the_tables_and_are_the_callers_own(new_store: NewStore):
    store = filled_store(new_store)

    keys, values = store.gather(0, torch.tensor([[3, 0], [1, 1]]))

    assert keys.shape == (2, 2 * SIZE, 2, 4) and values.shape == (2, 2 * SIZE, 2, 5)
    once = list(range(16, 32))
    assert keys[:, :, 0, 0].tolist() == [[*range(48, 64), *range(16)], once + once]
    assert (values[..., 0] == -keys[..., 0]).all()
    keys.fill_(-1)
    assert content(store, 0) == counted(0)


def test_the_block_that_pads_tables_is_zero_and_is_no_block_of_the_pool(new_store: NewStore):
    store = filled_store(new_store)

    keys, values = store.gather(0, torch.tensor([[store.num_blocks]]))

    assert not keys.any() and not values.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_read_all_sources_before_any_target_is_written(new_store: NewStore, dtype):
    """0 to 1 and 1 to 0: the two change places."""
    store = filled_store(new_store, dtype)

    store.copy(0, torch.tensor([0, 1, 60]), torch.tensor([1, 0, 35]))

    assert content(store, 0) == counted(0, s0=1, s1=0, s35=60)
    assert content(store, 1) == counted(100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeroed_slots_are_forgotten_in_all_layers(new_store: NewStore, dtype: torch.dtype):
    """What was no number, too: of codes, the scale says so."""
    store = filled_store(new_store, dtype)
    no_numbers = torch.full((1, 2, 5), torch.nan)
    store.write(0, no_numbers[..., :4], no_numbers, torch.tensor([37]))
    assert store.read(0, torch.tensor([37]))[0].isnan().all()

    store.zero(torch.tensor([2, 37]))

    assert content(store, 0) == counted(0, s2=0, s37=0)
    assert content(store, 1) == counted(100, s2=0, s37=0)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, 112), (torch.bfloat16, 56), (torch.float16, 56), (torch.int8, 28 + 6 * 4)],
)
def test_bytes_per_token_are_heads_times_key_and_value_sizes_over_all_layers(
    new_store: NewStore, dtype: torch.dtype, expected: int
):
    """2 × (4 + 5) + 1 × (6 + 4) = 28 elements; with 8 bits, a scale for each of 6 rows."""
    assert SPEC.bytes_per_token(dtype) == expected
    assert new_store(SPEC, 4, SIZE, dtype).num_bytes == NUM_SLOTS * expected


def test_a_store_larger_than_memory_is_refused_with_the_numbers(new_store: NewStore):
    """2**50 blocks of 16 slots of 112 bytes, and the one that pads."""
    with pytest.raises(ConfigError) as refusal:
        new_store(SPEC, 2**50, SIZE, torch.float32)

    message = str(refusal.value)
    assert f"{(2**50 + 1) * SIZE * 112:,} bytes" in message
    assert f"num_blocks={2**50}" in message and "bytes are available" in message
    assert "kv_cache_memory" in message


def test_a_store_that_is_zeroed_whole_is_zero_to_its_last_slot(new_store: NewStore):
    """More slots than are looked at in one go, and content at both ends of each look."""
    store = new_store(KVSpec((LayerKV(1, 2, 1),)), 625, SIZE, torch.float32)
    written = torch.tensor([0, 4095, 4096, 8191, 8192, 9999])
    store.write(0, torch.ones(6, 1, 2), torch.ones(6, 1, 1), written)

    store.zero(torch.arange(10_000))

    assert not any(rows.any() for rows in store.read(0, torch.arange(10_000)))


def test_codes_are_off_by_half_a_scale_at_most_and_the_largest_element_not_at_all():
    rows = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(2)) * 10
    rows[7] = 0
    rows[8, 0, 5] = torch.inf

    found = decode(encode(rows))

    assert found[8, 0].isnan().all() and not found[7].any()
    rows[8, 0] = found[8, 0] = 0
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((found - rows).abs() <= largest / 254 * 1.0001).all()
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest)


def test_a_plain_store_has_blocks_of_any_size_in_any_dtype():
    store = PlainKVStore(StoreShape(KVSpec((LayerKV(1, 3, 1),)), 3, 1, torch.float64))
    store.write(0, torch.ones(1, 1, 3), torch.ones(1, 1, 1), torch.tensor([2]))

    assert store.read(0, torch.arange(3))[0][:, 0, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("block_size", "key_dim", "dtype"),
    [(8, 4, torch.float32), (16, 3, torch.float32), (16, 4, torch.float64)],
)
def test_a_native_store_refuses_what_the_library_has_no_kernel_for(block_size, key_dim, dtype):
    with pytest.raises(ValueError, match="no native store has"):
        native_store(StoreShape(KVSpec((LayerKV(1, key_dim, 4),)), 4, block_size, dtype))


@pytest.mark.parametrize("slots", [[-1], [0, NUM_SLOTS + SIZE]])
def test_a_native_store_refuses_slots_that_it_does_not_have(slots: list[int]):
    store = native_store(StoreShape(SPEC, 4, SIZE, torch.float32))

    with pytest.raises(ValueError, match=f"slots are between 0 and {NUM_SLOTS + SIZE}"):
        store.read(0, torch.tensor(slots))


def test_a_native_store_asks_for_huge_pages():
    """``hg`` among the flags of its memory, see proc(5)."""
    store = native_store(StoreShape(KVSpec((LayerKV(4, 64, 64),)), 1024, 16, torch.float32))
    layer = store.of_layer(0)
    addresses = [layer.keys, layer.values]
    flags = {address: "" for address in addresses}
    inside: list[int] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(text, 16) for text in found.groups())
            inside = [address for address in addresses if begin <= address < end]
        elif line.startswith("VmFlags:"):
            flags |= {address: line for address in inside}

    assert Path("/sys/kernel/mm/transparent_hugepage").exists() == all(
        " hg" in line for line in flags.values()
    )
