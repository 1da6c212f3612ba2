"""One receive as a state machine.

    INIT ──> FIRST_POP ──> WAITING <──> CONSUMING
                 └────────────┴─────────────┴──────> DONE

    FIRST_POP   it has not heard of nothing yet: the first pop is under way, or one that is parked
    WAITING     for a hint; or for any broker, where none could be reached when it began
    CONSUMING   a pop where a hint pointed, or a last look
    DONE        found, empty, failed or cancelled

Its pair decides what it does next when it waits; here is what holds for each: one pop under way at
most, one end, and what is popped behind the end goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

from tidemill.common.errors import ConnectionBufferFull, MessageNotFound, Overloaded

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.polling.mode import Name
    from tidemill.proxy.polling.pair import Pair

# Beyond its poll duration, for pops at brokers that nobody would have told of: half of what a
# client's deadline leaves by default (deadline_reserve_ms).
LAST_LOOK_MS: Final = 100

Broker: TypeAlias = str  # the name of a broker group


class State(Enum):
    """Where a poll is."""

    INIT = 0
    FIRST_POP = 1
    WAITING = 2
    CONSUMING = 3
    DONE = 4


class Outcome(Enum):
    """How a poll has ended; the value is what the metrics call it, where they do."""

    FOUND = "notified"
    FOUND_AT_FIRST = "first_pop"
    EMPTY = "timeout_empty"
    FAILED = "error"
    THROTTLED = "throttled"
    NO_ROOM = "no_room"
    CANCELLED = "cancelled"


def outcome_of(error: ServiceError) -> Outcome:
    """Return how a receive has ended that was refused with `error`."""
    if isinstance(error, Overloaded):
        return Outcome.THROTTLED
    if isinstance(error, ConnectionBufferFull):
        return Outcome.NO_ROOM
    return Outcome.EMPTY if isinstance(error, MessageNotFound) else Outcome.FAILED


class Pop(NamedTuple):
    """Pop at a broker, and let it wait there for so long."""

    broker: Broker
    poll_ms: int


class End(NamedTuple):
    """The poll is over; `error` where it failed."""

    outcome: Outcome
    error: ServiceError | None = None


Step: TypeAlias = Pop | End | None  # None: wait until it is another one


@final
class Poll:
    """One receive."""

    __slots__ = (
        "_to_ask",
        "began_ms",
        "end_ms",
        "error",
        "has_heard",
        "has_looked",
        "hinted_by",
        "is_direct",
        "is_long",
        "is_stopping",
        "mode",
        "number",
        "pair",
        "parked_at",
        "state",
        "step",
    )

    def __init__(
        self, pair: Pair, number: int, *, began_ms: int, end_ms: int, is_long: bool, is_direct: bool
    ) -> None:
        self.pair = pair
        self.number = number  # in the order in which they came
        self.began_ms = began_ms
        self.end_ms = end_ms
        self.is_long = is_long  # It may wait.
        self.is_direct = is_direct  # It waits at brokers and not for hints.
        self.mode: Final[Name] = "direct" if is_direct else "notify"  # in which it began
        self.state = State.INIT
        self.step: Step = None
        self.error: ServiceError | None = None  # the last one of a pop
        self.has_heard = False  # Some broker has answered.
        self.has_looked = False  # The last look is over, or under way.
        self.parked_at: Broker | None = None
        self.is_stopping = False  # Its pop was told to break off.
        self.hinted_by: Broker | None = None  # whose hint the pop under way follows
        self._to_ask: list[Broker] = []

    @property
    def hard_end_ms(self) -> int:
        """When it ends whatever is under way."""
        return self.end_ms + LAST_LOOK_MS

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.state is State.DONE

    def ask(self, brokers: Sequence[Broker]) -> None:
        """Pop at each of `brokers` in turn, without waiting there, until one has something."""
        assert self.state in {State.INIT, State.WAITING}, "one pop at a time"
        self._to_ask = list(reversed(brokers))
        self._leave_waiting()
        self._ask_next()

    def leave_out(self, broker: Broker) -> None:
        """Do not ask a broker any more."""
        if broker in self._to_ask:
            self._to_ask.remove(broker)

    def park(self, broker: Broker, now_ms: int) -> None:
        """Pop at `broker`, and wait there to the end."""
        self.follow(broker, poll_ms=max(self.end_ms - now_ms, 0))
        self.hinted_by, self.parked_at = None, broker

    def follow(self, broker: Broker, *, poll_ms: int) -> None:
        """Pop where a hint points."""
        assert self.state in {State.INIT, State.WAITING}, "one pop at a time"
        self._leave_waiting()
        self.hinted_by = broker
        self.step = Pop(broker, poll_ms)

    def wait(self) -> None:
        """Wait from the beginning: there is nobody to ask."""
        assert self.state is State.INIT
        self.state = State.WAITING

    def found(self, *, was_parked: bool) -> bool:
        """End with what a pop has found; False: it has ended before, and this goes back."""
        if self.is_done:
            return False
        is_first = self.state is State.FIRST_POP and not (
            was_parked or self.has_heard or self.error
        )
        self.end(End(Outcome.FOUND_AT_FIRST if is_first else Outcome.FOUND))
        return True

    def missed(self, error: ServiceError | None = None) -> bool:
        """Go on behind a pop that found nothing, or failed; True: it waits now."""
        if self.is_done:
            return False
        if error is not None:
            self.error = error
        elif not self.is_stopping:
            self.has_heard = True
        self.hinted_by = self.parked_at = None
        self.is_stopping = False
        if self._to_ask:
            self._ask_next()
            return False
        self.state, self.step = State.WAITING, None
        return True

    def end(self, end: End) -> None:
        """End; nothing that comes later changes it."""
        assert not self.is_done, "a poll ends once"
        self.state, self.step = State.DONE, end

    @property
    def has_pop(self) -> bool:
        """Whether a pop is under way."""
        return self.state in {State.FIRST_POP, State.CONSUMING}

    def _leave_waiting(self) -> None:
        self.state = State.FIRST_POP if self.state is State.INIT else State.CONSUMING

    def _ask_next(self) -> None:
        self.step = Pop(self._to_ask.pop(), 0)
