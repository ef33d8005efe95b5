"""``ostinato savings``: the tokens that a shared prefix saves."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.options.option_groups import option
from ostinato.cli.output.tables import matrix, print_json, share
from ostinato.lab.simulate.savings import (
    Reuse,
    Workload,
    as_figures,
    by_token,
    by_whole_blocks,
    without_cache,
)
from ostinato.lab.size.quantities import count


def run(
    shared: int = option(512, "Tokens of the shared prefix.", "--shared", "-s"),
    suffix: int = option(16, "Tokens after it in each prompt.", "--suffix", "-x"),
    requests: int = option(1000, "Number of requests.", "--requests", "-n"),
    block_size: int = option(16, "Tokens per block of the cache.", "--block-size", "-b"),
    as_json: bool = option(False, "Print the results as JSON.", "--json"),
) -> None:
    """Count the tokens that a shared prefix saves.

    Without a cache, by whole blocks, and by token: the last two differ where the prefix ends
    inside a block. Try: ostinato savings -s 4097 -x 100 -n 50
    """
    workload = Workload(shared, suffix, requests, block_size)
    if as_json:
        print_json(as_figures(workload))
        return
    console = Console()
    console.print(_title(workload), _table(workload), _sentence(by_token(workload)), sep="\n")
    for note in _notes(workload):
        console.print(Text(note, style="dim"))


def _title(workload: Workload) -> Text:
    title = Text("\n").append(count(workload.num_requests, "request"), style="bold")
    return title.append(
        f" on a cold cache: {workload.shared_tokens:,} shared + {workload.suffix_tokens:,} own "
        f"tokens each, blocks of {workload.block_size:,}."
    )


_HEADINGS = ("", "each\nfinds", "each\ncopies", "each\ncomputes", "all\ncompute", "all\nsave", "")


def _table(workload: Workload) -> Table:
    """Print one row per kind of cache."""
    rows = (
        ("no cache", without_cache(workload)),
        ("whole blocks", by_whole_blocks(workload)),
        ("by token", by_token(workload)),
    )
    return matrix(
        _HEADINGS, ((name, *_cells(reuse)) for name, reuse in rows), is_whole=True, is_tight=True
    )


def _cells(reuse: Reuse) -> Iterator[object]:
    yield from (reuse.matched_tokens or None, reuse.copied_tokens or None)
    yield from (reuse.computed_per_request_tokens, reuse.computed_tokens or None)
    yield from (reuse.saved_tokens or None, share(reuse.saved_share) if reuse.saved_tokens else "")


def _sentence(reuse: Reuse) -> Text:
    """Return the result in words."""
    workload = reuse.workload
    if not reuse.saved_tokens:
        return Text("Nothing is saved: there is no second request that shares a token.")
    sentence = Text(
        f"{count(workload.num_requests, 'request')} sharing "
        f"{count(workload.shared_tokens, 'token')} send {reuse.computed_tokens:,} tokens through "
        f"the model instead of {workload.total_tokens:,}: "
    )
    return sentence.append(f"{reuse.saved_share:.1%} fewer.", style="bold green")


def _notes(workload: Workload) -> Iterator[str]:
    """Return why the figures are not rounder."""
    token = by_token(workload)
    more = token.saved_tokens - by_whole_blocks(workload).saved_tokens
    if workload.num_requests > 1:
        yield "Each: every request but the first, which computes its whole prompt."
    if workload.suffix_tokens == 0:
        yield (
            "The prompts are identical, and yet each computes one token: without a query there is "
            "no next token."
        )
    if more:
        yield (
            f"By token saves {count(more, 'token')} more: what can be reused ends "
            f"{count(token.copied_tokens, 'token')} into a block, which Ostinato copies instead of "
            "computing."
        )
    if more and token.needs_a_sealed_tail:
        yield (
            "That block is not full in any prompt, so it is found once a request has ended: this "
            "holds for requests one after another, not for all at once."
        )
