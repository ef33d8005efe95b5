"""llama.cpp by its C interface: batches of rows with sequence ids, as its server makes them.

A sequence of its own keeps the last prefix; what prompts begin with is computed once, and its
cells are shared with ``llama_memory_seq_cp``. It has no scheduler at this level, so conversations
are left out.
"""

import ctypes
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import (
    Served,
    Talk,
    Unsupported,
    Worker,
    answer_questions,
    common,
    now,
)
from benchmarks.peers.workers.gguf_file import convert

BATCH, MICRO_BATCH = 2048, 512
BF16 = 30
"""GGML_TYPE_BF16."""


class LlamaCpp(Worker):
    """A context in which sequences may share cells."""

    def load(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Convert the checkpoint if that was not done, and load it."""
        import llama_cpp as lib

        self.lib, self.keeper = lib, settings["max_num_seqs"]
        self.silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        path = convert(Path(model))
        network = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(network))
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_seq_max = settings["kv_tokens"], self.keeper + 1
        context.n_batch, context.n_ubatch = BATCH, MICRO_BATCH
        context.n_threads = context.n_threads_batch = settings["threads"]
        context.flash_attn_type, context.kv_unified = 1, True
        context.type_k = context.type_v = BF16
        self.context = lib.llama_init_from_model(network, context)
        if not self.context:
            raise RuntimeError("llama.cpp made no context of these settings")
        self.memory = lib.llama_get_memory(self.context)
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        self.kept: list[int] = []
        taken = {"n_ubatch": MICRO_BATCH, "flash_attention": True, "kv": "bf16", "weights": "bf16"}
        taken["system"] = lib.llama_print_system_info().decode()
        return {"version": lib.__version__, "settings": taken}

    def serve(self, talks: list[Talk]) -> Served:
        """Serve one batch of single turns."""
        prompts, lengths = [talk[0][0] for talk in talks], {talk[0][1] for talk in talks}
        if any(len(talk) > 1 for talk in talks) or len(lengths) > 1:
            raise Unsupported("has no scheduler below its server")
        [num_outputs] = lengths
        start = now()
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
        seconds, count = now() - start, len(prompts)
        for sequence in range(count):
            self.lib.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        cached = [self.reused] * count
        return Served(seconds, firsts, [seconds] * count, [num_outputs] * count, cached, outputs)

    def _prefill(self, prompts: list[list[int]], start: float) -> tuple[list[int], list[float]]:
        """Compute the head that all share once, in the keeper's sequence, then each one's own."""
        several = len(prompts) > 1
        head = prompts[0][: min(common(prompts), len(prompts[0]) - 1)]
        self.reused = shared = common([self.kept, head])
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
        tokens = self._decode(rows, lambda: firsts.append(now() - start))
        return tokens, firsts

    def _decode(self, rows: list[tuple[int, int, int, bool]], note: Any = None) -> list[int]:
        """Compute rows of (token, position, sequence, whether its next token is wanted)."""
        import numpy as np

        found = []
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
                found.append(int(row.argmax()))
                if note is not None:
                    note()
        return found


if __name__ == "__main__":
    answer_questions(LlamaCpp())
