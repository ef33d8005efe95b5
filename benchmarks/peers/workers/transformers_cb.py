"""transformers' continuous batching: paged attention, and blocks that requests share."""

from collections.abc import Hashable, Iterable
from typing import Any

from benchmarks.peers.protocol import (
    Served,
    Talk,
    Worker,
    answer_questions,
    serve_by_steps,
)

BLOCK_SIZE = 32


class TransformersCB(Worker):
    """Its manager runs in a thread of its own, and answers through a queue."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Load, and start the manager with block sharing on."""
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        network = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        network.generation_config.eos_token_id = None
        batching = transformers.ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=-(-settings["kv_tokens"] // BLOCK_SIZE),
            max_batch_tokens=4096,
            allow_block_sharing=True,
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=32, eos_token_id=-1, pad_token_id=0, do_sample=False
        )
        self.manager = network.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self.manager.start()
        self.made = 0
        taken = {"page_size": BLOCK_SIZE, "max_batch_tokens": 4096, "torch": torch.__version__}
        return {"version": transformers.__version__, "settings": taken}

    def serve(self, talks: list[Talk]) -> Served:
        """Serve through the manager."""
        self.counts: dict[str, int] = {}
        self.running: set[str] = set()
        served = serve_by_steps(self, talks)
        while self.running:  # the token too many, see add
            list(self.poll())
        return served

    def add(self, prompt: list[int], num_outputs: int) -> Hashable:
        """Give the manager a request; one that ends with its first token would leave no block."""
        self.made += 1
        name = str(self.made)
        self.counts[name] = 0
        self.running.add(name)
        self.manager.add_request(
            prompt, request_id=name, max_new_tokens=max(num_outputs, 2), streaming=True
        )
        return name

    def poll(self) -> Iterable[tuple[Hashable, list[int]]]:
        """Read the next answer from the manager's queue."""
        result = self.manager.get_result(timeout=1)
        if result is None:
            if not self.manager.is_running():
                raise RuntimeError("the manager of transformers' continuous batching stopped")
            return
        name = result.request_id
        seen = self.counts.get(name, len(result.generated_tokens))
        self.counts[name] = len(result.generated_tokens)
        if result.is_finished():
            self.running.discard(name)
        yield name, list(result.generated_tokens[seen:])


if __name__ == "__main__":
    answer_questions(TransformersCB())
