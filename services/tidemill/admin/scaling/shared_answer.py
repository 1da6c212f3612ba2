"""A cached answer that concurrent callers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, final

T = TypeVar("T")

# Maximum age of an answer for autoscalers, which ask every few seconds. Consumers take longer to
# start.
ANSWER_AGE_S_MAX: Final = 2.0


@final
class SharedAnswer(Generic[T]):
    """The last answer of a function, and its call in progress."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        tasks: asyncio.TaskGroup,
        *,
        now_s: Callable[[], float] = time.monotonic,
        pause_factor: int = 0,
        age_s_max: float = ANSWER_AGE_S_MAX,
    ) -> None:
        """Call `ask` in `tasks`, then pause `pause_factor` times as long as the call took.

        An answer is used until `age_s_max` after its call has begun, or until the end of the pause.
        """
        self._ask = ask
        self._tasks = tasks
        self._now_s = now_s
        self._pause_factor = pause_factor
        self._age_s_max = age_s_max
        self._answer: tuple[T] | None = None  # a tuple, since the answer may be None
        self._fresh_until_s = 0.0
        self._call: asyncio.Future[T] | None = None
        self.used_at_s = now_s()

    async def get(self) -> T:
        """Return a fresh answer. Raises the error of the call; errors are not cached."""
        self.used_at_s = self._now_s()
        if self._answer is not None and self.used_at_s < self._fresh_until_s:
            return self._answer[0]
        return await self.ask()

    async def ask(self) -> T:
        """Return the answer of the call in progress, or of a new one."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_future()
            # Mark the error as retrieved, since all callers may have been cancelled.
            self._call.add_done_callback(lambda call: call.cancelled() or call.exception())
            self._tasks.create_task(self._run(self._call), name="shared answer")
        # A cancelled caller must not cancel the call, which others share.
        return await asyncio.shield(self._call)

    async def _run(self, call: asyncio.Future[T]) -> None:
        began_at_s = self._now_s()
        try:
            answer = await self._ask()
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:  # noqa: BLE001  # The callers receive each error.
            call.set_exception(error)
        else:
            took_s = self._now_s() - began_at_s
            self._answer = (answer,)
            self._fresh_until_s = began_at_s + max(self._age_s_max, took_s * self._pause_factor)
            call.set_result(answer)
        finally:
            self._call = None
