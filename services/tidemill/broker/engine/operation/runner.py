"""The runner of operations: it changes items in slices, at the rate of each operation.

The log has the cursor of each operation, because each record of an item names the operation. The
runner only knows in addition how far it has looked behind the cursor, and when the next item is
allowed. A new owner looks again at items without a match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

from tidemill.broker.engine.layout.entry import Recorder
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.operation import (
    ItemFailure,
    ItemsFailed,
    Operation,
    OperationBegun,
    OperationEnded,
    OperationState,
)
from tidemill.broker.engine.metadata.catalog import Catalog
from tidemill.broker.engine.metadata.operations import RUNNING_MAX
from tidemill.broker.engine.room import DiskRoom
from tidemill.common.errors import DiskFull, OperationNotFound, Overloaded, Repairing, ServiceError

ITEMS_A_SLICE: Final = 16  # changed items, each as large as a message
BURST_MS: Final = 100  # an operation may catch up on its rate for this time
# Between two bursts of items. A steady flow of records would make the sync of each send wait.
PERIOD_MS: Final = 20
RETRY_MS: Final = 1_000  # after a full disk, or while a message is mended


class OperationWork(Protocol):
    """The change of the items of one kind of operation."""

    def run(self, operation: Operation, position: int, turn: OperationTurn) -> WorkResult:
        """Look at items from a position on, and change up to `items_max` that match, in a slice.

        Each record names the operation. A slice ends before it changes an item behind one that it
        could not change. Raises ServiceError; Repairing if a retry helps.
        """
        ...


class OperationTurn(NamedTuple):
    """The bound and the times of one slice of an operation."""

    items_max: int
    now_ms: int
    firing_ms: int  # decides which timers are due


class FailedOperation(NamedTuple):
    """An operation that has failed, for the log of the broker."""

    operation_id: LogOffset
    reason: str
    defect: Exception | None  # None: an error with a known cause


@final
class WorkResult:
    """The part of an operation that a slice has done."""

    __slots__ = ("changed_count", "failures", "position")

    def __init__(
        self, position: int, changed_count: int, failures: Sequence[ItemFailure] = ()
    ) -> None:
        self.position = position  # the items before it need no other look
        self.changed_count = changed_count
        self.failures = failures  # items behind the changed ones that match and cannot be changed


@final
class _Pace:
    """How far the runner is with an operation, and when it continues. Monotonic times."""

    __slots__ = ("allowed_at_ms", "burst_at_ms", "position")

    def __init__(self, position: int, now_ms: int) -> None:
        self.position = position
        self.allowed_at_ms = float(now_ms)  # of the next item
        self.burst_at_ms = now_ms  # of the next burst

    @property
    def due_at_ms(self) -> float:
        """When the next slice is due."""
        return max(self.allowed_at_ms, self.burst_at_ms)

    def items_max(self, rate_per_s: int, monotonic_ms: int) -> int:
        """Return how many items are allowed now."""
        self.allowed_at_ms = max(self.allowed_at_ms, monotonic_ms - BURST_MS)
        if self.due_at_ms > monotonic_ms:
            return 0
        allowed = int((monotonic_ms - self.allowed_at_ms) * rate_per_s / 1_000) + 1
        return min(allowed, ITEMS_A_SLICE)


@final
class OperationRunner:
    """Begins, runs, cancels and ends the operations of one broker group."""

    def __init__(
        self,
        catalog: Catalog,
        recorder: Recorder,
        room: DiskRoom,
        works: Mapping[int, OperationWork],
        state_mark: Callable[[], object],
    ) -> None:
        """`state_mark` returns a value that changes with every change of the state."""
        self._catalog = catalog
        self._recorder = recorder
        self._room = room
        self._works = works
        self._state_mark = state_mark
        self._failed: deque[FailedOperation] = deque(maxlen=RUNNING_MAX)
        self._paces: dict[LogOffset, _Pace] = {}
        self._monotonic_ms = 0  # of the last turn

    @property
    def _operations(self) -> dict[LogOffset, Operation]:
        return self._catalog.operations.by_id

    def begin(self, entry: OperationBegun, now_ms: int) -> Operation:
        """Begin an operation. Raises Overloaded."""
        if len(self._catalog.operations.running) >= RUNNING_MAX:
            raise Overloaded(
                f"{RUNNING_MAX} operations run at broker group {self._catalog.broker_name}, the"
                f" limit; wait for one of them, or cancel one"
            )
        return self._operations[self._recorder.append(entry, now_ms)]

    def find(self, operation_id: int) -> Operation:
        """Return an operation. Raises OperationNotFound."""
        found = self._operations.get(LogOffset(operation_id))
        if found is None:
            raise OperationNotFound(
                f"broker group {self._catalog.broker_name} has no operation {operation_id}; it"
                f" remembers the last 1,000 for 7 days"
            )
        return found

    def cancel(self, operation_id: int, now_ms: int) -> Operation:
        """End an operation; its completed items stay. One that has ended stays as it is.

        Raises OperationNotFound.
        """
        found = self.find(operation_id)
        if found.is_running:
            self._end(found, OperationState.CANCELLED, now_ms)
        return found

    def _end(
        self, operation: Operation, state: OperationState, now_ms: int, error: str = ""
    ) -> None:
        self._recorder.append(OperationEnded(operation.id, state, error), now_ms)
        self._paces.pop(operation.id, None)

    def _fail(
        self, operation: Operation, reason: str, now_ms: int, defect: Exception | None = None
    ) -> None:
        self._end(operation, OperationState.FAILED, now_ms, reason)
        self._failed.append(FailedOperation(operation.id, reason, defect))

    def take_notices(self) -> list[FailedOperation]:
        """Return and clear the newest operations that have failed."""
        failed = list(self._failed)
        self._failed.clear()
        return failed

    # ------------------------------------------------------------ turns

    def due_slices(
        self, now_ms: int, *, firing_ms: int, monotonic_ms: int
    ) -> Generator[None, None, bool]:
        """Run one slice of each operation that is due. Return whether more is due at once."""
        self._monotonic_ms = monotonic_ms
        has_more = False
        for operation in self._catalog.operations.running:
            pace = self._paces.get(operation.id)
            if pace is None:
                pace = self._paces[operation.id] = _Pace(operation.cursor, monotonic_ms)
            items_max = pace.items_max(operation.rate_per_s, monotonic_ms)
            if not items_max:
                continue
            self._run(operation, pace, OperationTurn(items_max, now_ms, firing_ms))
            has_more |= operation.is_running and pace.due_at_ms <= monotonic_ms
            yield
        return has_more

    def _run(self, operation: Operation, pace: _Pace, turn: OperationTurn) -> None:
        if not self._room.may_copy:
            pace.allowed_at_ms = self._monotonic_ms + RETRY_MS
            return
        work = self._works[operation.kind]
        before = self._state_mark()
        try:
            result = work.run(operation, pace.position, turn)
        except (Repairing, DiskFull):
            pace.allowed_at_ms = self._monotonic_ms + RETRY_MS
            return
        except ServiceError as error:
            self._fail(operation, error.message, turn.now_ms)
            return
        except (AssertionError, OSError):
            raise
        except Exception as error:
            # After half a change, only recovery from the log gives a valid state again. The cursor
            # is then behind the items that are done, so the next start fails here without a change.
            if self._state_mark() != before:
                raise
            reason = f"unexpected {type(error).__name__}: {error}; the broker's log has the details"
            self._fail(operation, reason, turn.now_ms, error)
            return
        if result.failures:
            failed = ItemsFailed(operation.id, result.position, list(result.failures))
            self._recorder.append(failed, turn.now_ms)
        pace.position = result.position
        pace.allowed_at_ms += result.changed_count * 1_000 / operation.rate_per_s
        if pace.allowed_at_ms > self._monotonic_ms:
            pace.burst_at_ms = self._monotonic_ms + PERIOD_MS
        if pace.position >= operation.end:
            self._end(operation, OperationState.DONE, turn.now_ms)

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the wall time of the next turn; None: no operation runs."""
        running = self._catalog.operations.running
        if not running:
            return None
        waits = [
            0.0 if pace is None else pace.due_at_ms - self._monotonic_ms
            for pace in [self._paces.get(one.id) for one in running]
        ]
        return now_ms + max(int(min(waits)), 0)
