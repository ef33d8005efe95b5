"""The measures: the rows of the table, and their goals.

A measure prepares once per engine (a prefix that is to be warm) and then takes one sample per
repetition.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import samples


@dataclass(frozen=True)
class Measure:
    """One row of the table.

    Attributes:
        name: What it is called on the command line and in JSON.
        title: What it is called in tables.
        unit: Of a sample.
        more_is_better: Whether it is a rate; else it is a time.
        sample: Takes one.
        prepare: Makes warm what is to be warm; returns the prefix.
        without: Engines that are not asked, and why not, by name.
        kind: ``serve``, ``http`` or ``manage``: what an engine is asked for.
        variants: Names of variants of ours that take part without being asked for.
        length: Name of the length of its prompts in ``Sizes``.
        is_long: Whether it takes minutes a sample, so that it is measured only where it is named.
    """

    name: str
    title: str
    unit: str
    more_is_better: bool
    sample: samples.Sample
    prepare: samples.Prepare | None = None
    without: Mapping[str, str] = field(default_factory=dict)
    kind: str = "serve"
    variants: tuple[str, ...] = ()
    length: str = "prefix"
    is_long: bool = False

    @property
    def needs_text(self) -> bool:
        """Whether its prompts are text, for which a checkpoint needs a chat template."""
        return self.kind == "http"


NO_SCHEDULER = {"transformers": "plain forward passes have no scheduler"}
SLOW = "not asked: takes minutes a sample"
TOO_SLOW = dict.fromkeys(("transformers", "transformers-cb"), SLOW)
STREAMED = ("ours:streamed",)
OTHER_BITS = ("ours:w8a8", "ours:w4a8", "ours:16")
MEASURES = (
    Measure(
        "cold_prefill", "cold prefill, 2,048 tokens", "tokens/s", True,
        samples.cold_prefill("prefix"),
        variants=OTHER_BITS,
    ),
    Measure(
        "first_token", "first token, 2,048 cached + 32 new", "s", False, samples.first_token,
        samples.warm("prefix"),
    ),
    Measure(
        "batch_cold", "16 × (2,048 shared + 32 own), cold, 32 out", "s", False, samples.batch_cold,
    ),
    Measure(
        "batch_warm", "16 × (2,048 shared + 32 own), warm, 32 out", "s", False, samples.batch_warm,
        samples.warm("prefix"),
    ),
    Measure(
        "decode_1", "decode, batch 1 on 2k", "tokens/s", True,
        samples.decode(lambda sizes: 1, lambda sizes: sizes.alone),
        samples.warm("prefix"), variants=STREAMED,
    ),
    Measure(
        "decode_16", "decode, 16 on a shared 2k", "tokens/s", True,
        samples.decode(lambda sizes: sizes.batch, lambda sizes: sizes.outputs),
        samples.warm("prefix"), variants=STREAMED,
    ),
    Measure(
        "strangers", "16 × 512 with nothing shared, 64 out", "s", False, samples.strangers,
    ),
    Measure(
        "conversations", "16 conversations × 10 turns, growing", "requests/s", True,
        samples.conversations, without=NO_SCHEDULER,
    ),
    Measure(
        "agents", "4 agents × 12 turns on 1.5k of tools, growing", "requests/s", True,
        samples.agents, without=NO_SCHEDULER,
    ),
    Measure(
        "decode_32_4k", "decode, 32 on a shared 4k", "tokens/s", True,
        samples.decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs),
        samples.warm("long"), without=TOO_SLOW, length="long",
    ),
    Measure(
        "decode_32_16k", "decode, 32 on a shared 16k", "tokens/s", True,
        samples.decode(lambda sizes: sizes.wide, lambda sizes: sizes.outputs // 2),
        samples.warm("longest"), without=TOO_SLOW | {"llamacpp": SLOW},
        variants=("ours:never",), length="longest",
    ),
    *(
        Measure(
            f"cold_prefill_{count}k", f"cold prefill, {count * 1024:,} tokens", "tokens/s", True,
            samples.cold_prefill(length), without=TOO_SLOW, length=length, is_long=True,
        )
        for count, length in ((8, "eight_thousand"), (32, "thirty_thousand"))
    ),
    *(
        Measure(
            f"decode_{name}_16k", f"decode, {title} 16k", "tokens/s", True,
            samples.decode(count, lambda sizes: sizes.outputs), samples.warm("longest"),
            without=TOO_SLOW, length="longest", is_long=True,
        )
        for name, title, count in (
            (1, "batch 1 on", lambda sizes: 1), (16, "16 on a shared", lambda sizes: sizes.batch)
        )
    ),
    *(
        Measure(
            f"http_{count}", f"streaming chats over HTTP, {count} at once", "answers/s", True,
            samples.http_chats(count), samples.warm_system, kind="http",
        )
        for count in (1, 8, 24)
    ),
    Measure(
        "manager_hit", "manager: 32,768 tokens that are cached, as a list", "ms", False,
        samples.managed("hit", 1e3), kind="manage",
    ),
    Measure(
        "manager_hit_packed", "manager: 32,768 tokens that are cached, packed", "ms", False,
        samples.managed("hit packed", 1e3), kind="manage",
    ),
    Measure(
        "manager_miss", "manager: 32,768 new tokens, published", "ms", False,
        samples.managed("miss", 1e3), kind="manage",
    ),
    Measure(
        "manager_chats", "manager: 64 conversations × 20 turns × 500 on 4k", "s", False,
        samples.managed("chats", 1.0), kind="manage",
    ),
)  # fmt: skip

VARIANTS = frozenset(name for measure in MEASURES for name in measure.variants)
"""Variants of ours that take part in some measures alone."""

GOALS: Mapping[str, Mapping[str, float]] = {
    "avx512_bf16": {
        "cold_prefill": 1.2, "first_token": 1.4, "batch_cold": 1.7, "batch_warm": 1.9,
        "decode_1": 1.25, "decode_16": 2.1, "decode_32_4k": 3.0, "strangers": 1.2,
        "conversations": 1.8, "manager_hit": 4.0, "manager_miss": 3.0, "manager_chats": 3.0,
    },
    "amx_bf16": {
        "cold_prefill": 1.5, "first_token": 1.8, "batch_cold": 2.0, "batch_warm": 2.2,
        "decode_1": 1.4, "decode_16": 2.1, "decode_32_4k": 3.5, "strangers": 1.4,
        "conversations": 2.0, "manager_hit": 4.0, "manager_miss": 4.0, "manager_chats": 4.0,
    },
    "int8": {"decode_1": 1.35, "decode_16": 2.2},
    "int4": {"decode_1": 2.0, "decode_16": 2.5},
    "http": {"http_1": 1.2, "http_8": 1.6, "http_24": 1.8},
}  # fmt: skip
"""How many times as fast as the best peer ours is to be: by processor for weights of 16 bits, by
weights elsewhere, by measure."""


def named(names: list[str]) -> list[Measure]:
    """Return measures by names or kinds, in the order of the table; all but long ones by default.

    Raises:
        ValueError: There is none of a name.
    """
    known = [measure.name for measure in MEASURES] + ["http", "manage"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no measure is called {unknown[0]}; there are {', '.join(known)}")
    if not names:
        return [measure for measure in MEASURES if not measure.is_long]
    return [m for m in MEASURES if m.name in names or (m.kind in names and not m.is_long)]


def goal_of(name: str, findings: Mapping[str, Any]) -> float | None:
    """Return what a measure of a run aims at; None where there is no goal for such a run."""
    bits = findings.get("weight_bits", 16)
    if findings["quick"]:
        return None
    if name.startswith("http_"):
        return GOALS["http"].get(name)
    if findings.get("checkpoint", "random") != "random" and not name.startswith("manager_"):
        return None
    kind = next((flag for flag in reversed(findings["stamp"]["flags"]) if flag in GOALS), "")
    return GOALS.get(kind if bits == 16 else f"int{bits}", {}).get(name)
