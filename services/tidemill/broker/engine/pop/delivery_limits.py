"""The limit of deliveries in flight, and the share of each consumer group.

| deliveries in flight | limit, as a part of `deliveries_max` |
| --- | --- |
| of all groups, by pops | 1 |
| of one group, by pops, while another group polls | 1/2 |
| of all groups, by changes of single messages of a batch | 1 + 1/8 |
| of all groups, by groups with at most 1/32 | 1 + 1/4 |
| of all groups, by releases of operators | 1 + 3/8 |

So a group that holds few deliveries is served although others have filled the table.

The table also keeps deliveries without live messages until their handles end: they were replaced or
given back, and the broker must reject their handles. They do not count as in flight. With more than
KEPT_PART of them, the broker drops those of the group that has the most. From then on it rejects
all handles of the group's earlier deliveries that are not in the table. It can no longer tell an
ack that it repeats from an ack of a replaced delivery.
"""

from __future__ import annotations

from typing import Final, final

from tidemill.broker.engine.layout.config import ConfigItem
from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import GroupId, LogOffset
from tidemill.broker.engine.layout.pop_checkpoint import MESSAGES_MAX
from tidemill.broker.engine.metadata.catalog import ConsumerGroup
from tidemill.broker.engine.metadata.ended_handles import handles_item
from tidemill.broker.engine.pop.progress import GroupSlots, PopProgress
from tidemill.broker.engine.pop.state import PopState
from tidemill.common.errors import Overloaded

# Parts of `deliveries_max`; see above.
CHANGES_PART: Final = 1 / 8
FEW_PART: Final = 1 / 32
FEW_RESERVE_PART: Final = 1 / 4
RELEASES_PART: Final = 3 / 8
KEPT_PART: Final = 1 / 4
TABLE_PART: Final = 2  # slots in use, void ones included
# A group polls if its last poll began within this time. The longest poll takes a minute.
POLLING_MS: Final = 75_000


@final
class DeliveryLimits:
    """The limits of one engine."""

    def __init__(self, state: PopState, recorder: Recorder, *, deliveries_max: int) -> None:
        self._state = state
        self._recorder = recorder
        self._max = deliveries_max
        self._few = int(deliveries_max * FEW_PART)
        # The group of the last poll, and when it and any other group polled last.
        self._polling_id: GroupId | None = None
        self._polled_at_ms = self._others_polled_at_ms = -POLLING_MS

    # ------------------------------------------------------------ pops

    def note_poll(self, group_id: GroupId, now_ms: int) -> None:
        """Note that a group asks for messages."""
        if group_id != self._polling_id:
            self._others_polled_at_ms = self._polled_at_ms
            self._polling_id = group_id
        self._polled_at_ms = now_ms

    def room_for_pop(self, group: ConsumerGroup, progress: PopProgress, now_ms: int) -> int:
        """Note a poll, and return how many deliveries it may make at most.

        `progress` is that of any queue. Raises Overloaded if there is no room.
        """
        # Every pop runs this. Most need only these lines.
        if group.id != self._polling_id:
            self.note_poll(group.id, now_ms)
        else:
            self._polled_at_ms = now_ms
        live, used = progress.slots.live, self._state.table.used_count
        if live + MESSAGES_MAX <= self._few and used + MESSAGES_MAX <= self._max:
            return MESSAGES_MAX
        return self._room_beyond_few(group, progress, now_ms)

    def _room_beyond_few(self, group: ConsumerGroup, progress: PopProgress, now_ms: int) -> int:
        state, most, live = self._state, self._max, progress.slots.live
        total = state.live_count
        is_shared = now_ms - self._others_polled_at_ms < POLLING_MS
        share = (most + 1) // 2 if is_shared else most
        room = min(share - live, most - total)
        if room <= 0:
            room = min(self._few - live, most + int(most * FEW_RESERVE_PART) - total)
        room = min(room, TABLE_PART * most - state.table.used_count)
        if room > 0:
            return room
        state.count("rejected", progress, 1)
        if is_shared and live >= share:
            limit = f"half of deliveries_max ({most}), its share while another group polls"
        else:
            limit = f"and the broker has reached its limit of {most} (deliveries_max)"
        raise Overloaded(
            f"consumer group {group.name} has {live} deliveries in flight, {limit}; ack messages or"
            f" release deliveries of this group, or poll again later"
        )

    # ------------------------------------------------------------ changes

    def check_change(self, slots: GroupSlots, *, is_last: bool, by_operator: bool) -> None:
        """Raise Overloaded if there is no room to replace one message's delivery by a new one.

        `is_last`: the old delivery has no other live message, so the number in flight stays.
        """
        state, most = self._state, self._max
        part = RELEASES_PART if by_operator else CHANGES_PART
        if not by_operator and slots.live < self._few:
            part = FEW_RESERVE_PART
        if not is_last and state.live_count >= most * (1 + part):
            raise Overloaded(
                f"the broker has {state.live_count} deliveries in flight, too many to split a batch"
                f" (deliveries_max is {most}); ack messages, or try again later"
            )
        if state.table.used_count >= TABLE_PART * most:
            raise Overloaded(
                "the broker's table of deliveries is full of replaced deliveries, which it drops"
                " now; try again"
            )

    # ------------------------------------------------------------ old handles

    @property
    def keeps_too_many(self) -> bool:
        """Whether `end_handles` has something to do."""
        is_over = self._state.kept_count > self._max * KEPT_PART
        return is_over and not self._state.index.numbers.has_marked

    def end_handles(self, now_ms: int, *, log_end: LogOffset) -> None:
        """Drop deliveries that only reject handles, if the table keeps too many of them.

        All acks of the round must be recorded. All deliveries must be below `log_end`.
        """
        if not self.keeps_too_many:
            return
        slots = self._state.index.slots
        group_id = max(slots, key=lambda one: slots[one].kept)
        self._recorder.append(ConfigItem(handles_item(group_id, log_end)), now_ms)
