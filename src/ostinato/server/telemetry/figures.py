"""Figures: a metric's name, help, kind and labels, how it is read, and where else it is shown.

All displays derive from the tables in ``engine_figures`` and ``request_figures``: ``/metrics``,
``/admin/stats``, the load on the page, and the table of ``docs/observing.md``.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterMetric
from prometheus_client import Histogram as HistogramMetric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ostinato.engine.loop.snapshot import Snapshot
from ostinato.observe.counters import Histogram

Value = float | Mapping[Any, float] | Mapping[str, str] | Histogram | None
"""A number; numbers by a label or a tuple of labels; texts; None if there is none."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a snapshot that JSON shows: a number, or a group of counts.

    Attributes:
        read: Reads it.
        admin: Its key in ``/admin/stats``; empty if it is not there.
        page: Its key in the load on the page; empty if it is not there.
    """

    read: Callable[[Snapshot], Any]
    admin: str = ""
    page: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of Prometheus, which JSON may show as well.

    Attributes:
        kind: Its kind.
        name: Without the prefix ``ostinato_`` and the suffix of its kind.
        help: What it counts, in Markdown; Prometheus gets it without links.
        read: Reads a snapshot; None if it is counted as requests happen.
        labels: Names of its labels.
        bounds: Upper bounds of a histogram's buckets.
        admin: As in ``Part``.
        page: As in ``Part``.
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    name: str
    help: str
    read: Callable[[Snapshot], Value] | None = None
    labels: Sequence[str] = ()
    bounds: Sequence[float] = ()
    admin: str = ""
    page: str = ""

    @property
    def metric(self) -> str:
        """The name in queries."""
        suffix = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return f"ostinato_{self.name}{suffix}"

    def family(self, value: Any) -> Metric:
        """Return the metric with a ``Value`` as its samples."""
        name, text = f"ostinato_{self.name}", plain(self.help)
        if isinstance(value, Histogram):
            buckets = value.cumulative(self.bounds)
            return HistogramMetricFamily(name, text, buckets=buckets, sum_value=value.total)
        if self.kind == "info":
            return InfoMetricFamily(name, text, value)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        if not isinstance(value, Mapping):
            return kind(name, text, value)
        family = kind(name, text, labels=self.labels)
        for labels, number in value.items():
            family.add_metric([labels] if isinstance(labels, str) else labels, number)
        return family

    def registered(self, registry: CollectorRegistry) -> Any:
        """Return a counter or histogram that the server updates as requests happen."""
        name, text = f"ostinato_{self.name}", plain(self.help)
        if self.kind == "histogram":
            return HistogramMetric(name, text, self.labels, buckets=self.bounds, registry=registry)
        return CounterMetric(name, text, self.labels, registry=registry)


def plain(help_text: str) -> str:
    """Return Markdown without links and backticks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", help_text).replace("`", "")


def shown(
    parts: Iterable[Figure | Part], display: Literal["admin", "page"], seen: Snapshot
) -> dict[str, Any]:
    """Return what ``/admin/stats`` or the page shows of a snapshot."""
    return {
        key: part.read(seen)
        for part in parts
        if (key := getattr(part, display)) and part.read is not None
    }


def figures_table(figures: Iterable[Figure]) -> str:
    """Return the rows of a Markdown table."""
    rows = [
        f"| `{figure.metric}` | {', '.join(f'`{label}`' for label in figure.labels)} "
        f"| {figure.help} |"
        for figure in figures
    ]
    return "\n".join(["| Metric | Labels | What it shows |", "|---|---|---|", *rows])
