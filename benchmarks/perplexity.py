"""Perplexity of a text, by the formats of weights, keys and values.

::

    python -m benchmarks.perplexity tiny-shakespeare --text FILE --pieces 120 --tokens 120
    python -m benchmarks.perplexity smollm2 --text FILE --pieces 6 --tokens 512

Each piece of the text is a prompt of its own, and every token but its first is scored; attention
always reads the store, so that what its format costs counts from the first token on. The first way
is what the others are compared with.
"""

import math
from pathlib import Path
from typing import Any

from benchmarks.command_line import parser_of
from ostinato import LLM, SamplingParams

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, int8 KV": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, int4": {"dtype": "bfloat16", "quantization": "int4"},
    "bfloat16, 8-bit activations": {"dtype": "bfloat16", "activation_dtype": "int8"},
    "bfloat16, w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "bfloat16, w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
    "bfloat16, int4, int8 KV": {
        "dtype": "bfloat16",
        "quantization": "int4",
        "kv_cache_dtype": "int8",
    },
}


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    """Return e to the mean loss of all scored tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    losses = []
    for output in llm.generate(pieces, params, use_tqdm=False):
        places = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        losses += [-entries[token].logprob for token, entries in places if entries is not None]
    return math.exp(sum(losses) / len(losses))


def pieces_of(llm: LLM, text: str, num_pieces: int, num_tokens: int) -> list[list[int]]:
    """Cut pieces out of a text, at equal distances; a token has at most 8 characters on average."""
    tokenizer, step = llm.engine.loaded.require_tokenizer(), len(text) // num_pieces
    starts = range(0, num_pieces * step, step)
    cut = (tokenizer(text[start : start + 8 * num_tokens])["input_ids"] for start in starts)
    return [list(ids)[:num_tokens] for ids in cut]


def main() -> None:
    """Read the command line, score the text in each way and print."""
    parser = parser_of(__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512, help="of a piece")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    text, first = options.text.read_text("utf-8"), None
    for way in options.ways:
        with LLM(options.model, num_blocks=1024, enable_prefix_caching=False, **WAYS[way]) as llm:
            value = perplexity(llm, pieces_of(llm, text, options.pieces, options.tokens))
        first = first or value
        print(f"{way:24} {value:9.4f} {value / first - 1:+.3%}", flush=True)


if __name__ == "__main__":
    main()
