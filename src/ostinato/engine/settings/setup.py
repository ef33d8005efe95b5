"""Loads an engine's model and sizes its pools.

A given number of blocks applies to every group of layers. A number of bytes, given or a share of
the free memory, is split by ``hybrid.pool_sizes``, between states and blocks first.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from ostinato.core.config import SchedulerConfig
from ostinato.core.errors import ConfigError
from ostinato.engine.settings.config import EngineConfig
from ostinato.hybrid.pool_sizes import TOKENS_PER_CHECKPOINT, split_pools, split_states
from ostinato.runner.attention_choice import (
    AttentionCase,
    check_attention_setting,
    choose_attention,
)
from ostinato.runner.checkpoints.model_resolver import resolve_model
from ostinato.runner.compute_path import ComputePath
from ostinato.runner.images.store import ImageStore
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.kv.layer_groups import LayerGroups, group_layers
from ostinato.runner.loaded_model import LoadedModel
from ostinato.runner.loading.pretrained import load_tokenizer
from ostinato.runner.memory import memory_for, num_blocks_for
from ostinato.runner.memory_share import CudaMemory, MemoryShare
from ostinato.runner.model_loader import load_model
from ostinato.runner.model_runner import ModelRunner
from ostinato.runner.portable_bits import check_portable, use_portable_kernels
from ostinato.settings import StateConfig, WindowConfig, window_blocks

logger = logging.getLogger("ostinato")

_MAX_CHECKPOINTS = 4096
"""Unless ``num_state_slots`` is set: the time to find the one to evict grows with their number."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Blocks per group, and slots of states."""

    num_blocks: int  # of group 0
    windows: tuple[WindowConfig, ...] = ()  # of each window
    states: StateConfig | None = None  # of layers that carry one; None if there are none


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model that is ready to run."""

    loaded: LoadedModel
    runner: ModelRunner  # executes steps
    compute_path: ComputePath  # how it does so, and why not faster
    sizes: PoolSizes  # blocks per group of layers
    scheduling: SchedulerConfig  # settings of the scheduler


def set_up(config: EngineConfig) -> ModelSetup:
    """Load the model and size the pools.

    Raises:
        ConfigError: A setting cannot be met.
        ModelError: The model cannot be served.
    """
    check_attention_setting(config.attention, config.device)
    other_tokenizer = _read_tokenizer(config)
    if config.portable_bits:
        use_portable_kernels()
    share = memory_share(config)
    loaded = load_model(
        config.model,
        config.dtype,
        config.device,
        config.attention,
        config.forward,
        config.revision,
        config.quantization,
        config.activation_dtype,
        config.max_images > 0,
        partial(_set_kv_bytes, config),
        config.weight_cache_bytes,
        config.same_bits,
    )
    if other_tokenizer is not None:
        loaded = replace(loaded, tokenizer=other_tokenizer)
    limit, spec = loaded.length_limit, loaded.kv_spec
    scheduling = config.scheduler(config.longest(limit.num_tokens, limit.reason))
    kv_dtype = _kv_dtype(config, loaded.dtype)
    groups = group_layers(spec, scheduling.max_model_len)
    case = AttentionCase(spec, loaded.dtype, kv_dtype, config.block_size, loaded.device)
    if config.portable_bits:
        check_portable(loaded, config.attention, case)
    attention = choose_attention(config.attention, case, config.read_once, config.same_bits)

    def new_runner(blocks: Sequence[int], num_slots: int) -> ModelRunner:
        return ModelRunner(
            loaded, blocks, config.block_size, kv_dtype, attention, groups, num_slots
        )

    memory = config.kv_cache_memory
    if share is not None:
        memory = share.kv_bytes(
            lambda num_blocks, num_slots: new_runner([num_blocks] * groups.num_groups, num_slots),
            scheduling,
            config.block_size,
        )
        logger.info("keys, values and states get %.2f GiB", memory / 2**30)
    sizes = size_pools(config, scheduling, loaded, groups, kv_dtype, memory)
    num_slots = 0 if sizes.states is None else sizes.states.num_slots
    blocks = [sizes.num_blocks, *(window.num_blocks for window in sizes.windows)]
    runner = new_runner(blocks, num_slots)
    if loaded.vision is not None:
        runner.images = ImageStore(loaded.vision, config.mm_encoder_cache_bytes)
    compute_path = ComputePath.of(loaded, config.attention, case)
    gib = loaded.size.num_bytes / 2**30
    logger.info("%s computes in %s; weights take %.2f GiB", loaded.name, compute_path, gib)
    return ModelSetup(loaded, runner, compute_path, sizes, scheduling)


def memory_share(config: EngineConfig) -> MemoryShare | None:
    """Return the share of a device's memory that is set, before a model takes any of it."""
    if config.gpu_memory_utilization is None:
        return None
    return MemoryShare(config.gpu_memory_utilization, CudaMemory(torch.device(config.device)))


def _set_kv_bytes(config: EngineConfig, spec: KVSpec, dtype: torch.dtype) -> int:
    """Return the bytes that settings give keys and values; 0 if they take what is left."""
    if config.num_blocks is None:
        return config.kv_cache_memory or 0
    kv_dtype = _kv_dtype(config, dtype)
    return config.num_blocks * config.block_size * spec.bytes_per_token(kv_dtype)


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of keys and values of a model that computes in ``dtype``."""
    auto = config.kv_cache_dtype == "auto"
    return dtype if auto else cast(torch.dtype, getattr(torch, config.kv_cache_dtype))


def size_pools(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    loaded: LoadedModel,
    groups: LayerGroups,
    dtype: torch.dtype,
    kv_cache_memory: int | None = None,
) -> PoolSizes:
    """Split memory among the groups of a model.

    Args:
        config: Settings of the engine.
        scheduling: Those of its scheduler.
        loaded: The model.
        groups: Its groups of layers.
        dtype: Format of keys and values.
        kv_cache_memory: Bytes for keys, values and states; None is a share of what is free.

    Raises:
        ConfigError: Not even one block fits, or not one sequence's window, or not two states.
    """
    spec = loaded.kv_spec
    per_block = [
        groups.bytes_per_token(spec, group, dtype) * config.block_size
        for group in range(groups.num_groups)
    ]
    states = size_states(config, scheduling, loaded, sum(per_block), kv_cache_memory)
    num_slots = 0 if states is None else states.num_slots
    if not any(per_block):  # blocks only list the prefixes of states
        listed = num_slots * TOKENS_PER_CHECKPOINT // config.block_size
        return PoolSizes(config.num_blocks or listed, (), states)
    even = num_blocks_for(
        bytes_per_block=sum(per_block),
        block_size=config.block_size,
        max_num_seqs=scheduling.max_num_seqs,
        max_model_len=scheduling.max_model_len,
        num_blocks=config.num_blocks,
        kv_cache_memory=kv_cache_memory,
        reserved_bytes=num_slots * loaded.state_spec.bytes_per_slot,
        mapped_bytes=loaded.mapped_bytes,
        device=loaded.device,
    )
    if config.num_blocks is not None:
        # As many as configured, but never fewer than one sequence needs to continue.
        full = even
        sizes = [max(even, window_blocks(w, config.block_size)) for w in groups.windows]
    else:
        full, sizes = split_pools(even, per_block, groups.windows, config.block_size, scheduling)
    windows = zip(groups.windows, sizes, strict=True)
    return PoolSizes(full, tuple(WindowConfig(window, size) for window, size in windows), states)


def size_states(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    loaded: LoadedModel,
    block_bytes: int,
    kv_cache_memory: int | None = None,
) -> StateConfig | None:
    """Return how many states the pool has; None for a model without.

    Raises:
        ConfigError: Not two of them fit, the model has no use for those that are configured, or
            it is unknown how much memory is free.
    """
    state_bytes, requested = loaded.state_spec.bytes_per_slot, config.num_state_slots
    if not state_bytes and requested is not None:
        raise ConfigError(
            f"num_state_slots={requested}: no layer of {loaded.name!r} carries a state: unset it"
        )
    if not state_bytes:
        return None
    if requested is not None:
        return StateConfig(requested)
    running = 2 * scheduling.max_num_seqs
    memory, _ = memory_for(kv_cache_memory, loaded.device, loaded.mapped_bytes)
    if config.num_blocks is None:
        _, slots = split_states(memory, block_bytes, state_bytes, config.block_size, scheduling)
    else:
        checkpoints = config.num_blocks * config.block_size // TOKENS_PER_CHECKPOINT
        slots = min(running + checkpoints, memory // state_bytes)
    return StateConfig(max(2, min(slots, running + _MAX_CHECKPOINTS)))


def _read_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """Read the tokenizer that replaces the model's own, if one is set."""
    if config.tokenizer is None:
        return None
    tokenizer = load_tokenizer(resolve_model(config.tokenizer))
    if tokenizer is None:
        raise ConfigError(f"tokenizer={str(config.tokenizer)!r}: no tokenizer files are there")
    return tokenizer
