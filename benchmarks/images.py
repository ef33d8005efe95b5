"""Time to first token of a second question on the same image.

::

    python -m benchmarks.images                  # an encoder of 12 layers, an image of 576 tokens
    python -m benchmarks.images --rounds 9 --dtype float32

A random model of LLaVA's type, with CLIP's encoder for images of 336 pixels. By turns in one run:
an image that was never seen, a second question on it, the same image behind another beginning (the
prefix differs, so only the encoder's output is found), and a text of the same length. Times are
CPU time of the process from the request to its first token; the median counts.

Then the longest step of a text that is being continued while an image is encoded beside it, against
the time that the encoder takes by itself; both by the clock, so the machine should be quiet.
"""

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from benchmarks.command_line import parser_of
from benchmarks.greedy import greedy
from ostinato import LLM
from ostinato.engine.requests.prompts import Prompt, PromptDict

ONE, ENDLESS = greedy(1), greedy(4096)
PLACEHOLDER, VOCAB_SIZE, NUM_IMAGE_TOKENS = 1, 4096, 576
BEGINNING, QUESTION = 32, 24


def make_llm(folder: Path, num_layers: int, dtype: str) -> LLM:
    """Return an engine with a random model."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=num_layers, image_size=336,
        num_attention_heads=12, patch_size=14,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
        num_attention_heads=16, num_key_value_heads=4,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=PLACEHOLDER)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    ).save_pretrained(folder)
    settings: dict[str, Any] = {"dtype": dtype, "num_blocks": 1024, "max_num_seqs": 4}
    return LLM(str(folder), **settings)


def first_token_ms(llm: LLM, ids: list[int], *images: Image.Image) -> tuple[float, int]:
    """Return the CPU time up to the first token, and how many tokens hit."""
    prompt: PromptDict = {"prompt_token_ids": ids}
    if images:
        prompt["multi_modal_data"] = {"image": list(images)}
    start = time.process_time()
    [output] = llm.generate([prompt], ONE, use_tqdm=False)
    return 1e3 * (time.process_time() - start), output.num_cached_tokens


def draw(random: np.random.Generator, length: int) -> list[int]:
    """Return ids of a text."""
    return [int(token) for token in random.integers(2, VOCAB_SIZE, length)]


def measure(llm: LLM, rounds: int) -> dict[str, tuple[float, int]]:
    """Return the median time and the hits of each case."""
    random = np.random.default_rng(0)
    times: dict[str, list[tuple[float, int]]] = {}
    for _ in range(rounds):
        pixels = random.integers(0, 256, (600, 800, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        beginning, other = draw(random, BEGINNING), draw(random, BEGINNING)
        cases: dict[str, tuple[Any, ...]] = {
            "an image that was never seen": (
                [*beginning, PLACEHOLDER, *draw(random, QUESTION)],
                image,
            ),
            "a second question on it": ([*beginning, PLACEHOLDER, *draw(random, QUESTION)], image),
            "the image, behind another beginning": (
                [*other, PLACEHOLDER, *draw(random, QUESTION)],
                image,
            ),
            "a text of the same length": (draw(random, BEGINNING + NUM_IMAGE_TOKENS + QUESTION),),
        }
        for name, case in cases.items():
            times.setdefault(name, []).append(first_token_ms(llm, *case))
    return {name: (median(ms for ms, _ in runs), runs[-1][1]) for name, runs in times.items()}


def beside(llm: LLM, rounds: int) -> tuple[float, float]:
    """Return the median of the longest step beside an encoder, and of the encoder alone, in ms."""
    random, engine = np.random.default_rng(1), llm.engine
    images = engine.runner.images
    assert images is not None
    steps_ms, encoder_ms = [], []
    for _ in range(rounds):
        pixels = random.integers(0, 256, (600, 800, 3), dtype=np.uint8)
        start = time.perf_counter()
        images.vision.encode(pixels)
        encoder_ms.append(1e3 * (time.perf_counter() - start))
        text = engine.make_request(Prompt(token_ids=draw(random, 64)), ENDLESS)
        engine.add(text)
        for _ in range(8):
            engine.step()
        prompt = Prompt(token_ids=[*draw(random, 4), PLACEHOLDER], images=(pixels,))
        engine.add(engine.make_request(prompt, ONE))
        num_encoded, longest = images.num_encoded, 0.0
        while images.num_encoded == num_encoded:
            start = time.perf_counter()
            engine.step()
            if images.num_encoded == num_encoded:  # else the step has computed the prompt as well
                longest = max(longest, time.perf_counter() - start)
        steps_ms.append(1e3 * longest)
        engine.cancel(text.request.request_id)
        while engine.has_work:
            engine.step()
    return median(steps_ms), median(encoder_ms)


def main() -> None:
    """Measure and print."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--layers", type=int, default=12, help="of the encoder")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    with TemporaryDirectory() as folder, make_llm(Path(folder), given.layers, given.dtype) as llm:
        results = measure(llm, given.rounds)
        longest_ms, encoder_ms = beside(llm, given.rounds)
        console, path = Console(), str(llm.engine.compute_path)
    cold = next(iter(results.values()))[0]
    table = Table("prompt", "hits", "CPU time to the first token", "by the first", title=path)
    for name, (ms, hits) in results.items():
        table.add_row(name, str(hits), f"{ms:,.0f} ms", f"{ms / cold:.3f}")
    console.print(table)
    console.print(
        f"Longest step of a text while an image is encoded: {longest_ms:,.0f} ms; the encoder "
        f"alone takes {encoder_ms:,.0f} ms."
    )


if __name__ == "__main__":
    main()
