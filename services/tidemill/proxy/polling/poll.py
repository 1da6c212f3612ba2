"""One receive as a state machine.

    INIT ──> FIRST_POP ──> WAITING <──> CONSUMING
                 └────────────┴─────────────┴──────> DONE

    FIRST_POP   the first pop, or a parked one, is in flight
    WAITING     for a hint, or for any broker if none was reachable at the begin
    CONSUMING   a pop at the broker of a hint, or a last pop
    DONE        found, empty, failed or cancelled

The pair decides the next step of a waiting poll. Invariants of each poll: at most one pop is in
flight; the poll ends once; messages popped after the end go back to the broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar, final

from tidemill.common.errors import ConnectionBufferFull, MessageNotFound, Overloaded
from tidemill.proxy.polling.level_order import FACTOR_MAX, FAIR, NO_LEVEL

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.polling.level_order import LevelChoice
    from tidemill.proxy.polling.mode import WaitModeName

# Time after the poll duration for the last pops at brokers without a notification: half of the
# default deadline_reserve_ms.
LAST_LOOK_MS: Final = 100

# Pops of one poll that find nothing below the level that another broker is known to have. If other
# consumers were faster that often, the poll takes what it gets.
CONDITIONS_MAX: Final = 3

PairT = TypeVar("PairT")  # PollPair, which imports this module
Broker: TypeAlias = str  # the name of a broker group


class PollState(Enum):
    """State of a poll."""

    INIT = 0
    FIRST_POP = 1
    WAITING = 2
    CONSUMING = 3
    DONE = 4


class Outcome(Enum):
    """Outcome of a poll; the value is its label in metrics."""

    FOUND = "notified"
    FOUND_AT_FIRST = "first_pop"
    EMPTY = "timeout_empty"
    FAILED = "error"
    THROTTLED = "throttled"
    NO_ROOM = "no_room"
    CANCELLED = "cancelled"


def outcome_of(error: ServiceError) -> Outcome:
    """Return the outcome of a receive that failed with `error`."""
    if isinstance(error, Overloaded):
        return Outcome.THROTTLED
    if isinstance(error, ConnectionBufferFull):
        return Outcome.NO_ROOM
    return Outcome.EMPTY if isinstance(error, MessageNotFound) else Outcome.FAILED


class PopStep(NamedTuple):
    """Step: pop at a broker, with a poll duration.

    Of a PRIORITY topic, the pop finds nothing below `level_min`. With a `choice`, the pop has its
    own factor, and the proxy accounts for its messages.
    """

    broker: Broker
    poll_ms: int
    level_min: int = 0
    choice: LevelChoice | None = None

    @property
    def factor(self) -> int | None:
        """The factor of this pop; None: that of the consumer group."""
        return None if self.choice is None else self.choice.factor

    @property
    def level_below(self) -> int:
        """The pop finds nothing from this level on; 0: it finds all levels."""
        is_fair = self.choice is not None and self.choice.factor == FAIR
        return self.choice.highest if self.choice is not None and is_fair else 0


class PollEnd(NamedTuple):
    """Step: the poll has ended, with an error if it failed."""

    outcome: Outcome
    error: ServiceError | None = None


Step: TypeAlias = PopStep | PollEnd | None  # None: wait for another step


@final
class ReceivePoll(Generic[PairT]):
    """One receive."""

    __slots__ = (
        "_conditions_left",
        "_to_ask",
        "began_ms",
        "end_ms",
        "error",
        "has_answer",
        "has_looked",
        "hinted_by",
        "is_direct",
        "is_long",
        "is_stopping",
        "max_messages",
        "mode",
        "number",
        "other_level",
        "pair",
        "parked_at",
        "state",
        "step",
    )

    def __init__(
        self,
        pair: PairT,
        number: int,
        *,
        began_ms: int,
        end_ms: int,
        is_long: bool,
        is_direct: bool,
        max_messages: int,
    ) -> None:
        self.pair = pair
        self.number = number  # in the order of arrival
        self.began_ms = began_ms
        self.end_ms = end_ms
        self.is_long = is_long  # whether it may wait
        self.max_messages = max_messages
        self.is_direct = is_direct  # whether it waits at brokers instead of for hints
        self.mode: Final[WaitModeName] = (
            "direct" if is_direct else "notify"
        )  # the mode at its begin
        self.state = PollState.INIT
        self.step: Step = None
        self.error: ServiceError | None = None  # the last one of a pop
        self.has_answer = False  # whether any broker has answered
        self.has_looked = False  # whether the last pops have begun
        self.parked_at: Broker | None = None
        self.is_stopping = False  # whether its pop was cancelled
        self.hinted_by: Broker | None = None  # broker of the hint that the pop follows
        # The highest level that other brokers were known to have when the pop was chosen.
        self.other_level = NO_LEVEL
        self._conditions_left = CONDITIONS_MAX
        self._to_ask: list[PopStep] = []

    @property
    def hard_end_ms(self) -> int:
        """Latest end of the poll."""
        return self.end_ms + LAST_LOOK_MS

    @property
    def is_done(self) -> bool:
        """Whether the poll has ended."""
        return self.state is PollState.DONE

    def ask(self, pops: Sequence[PopStep]) -> None:
        """Carry out `pops`, which do not wait, one after the other, until one finds something."""
        assert self.state in {PollState.INIT, PollState.WAITING}, "one pop at a time"
        self._to_ask = list(reversed(pops))
        self._leave_waiting()
        self._ask_next()

    def exclude(self, broker: Broker) -> None:
        """Remove a broker from the remaining pops."""
        self._to_ask = [pop for pop in self._to_ask if pop.broker != broker]

    def park(self, broker: Broker, now_ms: int) -> None:
        """Park a pop at `broker` until the end of the poll."""
        self.follow(broker, poll_ms=max(self.end_ms - now_ms, 0))
        self.hinted_by, self.parked_at = None, broker

    def follow(self, broker: Broker, *, poll_ms: int, choice: LevelChoice | None = None) -> None:
        """Pop at the broker of a hint.

        After CONDITIONS_MAX pops with a condition, the pop takes every level.
        """
        assert self.state in {PollState.INIT, PollState.WAITING}, "one pop at a time"
        self._leave_waiting()
        self.hinted_by = broker
        self.other_level = NO_LEVEL if choice is None else choice.other_level
        level_min = max(self.other_level, 0)
        is_conditional = level_min > 0 or (choice is not None and choice.factor == FAIR)
        if is_conditional and not self._conditions_left:
            # A strict pop, so that a lower level is an inversion.
            level_min, choice = 0, choice and choice._replace(factor=FACTOR_MAX)
            is_conditional = False
        self._conditions_left -= is_conditional
        has_factor = choice is not None and choice.factor is not None
        self.step = PopStep(broker, poll_ms, level_min, choice if has_factor else None)

    def wait(self) -> None:
        """Wait for a broker, because none is reachable."""
        assert self.state is PollState.INIT
        self.state = PollState.WAITING

    def found(self, *, was_parked: bool) -> bool:
        """End with the messages of a pop. Return False if the poll has ended before."""
        if self.is_done:
            return False
        is_first = self.state is PollState.FIRST_POP and not (
            was_parked or self.has_answer or self.error
        )
        self.end(PollEnd(Outcome.FOUND_AT_FIRST if is_first else Outcome.FOUND))
        return True

    def missed(self, error: ServiceError | None = None) -> bool:
        """Continue after a pop without messages. Return whether the poll waits now."""
        if self.is_done:
            return False
        if error is not None:
            self.error = error
        elif not self.is_stopping:
            self.has_answer = True
        self.hinted_by = self.parked_at = None
        self.is_stopping = False
        if self._to_ask:
            self._ask_next()
            return False
        self.state, self.step = PollState.WAITING, None
        return True

    def end(self, end: PollEnd) -> None:
        """End the poll. Later events do not change it."""
        assert not self.is_done, "a poll ends once"
        self.state, self.step = PollState.DONE, end

    @property
    def has_pop(self) -> bool:
        """Whether a pop is in flight."""
        return self.state in {PollState.FIRST_POP, PollState.CONSUMING}

    def _leave_waiting(self) -> None:
        self.state = PollState.FIRST_POP if self.state is PollState.INIT else PollState.CONSUMING

    def _ask_next(self) -> None:
        self.step = pop = self._to_ask.pop()
        self.other_level = pop.level_min or NO_LEVEL
