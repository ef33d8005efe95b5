"""What a caller of ``embed``, ``score`` and ``classify`` may set, with vLLM's names."""

from dataclasses import dataclass
from typing import Any

from ostinato.engine.requests.sampling_params import MAX_LENGTH
from ostinato.errors import InvalidSamplingParams


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How results are given.

    Attributes:
        dimensions: Numbers of an embedding that are kept; None keeps all.
        normalize: Whether embeddings have length 1; None is as the checkpoint says.
        use_activation: False gives logits in place of probabilities and scores.
        truncate_prompt_tokens: Maximum tokens of a text, which loses its end beyond them; -1 is
            what the model takes, None refuses a text that is too long.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidSamplingParams: A value is out of range or of the wrong type.
        """
        _check("dimensions", self.dimensions, 1)
        _check("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise InvalidSamplingParams("truncate_prompt_tokens=0 leaves no text: keep 1 or more")

    def max_tokens(self, max_model_len: int) -> int | None:
        """Return how many tokens of a text are kept; None keeps all."""
        if self.truncate_prompt_tokens == -1:
            return max_model_len - 1  # one place is kept for a next token, which every request has
        return self.truncate_prompt_tokens


def _check(name: str, value: Any, minimum: int) -> None:
    if value is not None and not (type(value) is int and minimum <= value <= MAX_LENGTH):
        limit = f"from {minimum} to {MAX_LENGTH}"
        raise InvalidSamplingParams(f"{name}={value!r:.80}: must be an integer, {limit}")
