"""Requests that wait for a frame, and the rule for sending the frame.

A request joins the next frame and waits in it while there is no stream. The frame is sent when the
broker has answered the previous one, or when it has enough requests. At most three frames are
unanswered. An idle link therefore sends at once and a busy link in batches, without a timer.

A frame costs both sides as much as many requests, so a plain call from the event loop sends it, not
a task. A full frame is sent in the middle of a turn of the loop: the broker then works while the
proxy reads the remaining calls of the turn. Otherwise the two would wait for each other in turns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, MutableSequence, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, final

from tidemill.message.client_key import ClientKey
from tidemill.proxy.link.client_reports import REPORT_DELAY_S
from tidemill.proxy.link.commands import FRAME_BYTES
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.link.client_reports import ClientReports
    from tidemill.proxy.link.commands import LinkCommand, Row

BUSY_REQUESTS = 16  # in flight on a link that counts as busy
BUSY_TURNS = 4  # of the event loop before a busy link sends; reading a call takes a few turns
FRAMES_MAX = 3  # sent and unanswered
NEXT_FRAME_REQUESTS = 48  # sends and acks that start a frame while another one is unanswered
FULL_FRAME_REQUESTS = 96  # that start a frame before the end of the turn
SWEEP_S = 0.1  # time that a withdrawn request may still take memory


@final
class FrameBatcher:
    """The requests of the next frame, and the unanswered frames."""

    def __init__(
        self,
        in_flight: Sized,
        write: Callable[[link_pb2.RequestFrame], None],
        reports: ClientReports | None = None,
    ) -> None:
        """Send frames with `write`. The number of requests `in_flight` says how busy the link is.

        Frames carry the `reports`, too.
        """
        self._in_flight = in_flight
        self._write = write
        self._reports = reports
        self._is_report_due = False  # A frame is scheduled for the reports alone.
        self._reported: asyncio.Future[None] | None = None  # of callers of `wait_reported`
        self._loop = asyncio.get_running_loop()
        self._rows: dict[LinkCommand[Any, Any], list[Row]] = {}
        self._cancelled_polls: list[int] = []
        self._weight = 0  # of all rows
        self._sequence = 0  # of the frame sent last on this stream
        self._answered_sequence = 0  # of the frame answered last
        self._repeated: set[int] = set()  # ids of waiting requests that an older stream has sent
        self._waiting: set[int] = set()  # ids of all requests in `_rows` that are not withdrawn
        # Ids in `_rows` of withdrawn requests. While the broker is down there may be very many, so
        # one sweep removes all of them.
        self._withdrawn: set[int] = set()
        self._is_sweeping = False
        self._is_open = False  # whether there is a stream
        self._is_scheduled = False  # whether a frame is about to be sent
        self._unanswered_since_s = 0.0  # the oldest unanswered frame was sent then, or earlier
        self._turns_left = 0  # of the event loop until the scheduled frame is sent

    @property
    def unanswered(self) -> int:
        """The number of unanswered frames."""
        return self._sequence - self._answered_sequence

    def unanswered_for_s(self) -> float:
        """Return the minimum age of the oldest unanswered frame; 0 if all are answered."""
        return time.monotonic() - self._unanswered_since_s if self.unanswered else 0.0

    def add(self, command: LinkCommand[Any, Any], row: Row) -> None:
        """Add a request to the next frame."""
        rows = self._rows.get(command)
        if rows is None:
            self._rows[command] = [row]
        else:
            rows.append(row)
        self._waiting.add(row[0])
        self._weight += command.weight
        if not self._is_scheduled:
            self._schedule()
        elif self._weight >= FULL_FRAME_REQUESTS and self._may_send:
            self._send()

    def add_again(self, requests: Iterable[tuple[LinkCommand[Any, Any], Sequence[Row]]]) -> None:
        """Add requests that a lost stream has sent, before all others.

        They are older than the waiting requests, and the order of some matters.
        """
        older: dict[LinkCommand[Any, Any], list[Row]] = {}
        for command, rows in requests:
            if not rows:
                continue
            older.setdefault(command, []).extend(rows)
            ids = [row[0] for row in rows]
            self._repeated.update(ids)
            self._waiting.update(ids)
            self._weight += command.weight * len(rows)
        for command, repeated in older.items():
            self._rows[command] = [*repeated, *self._rows.get(command, ())]

    def add_all(self, command: LinkCommand[Any, Any], rows: Sequence[Row]) -> None:
        """Add all rows of one request to the next frame."""
        self._rows.setdefault(command, []).extend(rows)
        self._waiting.update([row[0] for row in rows])
        self._weight += command.weight * len(rows)
        if not self._is_scheduled:
            self._schedule()

    def cancel_poll(self, request_id: int) -> None:
        """Cancel a pop or a notification at the broker, with the next frame."""
        self._cancelled_polls.append(request_id)
        if not self._is_scheduled:
            self._schedule()

    def send_reports(self) -> None:
        """Send the reports with the next frame, after `REPORT_DELAY_S` at the latest.

        The end of a client, and a lost right, are sent at once.
        """
        if self._reports is not None and self._reports.has_urgent:
            if not self._is_scheduled:
                self._schedule()
        elif not self._is_report_due:
            self._is_report_due = True
            self._loop.call_later(REPORT_DELAY_S, self._send_reports_now)

    async def wait_reported(self) -> None:
        """Wait until the broker has answered all reports, or the stream is lost."""
        while self._is_open and (self._reports or self.unanswered):
            if self._reported is None:
                self._reported = self._loop.create_future()
            if not self._is_scheduled:
                self._schedule()
            await asyncio.shield(self._reported)

    def _wake_reporters(self) -> None:
        reported, self._reported = self._reported, None
        if reported is not None:
            reported.set_result(None)

    def _send_reports_now(self) -> None:
        self._is_report_due = False
        if self._has_work and not self._is_scheduled:
            self._schedule()

    def mark_answered(self, sequence: int) -> None:
        """Note that the broker has answered a frame, and send the next one."""
        self._answered_sequence = sequence
        self._unanswered_since_s = time.monotonic()  # The next frames were sent before now.
        self._wake_reporters()
        if self._has_work and not self._is_scheduled:
            self._schedule()

    def withdraw(self, request_ids: AbstractSet[int]) -> set[int]:
        """Remove requests that were not sent; return their ids.

        Nothing counts their memory any more, and their callers may already have sent them again.
        """
        unsent = self._waiting.intersection(request_ids)
        if unsent:
            self._waiting -= unsent
            self._repeated -= unsent
            self._withdrawn |= unsent
            if not self._is_sweeping:
                self._is_sweeping = True
                self._loop.call_later(SWEEP_S, self._sweep_later)
        return unsent

    def _sweep_later(self) -> None:
        self._is_sweeping = False
        self._sweep()

    def _sweep(self) -> None:
        """Remove the rows of withdrawn requests."""
        if not self._withdrawn:
            return
        withdrawn, self._withdrawn = self._withdrawn, set()
        rows_by_command, self._rows, self._weight = self._rows, {}, 0
        for command, rows in rows_by_command.items():
            self._put_back(command, [row for row in rows if row[0] not in withdrawn])

    def rows_of(self, command: LinkCommand[Any, Any]) -> Sequence[Row]:
        """Return the waiting requests of one command."""
        self._sweep()
        return self._rows.get(command, ())

    def open(self) -> None:
        """Start to send: there is a stream."""
        self._is_open = True
        if self._has_work and not self._is_scheduled:
            self._schedule()

    def clear(self) -> None:
        """Forget all waiting requests."""
        for ids in (self._repeated, self._waiting, self._withdrawn):
            ids.clear()
        self._rows, self._weight = {}, 0

    def close(self) -> set[int]:
        """Keep the waiting requests for the next stream; return their ids."""
        self._is_open = False
        # The broker forgets the polls of a lost stream without a message.
        self._cancelled_polls = []
        if self._reports is not None:
            self._reports.close()
        self._sequence = self._answered_sequence = 0
        self._wake_reporters()
        return set(self._waiting)

    def _schedule(self) -> None:
        """Send a frame after one turn of the event loop, or a few turns if the link is busy.

        Requests of those turns join the frame. The turns cost no time: each does work that is due
        anyway, mostly reading calls that have arrived.
        """
        if not self._may_send:
            return
        self._is_scheduled = True
        self._turns_left = BUSY_TURNS if len(self._in_flight) >= BUSY_REQUESTS else 1
        self._loop.call_soon(self._count_turn)

    @property
    def _may_send(self) -> bool:
        """Whether a frame may be sent: all are answered, or few are not and many requests wait."""
        if not self._is_open:
            return False
        unanswered = self.unanswered
        if unanswered:
            return unanswered < FRAMES_MAX and self._weight >= NEXT_FRAME_REQUESTS
        return True

    def _count_turn(self) -> None:
        self._turns_left -= 1
        if self._turns_left > 0:
            self._loop.call_soon(self._count_turn)
            return
        self._is_scheduled = False
        if self._has_work and self._may_send:
            self._send()

    def _send(self) -> None:
        self._sweep()
        if not self._has_work:
            return
        frame = self._take_frame()
        if not self.unanswered:
            self._unanswered_since_s = time.monotonic()
        frame.sequence = self._sequence = self._sequence + 1
        self._write(frame)

    @property
    def _has_work(self) -> bool:
        return bool(self._rows or self._cancelled_polls or self._reports)

    def _take_frame(self) -> link_pb2.RequestFrame:
        frame = link_pb2.RequestFrame()
        if self._cancelled_polls:
            frame.cancelled_polls.extend(self._cancelled_polls)
            self._cancelled_polls = []
        room_bytes = FRAME_BYTES
        if self._reports:
            reports = self._reports.take()
            _add_clients(frame.alive_clients, frame.alive_owners, reports.alive)
            _add_clients(frame.ended_clients, frame.ended_owners, reports.ended)
            _add_clients(
                frame.disconnected_clients, frame.disconnected_owners, reports.disconnected
            )
            for (client_id, owner), group, topic in reports.revoked:
                frame.revoked.add(client_id=client_id, owner=owner, group=group, topic=topic)
            if reports.handovers:
                slots, delivery_ids = zip(*reports.handovers, strict=True)
                frame.handed_over.slots.extend(slots)
                frame.handed_over.delivery_ids.extend(delivery_ids)
            if reports.subscriptions:
                group_ids, topic_ids = zip(*reports.subscriptions, strict=True)
                frame.subscribed.group_ids.extend(group_ids)
                frame.subscribed.topic_ids.extend(topic_ids)
            room_bytes -= frame.ByteSize()
        rows_by_command, self._rows, self._weight = self._rows, {}, 0
        remainders: list[tuple[LinkCommand[Any, Any], list[Row]]] = []
        packed: list[list[Row]] = []
        for command, rows in rows_by_command.items():
            count, taken_bytes = command.cut(rows, room_bytes)
            room_bytes -= taken_bytes
            if count == 0:
                self._put_back(command, rows)
                continue
            if count < len(rows):
                remainders.append((command, rows[count:]))
                del rows[count:]
            command.pack(frame, rows)
            if self._repeated:
                repeated = self._repeated.intersection([row[0] for row in rows])
                frame.repeated_ids.extend(repeated)
                self._repeated -= repeated
            packed.append(rows)
        # Commands without room in this frame are first in the next one; remainders follow.
        for command, rows in remainders:
            self._put_back(command, rows)
        if self._rows:
            for rows in packed:
                self._waiting.difference_update([row[0] for row in rows])
        else:
            self._waiting.clear()
        return frame

    def _put_back(self, command: LinkCommand[Any, Any], rows: list[Row]) -> None:
        """Let `rows` wait for the next frame."""
        if rows:
            self._rows[command] = rows
            self._weight += command.weight * len(rows)


def _add_clients(
    client_ids: MutableSequence[str], owners: MutableSequence[int], clients: Sequence[ClientKey]
) -> None:
    client_ids.extend([client_id for client_id, _ in clients])
    if any(owner for _, owner in clients):
        owners.extend([owner for _, owner in clients])
