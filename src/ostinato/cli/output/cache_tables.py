"""Tables for the responses of ``/admin`` routes."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from ostinato.cli.output.tables import Field, Figure, figures, share, table_of
from ostinato.lab.size.quantities import count, write_bytes, write_seconds

Draw = Callable[[Console, dict[str, Any]], None]
"""Prints an answer."""


def draw_stats(console: Console, answer: dict[str, Any]) -> None:
    """Print blocks by state, and look-ups in total and per tenant."""
    blocks = answer["blocks"]
    parts = ", ".join(f"{number:,} {name}" for name, number in blocks.items())
    console.print(f"{sum(blocks.values()):,} blocks: {parts}", highlight=False)
    console.print(
        f"{answer['num_leased_blocks']:,} of them leased; {answer['num_running']:,} sequences run, "
        f"{answer['num_waiting']:,} wait; {answer['evicted_blocks']:,} blocks evicted so far",
        highlight=False,
    )
    if (states := answer["states"]) is not None:
        console.print(
            f"{states['num_slots']:,} states: {states['num_running']:,} running, "
            f"{states['num_checkpoints']:,} checkpoints; {states['num_hits']:,} hits, "
            f"{states['num_evicted']:,} evicted, {states['num_again_tokens']:,} tokens computed "
            "again",
            highlight=False,
        )
    rows = {"all": answer["lookups"], **answer["tenants"]}
    named = [{"tenant": name, **counts} for name, counts in rows.items()]
    console.print(table_of(named, _LOOKUPS))
    if answer["ghosts"]:
        by_memory = sorted(
            answer["ghosts"], key=lambda row: (row["memory"] == 1.0, row["memory"], row["policy"])
        )
        console.print(table_of(by_memory, _GHOSTS))


def draw_audit(console: Console, answer: dict[str, Any]) -> None:
    """Print the numbers of hits compared, and of wrong ones."""
    if not answer["share"]:
        console.print("No hits are audited: start the server with --audit-share.")
        return
    console.print(
        f"{answer['num_same']:,} hits of {answer['num_tokens']:,} tokens in all have the bits that "
        f"the model computes, {answer['num_different']:,} differ; {answer['num_gone']:,} were "
        f"evicted before their turn; {answer['num_removed']:,} blocks quarantined",
        highlight=False,
    )
    if not answer["findings"]:
        return
    console.print(table_of(answer["findings"], _FINDINGS))


def draw_tiers(console: Console, answer: dict[str, Any]) -> None:
    """Print each tier, and what was loaded and written."""
    if not answer["tiers"]:
        console.print("There are no tiers: start the server with --kv-disk FOLDER.")
        return
    for tier in answer["tiers"]:
        state = f"{tier['state']}: {tier['reason']}" if tier["reason"] else tier["state"]
        _print_line(console, f"{tier['tier']} is {state} ({tier['where']})")
    loaded = answer["loaded_tokens"]
    tokens = Figure("Tokens loaded", lambda tier: loaded.get(tier["tier"], 0))
    console.print(table_of(answer["tiers"], (*_TIERS, tokens)))
    _print_line(
        console,
        f"Loading took {write_seconds(answer['load_seconds'])}; "
        f"computing was cheaper {count(answer['num_cheaper'], 'time')}",
    )
    for title, name in (("Loads that ended early", "load_faults"), ("Stores", "stores")):
        if answer[name]:
            counts = ", ".join(f"{what} {number:,}" for what, number in answer[name].items())
            _print_line(console, f"{title}: {counts}")


def draw_prewarmed(console: Console, answer: dict[str, Any]) -> None:
    """Describe how much was computed."""
    console.print(
        f"{answer['num_tokens']:,} tokens are cached; {answer['num_computed_tokens']:,} of them "
        "were computed for it",
        highlight=False,
    )


def draw_lease(console: Console, answer: dict[str, Any]) -> None:
    """Describe what is leased, and why not all of it."""
    colour = {"accepted": "green", "clipped": "yellow"}.get(answer["status"], "red")
    line = Text(answer["status"], style=f"bold {colour}")
    if answer["lease_id"] is not None:
        line.append(f": lease {answer['lease_id']} keeps {answer['num_tokens']:,} tokens", "")
    if answer["reason"]:
        line.append(f" ({answer['reason']})", "dim")
    console.print(line)


def draw_receipt(console: Console, answer: dict[str, Any]) -> None:
    """Print what was erased, and where."""
    erased = [(place, number) for place, number in answer.items() if place != "tiers"]
    table = table_of(erased, _ERASED)
    console.print(table)
    for tier in answer.get("tiers", []):
        parts = [count(tier["num_extents"], "extent"), write_bytes(tier["num_bytes"])]
        if tier["num_keys"]:
            parts.append(count(tier["num_keys"], "key"))
        if not tier["complete"]:
            parts.append("and there is more: erase again")
        _print_line(console, f"{tier['tier']} ({tier['where']}): {', '.join(parts)}")


def _print_line(console: Console, line: str) -> None:
    """Print a line that may hold a path, which is not to be broken."""
    console.print(Text(line), soft_wrap=True)


def _line(text: str | list[int]) -> str:
    """Return a text on one line; ids without a tokenizer."""
    return " ".join(text.split()) if isinstance(text, str) else " ".join(map(str, text))


def _owner(name: str | None) -> str:
    return name or "(no salt)"


def _unless_remote(name: str, write: Callable[[int], str]) -> Callable[[dict[str, Any]], str]:
    """Return a cell of a tier; the size of a remote tier is not known here."""
    return lambda tier: write(tier[name]) if tier["limit_bytes"] else "–"


def _prefix(prefix: dict[str, Any]) -> str:
    head, branch = _line(prefix["head"]), _line(prefix["branch"])
    return (head if head == branch else f"… {branch}")[:48]


def _prefix_owner(prefix: dict[str, Any]) -> str:
    public = prefix["public"]
    return _owner(prefix["tenant"]) if public is None else f"public {public}"


def _count_or_names(number: int | list[str]) -> str:
    return ", ".join(number) or "–" if isinstance(number, list) else f"{number:,}"


def _expiry(left_s: float | None) -> str:
    return "never" if left_s is None else write_seconds(max(0.0, left_s))


_LOOKUPS = (
    Field("Tenant", "tenant", _owner),
    *figures(Requests="num_requests", Looked_up="query_tokens"),
    *figures(Shared="shared_tokens", Copied="copied_tokens"),
    Figure("Hit", "hit_ratio", share),
)
_GHOSTS = (
    Field("Memory", "memory", "{:g} x".format),
    *figures(Policy="policy", Blocks="num_blocks"),
    Figure("Would hit", "hit_ratio", share),
    Figure("Between", lambda row: f"{row['low']:.1%} and {row['high']:.1%}"),
    *figures(Requests="num_requests", Since="num_later_requests"),
)
_FINDINGS = (
    Field("First wrong token", "first_token"),
    Figure("Of", "num_tokens"),
    Figure("Layers", "layers", _line),
    Figure("Cached in blocks", "cached_blocks", lambda rows: "; ".join(map(_line, rows))[:60]),
    Figure("Removed", "num_removed"),
)
_TIERS = (
    Field("Tier", "tier"),
    Figure("Extents", _unless_remote("num_extents", "{:,}".format)),
    *(
        Figure(name.title(), _unless_remote(f"{key}_bytes", write_bytes))
        for name, key in (("used", "num"), ("limit", "limit"), ("leased", "leased"))
    ),
    Figure("Written", "written_bytes", write_bytes),
)
_PREFIXES = (
    Field("Prefix", _prefix),
    Figure("Tenant", _prefix_owner),
    *figures(Tokens="num_tokens", Hits="num_hits", Saved="saved_tokens"),
    Figure("Age", "age_s", write_seconds),
)
_LEASES = (
    Field("Tenant", "tenant", _owner),
    Figure("Lease", "lease_id", str),
    Figure("Tokens", "num_tokens"),
    Figure("Expires in", "expires_in_s", _expiry),
)
_PUBLIC = (
    Field("Name", "name"),
    Figure("Tokens", "num_tokens"),
    Figure("Held", "is_held", lambda is_held: "yes" if is_held else "no: publish it again"),
)


def _drawn(key: str, fields: tuple[Field, ...], otherwise: str) -> Draw:
    """Return what prints the rows of an answer, or a sentence where there are none."""

    def draw(console: Console, answer: dict[str, Any]) -> None:
        console.print(table_of(answer[key], fields) if answer[key] else otherwise)

    return draw


draw_heaviest = _drawn("prefixes", _PREFIXES, "Nothing is cached.")
draw_leases = _drawn("leases", _LEASES, "Nothing is kept.")
draw_public = _drawn("public", _PUBLIC, "Nothing is public.")

_ERASED = (
    Field("Erased", lambda pair: pair[0].removeprefix("num_").replace("_", " ")),
    Figure("Count", lambda pair: _count_or_names(pair[1])),
)
