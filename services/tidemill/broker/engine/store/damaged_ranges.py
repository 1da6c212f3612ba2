"""Where the log was found damaged, and whether another replica has what stood there (ADR 0047).

    ask_for(offset)      whoever meets damage calls this before anything is given up
    next_question        whom to ask for what; one question at a time
    answered             what came of it
    take_ended           whether any place is mended or given up: who holds something looks again

Nothing here survives a restart: who meets the damage again notes it again.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import Final, NamedTuple, final

from tidemill.broker.engine.layout.numbers import LogOffset

PLACES_MAX: Final = 1_024  # noted at a time; who meets more holds it, and notes it when these end
# Where some replica cannot be asked: an upgrade, and a node that starts again, take less.
GIVE_UP_MS: Final = 300_000
AGAIN_MS: Final = 1_000  # until somebody is asked again who could not be reached
# What was given up is asked for again by who meets it after so long: a replica may be back.
GIVEN_UP_MS: Final = 60_000


class MendOutcome(Enum):
    """What came of a question."""

    MENDED = auto()  # what stands here is intact now
    NOTHING = auto()  # that replica has no intact bytes of it
    SILENT = auto()  # it could not be asked, or does not know yet that these are confirmed
    SOUND = auto()  # what stands here was intact: whoever noted it was led here by something else


class MendRequest(NamedTuple):
    """A stretch of the log that another replica is to be asked for."""

    replica_id: int
    begin: LogOffset  # where a record begins
    end: LogOffset  # whole records are wanted up to here, and one at least


class _DamagedRange:
    __slots__ = ("ask_at_ms", "end", "since_ms", "turn", "without")

    def __init__(self, end: LogOffset) -> None:
        self.end = end
        self.since_ms: int | None = None  # monotonic; None: nobody has looked at it yet
        self.ask_at_ms = 0
        self.turn = 0
        self.without: set[int] = set()  # replicas that have said they have nothing


@final
class DamagedRanges:
    """The places, in the order in which they were met."""

    def __init__(self) -> None:
        # Whether this store is a replica's: else nobody is to be asked, and nothing is awaited.
        self.has_replicas = False
        self.mended_count = self.given_up_count = 0
        self._places: dict[LogOffset, _DamagedRange] = {}
        self._given_up: dict[LogOffset, int] = {}  # and when, monotonic
        self.has_ended = False  # any place, and nobody has looked

    def request(self, log_offset: int, end: int | None = None) -> bool:
        """Note what is damaged at `log_offset`, where a record began; whether it may come back.

        False: nobody has it, and what depends on it may be given up.
        """
        at = LogOffset(log_offset)
        if not self.has_replicas or at in self._given_up:
            return False
        if at not in self._places and len(self._places) < PLACES_MAX:
            self._places[at] = _DamagedRange(LogOffset(log_offset + 1 if end is None else end))
        return True

    @property
    def has_requests(self) -> bool:
        """Whether something is asked for."""
        return bool(self._places)

    def is_requested(self, log_offset: int) -> bool:
        """Whether a place is asked for."""
        return log_offset in self._places

    def next_request(self, others: Collection[int] | None, now_ms: int) -> MendRequest | None:
        """Return whom to ask now, of the other replicas there are; None: nobody.

        Nobody knows the others (None) before the first view.
        """
        for at, given_up_ms in list(self._given_up.items()):
            if now_ms - given_up_ms >= GIVEN_UP_MS:
                del self._given_up[at]
        for at, place in list(self._places.items()):
            if place.since_ms is None:
                place.since_ms = now_ms
            left = None if others is None else sorted(set(others) - place.without)
            if left == [] or now_ms - place.since_ms >= GIVE_UP_MS:
                self._give_up(at, now_ms)
            elif left and now_ms >= place.ask_at_ms:
                return MendRequest(left[place.turn % len(left)], at, place.end)
        return None

    def handle_outcome(self, question: MendRequest, answer: MendOutcome, now_ms: int) -> None:
        """Hear what came of a question."""
        place = self._places.get(question.begin)
        if place is None:
            return
        if answer is MendOutcome.MENDED:
            del self._places[question.begin]
            self.mended_count += 1
            self.has_ended = True
        elif answer is MendOutcome.SOUND:
            self._give_up(question.begin, now_ms)
        elif answer is MendOutcome.NOTHING:
            place.without.add(question.replica_id)
        else:
            place.turn += 1
            place.ask_at_ms = now_ms + AGAIN_MS

    def forget_before(self, log_min: int) -> None:
        """Forget what retention has taken."""
        for at in [at for at in self._places if at < log_min]:
            del self._places[at]
            self.has_ended = True

    def _give_up(self, at: LogOffset, now_ms: int) -> None:
        del self._places[at]
        self._given_up[at] = now_ms
        self.given_up_count += 1
        self.has_ended = True

    def take_ended(self) -> bool:
        """Return and clear whether any place was mended or given up."""
        has_ended, self.has_ended = self.has_ended, False
        return has_ended
