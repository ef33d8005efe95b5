"""What a caller of ``embed``, ``score`` and ``classify`` gets, with vLLM's names."""

from dataclasses import dataclass
from typing import Generic, TypeVar

OutputT = TypeVar("OutputT")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text.

    Attributes:
        embedding: Its numbers, shape (dimensions,).
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair.

    Attributes:
        score: From 0 to 1 of a reranker, from -1 to 1 of an embedder.
    """

    score: float


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one text.

    Attributes:
        probs: Probability of each class, shape (num_classes,).
        label: Name of the most likely one.
    """

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[OutputT]):
    """The result of one text or pair.

    Attributes:
        request_id: Name of the request, for ``explain``.
        outputs: What was computed.
        prompt_token_ids: The tokens of the prompt.
        num_cached_tokens: Prompt tokens whose KV came from the cache.
        finished: Always true.
    """

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
