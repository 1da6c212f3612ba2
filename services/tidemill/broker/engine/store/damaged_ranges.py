"""Damaged ranges of the log, and the requests to other replicas to mend them (ADR 0047).

    request(offset)      called by every reader that meets damage, before it drops anything
    next_request         the next replica and range to ask for; one request at a time
    handle_outcome       the result of a request
    take_ended           whether a range was mended or given up: readers then try again

A pack whose directory is derived is such a range too: nothing can be found there for now. A
background job derives it, and no other replica is asked.

A restart forgets all of it. A reader that meets the damage again requests it again.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.common.errors import Repairing

RANGES_MAX: Final = 1_024  # requested at a time; a reader that meets more waits until these end
# For replicas that cannot be reached. An upgrade or a node restart takes less time.
GIVE_UP_MS: Final = 300_000
AGAIN_MS: Final = 1_000  # pause before a replica that could not be reached is asked again
# A range that was given up may be requested again after this time: a replica may be back.
GIVEN_UP_MS: Final = 60_000


class MendOutcome(Enum):
    """The result of a request."""

    MENDED = auto()  # the range is intact now
    NOTHING = auto()  # the replica has no intact bytes of it
    SILENT = auto()  # the replica is unreachable, or does not know yet that the range is confirmed
    SOUND = auto()  # the range was intact: another fault led the reader here


class MendRequest(NamedTuple):
    """A range of the log to request from another replica."""

    replica_id: int
    begin: LogOffset  # begin of a record
    end: LogOffset  # whole records up to here, and at least one


class _DamagedRange:
    __slots__ = ("ask_at_ms", "end", "replicas_without", "since_ms", "turn")

    def __init__(self, end: LogOffset) -> None:
        self.end = end
        self.since_ms: int | None = None  # monotonic; None: not asked yet
        self.ask_at_ms = 0
        self.turn = 0
        self.replicas_without: set[int] = set()  # replicas that do not have the range


@final
class DamagedRanges:
    """The damaged ranges, in the order of their discovery."""

    def __init__(self) -> None:
        # Without replicas no range can be mended, so readers do not wait.
        self.has_replicas = False
        self.mended_count = self.given_up_count = 0
        self._ranges: dict[LogOffset, _DamagedRange] = {}
        self._given_up: dict[LogOffset, int] = {}  # and the monotonic time
        # Packs with a damaged directory: their begins and ends in the log.
        self._directories: dict[int, int] = {}
        self.has_ended = False  # a range, since the last `take_ended`

    def request(self, log_offset: int, end: int | None = None) -> bool:
        """Request the damaged range at `log_offset`, where a record began; return whether to wait.

        False means that no replica has it. What depends on it may be given up.
        """
        if self.awaits_directory(log_offset):
            return True
        at = LogOffset(log_offset)
        if not self.has_replicas or at in self._given_up:
            return False
        if at not in self._ranges and len(self._ranges) < RANGES_MAX:
            self._ranges[at] = _DamagedRange(LogOffset(log_offset + 1 if end is None else end))
        return True

    @property
    def has_requests(self) -> bool:
        """Whether a range is requested."""
        return bool(self._ranges)

    def is_requested(self, log_offset: int) -> bool:
        """Return whether the range at `log_offset` is requested, or its directory is derived."""
        return log_offset in self._ranges or self.awaits_directory(log_offset)

    def note_directory(self, begin: int, end: int) -> None:
        """Request that the directory of a pack is derived."""
        self._directories[begin] = end

    @property
    def next_directory(self) -> int | None:
        """The begin of the next pack whose directory must be derived."""
        return next(iter(self._directories), None)

    def awaits_directory(self, log_offset: int) -> bool:
        """Return whether a log offset cannot be found until a directory is derived."""
        return any(begin <= log_offset < end for begin, end in self._directories.items())

    def end_directory(self, begin: int) -> None:
        """Note that the directory of a pack is derived, or its file removed."""
        del self._directories[begin]
        self.has_ended = True

    def check_directories(self) -> None:
        """Raise Repairing while a directory is derived, for readers that must not miss records."""
        if self._directories:
            raise Repairing

    def next_request(self, others: Collection[int] | None, now_ms: int) -> MendRequest | None:
        """Return the next request to one of the `others`, or None.

        Before the first view the other replicas are unknown (None).
        """
        for at, given_up_ms in list(self._given_up.items()):
            if now_ms - given_up_ms >= GIVEN_UP_MS:
                del self._given_up[at]
        for at, one in list(self._ranges.items()):
            if self.awaits_directory(at):
                continue  # The record may be intact.
            if one.since_ms is None:
                one.since_ms = now_ms
            candidates = None if others is None else sorted(set(others) - one.replicas_without)
            if candidates == [] or now_ms - one.since_ms >= GIVE_UP_MS:
                self._give_up(at, now_ms)
            elif candidates and now_ms >= one.ask_at_ms:
                return MendRequest(candidates[one.turn % len(candidates)], at, one.end)
        return None

    def handle_outcome(self, request: MendRequest, outcome: MendOutcome, now_ms: int) -> None:
        """Handle the result of a request."""
        one = self._ranges.get(request.begin)
        if one is None:
            return
        if outcome is MendOutcome.MENDED:
            del self._ranges[request.begin]
            self.mended_count += 1
            self.has_ended = True
        elif outcome is MendOutcome.SOUND:
            self._give_up(request.begin, now_ms)
        elif outcome is MendOutcome.NOTHING:
            one.replicas_without.add(request.replica_id)
        else:
            one.turn += 1
            one.ask_at_ms = now_ms + AGAIN_MS

    def forget_before(self, log_min: int) -> None:
        """Forget ranges that retention has removed."""
        for at in [at for at in self._ranges if at < log_min]:
            del self._ranges[at]
            self.has_ended = True

    def _give_up(self, at: LogOffset, now_ms: int) -> None:
        del self._ranges[at]
        self._given_up[at] = now_ms
        self.given_up_count += 1
        self.has_ended = True

    def take_ended(self) -> bool:
        """Return and clear whether a range was mended or given up."""
        has_ended, self.has_ended = self.has_ended, False
        return has_ended
