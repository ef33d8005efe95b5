"""Calls a model."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ostinato.runner.adapters.lora import StepAdapters
from ostinato.runner.adapters.module_updates import hook_updates
from ostinato.runner.attention.registration import STEP_KEYWORD, LayerAttention
from ostinato.runner.experts.routers import PackedRouter
from ostinato.runner.heads import HiddenRows
from ostinato.runner.inputs import Ints
from ostinato.runner.states.mixers import bind_mixers, passes_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelCall:
    """Calls a model of ``transformers`` with one row of tokens.

    Attributes:
        model: In evaluation mode.
        vocab_size: Number of ids with an embedding.
        hands_step: Whether attention modules get the step directly.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        """Wrap a model.

        Effects: binds the model's layers with a state to the steps of these calls.
        """
        self.model = model
        self.vocab_size = int(cast(Any, model.get_input_embeddings()).num_embeddings)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._step: LayerAttention | None = None
        self._adapters: StepAdapters | None = None
        self._adapted: set[str] = set()
        self._later: Tensor | None = None
        self.hands_step = False
        self._num_hooked = 0
        bind_mixers(model, lambda: None if self._step is None else self._step.states)

    def __call__(
        self,
        input_ids: Ints | Tensor,
        position_ids: Ints | Tensor | None,
        step: LayerAttention | None,
        rows: Ints | Tensor | None = None,
        adapters: StepAdapters | None = None,
        vectors: Tensor | None = None,
        later: Tensor | None = None,
        hidden: HiddenRows | None = None,
    ) -> Tensor:
        """Return logits, shape (num_rows, vocab_size).

        Args:
            input_ids: Shape (num_tokens,), int64.
            position_ids: Shape (num_tokens,), or (3, num_tokens) for time, row and column, int64;
                None lets the model compute them.
            step: The attention of the layers; None for the model's own attention.
            rows: Rows whose logits are computed, shape (num_rows,), int64; None for all.
            adapters: Rows that adapters compute; None is none.
            vectors: Replaces the embeddings of the ids, shape (num_tokens, width).
            later: Added to the output of each of the first layers, shape (num_later, num_tokens,
                width); None adds nothing.
            hidden: Takes the input of the head; None keeps none.

        Effects: adds hooks to the modules that an adapter changes for the first time, and to
            the layers whose output is added to.
        """
        keywords: dict[str, Any] = {} if step is None else {STEP_KEYWORD: step}
        if position_ids is not None:
            keywords["position_ids"] = self.tensor(position_ids).unsqueeze(-2)
        kept = None if rows is None else self.tensor(rows)
        if kept is not None and self._keeps_rows:
            keywords["logits_to_keep"] = kept
        if vectors is None:
            keywords["input_ids"] = self.tensor(input_ids)[None]
        else:
            keywords["inputs_embeds"] = vectors[None]
        taken = nullcontext() if hidden is None else hidden.taken_from(self.model)
        with self.during(step, adapters, later), taken:
            output = self.model(use_cache=False, **keywords)
        logits = cast(Tensor, output.logits)[0]
        if kept is not None and not self._keeps_rows:
            logits = logits.index_select(0, kept)
            if hidden is not None:
                hidden.rows = hidden.rows.index_select(0, kept)
        return logits

    @contextmanager
    def during(
        self,
        step: LayerAttention | None,
        adapters: StepAdapters | None,
        later: Tensor | None = None,
    ) -> Iterator[None]:
        """Let the model, or modules of it that are called one by one, compute a step.

        Args:
            step: The attention of the layers, and their states.
            adapters: Rows that adapters compute; None is none.
            later: As of ``__call__``.

        Effects: adds hooks as ``__call__`` does.
        """
        self._hook_adapted(adapters)
        if later is not None:
            self._hook_layers(len(later))
        self._step, self._adapters, self._later = step, adapters, later
        try:
            yield
        finally:
            self._step = self._adapters = self._later = None

    def hand_step_to_attention(self) -> None:
        """Pass the step to each attention module directly, if layers drop keywords (StableLM).

        Effects: adds hooks to the model's attention modules, active during calls of this object.
        """
        self.hands_step = True
        for module in self.model.modules():
            if isinstance(getattr(module, "layer_idx", None), int) and _takes_keywords(module):
                module.register_forward_pre_hook(self._with_step, with_kwargs=True)

    @passes_steps
    def _with_step(
        self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, keywords if self._step is None else {**keywords, STEP_KEYWORD: self._step}

    def _hook_adapted(self, adapters: StepAdapters | None) -> None:
        """Add a hook for updates to each module that an adapter changes."""
        for segment in () if adapters is None else adapters.segments:
            for name in segment.adapter.modules.keys() - self._adapted:
                module, parent = map(self.model.get_submodule, (name, name.rpartition(".")[0]))
                module = parent if isinstance(parent, PackedRouter) else module
                hook_updates(name, module, segment.adapter, lambda: self._adapters)
                self._adapted.add(name)

    def _hook_layers(self, number: int) -> None:
        """Add a hook to each of the first layers that adds the vectors of a call."""
        layers = cast(Any, self.model.get_decoder()).layers
        for index in range(self._num_hooked, number):
            layers[index].register_forward_hook(partial(self._with_later, index))
        self._num_hooked = max(self._num_hooked, number)

    def _with_later(
        self, index: int, _module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        return output if self._later is None else output + self._later[index]

    def tensor(self, numbers: Ints | Tensor) -> Tensor:
        """Return numbers on the model's device; tensors are there."""
        if isinstance(numbers, Tensor):
            return numbers
        return torch.from_numpy(numbers).to(self.model.device)


class LaterCall:
    """A ``ModelCall`` whose model is built when it is first needed.

    Attributes:
        vocab_size: As of ``ModelCall``.
        hands_step: Likewise.
    """

    def __init__(self, build: Callable[[], ModelCall], vocab_size: int, hands_step: bool) -> None:
        """Build nothing yet."""
        self._build, self._call = build, cast(ModelCall | None, None)
        self._gate = threading.Lock()
        self.vocab_size, self.hands_step = vocab_size, hands_step

    @property
    def built(self) -> ModelCall:
        """The call; building it takes seconds."""
        with self._gate:
            if self._call is None:
                self._call = self._build()
            return self._call

    @property
    def model(self) -> "PreTrainedModel":
        """The model, in evaluation mode."""
        return self.built.model

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Return logits; see ``ModelCall``."""
        return self.built(*arguments, **keywords)

    def during(
        self, step: LayerAttention, adapters: StepAdapters | None
    ) -> AbstractContextManager[None]:
        """Let modules that are called one by one compute a step; see ``ModelCall``."""
        return self.built.during(step, adapters)


def _takes_keywords(module: nn.Module) -> bool:
    """Return whether a module can be called with keywords that it does not name."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
