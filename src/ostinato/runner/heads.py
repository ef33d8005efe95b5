"""Heads of checkpoints: a vocabulary, classes, or none.

The last layer of a causal model multiplies a hidden state by a matrix. What its rows mean depends
on the checkpoint; everything before it is the same model, so all are served by the same code::

    *ForCausalLM                  lm_head   a row per token     generation, and everything below
    *ForSequenceClassification    score     a row per class     classes, scores, embeddings
    *Model                        none                          embeddings

The model is always built with a language head, whose matrix is replaced by the rows of the classes
and a fixed random projection. The probe compares what these give, where a class or none would show
little of the hidden state; nothing else reads them.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ostinato.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeadKind = Literal["tokens", "classes", "none"]

_PROBED_ROWS = 64
"""Rows of the random projection."""

_CLASSIFIER = "ForSequenceClassification"

_LANGUAGE_HEADS = ("For", "LMHead", "DoubleHeads")
"""Parts of the names of classes with a language head."""


class HiddenRows:
    """The input of the head: the last hidden states, after the final norm.

    Attributes:
        rows: Of the rows whose logits a step computes, shape (num_rows, width).
    """

    def __init__(self) -> None:
        """Start empty; a step sets the rows."""
        self.rows: Tensor = torch.empty(0)

    @contextmanager
    def taken_from(self, model: "PreTrainedModel") -> Iterator[None]:
        """Take what the head reads during a call of the model."""
        head: Any = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(self._take)
        try:
            yield
        finally:
            hook.remove()

    def _take(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.rows = inputs[0][0]


@dataclass(frozen=True, slots=True)
class ModelHead:
    """What the last layer of a checkpoint gives.

    Attributes:
        kind: The meaning of its rows.
        labels: Names of the classes, in order; empty for the other kinds.
        is_multi_label: Whether several classes may hold at once.
    """

    kind: HeadKind = "tokens"
    labels: tuple[str, ...] = ()
    is_multi_label: bool = False

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ModelHead":
        """Read it from a config."""
        name = next(iter(config.architectures or ()), "")
        if name.endswith(_CLASSIFIER):
            labels = tuple(str(config.id2label[index]) for index in range(config.num_labels))
            return cls("classes", labels, config.problem_type == "multi_label_classification")
        is_headless = name.endswith("Model") and not any(mark in name for mark in _LANGUAGE_HEADS)
        return cls("none" if is_headless else "tokens")

    @property
    def num_rows(self) -> int:
        """Rows of the matrix that replaces the language head."""
        return len(self.labels) + _PROBED_ROWS

    @property
    def key_mapping(self) -> dict[str, str]:
        """Names of the checkpoint's weights that the model has under another name."""
        return {r"^score\.": "lm_head."} if self.kind == "classes" else {}

    def is_missing(self, name: str) -> bool:
        """Whether a weight of the model may be missing from the checkpoint."""
        return self.kind == "none" and name == "lm_head.weight"

    def complete(self, model: "PreTrainedModel") -> None:
        """Append the random projection to the rows of the classes; it is the same everywhere."""
        classes: Any = model.get_output_embeddings()
        old, width = classes.weight, classes.in_features
        generator = torch.Generator("cpu").manual_seed(0)
        numbers = torch.randn(_PROBED_ROWS, width, generator=generator, device="cpu") * width**-0.5
        rows = torch.cat((old.detach()[: len(self.labels)], numbers.to(old)))
        classes.weight = nn.Parameter(rows, requires_grad=False)
        classes.out_features = len(rows)


class HeadedClass:
    """A causal model's class, built with the head of its checkpoint; used like an auto class."""

    def __init__(self, auto: Any, head: ModelHead) -> None:
        """Take the auto class that knows the model."""
        self._auto, self._head = auto, head

    def from_config(self, config: PreTrainedConfig, **keywords: Any) -> "PreTrainedModel":
        """Build the model."""
        untied = _untied(config)
        model: PreTrainedModel = self._class_of(untied)._from_config(untied, **keywords)
        self._head.complete(model)
        return model

    def from_pretrained(self, config: PreTrainedConfig, **keywords: Any) -> Any:
        """Build the model and read its weights; the second value says which there were not."""
        untied = _untied(config)
        model, info = self._class_of(untied).from_pretrained(
            config=untied, key_mapping=self._head.key_mapping, **keywords
        )
        missing = [name for name in info["missing_keys"] if not self._head.is_missing(name)]
        self._head.complete(model)
        return model, {**info, "missing_keys": missing}

    def _class_of(self, config: PreTrainedConfig) -> Any:
        causal: Any = self._auto._model_mapping[type(config)]
        num_rows = max(1, len(self._head.labels))

        class Headed(causal):  # type: ignore[misc]  # a class that is known at run time alone
            def __init__(self, config: PreTrainedConfig, *arguments: Any, **keywords: Any) -> None:
                super().__init__(config, *arguments, **keywords)
                own: Any = getattr(self, "lm_head", None)
                if not isinstance(own, nn.Linear):
                    raise UnsupportedModel(
                        f"{causal.__name__} has no lm_head whose place the checkpoint's own head "
                        "could take: load a checkpoint of it with a language head"
                    )
                width, dtype = own.in_features, own.weight.dtype
                self.lm_head = nn.Linear(width, num_rows, bias=False, dtype=dtype)

        Headed.__name__ = Headed.__qualname__ = causal.__name__
        return Headed


def _untied(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config whose head is not the embedding."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    return config
