"""Prints what a chat template loses of earlier turns."""

from operator import itemgetter

from rich.console import Console
from rich.text import Text

from ostinato.cli.output.tables import Field, Figure, table_of
from ostinato.lab.size.quantities import count
from ostinato.templates.report import Case, Cause, TemplateReport, TurnLoss

_STATUS = {"appends": "only appends", "refused": "refused", "unused": "not in this template"}

_CAUSES: dict[Cause, str] = {
    "reasoning": "drops earlier reasoning",
    "opening": "begins the answer differently later",
    "end mark": "ends the answer differently later",
    "variable": "writes it before the conversation",
    "tokens": "same text, other tokens",
    "text": "rewrites or moves text",
}

_COLUMNS = (
    Field("Dialogue", itemgetter(0)),
    Field("What happens", itemgetter(1)),
    Field("At", itemgetter(2)),
    Figure("Lost tokens", itemgetter(3)),
)


def print_template(report: TemplateReport, model: str) -> None:
    """Print a table of dialogues, and an example of each loss."""
    console = Console(highlight=False)
    console.print(Text(_title(report, model), style="bold"))
    console.print(table_of((row for case in report.cases for row in _rows(case)), _COLUMNS))
    for case in report.losing:
        console.print(_example(case))
    console.print(Text(_end(report), style="dim"))


def _title(report: TemplateReport, model: str) -> str:
    if report.broken:
        return f"{model}: its chat template renders no conversation."
    if report.is_append_only:
        return f"{model}: each prompt begins with the one before and the answer to it."
    losing = [case for case in report.dialogues if case.status == "loses"]
    return f"{model}: earlier turns are rewritten in {count(len(losing), 'dialogue')}."


def _rows(case: Case) -> list[tuple[str, str, str, str]]:
    if case.status != "loses":
        shown = _STATUS[case.status] + (f": {case.error}" if case.error else "")
        return [(case.name, shown, "", "")]
    return [
        ("" if number else case.name, _CAUSES[loss.cause], _place(loss),
         f"{loss.lost_tokens:,} of {loss.known_tokens:,}")
        for number, loss in enumerate(case.losses)
    ]  # fmt: skip


def _place(loss: TurnLoss) -> str:
    numbered = loss.at.endswith(("message", "result"))
    return f"{loss.at} ({loss.message + 1})" if numbered else loss.at


def _example(case: Case) -> Text:
    """Show the worst place of a case: what was computed, and what the next prompt has."""
    loss = max(case.losses, key=lambda each: each.lost_tokens)
    return Text.assemble(
        f"{case.name}, after {loss.before[-24:]!r}\n",
        ("   computed  ", "dim"), (repr(loss.written[:48]), "red"), "\n",
        ("   then      ", "dim"), (repr(loss.rendered[:48]), "green"),
    )  # fmt: skip


def _end(report: TemplateReport) -> str:
    if report.broken:
        return report.summary()
    kept = "yes" if report.is_append_only else "no"
    return (
        f"Prefix-preserving, as trainers need it: {kept}. Tokens are those of synthetic dialogues; "
        "a number in brackets counts messages."
    )
