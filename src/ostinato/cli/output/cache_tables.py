"""Tables for the responses of ``/admin`` routes."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.cli.output.tables import FigureTable
from ostinato.lab.size.quantities import count, write_bytes, write_seconds


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
    table = _table("Tenant", ("Requests", "Looked up", "Shared", "Copied", "Hit"))
    rows = {"all": answer["lookups"], **answer["tenants"]}
    for name, counts in rows.items():
        table.add_row(
            Text(name or "(no salt)"),
            f"{counts['num_requests']:,}",
            f"{counts['query_tokens']:,}",
            f"{counts['shared_tokens']:,}",
            f"{counts['copied_tokens']:,}",
            f"{counts['hit_ratio']:.1%}",
        )
    console.print(table)
    if answer["ghosts"]:
        console.print(_ghosts(answer["ghosts"]))


def _ghosts(rows: list[dict[str, Any]]) -> Table:
    """Print the hit rates of other sizes and policies, and how old these estimates are."""
    table = _table("Memory", ("Policy", "Blocks", "Would hit", "Between", "Requests", "Since"))
    for row in sorted(rows, key=lambda row: (row["memory"] == 1.0, row["memory"], row["policy"])):
        table.add_row(
            Text(f"{row['memory']:g} x"),
            Text(row["policy"]),
            f"{row['num_blocks']:,}",
            f"{row['hit_ratio']:.1%}",
            f"{row['low']:.1%} and {row['high']:.1%}",
            f"{row['num_requests']:,}",
            f"{row['num_later_requests']:,}",
        )
    return table


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
    table = _table("First wrong token", ("Of", "Layers", "Cached in blocks", "Removed"))
    for finding in answer["findings"]:
        blocks = "; ".join(_line(row) for row in finding["cached_blocks"])
        table.add_row(
            f"{finding['first_token']:,}",
            f"{finding['num_tokens']:,}",
            _line(finding["layers"]),
            Text(blocks[:60]),
            f"{finding['num_removed']:,}",
        )
    console.print(table)


def draw_tiers(console: Console, answer: dict[str, Any]) -> None:
    """Print each tier, and what was loaded and written."""
    if not answer["tiers"]:
        console.print("There are no tiers: start the server with --kv-disk FOLDER.")
        return
    table = _table("Tier", ("Extents", "Used", "Limit", "Leased", "Written", "Tokens loaded"))
    for tier in answer["tiers"]:
        state = f"{tier['state']}: {tier['reason']}" if tier["reason"] else tier["state"]
        _print_line(console, f"{tier['tier']} is {state} ({tier['where']})")
        amounts = [tier[f"{name}_bytes"] for name in ("num", "limit", "leased")]
        loaded = answer["loaded_tokens"].get(tier["tier"], 0)
        # The size of a remote tier is not known here.
        shown = map(write_bytes, amounts) if tier["limit_bytes"] else "–––"
        extents = f"{tier['num_extents']:,}" if tier["limit_bytes"] else "–"
        written = write_bytes(tier["written_bytes"])
        table.add_row(Text(tier["tier"]), extents, *shown, written, f"{loaded:,}")
    console.print(table)
    _print_line(
        console,
        f"Loading took {write_seconds(answer['load_seconds'])}; "
        f"computing was cheaper {count(answer['num_cheaper'], 'time')}",
    )
    for title, name in (("Loads that ended early", "load_faults"), ("Stores", "stores")):
        if answer[name]:
            counts = ", ".join(f"{what} {number:,}" for what, number in answer[name].items())
            _print_line(console, f"{title}: {counts}")


def draw_heaviest(console: Console, answer: dict[str, Any]) -> None:
    """Print prefixes, most saved tokens first."""
    table = _table("Prefix", ("Tenant", "Tokens", "Hits", "Saved", "Age"))
    for prefix in answer["prefixes"]:
        head, branch = _line(prefix["head"]), _line(prefix["branch"])
        shown = head if head == branch else f"… {branch}"
        owner = prefix["tenant"] if prefix["public"] is None else f"public {prefix['public']}"
        table.add_row(
            Text(shown[:48]),
            Text(owner or "(no salt)"),
            f"{prefix['num_tokens']:,}",
            f"{prefix['num_hits']:,}",
            f"{prefix['saved_tokens']:,}",
            write_seconds(prefix["age_s"]),
        )
    console.print(table if answer["prefixes"] else "Nothing is cached.")


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


def draw_leases(console: Console, answer: dict[str, Any]) -> None:
    """Print all leases."""
    table = _table("Tenant", ("Lease", "Tokens", "Expires in"))
    for lease in answer["leases"]:
        left = lease["expires_in_s"]
        table.add_row(
            Text(lease["tenant"] or "(no salt)"),
            str(lease["lease_id"]),
            f"{lease['num_tokens']:,}",
            "never" if left is None else write_seconds(max(0.0, left)),
        )
    console.print(table if answer["leases"] else "Nothing is kept.")


def draw_public(console: Console, answer: dict[str, Any]) -> None:
    """Print all public prefixes."""
    table = _table("Name", ("Tokens", "Held"))
    for known in answer["public"]:
        table.add_row(
            Text(known["name"]),
            f"{known['num_tokens']:,}",
            "yes" if known["is_held"] else "no: publish it again",
        )
    console.print(table if answer["public"] else "Nothing is public.")


def draw_receipt(console: Console, answer: dict[str, Any]) -> None:
    """Print what was erased, and where."""
    table = _table("Erased", ("Count",))
    for place, number in answer.items():
        if place != "tiers":
            shown = ", ".join(number) or "–" if isinstance(number, list) else f"{number:,}"
            table.add_row(place.removeprefix("num_").replace("_", " "), shown)
    console.print(table)
    for tier in answer.get("tiers", []):
        parts = [count(tier["num_extents"], "extent"), write_bytes(tier["num_bytes"])]
        if tier["num_keys"]:
            parts.append(count(tier["num_keys"], "key"))
        if not tier["complete"]:
            parts.append("and there is more: erase again")
        _print_line(console, f"{tier['tier']} ({tier['where']}): {', '.join(parts)}")


def _table(first: str, others: tuple[str, ...]) -> Table:
    table = FigureTable()
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _print_line(console: Console, line: str) -> None:
    """Print a line that may hold a path, which is not to be broken."""
    console.print(Text(line), soft_wrap=True)


def _line(text: str | list[int]) -> str:
    """Return a text on one line; ids without a tokenizer."""
    return " ".join(text.split()) if isinstance(text, str) else " ".join(map(str, text))
