"""Parked polls: order, limits, and the ways in which a poll ends."""

from __future__ import annotations

import pytest

from tidemill.broker.engine.message_filter import EVERY_MESSAGE
from tidemill.broker.server.round.long_polling import (
    PARKED_PER_KEY_MAX,
    LongPolling,
    NotificationPoll,
    PollArguments,
    PopOutcome,
    PopPoll,
)
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import BadRequest, Overloaded

GROUP, TOPIC = 1, 2


class Receiver:
    """A link that finds messages for some request ids."""

    def __init__(self, *served: int) -> None:
        self.served = set(served)
        self.is_full = False
        self.asked: list[int] = []
        self.emptied: list[int] = []

    def try_pop(self, pop: PopPoll) -> PopOutcome:
        self.asked.append(pop.request_id)
        if self.is_full:
            return PopOutcome.NO_ROOM
        is_served = pop.request_id in self.served
        return PopOutcome.ANSWERED if is_served else PopOutcome.NO_MESSAGE

    def try_notify(self, notification: NotificationPoll) -> bool:
        self.asked.append(notification.request_id)
        return notification.request_id in self.served

    def answer_empty(self, poll: PollArguments) -> None:
        self.emptied.append(poll.request_id)


def pop(request_id: int, *, tags: tuple[str, ...] = (), topic: int = TOPIC) -> PopPoll:
    return PopPoll(request_id, GROUP, topic, 32, 30_000, find_filter(tags, ""), "")


def wake_topic(polls: LongPolling) -> None:
    for _ in polls.wake([TOPIC], []):
        pass


def test_a_full_link_does_not_keep_other_links_from_being_woken() -> None:
    polls, full, receiver = LongPolling(), Receiver(), Receiver(2)
    full.is_full = True
    polls.park(full, pop(1), deadline_ms=10)
    polls.park(receiver, pop(2), deadline_ms=10)
    wake_topic(polls)
    assert (full.asked, receiver.asked) == ([1], [2])
    assert polls.count == 1


def test_an_unfiltered_pop_that_finds_nothing_ends_the_wake() -> None:
    polls, receiver = LongPolling(), Receiver(1)
    for request_id in (1, 2, 3):
        polls.park(receiver, pop(request_id), deadline_ms=10)
    wake_topic(polls)
    assert receiver.asked == [1, 2]
    assert polls.count == 2


def test_a_filtered_pop_that_finds_nothing_does_not_block_later_pops() -> None:
    polls, receiver = LongPolling(), Receiver(3)
    polls.park(receiver, pop(1, tags=("a",)), deadline_ms=10)
    polls.park(receiver, pop(2, tags=("b",)), deadline_ms=10)
    polls.park(receiver, pop(3), deadline_ms=10)
    wake_topic(polls)
    assert receiver.asked == [1, 2, 3]
    assert polls.count == 2


def test_a_wake_of_a_key_does_not_wake_other_topics() -> None:
    polls, receiver = LongPolling(), Receiver(1, 2)
    polls.park(receiver, pop(1), deadline_ms=10)
    polls.park(receiver, pop(2, topic=9), deadline_ms=10)
    for _ in polls.wake([], [(GROUP, 9)]):
        pass
    assert receiver.asked == [2]


def test_a_request_id_of_a_waiting_poll_is_rejected() -> None:
    polls, receiver = LongPolling(), Receiver(1)
    polls.park(receiver, pop(1), deadline_ms=10)
    with pytest.raises(BadRequest, match="request id 1 already waits"):
        polls.park(receiver, pop(1), deadline_ms=10)
    polls.park(Receiver(), pop(1), deadline_ms=10)
    wake_topic(polls)
    assert (receiver.asked, polls.count) == ([1], 1)


def test_polls_expire_in_the_order_of_their_deadlines() -> None:
    polls, receiver = LongPolling(), Receiver()
    for request_id, deadline_ms in ((1, 30), (2, 10), (3, 20)):
        polls.park(receiver, pop(request_id), deadline_ms=deadline_ms)
    assert polls.find_next_deadline_ms() == 10
    polls.expire(20)
    assert receiver.emptied == [2, 3]
    assert polls.find_next_deadline_ms() == 30


def test_a_cancelled_poll_is_not_tried_again() -> None:
    polls, receiver = LongPolling(), Receiver(1)
    polls.park(receiver, pop(1), deadline_ms=10)
    polls.cancel(receiver, 1)
    polls.cancel(receiver, 2)
    wake_topic(polls)
    polls.expire(10)
    assert receiver.asked == receiver.emptied == []
    assert polls.find_next_deadline_ms() is None


def test_a_closed_link_removes_only_its_own_polls() -> None:
    polls, closed, other = LongPolling(), Receiver(1), Receiver(1)
    for receiver in (closed, other):
        polls.park(receiver, pop(1), deadline_ms=10)
    polls.forget(closed)
    wake_topic(polls)
    assert (closed.asked, other.asked) == ([], [1])
    assert polls.count == 0


def test_a_release_answers_all_polls_empty() -> None:
    polls, receiver = LongPolling(), Receiver()
    polls.park(receiver, pop(1), deadline_ms=10)
    polls.park(receiver, pop(2, topic=9), deadline_ms=10)
    polls.release()
    assert sorted(receiver.emptied) == [1, 2]
    assert polls.count == 0


def test_the_polls_of_one_key_are_limited() -> None:
    polls, receiver = LongPolling(), Receiver()
    for request_id in range(PARKED_PER_KEY_MAX):
        polls.park(receiver, pop(request_id), deadline_ms=10)
    with pytest.raises(Overloaded):
        polls.park(receiver, pop(PARKED_PER_KEY_MAX), deadline_ms=10)
    polls.park(receiver, pop(PARKED_PER_KEY_MAX, topic=9), deadline_ms=10)


def test_a_group_with_many_parked_polls_leaves_room_for_others() -> None:
    polls, receiver = LongPolling(parked_max=256), Receiver()
    for request_id in range(224):
        polls.park(receiver, pop(request_id, topic=request_id), deadline_ms=10)
    with pytest.raises(Overloaded, match="of this consumer group"):
        polls.park(receiver, pop(1_000), deadline_ms=10)
    for request_id in (300, 301):
        other = pop(request_id)._replace(group_id=GROUP + 1)
        polls.park(receiver, other, deadline_ms=10)
    polls.cancel(receiver, 300)
    polls.park(receiver, pop(302)._replace(group_id=GROUP + 1), deadline_ms=10)
    for request_id in range(224):
        polls.cancel(receiver, request_id)
    for request_id in range(222):
        polls.park(receiver, pop(request_id, topic=request_id), deadline_ms=10)


def test_deadlines_of_answered_polls_do_not_pile_up() -> None:
    polls, receiver = LongPolling(), Receiver()
    for request_id in range(1_000):
        polls.park(receiver, pop(request_id), deadline_ms=10)
        polls.cancel(receiver, request_id)
    assert len(polls._deadlines) < 100


def notification(request_id: int) -> NotificationPoll:
    return NotificationPoll(request_id, GROUP, TOPIC, EVERY_MESSAGE)


def test_pops_are_woken_before_notifications() -> None:
    polls, receiver = LongPolling(), Receiver(1, 2)
    polls.park(receiver, notification(1), deadline_ms=10)
    polls.park(receiver, pop(2), deadline_ms=10)
    wake_topic(polls)
    assert receiver.asked == [2, 1]
    assert polls.count == 0


def test_a_pop_that_finds_nothing_does_not_block_notifications() -> None:
    """The link of the pop may be full, and another proxy's notification waits."""
    polls, receiver = LongPolling(), Receiver(2)
    polls.park(receiver, pop(1), deadline_ms=10)
    polls.park(receiver, notification(2), deadline_ms=10)
    wake_topic(polls)
    assert receiver.asked == [1, 2]
    assert polls.count == 1


def test_a_notification_ends_like_a_pop() -> None:
    polls, receiver, closed = LongPolling(), Receiver(), Receiver()
    for request_id in (1, 2, 3):
        polls.park(receiver, notification(request_id), deadline_ms=10 * request_id)
    polls.park(closed, notification(4), deadline_ms=10)
    polls.cancel(receiver, 2)
    polls.forget(closed)
    polls.expire(10)
    assert (receiver.emptied, closed.emptied, polls.count) == ([1], [], 1)
    polls.release()
    assert (receiver.emptied, polls.count) == ([1, 3], 0)


def test_notifications_and_pops_of_one_key_have_limits_of_their_own() -> None:
    polls, receiver = LongPolling(), Receiver()
    for request_id in range(PARKED_PER_KEY_MAX):
        polls.park(receiver, notification(request_id), deadline_ms=10)
    with pytest.raises(Overloaded):
        polls.park(receiver, notification(PARKED_PER_KEY_MAX), deadline_ms=10)
    polls.park(receiver, pop(PARKED_PER_KEY_MAX), deadline_ms=10)
