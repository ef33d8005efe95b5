"""llama.cpp by its C interface: batches of rows with sequence ids, as its server makes them.

A sequence of its own keeps the last prefix of a batch; what prompts begin with is computed once,
and its cells are shared with ``llama_memory_seq_cp``. Conversations run in slots, as in its server:
a request takes the free slot that begins most like it, or the shared cells of another one, and each
step computes one token of every slot that decodes and fills up with prompts.
"""

import ctypes
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers import protocol
from benchmarks.peers.workers.gguf_file import gguf_of

BATCH, MICRO_BATCH = 2048, 512
KV_TYPES = {"f16": 1, "bf16": 30, "Q8_0": 8}
"""Numbers of ``ggml_type``, llama.cpp's default first: its kernels are made for it."""


def kv_type(settings: dict[str, Any]) -> str:
    """Return the format of keys and values.

    Raises:
        ValueError: The setting ``kv`` names none of ``KV_TYPES``.
    """
    kv = str(settings.get("kv", "f16"))
    if kv not in KV_TYPES:
        raise ValueError(f"kv={kv!r}: llama.cpp is measured with {', '.join(KV_TYPES)}")
    return kv


class LlamaCpp(protocol.Worker):
    """A context in which sequences may share cells."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint if that was not done, and load it."""
        kv = kv_type(settings)
        import llama_cpp as lib

        self.lib, self.keeper = lib, settings["max_num_seqs"]
        self.silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        path = gguf_of(Path(model), settings.get("weights", "BF16"))
        network = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(network))
        self.network = network
        if settings.get("pools"):
            self._pool_in(settings)
            return {"version": lib.__version__, "settings": {"weights": path.name}}
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_seq_max = settings["kv_tokens"], self.keeper + 1
        context.n_batch, context.n_ubatch = BATCH, MICRO_BATCH
        context.n_threads = context.n_threads_batch = settings["threads"]
        context.flash_attn_type, context.kv_unified = 1, True
        context.type_k = context.type_v = KV_TYPES[kv]
        self.context = lib.llama_init_from_model(network, context)
        if not self.context:
            raise RuntimeError("llama.cpp made no context of these settings")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.kept: list[int] = []
        taken = {
            "n_ubatch": MICRO_BATCH,
            "flash_attention": True,
            "kv": kv,
            "weights": path.name,
        }
        taken["system"] = lib.llama_print_system_info().decode()
        return {"version": lib.__version__, "settings": taken}

    def serve(self, talks: list[protocol.Talk]) -> protocol.Served:
        """Serve one batch of single turns, or conversations in slots."""
        prompts, lengths = [talk[0][0] for talk in talks], {talk[0][1] for talk in talks}
        if any(len(talk) > 1 for talk in talks) or len(lengths) > 1:
            return self._serve_in_slots(talks)
        [num_outputs] = lengths
        start = protocol.now()
        tokens, firsts = self._prefill(prompts, start)
        outputs = [[token] for token in tokens]
        for step in range(1, num_outputs):
            rows = [
                (token, len(prompt) + step - 1, sequence, True)
                for sequence, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            tokens = self._decode(rows)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        seconds, count = protocol.now() - start, len(prompts)
        for sequence in range(count):
            self.lib.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        cached = [self.reused] * count
        return protocol.Served(
            seconds, firsts, [seconds] * count, [num_outputs] * count, cached, outputs
        )

    def _pool_in(self, settings: dict[str, Any]) -> None:
        """Make a context that pools last tokens, as its server does for embeddings and reranking.

        A document is computed as a whole in one physical batch, and shares nothing with another.
        """
        lib, context = self.lib, self.lib.llama_context_default_params()
        context.n_ctx, context.n_seq_max = BATCH, 1
        context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = settings["threads"]
        context.flash_attn_type, context.embeddings = 1, True
        context.pooling_type = lib.LLAMA_POOLING_TYPE_LAST
        self.context = lib.llama_init_from_model(self.network, context)
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def embed(self, prompts: list[list[int]]) -> float:
        """Pool prompts one by one."""
        start = protocol.now()
        for prompt in prompts:
            self.lib.llama_memory_clear(self.memory, True)
            self.batch.n_tokens = len(prompt)
            for at, token in enumerate(prompt):
                self.batch.token[at], self.batch.pos[at] = token, at
                self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, 0
                self.batch.logits[at] = True
            if self.lib.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
            assert self.lib.llama_get_embeddings_seq(self.context, 0)
        return protocol.now() - start

    def _serve_in_slots(self, talks: list[protocol.Talk]) -> protocol.Served:
        for sequence in range(self.keeper + 1):
            self.lib.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self.kept = []
        slots = Slots(self, self.keeper)
        served = protocol.serve_by_steps(slots, talks)
        served.cached = slots.cached
        return served

    def _prefill(self, prompts: list[list[int]], start: float) -> tuple[list[int], list[float]]:
        """Compute the head that all share once, in the keeper's sequence, then each one's own."""
        several = len(prompts) > 1
        head = prompts[0][: min(protocol.common(prompts), len(prompts[0]) - 1)]
        self.reused = shared = protocol.common([self.kept, head])
        if (several and shared < len(head)) or shared < len(head) // 2:
            self.lib.llama_memory_seq_rm(self.memory, self.keeper, shared, -1)
            rows = [(head[at], at, self.keeper, False) for at in range(shared, len(head))]
            self._decode(rows)
            self.kept, shared = head, len(head)
        rows = []
        for sequence, prompt in enumerate(prompts):
            if shared:
                self.lib.llama_memory_seq_cp(self.memory, self.keeper, sequence, 0, shared)
            last = len(prompt) - 1
            rows += [(prompt[at], at, sequence, at == last) for at in range(shared, len(prompt))]
        firsts: list[float] = []
        tokens = self._decode(rows, lambda: firsts.append(protocol.now() - start))
        return tokens, firsts

    def _decode(self, rows: list[tuple[int, int, int, bool]], note: Any = None) -> list[int]:
        """Compute rows of (token, position, sequence, whether its next token is wanted)."""
        import numpy as np

        ids = []
        for begin in range(0, len(rows), BATCH):
            part = rows[begin : begin + BATCH]
            self.batch.n_tokens = len(part)
            for at, (token, position, sequence, wanted) in enumerate(part):
                self.batch.token[at], self.batch.pos[at] = token, position
                self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, sequence
                self.batch.logits[at] = wanted
            status = self.lib.llama_decode(self.context, self.batch)
            if status != 0:
                raise RuntimeError(
                    f"llama_decode answered {status}: is there room in the KV cache?"
                )
            for at in (at for at, row in enumerate(part) if row[3]):
                logits = self.lib.llama_get_logits_ith(self.context, at)
                row = np.ctypeslib.as_array(logits, shape=(self.vocab_size,))
                ids.append(int(row.argmax()))
                if note is not None:
                    note()
        return ids


class Slots:
    """Continuous batching over sequences.

    Attributes:
        cached: Prompt tokens of each request that were there.
    """

    def __init__(self, worker: LlamaCpp, num_slots: int) -> None:
        """All are free and empty."""
        self.worker, self.cached = worker, list[int]()
        self.held: list[list[int]] = [[] for _ in range(num_slots)]  # tokens with cells
        self.todo: dict[int, list[int]] = {}  # by slot, what is to be computed next
        self.left: dict[int, int] = {}  # by slot, how many tokens are still wanted
        self.names: dict[int, int] = {}

    def add(self, prompt: list[int], num_outputs: int) -> Hashable:
        """Take a request into the free slot that begins most like it."""
        lib, memory = self.worker.lib, self.worker.memory
        alike = [min(protocol.common([held, prompt]), len(prompt) - 1) for held in self.held]
        free = [slot for slot in range(len(self.held)) if slot not in self.left]
        slot = max(free, key=lambda at: (alike[at], -len(self.held[at])))
        best = max(range(len(alike)), key=alike.__getitem__)
        num_cached = alike[best]
        if alike[slot] < num_cached:
            lib.llama_memory_seq_rm(memory, slot, -1, -1)
            lib.llama_memory_seq_cp(memory, best, slot, 0, num_cached)
        else:
            lib.llama_memory_seq_rm(memory, slot, num_cached, -1)
        self.held[slot], self.todo[slot] = prompt[:num_cached], prompt[num_cached:]
        self.left[slot], self.names[slot] = num_outputs, len(self.cached)
        self.cached.append(num_cached)
        return self.names[slot]

    def poll(self) -> Iterable[tuple[Hashable, list[int]]]:
        """Compute a batch: what decodes first, then as much of prompts as fits."""
        rows: list[tuple[int, int, int, bool]] = []
        done: list[int] = []
        for slot in sorted(self.left, key=lambda at: len(self.todo[at])):
            tokens, begin = self.todo[slot][: BATCH - len(rows)], len(self.held[slot])
            rest = self.todo[slot] = self.todo[slot][len(tokens) :]
            last = begin + len(tokens) - 1
            rows += [
                (token, at, slot, at == last and not rest) for at, token in enumerate(tokens, begin)
            ]
            self.held[slot] = self.held[slot] + tokens
            done += [slot] if tokens and not rest else []
        for slot, token in zip(done, self.worker._decode(rows), strict=True):
            self.left[slot], self.todo[slot] = self.left[slot] - 1, [token]
            if not self.left[slot]:
                del self.left[slot], self.todo[slot]
            yield self.names[slot], [token]


if __name__ == "__main__":
    protocol.answer_questions(LlamaCpp())
