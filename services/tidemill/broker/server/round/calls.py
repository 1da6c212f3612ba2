"""Calls that run in a round, such as those of the admin process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, cast, final

import structlog

from tidemill.common.errors import ServiceError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.turn import Turn

log = structlog.get_logger()

T = TypeVar("T")

# A broken invariant or a failing disk: the broker ends, no matter what the call has changed.
FATAL = (AssertionError, OSError)


@final
class RoundCall(Generic[T]):
    """A call as work of a round, and its result as an effect."""

    size_bytes = 1024  # of memory, about

    def __init__(self, function: Callable[[Engine, Turn], Generator[None, None, T]]) -> None:
        self._function = function
        self._outcome: T | Exception | None = None
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def apply(self, turn: Turn) -> Iterator[None]:
        """Run the function, unless its caller was cancelled."""
        if self.result.cancelled():
            return
        turn.effects[self] = self
        before = turn.engine.state_mark
        try:
            self._outcome = yield from self._function(turn.engine, turn)
        except ServiceError as error:
            self._outcome = error
        except FATAL:
            raise
        except Exception as error:
            # After half a change, only recovery from the log gives a valid state again. A call
            # that has changed nothing fails alone.
            if turn.engine.state_mark != before:
                raise
            log.exception("call failed unexpectedly, nothing changed")
            self._outcome = error
        yield

    def release(self) -> Iterator[None]:
        """Set the result."""
        if self.result.cancelled():
            return
        if isinstance(self._outcome, Exception):
            self.result.set_exception(self._outcome)
        else:
            self.result.set_result(cast("T", self._outcome))
        yield


def do_nothing(_engine: Engine, _turn: Turn) -> Generator[None, None, None]:
    """Do nothing: such a call is a barrier."""
    yield from ()
