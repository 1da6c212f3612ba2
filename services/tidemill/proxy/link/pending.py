"""Requests in flight on one link, with their deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

from tidemill.common.deadlines import Deadlines
from tidemill.common.errors import BY_NAME, BrokerUnreachable, Overloaded, from_wire
from tidemill.proxy.link.broker_parts import forget_parts, note_parts, parts_of

if TYPE_CHECKING:
    from tidemill.common.errors import ServiceError
    from tidemill.common.slow_calls import CallParts
    from tidemill.proxy.link.commands import LinkCommand, Row
    from tidemill.proxy.metrics import ProxyMetrics
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

SLOW_MAX: Final = 10_000  # requests with parts whose callers have not run; about 2 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """The limits of one link."""

    pending_max: int  # requests in flight
    pending_bytes_max: int  # of messages and acks in flight
    patience_ms: int  # time without a stream until requests are rejected
    clients_max: int  # in reports about clients


class Waiter(Protocol):
    """A future, or the answer to a call without a task, which ends with the request (ADR 0106)."""

    def done(self) -> bool:
        """Whether it needs no result any more."""

    def cancelled(self) -> bool:
        """Whether its caller was cancelled."""

    def set_result(self, result: Any, /) -> None:
        """Take the result."""

    def set_exception(self, exception: Exception, /) -> None:
        """Take the error."""


class PendingRequest(NamedTuple):
    """A request in flight."""

    command: LinkCommand[Any, Any]
    waiter: Waiter
    started_s: float  # time.monotonic(), since the loop's own clock counts whole milliseconds
    size_bytes: int
    was_sent: bool = False  # on a lost stream; it waits to be sent again


@final
class PendingRequests:
    """Requests in flight on one link, limited in number and in bytes.

    The link accepts requests while there is no stream, since a broker that restarts is back soon.
    After `patience_ms` without a stream it rejects them.

    Each request ends once: with its reply, or with an error of the broker, a timeout or a loss of
    the stream.
    """

    def __init__(
        self,
        address: str,
        metrics: ProxyMetrics,
        limits: LinkLimits,
        on_expired: Callable[[Collection[int]], None],
    ) -> None:
        """Call `on_expired` with requests that have timed out; it must `fail` each of them."""
        self.count_max = limits.pending_max
        self.bytes_max = limits.pending_bytes_max
        self.bytes = 0  # of messages and acks
        self.is_open = False  # whether there is a stream, and the broker's configuration
        self.closed_at_s = time.monotonic()  # when the broker was last heard on the last stream
        # The rows of each request that may be sent again on the next stream.
        self.repeatable: dict[int, Sequence[Row]] = {}
        # Requests that the caller can send to another broker: they fail when the stream is lost.
        self.movable: set[int] = set()
        # The duration and its parts, of ended requests that took long: until their callers run. At
        # most SLOW_MAX.
        self.slow: dict[int, tuple[float, CallParts]] = {}
        self._patience_s = limits.patience_ms / 1000
        self._address = address
        self._metrics = metrics
        self._on_expired = on_expired
        self.broker = ""  # its name; "" before its first configuration
        self._requests: dict[int, PendingRequest] = {}
        self._request_id = 0
        self._loop = asyncio.get_running_loop()
        # Deadlines of ended requests stay: all are near, and removing each would cost more.
        self._deadlines: Deadlines[int] = Deadlines(self._expire)

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._requests)

    def new_id(self) -> int:
        """Return an id for a request without a caller."""
        self._request_id += 1
        return self._request_id

    def begin(
        self, command: LinkCommand[Any, Any], timeout_ms: int, size_bytes: int = 0
    ) -> tuple[int, asyncio.Future[Any]]:
        """Begin a request; return its id, and a future of its result. Raises as `begin_for`."""
        future: asyncio.Future[Any] = self._loop.create_future()
        return self.begin_for(future, command, timeout_ms, size_bytes), future

    def begin_for(
        self, waiter: Waiter, command: LinkCommand[Any, Any], timeout_ms: int, size_bytes: int = 0
    ) -> int:
        """Begin a request; return its id.

        Raises Overloaded beyond the limits, which bound the memory of the proxy. Raises
        BrokerUnreachable if there has been no stream for too long.
        """
        if not self.is_open and self.is_given_up:
            raise BrokerUnreachable(f"there is no connection to the broker at {self._address}")
        requests = self._requests
        if len(requests) >= self.count_max or self.bytes + size_bytes > self.bytes_max:
            self._metrics.throttled += 1
            raise Overloaded(
                f"{len(requests)} requests with {self.bytes} bytes are in flight to the broker;"
                " retry after a pause"
            )
        self._request_id = request_id = self._request_id + 1
        self._deadlines.add(request_id, timeout_ms / 1000)
        requests[request_id] = PendingRequest(command, waiter, time.monotonic(), size_bytes)
        self.bytes += size_bytes
        return request_id

    @property
    def is_given_up(self) -> bool:
        """Whether there has been no stream for longer than the patience."""
        return not self.is_open and self.closed_for_s() > self._patience_s

    def closed_for_s(self) -> float:
        """Return the time without a stream."""
        return 0.0 if self.is_open else time.monotonic() - self.closed_at_s

    def was_sent(self, request_id: int) -> bool:
        """Whether a lost stream has sent a request."""
        return self._requests[request_id].was_sent

    def waited_ms(self, request_id: int) -> int:
        """Return the age of a request."""
        return int((time.monotonic() - self._requests[request_id].started_s) * 1000)

    def resolve(
        self, command: LinkCommand[Any, Any], results: Iterable[tuple[int, Any]]
    ) -> list[tuple[int, Any]]:
        """End requests with their results; return the results of requests without a caller."""
        requests, now_s = self._requests, time.monotonic()
        repeatable, movable = self.repeatable, self.movable
        label, observe = (self.broker, command.name, "success"), self._metrics.backend.observe
        unclaimed = []
        for request_id, result in results:
            request = requests.pop(request_id, None)
            repeatable.pop(request_id, None)
            movable.discard(request_id)
            if request is None:
                unclaimed.append((request_id, result))
                continue
            self.bytes -= request.size_bytes
            observe(label, (now_s - request.started_s) * 1000)
            if request.waiter.done():
                unclaimed.append((request_id, result))
            elif request.was_sent and request.command.when_repeated is not None:
                request.waiter.set_result(request.command.when_repeated(result))
            else:
                request.waiter.set_result(result)
        return unclaimed

    def timed(
        self, results: Iterable[tuple[int, Any]], times: link_pb2.RoundTimes
    ) -> Iterator[tuple[int, Any]]:
        """Yield `results`. The parts of a request are noted while the caller ends it."""
        now_s = time.monotonic()
        for request_id, result in results:
            request = self._requests.get(request_id)
            if request is None or request.waiter.done():
                yield request_id, result
                continue
            took_ms = (now_s - request.started_s) * 1000
            parts = parts_of(times, took_ms)
            if isinstance(request.waiter, asyncio.Future):  # Its task runs later.
                if len(self.slow) >= SLOW_MAX:
                    self.slow.clear()  # Their calls have no parts.
                self.slow[request_id] = took_ms, parts
            note_parts(took_ms, parts)
            yield request_id, result
            forget_parts()

    def fail(self, request_id: int, error: ServiceError, *, result: str = "refused") -> None:
        """End a request with `error`, counted as `result`."""
        request = self.forget(request_id)
        if request is not None:
            elapsed_s = time.monotonic() - request.started_s
            self._metrics.observe_backend(
                self.broker, request.command.name, result, elapsed_s * 1000
            )
            if not request.waiter.done():
                request.waiter.set_exception(error)

    def forget(self, request_id: int) -> PendingRequest | None:
        """Remove a request without a result; return it if it was in flight."""
        request = self._requests.pop(request_id, None)
        self.repeatable.pop(request_id, None)
        self.movable.discard(request_id)
        self.slow.pop(request_id, None)
        if request is not None:
            self.bytes -= request.size_bytes
        return request

    def open(self) -> None:
        """Note that there is a stream."""
        self.is_open = True

    def close(
        self, unsent: AbstractSet[int], *, silent_since_s: float
    ) -> list[tuple[LinkCommand[Any, Any], Sequence[Row]]]:
        """Note that the stream is lost; return the requests to send again on the next one.

        Sent requests fail unless they are repeatable. Requests in `unsent` wait for the next
        stream.
        """
        if self.is_open:
            # A broker that hangs is down since it was last heard, not since the stream ended.
            self.is_open, self.closed_at_s = False, silent_since_s
        repeated = []
        for request_id, request in list(self._requests.items()):
            if request_id in unsent:
                continue
            if request.waiter.cancelled():
                self.forget(request_id)
            elif request_id in self.repeatable:
                self._requests[request_id] = request._replace(was_sent=True)
                repeated.append((request.command, self.repeatable[request_id]))
            else:
                reason = f"the connection to the broker was lost; {request.command.when_lost}"
                self.fail(request_id, BrokerUnreachable(reason))
        return repeated

    def fail_all(self, reason: str) -> None:
        """Fail every request: the broker will not answer."""
        for request_id in list(self._requests):
            self.fail(request_id, BrokerUnreachable(reason))

    def _expire(self, request_ids: Iterable[int]) -> None:
        requests = self._requests
        if expired := [request_id for request_id in request_ids if request_id in requests]:
            self._on_expired(expired)


def error_of(failure: link_pb2.Failure) -> ServiceError:
    """Return the error that a broker has answered."""
    # A broker of a newer release may send errors that this proxy does not know.
    if failure.error not in BY_NAME:
        return BrokerUnreachable(
            f"the broker rejected the request: {failure.error}: {failure.message}"
        )
    return from_wire(failure.error, failure.message)
