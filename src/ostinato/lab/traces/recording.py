"""A recorded run."""

from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import BrokenTrace
from ostinato.lab.log.lines import BrokenLine, OnBroken, read_lines
from ostinato.traces.format import Added, AnyEvent, Ended, Header, Stopped, read_event, read_header


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
    header: Header
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
    headers: list[Header] = []

    def parse(line: bytes) -> AnyEvent | None:
        if not headers:
            headers.append(read_header(line))
            return None
        return read_event(line)

    lines = read_lines(path, parse, on_broken)
    if not headers:
        raise BrokenTrace(f"{path.name} does not begin with the header of a recorded trace")
    events = tuple(event for event in lines.items if event is not None)
    return Recording(path.name, headers[0], events, lines.broken)
