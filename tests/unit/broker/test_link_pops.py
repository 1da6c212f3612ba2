"""The rule for the polls of a link: every combination of its conditions."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from tests.support.worlds.round_world import Proxy, RoundWorld
from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.server.link.pops import (
    EXPIRY_TICK_MS,
    NOTIFICATION,
    POP,
    ROOM_WAIT_MS,
    UNSENT_POPS_BYTES_MAX,
)
from tidemill.broker.server.round.long_polling import NotificationPoll, PopPoll
from tidemill.broker.server.round.turn import Turn
from tidemill.common.errors import Overloaded

REQUEST_ID = 7


class Conditions(NamedTuple):
    """What decides about a poll."""

    kind: str
    link: str  # "open", "full", "closed"
    has_message: bool
    wait_ms: int
    is_draining: bool


CASES = [
    Conditions(*case)
    for case in itertools.product(
        (POP, NOTIFICATION), ("open", "full", "closed"), (False, True), (0, 20_000), (False, True)
    )
]


def expected_answer(case: Conditions) -> str:
    """Return the answer by the table of the module."""
    if case.link == "closed":
        return "none"
    needs_room = case.kind == POP and case.link == "full"
    if case.has_message and not needs_room:
        return "message"
    if not case.is_draining and (case.wait_ms or needs_room):
        return "waits"
    return "overloaded" if needs_room else "empty"


class PopWorld:
    """A link with one poll, in a round that is never committed."""

    def __init__(self, case: Conditions) -> None:
        world = RoundWorld()
        world.world.pop()  # The ready messages of a group are unknown before its first pop.
        if case.has_message:
            world.world.send("a")
        self.polls = world.polls
        self.turn = world.rounds.turn = Turn(world.world.engine, world.polls, world.clock)
        self.turn.is_draining = case.is_draining
        self.proxy = Proxy(world.rounds, {})
        link = self.link = self.proxy.link
        if case.link == "full":
            self.proxy.unsent_bytes = UNSENT_POPS_BYTES_MAX
        if case.link == "closed":
            link.end()
        if case.kind == POP:
            pop = PopPoll(
                REQUEST_ID, world.group_id, world.topic_id, 32, 30_000, EVERY_MESSAGE, attempt_id=""
            )
            link.pops.begin_pop(pop, case.wait_ms, self.turn)
        else:
            notification = NotificationPoll(
                REQUEST_ID, world.group_id, world.topic_id, EVERY_MESSAGE
            )
            link.pops.begin_notification(notification, case.wait_ms, self.turn)

    def answer(self, kind: str) -> str:
        replies = self.link.replies
        if replies.failures:
            ((request_id, error),) = replies.failures
            assert request_id == REQUEST_ID
            assert isinstance(error, Overloaded)
            return "overloaded"
        if results := replies.of(kind):
            ((_, found),) = results
            return "message" if (found if kind == POP else found.ready_count) else "empty"
        return "waits" if self.polls.count else "none"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_poll_is_answered_or_waits_by_its_conditions(case: Conditions) -> None:
    assert PopWorld(case).answer(case.kind) == expected_answer(case)


@pytest.mark.parametrize("case", [case for case in CASES if expected_answer(case) == "waits"])
def test_a_poll_without_an_answer_ends_with_its_wait(case: Conditions) -> None:
    world = PopWorld(case)
    deadline_ms = world.polls.find_next_deadline_ms()
    assert deadline_ms is not None
    wait_ms = case.wait_ms or ROOM_WAIT_MS
    assert 0 <= deadline_ms - world.turn.monotonic_ms - wait_ms < EXPIRY_TICK_MS
    world.polls.expire(deadline_ms)
    needs_room = case.kind == POP and case.link == "full"
    assert world.answer(case.kind) == ("overloaded" if needs_room else "empty")
