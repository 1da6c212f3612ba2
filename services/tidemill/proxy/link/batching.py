"""What has gathered for the broker, and when it leaves.

A request joins the frame that is being gathered, and waits in it while there is no stream. When the
broker has answered the last frame, or enough has come together, the next one leaves; three are
under way at most. An idle link so sends at once and a busy one in batches, and nobody waits for a
timer. A frame costs both sides as much as many requests do, so it passes no task: it leaves by a
plain call from the loop. One that is full leaves in the middle of a turn: the broker is at it while
the rest of the turn's calls are read, else the two would take turns and each wait for the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, final

from tidemill.proxy.link.client_reports import REPORT_DELAY_S
from tidemill.proxy.link.commands import FRAME_BYTES
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

if TYPE_CHECKING:
    from tidemill.proxy.link.client_reports import ClientReports
    from tidemill.proxy.link.commands import LinkCommand, Row

BUSY_REQUESTS = 16  # under way on a link that is busy
BUSY_TURNS = 4  # of the event loop before a busy link sends: it takes some to read a call
FRAMES_MAX = 3  # sent and not answered
NEXT_FRAME_REQUESTS = 48  # sends and acks that are worth a frame before the last is answered
FULL_FRAME_REQUESTS = 96  # that do not wait for the turn's end
SWEEP_S = 0.1  # how long a request that was withdrawn may still take memory


@final
class FrameBatcher:
    """Requests on their way into a frame, and frames on their way to an answer."""

    def __init__(
        self,
        under_way: Sized,
        write: Callable[[link_pb2.RequestFrame], None],
        reports: ClientReports | None = None,
    ) -> None:
        """Send by `write`; a link is as busy as many are `under_way`. `reports` travel along."""
        self._under_way = under_way
        self._write = write
        self._reports = reports
        self._is_report_due = False  # Signs of life leave soon, with a request or without.
        self._reported: asyncio.Future[None] | None = None  # of who waits until they are answered
        self._loop = asyncio.get_running_loop()
        self._rows: dict[LinkCommand[Any, Any], list[Row]] = {}
        self._cancelled_polls: list[int] = []
        self._weight = 0  # of all that has gathered
        self._sequence = 0  # of the frame sent last on this stream
        self._answered_sequence = 0  # of the last frame that is answered
        self._again: set[int] = set()  # of those that have gathered, which have left once
        self._gathered: set[int] = set()  # the ids of all requests in `_rows` that are to leave
        # And of those that are not, any more: while the broker is away there may be very many, so
        # they go all at once, soon.
        self._withdrawn: set[int] = set()
        self._is_sweeping = False
        self._is_open = False  # whether there is a stream
        self._is_gathering = False
        self._asked_at_s = 0.0  # when the oldest frame that is not answered left, or later
        self._turns_left = 0  # of the event loop until the gathered frame leaves

    @property
    def unanswered(self) -> int:
        """How many frames have left and are not answered."""
        return self._sequence - self._answered_sequence

    def unanswered_for_s(self) -> float:
        """Return for how long, at least, a frame has waited for its answer; 0: none does."""
        return time.monotonic() - self._asked_at_s if self.unanswered else 0.0

    def add(self, command: LinkCommand[Any, Any], row: Row) -> None:
        """Let a request leave with the next frame."""
        rows = self._rows.get(command)
        if rows is None:
            self._rows[command] = [row]
        else:
            rows.append(row)
        self._gathered.add(row[0])
        self._weight += command.weight
        if not self._is_gathering:
            self._wake()
        elif self._weight >= FULL_FRAME_REQUESTS and self._may_send:
            self._send()

    def add_again(self, requests: Iterable[tuple[LinkCommand[Any, Any], Sequence[Row]]]) -> None:
        """Let requests leave that have left once, on a stream that was lost: before all others.

        They are older than what has gathered meanwhile, and some have an order.
        """
        older: dict[LinkCommand[Any, Any], list[Row]] = {}
        for command, rows in requests:
            if not rows:
                continue
            older.setdefault(command, []).extend(rows)
            ids = [row[0] for row in rows]
            self._again.update(ids)
            self._gathered.update(ids)
            self._weight += command.weight * len(rows)
        for command, again in older.items():
            self._rows[command] = [*again, *self._rows.get(command, ())]

    def add_all(self, command: LinkCommand[Any, Any], rows: Sequence[Row]) -> None:
        """Let the rows of one request leave together."""
        self._rows.setdefault(command, []).extend(rows)
        self._gathered.update([row[0] for row in rows])
        self._weight += command.weight * len(rows)
        if not self._is_gathering:
            self._wake()

    def cancel_poll(self, request_id: int) -> None:
        """Tell the broker with the next frame that nobody waits for a pop any more."""
        self._cancelled_polls.append(request_id)
        if not self._is_gathering:
            self._wake()

    def send_reports(self) -> None:
        """Let reports of life leave with the next frame, soon; ends of clients at once."""
        if self._reports is not None and self._reports.has_ended:
            if not self._is_gathering:
                self._wake()
        elif not self._is_report_due:
            self._is_report_due = True
            self._loop.call_later(REPORT_DELAY_S, self._send_reports_now)

    async def wait_reported(self) -> None:
        """Wait until the broker has answered all that it is told of reports of life, or is gone."""
        while self._is_open and (self._reports or self.unanswered):
            if self._reported is None:
                self._reported = self._loop.create_future()
            if not self._is_gathering:
                self._wake()
            await asyncio.shield(self._reported)

    def _wake_reporters(self) -> None:
        reported, self._reported = self._reported, None
        if reported is not None:
            reported.set_result(None)

    def _send_reports_now(self) -> None:
        self._is_report_due = False
        if self._has_work and not self._is_gathering:
            self._wake()

    def mark_answered(self, sequence: int) -> None:
        """Send on: the broker has answered a frame."""
        self._answered_sequence = sequence
        self._asked_at_s = time.monotonic()  # At the latest, of those that are not answered yet.
        self._wake_reporters()
        if self._has_work and not self._is_gathering:
            self._wake()

    def withdraw(self, request_ids: AbstractSet[int]) -> set[int]:
        """Keep requests that have not left from leaving; return which those are.

        They would be memory that nobody counts, and surprise those who were told to try again.
        """
        unsent = self._gathered.intersection(request_ids)
        if unsent:
            self._gathered -= unsent
            self._again -= unsent
            self._withdrawn |= unsent
            if not self._is_sweeping:
                self._is_sweeping = True
                self._loop.call_later(SWEEP_S, self._sweep_later)
        return unsent

    def _sweep_later(self) -> None:
        self._is_sweeping = False
        self._sweep()

    def _sweep(self) -> None:
        """Take out what was withdrawn."""
        if not self._withdrawn:
            return
        withdrawn, self._withdrawn = self._withdrawn, set()
        gathered, self._rows, self._weight = self._rows, {}, 0
        for command, rows in gathered.items():
            self._keep(command, [row for row in rows if row[0] not in withdrawn])

    def rows_of(self, command: LinkCommand[Any, Any]) -> Sequence[Row]:
        """Return the requests of one kind that have gathered."""
        self._sweep()
        return self._rows.get(command, ())

    def open(self) -> None:
        """Let what has gathered leave: there is a stream."""
        self._is_open = True
        if self._has_work and not self._is_gathering:
            self._wake()

    def clear(self) -> None:
        """Forget what has gathered."""
        for ids in (self._again, self._gathered, self._withdrawn):
            ids.clear()
        self._rows, self._weight = {}, 0

    def close(self) -> set[int]:
        """Keep what has gathered for the next stream; return the ids of those requests."""
        self._is_open = False
        # The broker has forgotten the polls of the stream by itself.
        self._cancelled_polls = []
        if self._reports is not None:
            self._reports.close()
        self._sequence = self._answered_sequence = 0
        self._wake_reporters()
        return set(self._gathered)

    def _wake(self) -> None:
        """See to it that a frame leaves soon: there is something to ask.

        Those who are about to ask join it: a few on an idle link, many on a busy one. No time is
        waited: each turn of the loop does what is to be done anyway, above all the reading of calls
        that have arrived already.
        """
        if not self._may_send:
            return
        self._is_gathering = True
        self._turns_left = BUSY_TURNS if len(self._under_way) >= BUSY_REQUESTS else 1
        self._loop.call_soon(self._gather)

    @property
    def _may_send(self) -> bool:
        """Whether a frame may leave: all are answered, or some are not and much has gathered."""
        if not self._is_open:
            return False
        unanswered = self.unanswered
        if unanswered:
            return unanswered < FRAMES_MAX and self._weight >= NEXT_FRAME_REQUESTS
        return True

    def _gather(self) -> None:
        self._turns_left -= 1
        if self._turns_left > 0:
            self._loop.call_soon(self._gather)
            return
        self._is_gathering = False
        if self._has_work and self._may_send:
            self._send()

    def _send(self) -> None:
        self._sweep()
        if not self._has_work:
            return
        frame = self._take_frame()
        if not self.unanswered:
            self._asked_at_s = time.monotonic()
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
            frame.alive_clients.extend(reports.alive)
            frame.ended_clients.extend(reports.ended)
            if reports.handovers:
                slots, delivery_ids = zip(*reports.handovers, strict=True)
                frame.handed_over.slots.extend(slots)
                frame.handed_over.delivery_ids.extend(delivery_ids)
            room_bytes -= frame.ByteSize()
        gathered, self._rows, self._weight = self._rows, {}, 0
        partly: list[tuple[LinkCommand[Any, Any], list[Row]]] = []
        left: list[list[Row]] = []
        for command, rows in gathered.items():
            count, taken_bytes = command.cut(rows, room_bytes)
            room_bytes -= taken_bytes
            if count == 0:
                self._keep(command, rows)
                continue
            if count < len(rows):
                partly.append((command, rows[count:]))
                del rows[count:]
            command.pack(frame, rows)
            if self._again:
                again = self._again.intersection([row[0] for row in rows])
                frame.repeated_ids.extend(again)
                self._again -= again
            left.append(rows)
        # First in the next frame are commands that had no room in this one, then those with more.
        for command, rows in partly:
            self._keep(command, rows)
        if self._rows:
            for rows in left:
                self._gathered.difference_update([row[0] for row in rows])
        else:
            self._gathered.clear()
        return frame

    def _keep(self, command: LinkCommand[Any, Any], rows: list[Row]) -> None:
        """Let `rows` wait on for a frame."""
        if rows:
            self._rows[command] = rows
            self._weight += command.weight * len(rows)
