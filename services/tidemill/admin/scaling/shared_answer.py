"""One question, asked once for all who want its answer at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, final

T = TypeVar("T")

# An answer may be so old. A consumer takes longer to start, and autoscalers ask every few seconds.
ANSWER_AGE_S_MAX: Final = 2.0


@final
class SharedAnswer(Generic[T]):
    """The last answer, and the asking under way."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        tasks: asyncio.TaskGroup,
        *,
        now_s: Callable[[], float] = time.monotonic,
        rest: int = 0,
    ) -> None:
        """Ask by `ask`, in tasks of `tasks`, and then not for `rest` times as long as it took."""
        self._ask = ask
        self._tasks = tasks
        self._now_s = now_s
        self._rest = rest
        self._answer: tuple[T] | None = None  # of one that may be None itself
        self._fresh_until_s = 0.0
        self._asking: asyncio.Future[T] | None = None
        self.used_at_s = now_s()

    async def get(self) -> T:
        """Return an answer that is fresh. Raises what asking raises, and asks again next time."""
        self.used_at_s = self._now_s()
        if self._answer is not None and self.used_at_s < self._fresh_until_s:
            return self._answer[0]
        return await self.ask()

    async def ask(self) -> T:
        """Return the answer of the asking under way, or of a new one."""
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            # What nobody waits for any more was nobody's error.
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
            self._tasks.create_task(self._run(self._asking), name="scaling question")
        # Who waits may be cancelled; the asking is everybody's.
        return await asyncio.shield(self._asking)

    async def _run(self, asking: asyncio.Future[T]) -> None:
        began_at_s = self._now_s()
        try:
            answer = await self._ask()
        except asyncio.CancelledError:
            asking.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # Whatever it is, those who wait are told.
            asking.set_exception(error)
        else:
            took_s = self._now_s() - began_at_s
            self._answer = (answer,)
            self._fresh_until_s = began_at_s + max(ANSWER_AGE_S_MAX, took_s * self._rest)
            asking.set_result(answer)
        finally:
            self._asking = None
