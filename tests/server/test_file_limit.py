"""The limit of open files is raised as far as the system lets a server."""

import resource

import pytest

from ostinato.server.access.connections import raise_file_limit

RESERVED = 128


def fake_limits(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, maximum: int
) -> list[tuple[int, int]]:
    """Replace the system's limits; those above a maximum are refused, as Python reports it."""
    limits = [(soft, hard)]

    def change(kind: int, value: tuple[int, int]) -> None:
        if value[0] > maximum:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(value)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", change)
    return limits


@pytest.mark.parametrize(
    ("soft", "hard", "maximum", "raised"),
    [
        (1024, 4096, 4096, 4096),
        (1024, 1_048_576, 1_048_576, 65_536),
        (256, resource.RLIM_INFINITY, 10_240, 10_240),
        (256, resource.RLIM_INFINITY, 100, 256),
        (12_000, resource.RLIM_INFINITY, 12_000, 12_000),
    ],
    ids=["hard limit", "our maximum", "macOS", "refused", "macOS, raised before"],
)
def test_the_limit_is_raised_as_far_as_the_system_allows(
    soft, hard, maximum, raised, monkeypatch: pytest.MonkeyPatch
):
    """macOS names no hard limit, starts with 256 files, and refuses more than its kernel's."""
    limits = fake_limits(monkeypatch, soft, hard, maximum)

    assert raise_file_limit() == raised - RESERVED
    assert limits[-1] == (raised, hard)
