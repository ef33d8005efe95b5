"""Which settings of sampling do commands share?

Ranges are checked where they are known, by ``SamplingParams``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from ostinato.engine.sampling_params import SamplingParams

_SAMPLING = "Sampling"

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        help="0 always takes the likeliest token; higher is bolder.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Draw from the likeliest tokens that together have this probability; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        help="Draw from this many of the likeliest tokens; 0 is off.", rich_help_panel=_SAMPLING
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop tokens less likely than this share of the likeliest; 0 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        help="Lower the logit of every token generated so far, once.", rich_help_panel=_SAMPLING
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Lower it for each time that it was generated.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        help="Divide logits of tokens seen so far, prompt included; 1 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Stop before this text; may be repeated. In most shells $'\\n' is a line break.",
        rich_help_panel=_SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Go on after the model says that the text has ended.",
        rich_help_panel=_SAMPLING,
    ),
]


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, as ``SamplingParams`` names it."""

    max_tokens: MaxTokens = 200
    temperature: Temperature = 0.8
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = None
    stop: Stop = None

    def params(self, stop: Sequence[str] = (), **more: Any) -> SamplingParams:
        """Return them, with more that only one command knows.

        Args:
            stop: Texts to stop before if none are given.
            **more: As ``SamplingParams`` names them.

        Raises:
            InvalidSamplingParams: One is out of range.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**given, "stop": self.stop or tuple(stop), **more})
