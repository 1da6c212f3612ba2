"""Why a consumer group is behind: findings from its settings, numbers, locks and consumers.

A finding needs known numbers. A number that is unknown gives no finding, and `unknown` of the
numbers says why.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tidemill.admin.activity.numbers import GroupState
from tidemill.admin.json.activity import GroupNumbersView
from tidemill.admin.json.conflicts import ConflictView
from tidemill.admin.json.consumer_groups import GroupPauseView
from tidemill.admin.json.deliveries import QueueLockView
from tidemill.admin.json.topics import RETENTION_MS_MAX
from tidemill.common.times import duration_text, span, utc

SILENT_MS: Final = 10_000  # of a consumer that holds messages
FAILING_SHARE: Final = 0.1  # of deliveries that are repeated
SLOW_FACTOR: Final = 1.1  # of messages in to acks; smaller differences are noise
RETENTION_SHARE: Final = 0.8  # of the retention that the oldest message has used
SILENT_HOLDERS_MAX: Final = 3  # findings
# Consumers poll again after each long poll, which takes some 30 s at most.
NO_POLL_MS: Final = 60_000


class Code(StrEnum):
    """A cause of a backlog, the first to look at first."""

    PAUSED = "PAUSED"
    NO_CONSUMERS = "NO_CONSUMERS"
    NEVER_POLLED = "NEVER_POLLED"
    LOCKED_QUEUE = "LOCKED_QUEUE"
    HOLDER_SILENT = "HOLDER_SILENT"
    NOT_POLLING = "NOT_POLLING"
    FAILING = "FAILING"
    CONSUMERS_SLOW = "CONSUMERS_SLOW"
    SUBSCRIPTIONS_DIFFER = "SUBSCRIPTIONS_DIFFER"
    ORDER_LOST = "ORDER_LOST"
    RETENTION_NEAR = "RETENTION_NEAR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A consumer without a call for some time."""

    client_id: str
    silent_ms: int
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """The known facts about a consumer group."""

    name: str
    now_ms: int
    pause: GroupPauseView | None
    numbers: GroupNumbersView
    locks: Sequence[QueueLockView]  # those with the most messages behind them first
    silent: Sequence[Holder]
    conflicts: Sequence[ConflictView]
    has_polled: bool  # also after the numbers were sampled
    no_poll_ms: int | None  # time since the last poll, or less; None: unknown
    pollers: Sequence[str]  # ids of the connected push and simple consumers
    has_filter: bool  # consumers want only some messages, so the others need no ack
    # By topic: the store time of the oldest unacked message, and the retention in effect.
    oldest_at_ms: Mapping[str, int]
    retention_ms: Mapping[str, int]  # negative: for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogCause:
    """A cause with its numbers, and a command that helps."""

    code: Code
    text: str
    numbers: Mapping[str, float]
    command: str


def find_findings(facts: GroupFacts) -> list[BacklogCause]:
    """Return the causes, in the order of their codes; an empty list if none is known."""
    found = [
        *_pause(facts),
        *_consumers(facts),
        *_locks(facts),
        *_silent(facts),
        *_not_polling(facts),
        *_failing(facts),
        *_slow(facts),
        *_conflicts(facts),
        *_retention(facts),
    ]
    order = list(Code)
    return sorted(found, key=lambda each: order.index(each.code))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _longer(kept_ms: int) -> str:
    """Return twice a retention, as the command line reads it."""
    return duration_text(2 * kept_ms) if 2 * kept_ms <= RETENTION_MS_MAX else "forever"


def _command(verb: str, *arguments: str) -> str:
    """Return a command of the command line; names of clients may have any characters."""
    return f"tidemill {verb} {shlex.join(arguments)}"


def _pause(facts: GroupFacts) -> Iterator[BacklogCause]:
    pause = facts.pause
    if pause is not None:
        reason = f": {pause.reason}" if pause.reason else ""
        yield BacklogCause(
            code=Code.PAUSED,
            text=f"paused until {utc(pause.until_ms)} by {pause.by}{reason}",
            numbers={"untilMs": pause.until_ms},
            command=_command("group resume", facts.name),
        )


def _consumers(facts: GroupFacts) -> Iterator[BacklogCause]:
    numbers = facts.numbers
    if numbers.state is GroupState.NEVER_POLLED:
        if facts.has_polled:
            return  # The numbers are some seconds old.
        yield BacklogCause(
            code=Code.NEVER_POLLED,
            text="no consumer of the group has ever polled a topic, so no message counts for it",
            numbers={},
            command=_command("client list", "--group", facts.name),
        )
    elif numbers.consumers == 0:
        waits = None if numbers.ready is None else numbers.ready + (numbers.blocked or 0)
        waiting = "" if waits is None else f", and {_count(waits, 'message')} can be received"
        yield BacklogCause(
            code=Code.NO_CONSUMERS,
            text=f"no consumer is connected{waiting}",
            numbers={"consumers": 0},
            command=_command("client list", "--group", facts.name),
        )


def _locks(facts: GroupFacts) -> Iterator[BacklogCause]:
    blocking = [lock for lock in facts.locks if lock.waiting]
    if not blocking:
        return
    first = blocking[0]
    held = facts.now_ms - first.since_ms
    holder = f" by {first.client_id}" if first.client_id else ""
    others = f", and {len(blocking) - 1} more queues are locked" if len(blocking) > 1 else ""
    yield BacklogCause(
        code=Code.LOCKED_QUEUE,
        text=f"queue {first.queue} of {first.topic} at {first.broker} is locked for"
        f" {span(max(held, 0))}{holder}: {_count(first.waiting, 'message')} behind"
        f" {first.messages} in flight{others}",
        numbers={
            "locked": len(blocking),
            "waiting": sum(lock.waiting for lock in blocking),
            "longestMs": max(facts.now_ms - lock.since_ms for lock in blocking),
        },
        command=_command(
            "group unlock",
            facts.name,
            *("--topic", first.topic, "--queue", str(first.queue), "--broker", first.broker),
        ),
    )


def _silent(facts: GroupFacts) -> Iterator[BacklogCause]:
    holding = [one for one in facts.silent if one.in_flight and one.silent_ms > SILENT_MS]
    for one in sorted(holding, key=lambda each: -each.in_flight)[:SILENT_HOLDERS_MAX]:
        yield BacklogCause(
            code=Code.HOLDER_SILENT,
            text=f"consumer {one.client_id} holds {_count(one.in_flight, 'message')}, and has made"
            f" no call for {span(one.silent_ms)}",
            numbers={"inFlight": one.in_flight, "silentMs": one.silent_ms},
            command=_command("delivery release", facts.name, "--client", one.client_id),
        )


def _not_polling(facts: GroupFacts) -> Iterator[BacklogCause]:
    """Find connected consumers that leave ready messages for a minute."""
    numbers, age_ms = facts.numbers, facts.no_poll_ms
    if facts.pause is not None or not facts.pollers or age_ms is None or age_ms < NO_POLL_MS:
        return
    is_waiting = any(facts.now_ms - at_ms > NO_POLL_MS for at_ms in facts.oldest_at_ms.values())
    # A rate needs two samples of one run, so a broker that has just started gives no finding.
    if not numbers.ready or numbers.out_per_second != 0 or not is_waiting:
        return
    consumers = _count(len(facts.pollers), "consumer")
    yield BacklogCause(
        code=Code.NOT_POLLING,
        text=f"{_count(numbers.ready, 'message')} can be received, but the group has not polled"
        f" for at least {span(age_ms)}, with {consumers} connected: look for blocked threads,"
        " or restart the consumers; `tidemill client kick` ends their calls",
        numbers={"ready": numbers.ready, "consumers": len(facts.pollers), "noPollMs": age_ms},
        command=_command("client stack", facts.pollers[0]),
    )


def _failing(facts: GroupFacts) -> Iterator[BacklogCause]:
    repeated, out = facts.numbers.retry_per_second, facts.numbers.out_per_second
    if repeated is not None and out and repeated > FAILING_SHARE * out:
        yield BacklogCause(
            code=Code.FAILING,
            text=f"{repeated / out:.0%} of the deliveries are repeated: consumers fail, or take"
            " longer than the invisible duration",
            numbers={"retryPerSecond": repeated, "outPerSecond": out},
            command=_command("delivery list", facts.name),
        )


def _slow(facts: GroupFacts) -> Iterator[BacklogCause]:
    numbers = facts.numbers
    in_rate, ack_rate = numbers.in_per_second, numbers.ack_per_second
    if facts.pause is not None or facts.has_filter:
        return
    if not numbers.lag or not numbers.consumers or not in_rate or ack_rate is None:
        return
    if in_rate <= SLOW_FACTOR * ack_rate:
        return
    given: dict[str, float] = {
        "inPerSecond": in_rate,
        "ackPerSecond": ack_rate,
        "consumers": numbers.consumers,
    }
    consumers = _count(numbers.consumers, "consumer")
    text = f"{in_rate:.1f} messages arrive per second; the acks of {consumers} per second:"
    if not ack_rate:
        yield BacklogCause(
            code=Code.CONSUMERS_SLOW,
            text=f"{text} 0",
            numbers=given,
            command=_command("delivery list", facts.name),
        )
        return
    given["neededConsumers"] = needed = math.ceil(numbers.consumers * in_rate / ack_rate)
    if numbers.in_flight:
        # Little's law: the mean time from a delivery to its ack.
        given["meanWorkMs"] = round(numbers.in_flight / ack_rate * 1_000)
    yield BacklogCause(
        code=Code.CONSUMERS_SLOW,
        text=f"{text} {ack_rate:.1f}; at this speed {needed} consumers are needed",
        numbers=given,
        command=_command("group show", facts.name, "--scaling"),
    )


def _conflicts(facts: GroupFacts) -> Iterator[BacklogCause]:
    for one in facts.conflicts:
        if one.kind == "filter":
            yield BacklogCause(
                code=Code.SUBSCRIPTIONS_DIFFER,
                text=f"consumers use {len(one.filters or ())} different filters on {one.topic}, so"
                " messages that only one of them wants can be lost",
                numbers={"filters": len(one.filters or ())},
                command=_command("group show", facts.name),
            )
        else:
            yield BacklogCause(
                code=Code.ORDER_LOST,
                text=f"topic {one.topic} is FIFO, and the group is CONCURRENT: messages come out of"
                " order",
                numbers={},
                command=_command("group show", facts.name),
            )


def _retention(facts: GroupFacts) -> Iterator[BacklogCause]:
    for topic, oldest_at_ms in sorted(facts.oldest_at_ms.items()):
        kept_ms, age_ms = facts.retention_ms.get(topic, -1), facts.now_ms - oldest_at_ms
        if 0 < kept_ms * RETENTION_SHARE < age_ms:
            left_ms = max(kept_ms - age_ms, 0)
            yield BacklogCause(
                code=Code.RETENTION_NEAR,
                text=f"the oldest message of {topic} is {span(age_ms)} old, and retention"
                f" removes it in {span(left_ms)}",
                numbers={"ageMs": age_ms, "retentionMs": kept_ms},
                command=_command("topic set", topic, "--retention", _longer(kept_ms)),
            )
