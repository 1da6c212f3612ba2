"""Operations that the admin process runs itself. They are in its memory and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, final

import structlog

from tidemill.admin.http.request_access import RequestAccess
from tidemill.admin.json.operations import (
    ERRORS_MAX,
    OperationErrorView,
    OperationKindView,
    OperationStateView,
    OperationView,
)
from tidemill.common.clock import Clock
from tidemill.common.errors import IdempotencyMismatch, Overloaded

RUNNING_MAX: Final = 4
ENDED_MAX: Final = 100
LOST_KEPT_MS: Final = 7 * 86_400_000  # as long as the operations of brokers
PREFIX: Final = "admin"  # of the ids
# The kinds by the digit of their ids, which other versions read. The first one has never begun.
KINDS: Final = (
    OperationKindView.REPLAY_DEAD_LETTERS,
    OperationKindView.APPLY_DEFINITIONS,
    OperationKindView.SUPPORT_BUNDLE,
)
_ID: Final = re.compile(f"{PREFIX}:([0-9]{{13}})([12])[0-9]{{2}}")  # time (ms), kind, counter

log = structlog.get_logger()


@final
class OwnOperation:
    """One operation, with its progress."""

    def __init__(self, view: OperationView, *, user: str, key: str | None, digest: str) -> None:
        self._view = view
        self.user = user  # the owner that started it; see `owner_of`
        self.key = key  # of the Idempotency-Key and the user; None: none
        self.digest = digest  # of the request
        self.is_cancelled = False

    @property
    def view(self) -> OperationView:
        """The model of the operation as it is now."""
        return self._view.model_copy()

    def count(self) -> None:
        """Count an item as done."""
        self._view.done = (self._view.done or 0) + 1

    def fail(self, item: str, reason: str) -> None:
        """Count an item that could not be changed."""
        self._view.failed = (self._view.failed or 0) + 1
        listed = self._view.errors or []
        if len(listed) < ERRORS_MAX:
            self._view.errors = [*listed, OperationErrorView(id=item, outcome=reason)]

    def cancel(self) -> None:
        """End the operation after the present item. One that has ended stays as it is."""
        self.is_cancelled = self._view.ended_at_ms is None

    def end(self, state: OperationStateView, at_ms: int) -> None:
        """End the operation."""
        self._view.state, self._view.ended_at_ms = state, at_ms


Work = Callable[[OwnOperation], Awaitable[None]]


@final
class OwnOperations:
    """The operations of this process, the newest last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at_ms = clock.wall_ms()
        self._operations: dict[str, OwnOperation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = 0
        self._is_planning = False

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Prepare one operation at a time: it takes many calls. Raises Overloaded."""
        if self._is_planning:
            raise Overloaded("another file of definitions is compared now; try again")
        self._is_planning = True
        try:
            yield
        finally:
            self._is_planning = False

    def check_room(self, user: str) -> None:
        """Check that an owner may start one more operation. Raises Overloaded."""
        running = [one for one in self._operations.values() if one.view.ended_at_ms is None]
        if user and any(one.user == user for one in running):
            raise Overloaded(
                "you have a running operation of the admin process; wait for its end: `tidemill"
                " operation list --state running`"
            )
        if len(running) >= RUNNING_MAX:
            raise Overloaded(
                f"{RUNNING_MAX} operations of the admin process run already; wait for the end of"
                " one: `tidemill operation list --state running`"
            )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End all operations with the block."""
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def list(self) -> list[OwnOperation]:
        """Return all known operations."""
        return list(self._operations.values())

    def find(self, id_: str) -> OwnOperation | None:
        """Return an operation by its id."""
        return self._operations.get(id_)

    def find_lost(self, id_: str) -> OperationView | None:
        """Return an operation of another admin process, which may have ended; None: there is none.

        The id has the time of its begin. If that is before the start of this process, another
        process ran it. With several admin processes, the other one may still run it.
        """
        match = _ID.fullmatch(id_)
        if match is None:
            return None
        created_at_ms = int(match[1])
        oldest_ms = self._clock.wall_ms() - LOST_KEPT_MS
        if not oldest_ms <= created_at_ms < self._started_at_ms:
            return None
        return OperationView(
            id=id_,
            kind=KINDS[int(match[2])],
            state=OperationStateView.FAILED,
            error="its admin process has ended, or another admin process runs it",
            created_at_ms=created_at_ms,
        )

    def find_by_key(self, key: str | None, request: Any) -> OwnOperation | None:
        """Return the operation that a repeated request has started. Raises IdempotencyMismatch."""
        for one in self._operations.values():
            if key is not None and one.key == key:
                if one.digest != _digest(request):
                    raise IdempotencyMismatch(
                        f"this Idempotency-Key has started another operation, {one.view.id}; use a"
                        " new key"
                    )
                return one
        return None

    def start(
        self,
        kind: OperationKindView,
        work: Work,
        *,
        total: int,
        by: str,
        user: str,
        key: str | None = None,
        request: Any = None,
    ) -> OwnOperation:
        """Start an operation. `work` counts its items, and stops when it is cancelled.

        Raises Overloaded as `check_room`.
        """
        self.check_room(user)
        self._begun += 1
        now_ms = self._clock.wall_ms()
        view = OperationView(
            id=f"{PREFIX}:{now_ms:013}{KINDS.index(kind)}{self._begun % 100:02}",
            kind=kind,
            state=OperationStateView.RUNNING,
            by=by,
            created_at_ms=now_ms,
            total=total,
            done=0,
            failed=0,
        )
        operation = OwnOperation(view, user=user, key=key, digest=_digest(request))
        self._operations[view.id] = operation
        self._forget_oldest()
        task = asyncio.create_task(self._run(operation, work), name=f"operation {view.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    async def _run(self, operation: OwnOperation, work: Work) -> None:
        state = OperationStateView.FAILED  # unless the work ends
        try:
            await work(operation)
            if operation.is_cancelled:
                state = OperationStateView.CANCELLED
            elif not operation.view.failed:
                state = OperationStateView.DONE
        except Exception:  # A defect ends this operation alone.
            log.exception("operation failed", id=operation.view.id)
            operation.fail(operation.view.id, "internal error; see the log of the admin process")
        finally:
            operation.end(state, self._clock.wall_ms())

    def _forget_oldest(self) -> None:
        ended = [id_ for id_, one in self._operations.items() if one.view.ended_at_ms is not None]
        for id_ in ended[: max(len(ended) - ENDED_MAX, 0)]:
            del self._operations[id_]


def owner_of(access: RequestAccess) -> str:
    """Return the owner of an operation: a later user of the same name is another one.

    "": a caller without a verified user.
    """
    return f"{access.user} {access.user_id}" if access.user else ""


def _digest(request: Any) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
