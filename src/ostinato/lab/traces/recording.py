"""A recorded run."""

from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import BrokenTrace
from ostinato.lab.log.lines import BrokenLine, OnBroken, iter_lines
from ostinato.traces.format import (
    Added,
    AnyEvent,
    Ended,
    Stopped,
    TraceHeader,
    read_event,
    read_header,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of an engine.

    Attributes:
        name: Name of the file.
        header: Settings, and how the recording began.
        events: What happened, in order.
        broken: Lines that were left out.
    """

    name: str
    header: TraceHeader
    events: tuple[AnyEvent, ...]
    broken: tuple[BrokenLine, ...] = ()

    @property
    def added(self) -> list[Added]:
        """The requests, in order."""
        return [event for event in self.events if isinstance(event, Added)]

    @property
    def ended(self) -> dict[int, Ended]:
        """How requests ended, by number."""
        return {event.request: event for event in self.events if isinstance(event, Ended)}

    @property
    def is_whole(self) -> bool:
        """Whether it started cold, ended normally and lost no line, so that replays are exact."""
        ends = bool(self.events) and isinstance(self.events[-1], Stopped)
        return self.header.is_cold and ends and not self.broken


def read_recording(path: str | Path, on_broken: OnBroken = "refuse") -> Recording:
    """Read what an engine recorded.

    Raises:
        BrokenTrace: It is not a recording, or a line is invalid and not to be skipped.
    """
    path = Path(path)
    headers, broken = list[TraceHeader](), list[BrokenLine]()

    def parse(_number: int, line: bytes) -> AnyEvent | None:
        if not headers:
            headers.append(read_header(line))
            return None
        return read_event(line)

    events = [event for event in iter_lines(path, parse, on_broken, broken) if event is not None]
    if not headers:
        raise BrokenTrace(f"{path.name} does not begin with the header of a recorded trace")
    return Recording(path.name, headers[0], tuple(events), tuple(broken))
