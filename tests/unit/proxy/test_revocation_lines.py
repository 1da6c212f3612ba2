"""The log lines of revoked clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server.revocation_lines import LINES_PER_S_MAX, RevocationLines


class World:
    """The lines, with their time."""

    def __init__(self, lines: list[Any]) -> None:
        self.lines = lines
        self.clock = ManualClock()
        self.revocations = RevocationLines(self.clock.monotonic_ms)

    def revoke(self, count: int) -> None:
        for number in range(count):
            self.revocations.note(ClientKey(f"client-{number}", 7))

    def events(self, name: str) -> list[Any]:
        return [line for line in self.lines if line["event"] == name]


@pytest.fixture
def world() -> Iterator[World]:
    with capture_logs() as lines:
        yield World(lines)


def test_each_of_a_few_clients_has_a_line(world: World) -> None:
    world.revoke(LINES_PER_S_MAX)
    world.clock.advance(1_000)
    world.revocations.tick()
    assert len(world.lines) == LINES_PER_S_MAX
    first = world.lines[0]
    assert (first["client_id"], first["owner"]) == ("client-0", 7)


def test_further_clients_of_a_second_are_counted_once(world: World) -> None:
    world.revoke(LINES_PER_S_MAX + 5)
    world.revocations.tick()
    assert len(world.lines) == LINES_PER_S_MAX, "the second is not over"
    world.clock.advance(1_000)
    for _ in range(2):
        world.revocations.tick()
    [counted] = world.events("further clients revoked")
    assert counted["count"] == 5


def test_the_next_second_has_lines_again_after_the_count(world: World) -> None:
    world.revoke(LINES_PER_S_MAX + 3)
    world.clock.advance(1_000)
    world.revoke(1)
    assert [line["event"] for line in world.lines[-2:]] == [
        "further clients revoked",
        "client revoked",
    ]
    assert len(world.events("client revoked")) == LINES_PER_S_MAX + 1
