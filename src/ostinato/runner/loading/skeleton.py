"""Models without weights: what a model is, before gigabytes are read.

A skeleton has all modules and buffers of its model, and no storage for weights. ``cut_to_trial``
keeps the first layers of a skeleton, enough that each kind of layer is among them, and the first
ids; ``trial_config`` keeps the first experts: as little as the probe has to see.
"""

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ostinato.runner.attention.backend import AttentionStyle
from ostinato.runner.attention.registration import ATTENTION_NAME, register
from ostinato.runner.images.vision import encoder_parts
from ostinato.runner.kv.kv_store import KVSpec
from ostinato.runner.loading.model_support import auto_class
from ostinato.runner.loading.weight_source import WeightSource
from ostinato.runner.states.store import StateSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_IDS = 4096
"""Ids that the probe draws its prompts from."""

TRIAL_EXPERTS = 16
"""Experts of a layer that the probe chooses from."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_GROUP_COUNTS = ("n_group", "num_expert_group")

_CACHE = re.compile(r"(cache_params|past_key_values?)\.")
"""Begins the methods of caches, as modules of ``transformers`` call them."""

_VALUES = (bool, int, float, str, tuple, type(None))


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> "PreTrainedModel":
    """Return a model whose buffers are computed, and whose weights have no storage."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    register()
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = auto_class(config).from_config(
            copy.deepcopy(config), attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    model.tie_weights()
    return model.eval()


def trial_layers(
    model: "PreTrainedModel", spec: KVSpec, states: StateSpec, styles: tuple[AttentionStyle, ...]
) -> int:
    """Return how many of the first layers have one of each kind.

    Layers are of one kind if their modules have the same types, shapes and settings, keep keys and
    values and states of the same shape, and attend with the same parameters.
    """
    layers = cast(nn.ModuleList, cast(Any, model.get_decoder()).layers)
    settings = list(_settings_by_layer(model.config.get_text_config(), len(layers)))
    by_layer = dict(zip(spec.attending, styles, strict=True))
    seen: set[Hashable] = set()
    num_layers = 0
    for index, layer in enumerate(layers):
        kept = spec.layers[index], states.layers.get(index), by_layer.get(index)
        kind = (_kind(layer), kept, settings[index])
        if kind not in seen:
            seen.add(kind)
            num_layers = index + 1
    return num_layers


def trial_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config with few experts; of groups, each keeps all its experts.

    A row is computed by each of its experts in the same way, however many there are to choose from.
    """
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    num_chosen = getattr(text, "num_experts_per_tok", None) or 1
    if all((getattr(text, name, None) or 1) == 1 for name in _GROUP_COUNTS):
        for name in _EXPERT_COUNTS:
            count = getattr(text, name, None)
            if isinstance(count, int):
                setattr(text, name, min(count, max(TRIAL_EXPERTS, 2 * num_chosen)))
    return config


def cut_to_trial(model: "PreTrainedModel", num_layers: int) -> None:
    """Keep the first layers of a skeleton, and the first ids."""
    decoder, config = cast(Any, model.get_decoder()), model.config.get_text_config()
    all_layers = len(decoder.layers)
    decoder.layers = decoder.layers[:num_layers]
    for part in {id(part): part for part in (config, decoder.config)}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == all_layers:
                setattr(part, name, value[:num_layers])
        part.num_hidden_layers = num_layers
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    _keep_rows(embedding, "num_embeddings")
    _keep_rows(head, "out_features")
    if is_tied:
        head.weight = embedding.weight


def fill(
    model: "PreTrainedModel", source: WeightSource, dtype: torch.dtype, skipped: frozenset[int]
) -> None:
    """Read the weights of a skeleton, but for those in ``skipped``, by their ids.

    Some stay in float32, as ``transformers`` has them.
    """
    plan = model._get_dtype_plan(dtype)
    for name, module, own_name in _kept_buffers(model):
        buffer = cast(Tensor, module._buffers[own_name])
        numbers = source.plain(name, _planned(plan, name) or buffer.dtype, len(buffer))
        module._buffers[own_name] = buffer.to(numbers.dtype).copy_(numbers)
    for parameter, holders in list(_holders(model, skipped)):
        name = next(name for name, _, _ in holders if name in source.shapes)
        numbers = source.plain(name, _planned(plan, name) or dtype, parameter.shape[0])
        filled = nn.Parameter(numbers, requires_grad=False)
        for _, module, own_name in holders:
            module._parameters[own_name] = filled


def fill_encoder(model: "PreTrainedModel", source: WeightSource, dtype: torch.dtype) -> None:
    """Read the weights of a skeleton's encoder of images, and no others."""
    parts = [part for part in encoder_parts(model).values() if part is not None]
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    others = {id(parameter) for parameter in model.parameters()} - inside
    if inside:
        fill(model, source, dtype, frozenset(others))


def keep_blocks(model: "PreTrainedModel", source: WeightSource, dtype: torch.dtype) -> None:
    """Use the file's own blocks for the embedding, if it has any and the module is a plain one."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    if type(embedding) is nn.Embedding:
        smaller = source.embedding(f"{name}.weight", dtype)
        if smaller is not None:
            model.set_input_embeddings(smaller)


def reads_all(model: "PreTrainedModel", source: WeightSource) -> bool:
    """Return whether a source has exactly the weights of a skeleton, under its names.

    Cost: reads headers, and weights that are there several times.
    """
    unread, plan = set(source.shapes), model._get_dtype_plan(model.dtype)
    if any(buffer.is_meta for buffer in model.buffers()):
        return False
    for name, module, own_name in _kept_buffers(model):
        if source.shapes.get(name) != tuple(cast(Tensor, module._buffers[own_name]).shape):
            return False
        unread.remove(name)
    for parameter, holders in _holders(model, frozenset()):
        names = [name for name, _, _ in holders if name in source.shapes]
        if any(_planned(plan, name) and isinstance(owner, nn.Linear) for name, owner, _ in holders):
            return False
        if not names or any(source.shapes[name] != tuple(parameter.shape) for name in names):
            return False
        # What is tied may be there twice, as a published lm_head is; other numbers are not tied.
        if len(names) > 1 and not source.are_equal(names):
            return False
        unread -= set(names)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return all(any(re.search(pattern, name) for pattern in ignored) for name in unread)


def _planned(plan: Mapping[str, torch.dtype], name: str) -> torch.dtype | None:
    """Return the dtype that a weight has whatever that of the model is; None if it follows."""
    return next((dtype for part, dtype in plan.items() if part in name), None)


def _holders(
    model: nn.Module, skipped: frozenset[int]
) -> Iterator[tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]]:
    """Yield the weights without storage, and the names and modules that hold them."""
    by_id: dict[int, tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and id(parameter) not in skipped:
                full = f"{path}.{name}" if path else name
                by_id.setdefault(id(parameter), (parameter, []))[1].append((full, module, name))
    yield from by_id.values()


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the names of buffers that are weights of a checkpoint, and what holds them."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", module, name


def _keep_rows(module: nn.Module, name: str) -> None:
    """Keep the first rows of an embedding or a head, if it has more."""
    if getattr(module, name) > TRIAL_IDS:
        setattr(module, name, TRIAL_IDS)
        weight = cast(Tensor, module.weight)
        module.weight = nn.Parameter(weight[:TRIAL_IDS], requires_grad=False)
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            module.bias = nn.Parameter(bias[:TRIAL_IDS], requires_grad=False)


def _kind(layer: nn.Module) -> Hashable:
    """Describe the modules of a layer."""
    return tuple((name, *_own_kind(module)) for name, module in layer.named_modules())


def _own_kind(module: nn.Module) -> Iterator[Hashable]:
    uses_index = _computes_with_index(type(module))
    yield cast(Hashable, type(module))
    for name, value in sorted(vars(module).items()):
        is_index = name == "layer_idx" and not uses_index
        if isinstance(value, _VALUES) and not name.startswith("_") and not is_index:
            yield name, _hashable(value)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield name, None if tensor is None else (tensor.shape, tensor.dtype)


def _computes_with_index(kind: type[nn.Module]) -> bool:
    """Return whether a module's code reads the index of its layer for more than its cache."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return True
    nodes = list(ast.walk(code))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    in_calls = {n for call in calls if _CACHE.match(ast.unparse(call.func)) for n in ast.walk(call)}
    return any(
        isinstance(node, ast.Attribute) and node.attr == "layer_idx" and node not in in_calls
        for node in nodes
    )


def _settings_by_layer(config: PreTrainedConfig, num_layers: int) -> Iterator[Hashable]:
    """Yield each layer's entries of the lists in a config."""
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    ]
    for index in range(num_layers):
        yield tuple(_hashable(each[index]) for each in lists)


def _hashable(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) and not isinstance(value, tuple) else repr(value)
