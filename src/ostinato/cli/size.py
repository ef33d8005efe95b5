"""``ostinato size``: the size of a model's KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.options.config_source import load_config
from ostinato.cli.options.option_groups import option
from ostinato.cli.output.tables import Field, Figure, attributes, matrix, print_json, table_of
from ostinato.core.config import SchedulerConfig, check_minimum
from ostinato.drafts.tree_text import MAX_TOKEN_BYTES
from ostinato.hybrid.pool_sizes import split_states
from ostinato.lab.size.image_tokens import encoder_weights, image_tokens, output_values, read_size
from ostinato.lab.size.kv_bytes import DTYPE_BITS, Footprint, KVBytes, KVLayerGroup, kv_bytes
from ostinato.lab.size.kv_config import Config
from ostinato.lab.size.kv_layers import AttentionKind
from ostinato.lab.size.quantities import count, read_bytes, write_bytes
from ostinato.lab.size.weights import WEIGHT_BYTES, adapter_bytes

_ENGINE_BLOCK = 16
_DTYPES = ", ".join(["auto", *DTYPE_BITS])


@dataclass(frozen=True, slots=True)
class Question:
    """The arguments.

    Attributes:
        model: The model as the user named it.
        num_tokens: Length of a sequence.
        num_requests: Concurrent sequences, which share nothing.
        memory: Memory for KV, as the user wrote it.
        adapter_bytes: Bytes of it for LoRA adapters.
        image: Size of an image, such as ``1024x768``; empty for none.
        image_tokens: Tokens of the image.
        output_bytes: Bytes of the encoder's output, which is not part of the KV.
        encoder_bytes: Bytes of the encoder's weights.
    """

    model: str
    num_tokens: int
    num_requests: int
    memory: str
    adapter_bytes: int = 0
    image: str = ""
    image_tokens: int | None = None
    output_bytes: int | None = None
    encoder_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory for KV in bytes, without adapters."""
        return max(0, read_bytes("memory", self.memory) - self.adapter_bytes)


def run(
    model: Annotated[
        str,
        typer.Argument(help="A config.json, a directory, a bundled model, or a name on the hub."),
    ],
    dtype: str = option("auto", f"Format of the KV: {_DTYPES}. auto takes the model's own."),
    tokens: int = option(1000, "Length of a sequence."),
    requests: int = option(100, "Concurrent sequences, which share nothing."),
    memory: str = option("24GiB", "Memory for KV, such as 24GiB or 80GB."),
    image: str = option("", "Size of an image in the prompt, such as 1024x768."),
    lora: list[str] | None = option(
        None, "Directory of a LoRA adapter that takes a part of the memory; may be repeated."
    ),
    as_json: bool = option(False, "Print exact bytes as JSON.", "--json"),
) -> None:
    """Size a model's KV cache from its config: no weights, no GPU.

    Multi-head, grouped-query, multi-query and latent attention, sliding windows, layers that
    share KV, and layers that keep a state instead. Try: ostinato size tiny-shakespeare
    """
    check_minimum("tokens", tokens, 1)
    check_minimum("requests", requests, 1)
    config = load_config(model)
    lora_bytes = adapter_bytes(lora or [], packed=True)
    question = Question(model, tokens, requests, memory.strip(), lora_bytes)
    if image:
        question = _with_image(question, config, image)
    size = kv_bytes(config, dtype)
    if as_json:
        print_json(_as_json(question, size))
        return
    console = Console()
    console.print(_title(question, size), _layers_table(size), _sum_table(question, size), sep="\n")
    for note in _notes(question, size):
        console.print(Text(note, style="dim"))


def _with_image(question: Question, config: Config, image: str) -> Question:
    """Add the size of an image, in bfloat16."""
    num_tokens = image_tokens(config, *read_size(image))
    return replace(
        question,
        image=image,
        image_tokens=num_tokens,
        output_bytes=WEIGHT_BYTES * output_values(config, num_tokens),
        encoder_bytes=WEIGHT_BYTES * encoder_weights(config),
    )


def _title(question: Question, size: KVBytes) -> Text:
    family = f" ({size.model_type})" if size.model_type else ""
    title = Text("\n").append(question.model, style="bold")
    return title.append(f"{family} keeps its KV in {size.dtype}.")


def _layers_table(size: KVBytes) -> Table:
    """Print one row per kind of layer, with the columns that this model needs."""
    fields = [
        Figure("Layers", "num_layers", footer=str(size.num_layers)),
        Field("Kind", _kind, footer="all"),
        Figure("KV heads", _heads),
        Figure("KV per token", "token_bytes", "{:,} B".format, f"{size.token_bytes:,} B"),
    ]
    if size.windowed is not None:
        fields.append(Figure("Window", lambda group: group.layer.window_tokens or None))
        fields.append(Figure("holds at most", "window_bytes", _bytes_or_dash))
    if size.state_bytes:
        total = write_bytes(size.state_bytes)
        fields.append(Figure("State", "state_bytes", _bytes_or_dash, total))
    if len(size.groups) == 1:
        fields = [replace(field, footer="") for field in fields]
    return table_of(size.groups, fields)


def _kind(group: KVLayerGroup) -> str:
    """Name a group: ``grouped-query``, ``grouped-query + Mamba-2``, ``convolution``."""
    layer = group.layer
    if layer.state is None:
        return str(layer.kind)
    return (
        layer.state.name
        if layer.kind is AttentionKind.STATE
        else f"{layer.kind} + {layer.state.name}"
    )


def _heads(group: KVLayerGroup) -> str:
    """Format the number and size of KV heads, or the size of the latent vector."""
    layer = group.layer
    if not layer.values_per_token:
        return "-"
    heads = f"{layer.num_kv_heads} x " if layer.num_kv_heads else ""
    return f"{heads}{layer.head_dim}"


def _bytes_or_dash(num_bytes: int | None) -> str:
    return write_bytes(num_bytes) if num_bytes else "-"


def _sum_table(question: Question, size: KVBytes) -> Table:
    """Print one column per way of keeping KV."""
    ways = list(_ways(size))
    rows = ((name, *(cell(way) for _, way in ways)) for name, cell in _sums(question, size))
    return matrix(("", *(title for title, _ in ways)), rows)


def _ways(size: KVBytes) -> Iterator[tuple[str, Footprint]]:
    """List the ways in which engines keep this model's KV."""
    if size.expanded is not None:
        yield "latents kept", size.whole
        yield "heads kept", size.expanded
    else:
        yield "every token kept", size.whole
    if size.windowed is not None:
        yield "windows kept", size.windowed


def _sums(question: Question, size: KVBytes) -> Iterator[tuple[str, Callable[[Footprint], str]]]:
    """List the rows: a name, and a value for each way of keeping KV."""
    tokens, requests, memory = question.num_tokens, question.num_requests, question.memory_bytes
    yield "1 token", lambda way: write_bytes(way.token_bytes)
    if tokens != 1000 or size.state_bytes:
        yield "1,000 tokens", lambda way: write_bytes(way.tokens_bytes(1000))
    state = " and its state" if size.state_bytes else ""
    yield (
        f"1 sequence of {count(tokens, 'token')}{state}",
        lambda way: write_bytes(way.sequence_bytes(tokens)),
    )
    if requests > 1:
        yield (
            f"{requests:,} such sequences, sharing nothing",
            lambda way: write_bytes(requests * way.sequence_bytes(tokens)),
        )
    yield (
        f"Such sequences in {question.memory}",
        lambda way: _number(way.sequences_within(memory, tokens)),
    )
    yield (
        f"Longest sequence in {question.memory}",
        lambda way: _number(way.longest_within(memory), "token"),
    )


def _number(value: int | None, noun: str | None = None) -> str:
    if value is None:
        return "any length" if noun else "any number"
    return count(value, noun) if noun else f"{value:,}"


def _notes(question: Question, size: KVBytes) -> Iterator[str]:
    """Return notes on the results."""
    yield from size.notes
    if question.adapter_bytes:
        adapters = write_bytes(question.adapter_bytes)
        yield (
            f"The adapters take {adapters} of the memory, which are not counted as KV; on a CPU, "
            "ranks count as multiples of 32."
        )
    if size.windowed is not None:
        yield "Windows kept: for engines that free tokens outside the window."
    if size.expanded is not None:
        yield "Heads kept: for engines that store the K and V which a latent expands to."
    if size.state_bytes:
        yield "A state holds a whole prefix: it can be reused only at positions where it was saved."
        yield from _about_checkpoints(question, size)
    if size.token_bytes:
        prefix = count(question.num_tokens, "token")
        kept = write_bytes(size.whole.tokens_bytes(question.num_tokens))
        yield f"A cached prefix of {prefix} takes {kept}, once for all that begin with it."
        if size.windowed is None and not size.state_bytes:
            index = write_bytes(question.num_tokens * MAX_TOKEN_BYTES)
            yield f"The index for drafts takes up to {index} for it, beside the memory for KV."
    if question.image_tokens is not None:
        kept = write_bytes(size.whole.tokens_bytes(question.image_tokens))
        amount = count(question.image_tokens, "token")
        yield f"An image of {question.image} pixels is {amount} of a prompt and takes {kept}."
        if question.output_bytes is not None and question.encoder_bytes is not None:
            yield (
                f"The encoder's output for it takes {write_bytes(question.output_bytes)} of "
                "mm_encoder_cache_bytes, and the encoder itself "
                f"{write_bytes(question.encoder_bytes)} in bfloat16, beside the memory for KV."
            )


def _about_checkpoints(question: Question, size: KVBytes) -> Iterator[str]:
    """Describe the size of a saved state, and the split of memory between states and blocks."""
    saved = f"A checkpoint, one saved state, takes {write_bytes(size.state_bytes)}"
    if size.token_bytes:
        saved += f", as much as the KV of {count(size.state_bytes // size.token_bytes, 'token')}"
    memory, block_bytes = question.memory_bytes, _ENGINE_BLOCK * size.token_bytes
    if not block_bytes or memory < 2 * size.state_bytes + block_bytes:
        yield f"{saved}."
        return
    scheduling = SchedulerConfig(max_num_seqs=1)
    blocks, slots = split_states(memory, block_bytes, size.state_bytes, _ENGINE_BLOCK, scheduling)
    yield (
        f"{saved}. Of {question.memory} for one sequence at a time, the engine gives "
        f"{count(slots, 'slot')} to states and keeps {count(blocks * _ENGINE_BLOCK, 'token')}."
    )


def _as_json(question: Question, size: KVBytes) -> dict[str, object]:
    """Return all figures in exact bytes; null where there is none."""
    ways = {"whole": size.whole, "windowed": size.windowed, "expanded": size.expanded}
    return {
        "model": question.model,
        "tokens": question.num_tokens,
        "requests": question.num_requests,
        **attributes(question, "memory_bytes", "image_tokens"),
        "image_output_bytes": question.output_bytes,
        **attributes(question, "encoder_bytes", "adapter_bytes"),
        **attributes(size, "model_type", "dtype", "num_layers", "token_bytes", "state_bytes"),
        "checkpoint_tokens": size.state_bytes // size.token_bytes if size.token_bytes else None,
        "layers": [_group_as_json(group) for group in size.groups],
        "footprints": {
            name: None if way is None else _way_as_json(question, way) for name, way in ways.items()
        },
        "notes": list(size.notes),
    }


def _group_as_json(group: KVLayerGroup) -> dict[str, object]:
    layer = group.layer
    return {
        "num_layers": group.num_layers,
        "kind": str(layer.kind),
        **attributes(layer, "num_kv_heads", "head_dim", "window_tokens"),
        "state": None if layer.state is None else layer.state.name,
        **attributes(group, "token_bytes", "window_bytes", "state_bytes"),
    }


def _way_as_json(question: Question, way: Footprint) -> dict[str, object]:
    sequence_bytes = way.sequence_bytes(question.num_tokens)
    return {
        "token_bytes": way.token_bytes,
        "thousand_tokens_bytes": way.tokens_bytes(1000),
        "sequence_bytes": sequence_bytes,
        "all_requests_bytes": question.num_requests * sequence_bytes,
        "num_sequences_within": way.sequences_within(question.memory_bytes, question.num_tokens),
        "longest_sequence_tokens": way.longest_within(question.memory_bytes),
    }
