"""Who waits for the broker's reply, and until when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, final

from tidemill.common.deadlines import Deadlines
from tidemill.common.errors import BrokerUnreachable, Overloaded

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.proxy.link.commands import LinkCommand, Row
    from tidemill.proxy.metrics import ProxyMetrics


class PendingRequest(NamedTuple):
    """A request whose reply is awaited."""

    command: LinkCommand[Any, Any]
    future: asyncio.Future[Any]
    started_s: float  # time.monotonic(), since the loop's own clock counts whole milliseconds
    size_bytes: int
    was_sent: bool = False  # on a stream that is lost, and is asked again


@final
class PendingRequests:
    """Requests under way on one link, bounded in number and in bytes.

    They are taken while there is no stream as well, and leave when there is one: a broker that
    restarts is back soon. Who has waited for one for `patience_ms` already takes no more.

    Each ends once: with its reply, refused, or because its time is up or its stream is lost.
    """

    def __init__(
        self,
        address: str,
        metrics: ProxyMetrics,
        *,
        count_max: int,
        bytes_max: int,
        patience_ms: int,
        on_expired: Callable[[Collection[int]], None],
    ) -> None:
        """Call `on_expired` with requests whose time is up; it is to `fail` each of them."""
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.bytes = 0  # of messages and acks
        self.is_open = False  # whether there is a stream, and the broker's configuration
        self.closed_at_s = time.monotonic()  # when the last stream gave its last sign of life
        # Of requests that may be asked again, what they ask: one row, or those of one request.
        self.repeatable: dict[int, Sequence[Row]] = {}
        # Requests that somebody else may be asked: they do not wait for another stream.
        self.movable: set[int] = set()
        self._patience_s = patience_ms / 1000
        self._address = address
        self._metrics = metrics
        self._on_expired = on_expired
        self.broker = ""  # its name, once it has told
        self._requests: dict[int, PendingRequest] = {}
        self._request_id = 0
        self._loop = asyncio.get_running_loop()
        # Nothing is discarded: all deadlines are near, and most requests end in milliseconds.
        self._deadlines: Deadlines[int] = Deadlines(self._expire)

    def __len__(self) -> int:
        """Return how many requests are under way."""
        return len(self._requests)

    def new_id(self) -> int:
        """Return the id of a request that nobody waits for."""
        self._request_id += 1
        return self._request_id

    def begin(
        self, command: LinkCommand[Any, Any], timeout_ms: int, size_bytes: int = 0
    ) -> tuple[int, asyncio.Future[Any]]:
        """Return the id of a request, and what its reply will be put into.

        Raises Overloaded beyond the limits: what waits here is memory of the proxy; and
        BrokerUnreachable when there has been no stream for too long.
        """
        if not self.is_open and self.is_given_up:
            raise BrokerUnreachable(f"there is no connection to the broker at {self._address}")
        waiting = self._requests
        if len(waiting) >= self.count_max or self.bytes + size_bytes > self.bytes_max:
            self._metrics.throttled += 1
            raise Overloaded(
                f"{len(waiting)} requests with {self.bytes} bytes wait for the"
                " broker already; repeat after a pause"
            )
        self._request_id = request_id = self._request_id + 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._deadlines.add(request_id, timeout_ms / 1000)
        waiting[request_id] = PendingRequest(command, future, time.monotonic(), size_bytes)
        self.bytes += size_bytes
        return request_id, future

    @property
    def is_given_up(self) -> bool:
        """Whether there has been no stream for so long that none is waited for."""
        return not self.is_open and self.closed_for_s() > self._patience_s

    def closed_for_s(self) -> float:
        """Return for how long there has been no stream."""
        return 0.0 if self.is_open else time.monotonic() - self.closed_at_s

    def was_sent(self, request_id: int) -> bool:
        """Whether a request has left once, on a stream that was lost."""
        return self._requests[request_id].was_sent

    def waited_ms(self, request_id: int) -> int:
        """Return how long a request has been under way."""
        return int((time.monotonic() - self._requests[request_id].started_s) * 1000)

    def resolve(
        self, command: LinkCommand[Any, Any], results: Iterable[tuple[int, Any]]
    ) -> list[tuple[int, Any]]:
        """Hand results to who waits for them; return those of requests that nobody waits for."""
        waiting, now_s = self._requests, time.monotonic()
        repeatable, movable = self.repeatable, self.movable
        label, observe = (self.broker, command.name, "success"), self._metrics.backend.observe
        unclaimed = []
        for request_id, result in results:
            request = waiting.pop(request_id, None)
            repeatable.pop(request_id, None)
            movable.discard(request_id)
            if request is None:
                unclaimed.append((request_id, result))
                continue
            self.bytes -= request.size_bytes
            observe(label, (now_s - request.started_s) * 1000)
            if request.future.done():
                unclaimed.append((request_id, result))
            elif request.was_sent and request.command.when_repeated is not None:
                request.future.set_result(request.command.when_repeated(result))
            else:
                request.future.set_result(result)
        return unclaimed

    def fail(self, request_id: int, error: ServiceError, *, result: str = "refused") -> None:
        """End a request with `error`, counted as `result`."""
        request = self.forget(request_id)
        if request is not None:
            elapsed_s = time.monotonic() - request.started_s
            self._metrics.observe_backend(
                self.broker, request.command.name, result, elapsed_s * 1000
            )
            if not request.future.done():
                request.future.set_exception(error)

    def forget(self, request_id: int) -> PendingRequest | None:
        """Let a request go without a result; return it if it was under way."""
        request = self._requests.pop(request_id, None)
        self.repeatable.pop(request_id, None)
        self.movable.discard(request_id)
        if request is not None:
            self.bytes -= request.size_bytes
        return request

    def open(self) -> None:
        """Know that there is a stream."""
        self.is_open = True

    def close(
        self, unsent: AbstractSet[int], *, silent_since_s: float
    ) -> list[tuple[LinkCommand[Any, Any], Sequence[Row]]]:
        """Know that the stream is lost; return what is to be asked again on the next one.

        All that had left fails, but for what may be asked again; what is `unsent` waits on.
        """
        if self.is_open:
            # One that hung was away long before it was given up.
            self.is_open, self.closed_at_s = False, silent_since_s
        again = []
        for request_id, request in list(self._requests.items()):
            if request_id in unsent:
                continue
            if request.future.cancelled():
                self.forget(request_id)
            elif request_id in self.repeatable:
                self._requests[request_id] = request._replace(was_sent=True)
                again.append((request.command, self.repeatable[request_id]))
            else:
                reason = f"the connection to the broker was lost; {request.command.when_lost}"
                self.fail(request_id, BrokerUnreachable(reason))
        return again

    def fail_all(self, reason: str) -> None:
        """End every request: who could answer is gone for good."""
        for request_id in list(self._requests):
            self.fail(request_id, BrokerUnreachable(reason))

    def _expire(self, request_ids: Iterable[int]) -> None:
        waiting = self._requests
        if expired := [request_id for request_id in request_ids if request_id in waiting]:
            self._on_expired(expired)
