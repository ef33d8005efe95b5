"""Cost of a long conversation's next turn before it is scheduled, and how often it drifts.

::

    python benchmarks/kept_tokens.py                         # a history of 100,000 tokens
    python benchmarks/kept_tokens.py --tokenizer CHECKPOINT --tokens 30000

From the messages to a request that is in the queue: template, tokens, checks. By turns in one run:
with the history known, with nothing known, and the tokenizer alone. The model is a random one that
takes prompts so long; no step runs. Times are CPU time of this thread; the median counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from ostinato import LLM, SamplingParams
from ostinato.engine.loop.engine import Engine
from ostinato.engine.prompts.chat import render_text
from ostinato.engine.requests.prompts import Prompt

WORDS = "The quick brown fox jumps over the lazy dog, and 3.14 is not 22/7; is it? "
NEW = "And now, in a few words, say what else there is to know of all this. " * 3


def make_llm(tokenizer: str, num_tokens: int, folder: Path) -> LLM:
    """Return an engine with a tokenizer of choice and a random model that takes so many tokens."""
    with LLM(tokenizer, num_blocks=16, max_model_len=64) as other:
        other.get_tokenizer().save_pretrained(folder)
        vocab_size = other.engine.loaded.vocab_size
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=num_tokens,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return LLM(str(folder), num_blocks=-(-num_tokens // 16))


def history(llm: LLM, num_tokens: int) -> list[dict[str, str]]:
    """Return a conversation of so many tokens."""
    per_turn = len(llm.get_tokenizer()(WORDS * 20, add_special_tokens=False)["input_ids"])
    num_turns, roles = -(-num_tokens // per_turn), ("user", "assistant")
    turns = ({"role": roles[n % 2], "content": f"{n}. {WORDS * 20}"} for n in range(num_turns))
    return [*turns, {"role": "assistant", "content": "Yes."}]


def schedule(engine: Engine, messages: list[dict[str, str]], keep_tokens: bool) -> int:
    """Bring a conversation into the queue and out again; returns its tokens."""
    prompt = Prompt(keep_tokens=keep_tokens)
    made = engine.make_request(
        engine.prompts.tokenized_chat(prompt, engine.prompts.continued(prompt, messages)),
        SamplingParams(max_tokens=1),
    )
    engine.add(made)
    engine.discard(made.request.request_id)
    return len(made.request.prompt_token_ids)


def cpu_ms(work: Callable[[], Any]) -> float:
    """Return what a piece of work takes of this thread."""
    begin_s = time.thread_time()
    work()
    return (time.thread_time() - begin_s) * 1000


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="smollm2")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        llm = make_llm(options.tokenizer, options.tokens * 2, Path(folder))
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    messages = history(llm, options.tokens)
    more = [*messages, {"role": "user", "content": NEW}]
    text = render_text(tokenizer, more)
    cases: dict[str, Callable[[], Any]] = {
        "history known": lambda: schedule(engine, more, keep_tokens=True),
        "nothing known": lambda: schedule(engine, more, keep_tokens=False),
        "the tokenizer alone": lambda: tokenizer(text, add_special_tokens=False, verbose=False),
    }
    num_known = schedule(engine, messages, keep_tokens=True)
    num_new = schedule(engine, more, keep_tokens=False) - num_known
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, work in cases.items():
            taken[name].append(cpu_ms(work))
    table = Table("case", "CPU ms", "of the tokenizer", title=f"{num_known:,} + {num_new} tokens")
    whole = median(taken["the tokenizer alone"])
    for name, times in taken.items():
        table.add_row(name, f"{median(times):.2f}", f"1/{whole / median(times):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
