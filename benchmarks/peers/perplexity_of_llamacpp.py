"""Perplexity of llama.cpp with keys and values of 8 bits; compare ``benchmarks/perplexity.py``.

::

    PEERS/llamacpp/bin/python -m benchmarks.peers.perplexity_of_llamacpp MODEL.gguf --text FILE

Pieces of the text are cut and scored as there: each is a prompt of its own, and every token but its
first counts. Formats of keys and values are compared with the first. It needs nothing but the
Python of llama.cpp.
"""

import ctypes
import math
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.command_line import parser_of

KV_TYPES = {"f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
"""Numbers of ``ggml_type``."""


def main() -> None:
    """Read the command line, score the text in each format and print."""
    parser = parser_of(__doc__, threads=2)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of a piece")
    parser.add_argument("--kv", nargs="*", choices=KV_TYPES, default=["f16", "bf16", "q8_0"])
    options = parser.parse_args()
    silence = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silence, ctypes.c_void_p(0))
    lib.llama_backend_init()
    path = str(options.model).encode()
    network = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
    pieces = _pieces(network, options.text.read_text("utf-8"), options.pieces, options.tokens)
    first = None
    for kv in options.kv:
        value = _perplexity(network, pieces, KV_TYPES[kv], options.threads)
        first = first or value
        print(f"{kv:24} {value:9.4f} {value / first - 1:+.3%}", flush=True)


def _pieces(network: Any, text: str, num_pieces: int, num_tokens: int) -> list[list[int]]:
    """Cut pieces at equal distances; a token has at most 8 characters on average."""
    step, vocab = len(text) // num_pieces, lib.llama_model_get_vocab(network)
    room, pieces = (lib.llama_token * (8 * num_tokens))(), []
    for start in range(0, num_pieces * step, step):
        data = text[start : start + 8 * num_tokens].encode()
        count = lib.llama_tokenize(vocab, data, len(data), room, len(room), True, False)
        pieces.append(list(room[:count])[:num_tokens])
    return pieces


def _perplexity(network: Any, pieces: list[list[int]], kv_type: int, threads: int) -> float:
    """Return e to the mean loss of all scored tokens."""
    wanted = lib.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = max(map(len, pieces))
    wanted.n_threads = wanted.n_threads_batch = threads
    wanted.flash_attn_type, wanted.type_k, wanted.type_v = 1, kv_type, kv_type
    context = lib.llama_init_from_model(network, wanted)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(network))
    losses = []
    for piece in pieces:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        logits = _logits(context, piece, vocab_size)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        own = logits[np.arange(len(piece) - 1), piece[1:]]
        losses += list(np.log(np.exp(logits).sum(axis=1)) - own)
    lib.llama_free(context)
    return math.exp(sum(losses) / len(losses))


def _logits(context: Any, piece: list[int], vocab_size: int) -> np.ndarray:
    """Compute a piece as one batch; returns the logits of all its tokens."""
    batch = lib.llama_batch_init(len(piece), 0, 1)
    batch.n_tokens = len(piece)
    for at, token in enumerate(piece):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, True
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    status = lib.llama_decode(context, batch)
    if status != 0:
        raise RuntimeError(f"llama_decode answered {status}")
    rows = np.ctypeslib.as_array(lib.llama_get_logits(context), shape=(len(piece), vocab_size))
    copy = rows.copy()
    lib.llama_batch_free(batch)
    return copy


if __name__ == "__main__":
    main()
