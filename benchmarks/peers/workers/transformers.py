"""transformers as one would use it by hand: plain forward passes, and a prefix that is kept.

The cache of the last prompt is kept; what a batch shares with it, or with each other, is computed
once and copied. Prompts of a batch have one length. Conversations would need a scheduler. The
clock stands still while keys and values are copied: a server would not copy them.
"""

import copy
from typing import Any

from benchmarks.peers import protocol


class Transformers(protocol.Worker):
    """A model, and the keys and values of one prefix."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load with PyTorch's own attention."""
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        torch.set_grad_enabled(False)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.kept: tuple[list[int], Any] = ([], None)
        taken = {"attention": "sdpa", "torch": torch.__version__}
        return {"version": transformers.__version__, "settings": taken}

    def serve(self, talks: list[protocol.Talk]) -> protocol.Served:
        """Serve one batch of single turns."""
        prompts, lengths = [talk[0][0] for talk in talks], {talk[0][1] for talk in talks}
        if any(len(talk) > 1 for talk in talks) or len(lengths) > 1:
            raise protocol.Unsupported("plain forward passes have no scheduler")
        [num_outputs] = lengths
        start, self.copying_s = protocol.now(), 0.0
        rows = [[token] for token in self._prefill(prompts)]
        first = protocol.now() - start - self.copying_s
        outputs = [list(row) for row in rows]
        for _ in range(num_outputs - 1):
            rows = [[token] for token in self._forward(rows, self.cache)]
            for output, row in zip(outputs, rows, strict=True):
                output += row
        seconds, count = protocol.now() - start - self.copying_s, len(prompts)
        return protocol.Served(
            seconds,
            [first] * count,
            [seconds] * count,
            [num_outputs] * count,
            [self.reused] * count,
            outputs,
        )

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute what is not there; returns the first tokens, and leaves the batch's cache."""
        head = prompts[0][: min(protocol.common(prompts), len(prompts[0]) - 1)]
        num_cached = self.reused = protocol.common([self.kept[0], head])
        self.cache = self._copy_of_kept(num_cached)
        if len(prompts) > 1:
            if num_cached < len(head):  # what all begin with is computed once, and kept
                self._forward([head[num_cached:]], self.cache)
                self.kept = (head, self._copy(self.cache))
                num_cached = len(head)
            if num_cached:
                self.cache.batch_repeat_interleave(len(prompts))
        first_ids = self._forward([prompt[num_cached:] for prompt in prompts], self.cache)
        if len(prompts) == 1 and num_cached < len(head) // 2:
            self.kept = (prompts[0], self._copy(self.cache))
        return first_ids

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _copy(self, cache: Any) -> Any:
        begin = protocol.now()
        copied = copy.deepcopy(cache)
        self.copying_s += protocol.now() - begin
        return copied

    def _copy_of_kept(self, num_tokens: int) -> Any:
        if num_tokens == 0:
            return self._new_cache()
        cache = self._copy(self.kept[1])
        if num_tokens < len(self.kept[0]):
            cache.crop(num_tokens - len(self.kept[0]))  # so many off its end
        return cache

    def _forward(self, rows: list[list[int]], cache: Any) -> list[int]:
        import torch

        result = self.model(
            input_ids=torch.tensor(rows), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return result.logits[:, -1].argmax(-1).tolist()


if __name__ == "__main__":
    protocol.answer_questions(Transformers())
