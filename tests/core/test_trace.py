"""Lines of a trace can be read as they were written."""

import pytest

from ostinato.errors import BrokenTrace
from ostinato.traces.format import Added, Steps, read_event, read_header, write_line


def test_lines_are_read_as_they_were_written():
    events = [
        Added(step=3, at_us=5, request=1, arrival_us=-4, prompt=b"\0\1\2\3", head=("ab", 16), n=2),
        Steps(step=0, times_us=(1, 2, 3, 4)),
    ]
    assert [read_event(write_line(event)) for event in events] == events


def test_what_is_no_line_of_a_trace_is_refused():
    for line in (b"{}", b'{"event":"dance","step":0}', b"\xff", b'{"event":"steps","step":"x"}'):
        with pytest.raises(BrokenTrace, match="no event of a recorded trace"):
            read_event(line)
    with pytest.raises(BrokenTrace, match="no header"):
        read_header(b'{"event":"header"}')
