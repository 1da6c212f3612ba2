"""The numbers of a sample as JSON rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tidemill.admin.activity.numbers import NO_LAST_HOUR, ClusterNumbers
from tidemill.admin.activity.sampler import Reading
from tidemill.admin.json.activity import DeadLetterNumbersView, GroupNumbersView, TopicNumbersView

TOPIC_FIELDS: Final = ("messages", "bytes", "inPerSecond", "outPerSecond", "pendingTimers")
GROUP_FIELDS: Final = (
    "lag",
    "ready",
    "inFlight",
    "blocked",
    "oldestUnackedAtMs",
    "inPerSecond",
    "outPerSecond",
    "ackPerSecond",
    "retryPerSecond",
    "consumers",
    "lockedQueues",
    "deadLetters",
)
TOO_NEW: Final = "created after the last sample; try again in 5 s"


def topic_numbers(reading: Reading, name: str) -> TopicNumbersView:
    """Return the numbers of a topic."""
    if reading.numbers is None:
        return TopicNumbersView(unknown=reading.reason)
    found = reading.numbers.topics.get(name)
    if found is None:
        return TopicNumbersView(unknown=_reason_of_absence(reading.numbers))
    return TopicNumbersView(
        messages=found.messages,
        bytes=found.bytes,
        in_per_second=_rounded(found.in_per_second),
        out_per_second=_rounded(found.out_per_second),
        pending_timers=found.pending_timers,
        has_consumer=reading.numbers.has_consumer(name),
        unknown=found.unknown or None,
    )


def group_numbers(reading: Reading, name: str) -> GroupNumbersView:
    """Return the numbers of a consumer group."""
    if reading.numbers is None:
        return GroupNumbersView(unknown=reading.reason)
    found = reading.numbers.groups.get(name)
    if found is None:
        return GroupNumbersView(unknown=_reason_of_absence(reading.numbers))
    return GroupNumbersView(
        state=found.state,
        lag=found.lag,
        ready=found.ready,
        in_flight=found.in_flight,
        blocked=found.blocked,
        oldest_unacked_at_ms=found.oldest_unacked_at_ms,
        in_per_second=_rounded(found.in_per_second),
        out_per_second=_rounded(found.out_per_second),
        ack_per_second=_rounded(found.ack_per_second),
        retry_per_second=_rounded(found.retry_per_second),
        consumers=found.consumers,
        locked_queues=found.locked_queues,
        dead_letters=DeadLetterNumbersView(
            open=found.dead_letters, last_hour=found.dead_letters_last_hour
        ),
        unknown=found.unknown or None,
    )


def _reason_of_absence(numbers: ClusterNumbers) -> str:
    """Return why a sample lacks a topic or a consumer group."""
    if not numbers.unreachable:
        return TOO_NEW
    names = ", ".join(numbers.unreachable)
    return f"the sample lacks it; {names} cannot be reached, and may have it"


def number_of_topic(reading: Reading, name: str, field: str) -> float | None:
    """Return a number of a topic by the name of its attribute; None if it is unknown."""
    found = None if reading.numbers is None else reading.numbers.topics.get(name)
    number: float | None = getattr(found, field, None)
    return number


def number_of_group(reading: Reading, name: str, field: str) -> float | None:
    """Return a number of a consumer group by the name of its attribute; None if it is unknown."""
    found = None if reading.numbers is None else reading.numbers.groups.get(name)
    number: float | None = getattr(found, field, None)
    return number


def dead_letters_of(
    reading: Reading, is_shown: Callable[[str], bool]
) -> DeadLetterNumbersView | None:
    """Return the sums of the consumer groups that `is_shown` accepts; None without numbers."""
    if reading.numbers is None:
        return None
    total, last_hour = 0, 0
    has_unknown = False
    for name, group in reading.numbers.groups.items():
        if (group.dead_letters or group.dead_letters_last_hour != 0) and is_shown(name):
            total += group.dead_letters
            last_hour += group.dead_letters_last_hour or 0
            has_unknown |= group.dead_letters_last_hour is None
    return DeadLetterNumbersView(
        open=total,
        last_hour=None if has_unknown else last_hour,
        unknown=NO_LAST_HOUR if has_unknown else None,
    )


def open_letters_of(reading: Reading, is_shown: Callable[[str], bool]) -> list[tuple[str, int]]:
    """Return the consumer groups with open dead letters and their counts, the highest first."""
    if reading.numbers is None:
        return []
    found = [
        (name, group.dead_letters)
        for name, group in reading.numbers.groups.items()
        if group.dead_letters and is_shown(name)
    ]
    return sorted(found, key=lambda each: (-each[1], each[0]))


def sampled_at_ms(reading: Reading) -> int | None:
    """Return the time of the numbers; None without numbers."""
    return None if reading.numbers is None else reading.numbers.sampled_at_ms


def all_unreachable(reading: Reading, *others: Iterable[str] | None) -> list[str] | None:
    """Return the broker groups that are missing in the numbers or in other answers; None: none."""
    found = set() if reading.numbers is None else set(reading.numbers.unreachable)
    for names in others:
        found.update(names or ())
    return sorted(found) or None


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 3)
