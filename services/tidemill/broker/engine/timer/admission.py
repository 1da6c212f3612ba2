"""Admission: the limits of new delayed messages, and their due times.

Due times are exact to the millisecond. The broker's clock resolves a relative delay. The checksum
of the message is the source of chance: it decides which messages a full second rejects.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import final

from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.broker.engine.timer.config import OverloadPolicy, TimerConfig
from tidemill.broker.engine.timer.index import TimerIndex
from tidemill.common.errors import IllegalDeliveryTime, Overloaded
from tidemill.common.reserves import has_little, unreserved

VALUE_MAX = 1 << 53  # larger values are inexact in clients that use floating point
CLIENT_SKEW_MS_MAX = 2_000
_HASH_FACTOR = 0x9E3779B1  # spreads neighbouring checksums over 32 bits


@final
class Admission:
    """The limits of new timers."""

    def __init__(self, index: TimerIndex, config: TimerConfig, *, volume_bytes: int) -> None:
        self._index = index
        self._config = config
        self._pinned_max = int(volume_bytes * config.max_pinned_part)
        # Beyond these, only topics with few pending timers get more.
        self._count_room = unreserved(config.max_pending)
        self._bytes_room = unreserved(self._pinned_max)
        self._has_seconds_limit = (
            config.soft_limit_per_second > 0 and config.overload_policy is not OverloadPolicy.ACCEPT
        )
        self.refused: Counter[str] = Counter()  # by reason
        self.skewed_count = 0
        self.spread: Counter[TopicId] = Counter()  # by topic id

    def check_due(self, due_at_ms: int, *, now_ms: int) -> None:
        """Raise IllegalDeliveryTime unless a message may be due at `due_at_ms`."""
        if not 0 <= due_at_ms <= VALUE_MAX:
            raise IllegalDeliveryTime(
                f"the delivery time {due_at_ms} is not between 0 and {VALUE_MAX} ms since 1970"
            )
        if due_at_ms - now_ms > self._config.max_delay_ms:
            limit_ms = self._config.max_delay_ms
            raise IllegalDeliveryTime(
                f"the delivery time {_utc(due_at_ms)} is too late: a message may be delayed by at "
                f"most {_span(limit_ms)} ({limit_ms} ms), until {_utc(now_ms + limit_ms)}"
            )

    def due_after(self, delay_ms: int, *, now_ms: int) -> int:
        """Return when a relative delay ends. Raises IllegalDeliveryTime."""
        if not 0 <= delay_ms <= VALUE_MAX:
            raise IllegalDeliveryTime(
                f"the delay of {delay_ms} ms is not between 0 and {VALUE_MAX} ms"
            )
        self.check_due(now_ms + delay_ms, now_ms=now_ms)
        return now_ms + delay_ms

    def admit(self, due_at_ms: int, topic: Topic, size: int, chance: int, now_ms: int) -> int:
        """Return the due time of a message. `chance` is a 32-bit number from the message.

        Raises Overloaded if the second or the store has no room for another timer.
        """
        index = self._index
        if index.pending_count >= self._count_room or index.pinned_bytes + size > self._bytes_room:
            self._check_reserve(topic, size)
        if self._has_seconds_limit or topic.delivery_spread_ms:
            return self._find_room(due_at_ms, topic, chance, now_ms)
        return due_at_ms

    def admit_replacement(self, topic: Topic, size: int) -> None:
        """Admit a message that replaces that of a pending timer. Raises Overloaded.

        The number of timers stays. The bytes of the replaced message count until the next look.
        """
        if self._index.pinned_bytes + size > self._bytes_room:
            self._check_reserve(topic, size)

    def _check_reserve(self, topic: Topic, size: int) -> None:
        """Raise Overloaded unless the topic may use the reserve for another timer."""
        index, count_max = self._index, self._config.max_pending
        own_count = index.counts.pending[topic.id]
        count_room, bytes_room = self._count_room, self._bytes_room
        if has_little(own_count, count_max):
            count_room, bytes_room = count_max, self._pinned_max
        if index.pending_count >= count_room:
            self.refused["backlog"] += 1
            raise Overloaded(
                f"the broker has {index.pending_count} pending delayed messages, {own_count} of "
                f"them of topic {topic.name}; the limit (timer_max_pending) is {count_max}, and "
                f"its last eighth is for topics with few; try again when some have been delivered"
            )
        if index.pinned_bytes + size > bytes_room:
            self.refused["backlog"] += 1
            raise Overloaded(
                f"delayed messages use {index.pinned_bytes >> 20} MiB of the broker's disk, and "
                f"another {size} bytes of topic {topic.name} exceed its limit "
                f"(timer_max_pinned_part), whose last eighth is for topics with few; enlarge the "
                f"volume, or try again later"
            )

    def _find_room(self, due_at_ms: int, topic: Topic, chance: int, now_ms: int) -> int:
        """Return a due time in a second with room. Raises Overloaded if there is none."""
        index, config = self._index, self._config
        soft_limit, policy = config.soft_limit_per_second, config.overload_policy
        spread_ms = topic.delivery_spread_ms
        if not spread_ms and policy is OverloadPolicy.SPREAD:
            spread_ms = config.spread_ms
        if not soft_limit:
            return due_at_ms
        index.link_gathered()
        second = due_at_ms // 1000
        count = index.links.wheel.count(second) if second < index.links.ring_end_s else 0
        if count <= soft_limit:
            return due_at_ms
        chance = chance * _HASH_FACTOR & 0xFFFFFFFF
        if spread_ms:
            self.spread[topic.id] += 1
            later_ms = due_at_ms + chance % (spread_ms + 1)
            return min(later_ms, now_ms + config.max_delay_ms)
        if count >= 2 * soft_limit or chance < (count - soft_limit) / soft_limit * (1 << 32):
            self.refused["slot_full"] += 1
            raise Overloaded(
                f"about {count} messages are due in the second {_utc(second * 1000)}, above the "
                f"limit of {soft_limit} (timer_soft_limit_per_second); choose another second"
            )
        return due_at_ms

    def note_skew(self, born_at_ms: int, *, now_ms: int) -> None:
        """Count a message if the clock of its sender is wrong."""
        if abs(born_at_ms - now_ms) > CLIENT_SKEW_MS_MAX:
            self.skewed_count += 1


def _utc(at_ms: int) -> str:
    try:
        at = datetime.fromtimestamp(at_ms / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _span(duration_ms: int) -> str:
    days, rest_ms = divmod(duration_ms, 24 * 3600 * 1000)
    return f"{days} days" if not rest_ms else f"{duration_ms / 1000:g} s"
