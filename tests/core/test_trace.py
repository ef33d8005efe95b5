"""Lines of a trace can be read as they were written."""

import msgspec
import pytest

from ostinato.core.config import SchedulerConfig
from ostinato.errors import BrokenTrace
from ostinato.settings import PrefixCacheConfig, TenantShare
from ostinato.traces import format as trace


def test_lines_are_read_as_they_were_written():
    events = [
        trace.Added(
            step=3, at_us=5, request=1, arrival_us=-4, prompt=b"\0\1\2\3", head=("ab", 16), n=2
        ),
        trace.Steps(step=0, times_us=(1, 2, 3, 4)),
    ]
    assert [trace.read_event(trace.write_line(event)) for event in events] == events


def test_what_is_no_line_of_a_trace_is_refused():
    for line in (b"{}", b'{"event":"dance","step":0}', b"\xff", b'{"event":"steps","step":"x"}'):
        with pytest.raises(BrokenTrace, match="no event of a recorded trace"):
            trace.read_event(line)
    with pytest.raises(BrokenTrace, match="no header"):
        trace.read_header(b'{"event":"header"}')


def test_a_header_of_version_1_is_read_with_the_names_of_today():
    """Its cache has ``policy``; without that name, a replay would silently evict by LRU."""
    cache = PrefixCacheConfig(
        8, eviction_policy="reuse_hazard", tenant_shares={b"a": TenantShare(2, 4)}
    )
    header = trace.TraceHeader(
        version=trace.VERSION,
        cache=cache,
        scheduler=SchedulerConfig(),
        model={"policy": "of the model"},
        is_cold=True,
        epoch=0,
        start_us=1,
        unix_s=2.5,
    )
    assert trace.read_header(trace.write_line(header)) == header

    old = msgspec.json.decode(trace.write_line(header))
    old["version"], old["cache"]["policy"] = 1, old["cache"].pop("eviction_policy")
    line = msgspec.json.encode(old)
    assert trace.read_header(line) == msgspec.structs.replace(header, version=1)
