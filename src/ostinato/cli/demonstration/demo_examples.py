"""Four small examples.

Those of the article "Adding Prefix Caching to NanoGPT", with its prompts and its blocks of four
tokens, on the bundled model, whose tokens are letters. The numbers differ from the article's where
it is wrong: its log says "16/1 tokens cached, -15 to prefill" of the first test
(16 of 18 by whole blocks, 17 by token), it computes nothing at all for a prompt that is cached
in full, and its fourth test evicts the root, which makes all other blocks unreachable.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ostinato import LLM

BLOCK_SIZE = 4
SMALL_POOL_BLOCKS = 10

_PLENTY_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Example:
    """Prompts that are sent one after another, starting with an empty cache.

    Attributes:
        title: Its title.
        lesson: What the numbers show.
        prompts: The prompts, in order.
        num_blocks: Blocks in the pool.
    """

    title: str
    lesson: str
    prompts: tuple[str, ...]
    num_blocks: int = _PLENTY_BLOCKS


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one prompt.

    Attributes:
        prompt: Its text.
        prompt_tokens: Its length.
        found_tokens: Tokens found in whole blocks.
        copied_tokens: Tokens copied from a block that matches only at its beginning.
    """

    prompt: str
    prompt_tokens: int
    found_tokens: int
    copied_tokens: int

    @property
    def computed_tokens(self) -> int:
        """Tokens computed by the model."""
        return self.prompt_tokens - self.found_tokens - self.copied_tokens


EXAMPLES = (
    Example(
        "The same prompt twice",
        "4 blocks are found and 1 more token is copied. The last one is always computed: "
        "without it, there is no next.",
        ("To be or not to be", "To be or not to be"),
    ),
    Example(
        "One beginning, two endings",
        "3 blocks are found; the fourth differs from its first letter on.",
        ("Hello world cat", "Hello world dog"),
    ),
    Example(
        "Nothing in common",
        "Nothing is found, and nothing may be.",
        ("The cat sat on the mat", "Once upon a midnight"),
    ),
    Example(
        f"Too much for {SMALL_POOL_BLOCKS} blocks",
        "The second prompt pushed out the last blocks of the first: without the first ones, "
        "the others could not be found.",
        (
            "The cat sat on the mat and then",
            "Once upon a midnight",
            "The cat sat on the mat and then",
        ),
        SMALL_POOL_BLOCKS,
    ),
)


def run_examples(index: str) -> list[list[Outcome]]:
    """Run all tests; one row of results per test, one result per prompt."""
    from ostinato import LLM

    # Blocks of a few letters are for the eye; the native library takes multiples of 16.
    small: dict[str, Any] = {
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "attention": "torch",
        "index": index,
    }
    pools = {
        num_blocks: LLM(num_blocks=num_blocks, **small)
        for num_blocks in {example.num_blocks for example in EXAMPLES}
    }
    return [_run(pools[example.num_blocks], example) for example in EXAMPLES]


def _run(llm: "LLM", example: Example) -> list[Outcome]:
    """Send an example's prompts, one after another."""
    from ostinato import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=1, temperature=0)
    outputs = [
        llm.generate(prompt, params, use_tqdm=False)[0] for prompt in example.prompts
    ]  # one call each: all at once, they would share a step
    return [
        Outcome(
            prompt,
            len(output.prompt_token_ids),
            output.num_cached_tokens - output.num_copied_tokens,
            output.num_copied_tokens,
        )
        for prompt, output in zip(example.prompts, outputs, strict=True)
    ]


def draw_examples(results: list[list[Outcome]]) -> Group:
    """Print the examples, with their numbers aligned."""
    parts: list[RenderableType] = [_header()]
    for number, (example, outcomes) in enumerate(zip(EXAMPLES, results, strict=True), start=1):
        table = _columns()
        for outcome in outcomes:
            table.add_row(*_row(outcome))
        title = Text(f"{number}  {example.title}", style="bold")
        lesson = Padding(Text(example.lesson, style="dim"), (0, 0, 1, 3))
        parts += [title, Padding(table, (0, 0, 0, 3)), lesson]
    return Group(*parts)


def _header() -> Table:
    """Print the column headings."""
    table = _columns(offset=3)
    names = ("tokens", "found", "copied", "computed")
    table.add_row(
        Text(f"Four small tests, in blocks of {BLOCK_SIZE}", style="bold"),
        *(Text(name, style="bold") for name in names),
    )
    return table


def _columns(offset: int = 0) -> Table:
    """Fit the columns to the longest prompt and name."""
    table = Table.grid()
    table.add_column(width=max(len(prompt) for e in EXAMPLES for prompt in e.prompts) + offset)
    for width in (9, 8, 8, 10):
        table.add_column(width=width, justify="right")
    return table


def _row(outcome: Outcome) -> Iterator[RenderableType]:
    """Print the result of one prompt, with reused tokens in green."""
    yield Text(outcome.prompt)
    yield str(outcome.prompt_tokens)
    for reused in (outcome.found_tokens, outcome.copied_tokens):
        yield Text(str(reused), style="green") if reused else Text("-", style="dim")
    yield str(outcome.computed_tokens)
