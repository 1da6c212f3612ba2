"""The interface of the link: requests to one broker, and its configuration."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, final

import structlog

from tidemill.common.errors import (
    BrokerTimeout,
    BrokerUnreachable,
    TooFewInSync,
    VersionUnsupported,
)
from tidemill.common.log import LEVEL
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.proxy.link.batching import FrameBatcher
from tidemill.proxy.link.broker_configuration import BrokerConfiguration
from tidemill.proxy.link.broker_parts import note_parts
from tidemill.proxy.link.client_reports import ClientReports, revoked_rights
from tidemill.proxy.link.commands import ACK, APPEND, CHANGE_INVISIBLE, COMMANDS, NOTIFICATION, POP
from tidemill.proxy.link.link_state import LinkObserver, LinkState
from tidemill.proxy.link.pending import PendingRequests, error_of
from tidemill.proxy.link.pops import PopInFlight, PoppedBatch, PopsInFlight
from tidemill.proxy.link.stream import SILENT_S, LinkStream
from tidemill.transport.aio.channel import connected

if TYPE_CHECKING:
    from tidemill.message.receipt_handle import HandleFields
    from tidemill.proxy.link.commands import Appended, LinkCommand, Request, Result
    from tidemill.proxy.link.pending import LinkLimits, Waiter
    from tidemill.proxy.metrics import ProxyMetrics
    from tidemill.security.acl import Resource
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
    from tidemill.transport.aio.connect import Connector
    from tidemill.transport.routes.master_routes import MasterRoutes

log = structlog.get_logger()

LOGGED_NAMES_MAX = 20  # names in a debug line; the first configuration has all of them
ACK_BYTES = 200  # approximate memory of an ack in flight
_UNKNOWN = "the broker did not answer in time; the outcome is unknown"
_NOT_SENT = "the request was not sent in time and has done nothing; retry later"
_PARKED = POP, NOTIFICATION  # They wait for messages, so their time has no parts.
_BY_REPLY_FIELD = {command.reply_field: command for command in COMMANDS}


@final
class BrokerLink:
    """The link to one broker, or to the master of a broker group.

    It is one class, because the end of its stream ends or keeps the requests of all its parts.
    """

    def __init__(
        self,
        address: str,
        metrics: ProxyMetrics,
        limits: LinkLimits,
        *,
        connect: Connector = connected,
        routes: MasterRoutes | None = None,
    ) -> None:
        """Link to the broker at `address`; with `routes`, to the master of its broker group."""
        self.address = address
        self.on_change: Callable[[], None] = lambda: None  # of the configuration
        self.configuration = BrokerConfiguration()
        # Set once the first configuration has been applied, with all security items.
        self.configured = asyncio.Event()
        self._is_greeted = False  # the configuration has arrived on this stream
        self._why_rejected = ""  # why the broker can confirm no message; "": it can
        self._metrics = metrics
        self._stream = LinkStream(
            address, receive=self._receive, on_end=self._close, connect=connect, routes=routes
        )
        self.pending = PendingRequests(address, metrics, limits, self._expire)
        self._reports = ClientReports(clients_max=limits.clients_max)
        self.batching = FrameBatcher(self.pending, self._stream.write, self._reports)
        self._pops = PopsInFlight(self.pending, self.batching)
        self._loop = asyncio.get_running_loop()
        self._observers: list[LinkObserver] = []  # few, added at the start

    @property
    def is_connected(self) -> bool:
        """Whether the configuration has arrived on this stream."""
        return self.pending.is_open

    @property
    def is_given_up(self) -> bool:
        """Whether the broker has been down for so long that requests are rejected."""
        return self.pending.is_given_up

    @property
    def dialled(self) -> str:
        """The address dialled last: the present or the last known master."""
        return self._stream.dialled

    @property
    def is_up(self) -> bool:
        """Whether the broker is connected and answers. Called for each message and broker."""
        return (
            self.pending.is_open
            and self._stream.silent_s() <= SILENT_S
            and self.batching.unanswered_for_s() <= SILENT_S
        )

    def state(self) -> LinkState:
        """Return the reachability of the broker."""
        if not self.pending.is_open:
            return LinkState("down", self.pending.closed_for_s(), self._stream.reason)
        silent_s = self._stream.silent_s()
        if silent_s > SILENT_S:
            return LinkState("silent", silent_s, "connected, but the broker does not answer")
        unanswered_s = self.batching.unanswered_for_s()
        if unanswered_s > SILENT_S:
            return LinkState("silent", unanswered_s, "connected, but its disk does not answer")
        return LinkState("up", 0.0, "")

    def add_observer(self, observer: LinkObserver) -> None:
        """Notify `observer` of later changes of the link state."""
        self._observers.append(observer)

    async def run(self) -> None:
        """Keep the stream open until cancelled. Without a stream, requests wait for the next."""
        await self._stream.run()

    # ------------------------------------------------------------ requests

    # The methods below add the request to a frame at the call. Await their result at once.

    def ask(
        self, command: LinkCommand[Request, Result], request: Request, *, timeout_ms: int
    ) -> Coroutine[None, None, Result]:
        """Send one request, and return the result that the reply of the broker resolves to."""
        future: asyncio.Future[Result] = self._loop.create_future()
        self.ask_for(future, command, request, timeout_ms=timeout_ms)
        return self._reply(request.request_id, future)

    def ask_for(
        self,
        waiter: Waiter,
        command: LinkCommand[Request, Result],
        request: Request,
        *,
        timeout_ms: int,
    ) -> int:
        """Do as `ask`, but pass the result to `waiter`; return the id for `withdraw`."""
        request.request_id = request_id = self.pending.begin_for(waiter, command, timeout_ms)
        row = request_id, request
        if command.may_repeat:
            self.pending.repeatable[request_id] = (row,)
        self.batching.add(command, row)
        return request_id

    def withdraw(self, request_id: int) -> None:
        """Forget a request without a caller; do not send it if that has not happened yet."""
        self.pending.forget(request_id)
        self.batching.withdraw({request_id})

    def append(
        self,
        topic_id: int,
        queue_id: int,
        blob: bytes,
        *,
        timeout_ms: int,
        may_repeat: bool = False,
        may_move: bool = False,
        key_version: int = 0,
    ) -> Coroutine[None, None, Appended]:
        """Store or schedule a message, and return its position once it is durable.

        `may_repeat`: whether to send it again if the reply is lost; the broker then looks for it.
        `may_move`: whether to fail at once if the stream is lost; the caller tries another broker.
        `key_version`: of the list with which the dedup key was looked up at its old owner; else 0.
        """
        future: asyncio.Future[Appended] = self._loop.create_future()
        request_id = self.append_for(
            future,
            topic_id,
            queue_id,
            blob,
            timeout_ms=timeout_ms,
            may_repeat=may_repeat,
            may_move=may_move,
            key_version=key_version,
        )
        return self._reply(request_id, future)

    def append_for(
        self,
        waiter: Waiter,
        topic_id: int,
        queue_id: int,
        blob: bytes,
        *,
        timeout_ms: int,
        may_repeat: bool,
        may_move: bool,
        key_version: int = 0,
    ) -> int:
        """Do as `append`, but pass the position to `waiter`; return the id for `withdraw`."""
        if self._why_rejected:
            raise TooFewInSync.of(self.configuration.broker_name, self._why_rejected)
        request_id = self.pending.begin_for(waiter, APPEND, timeout_ms, len(blob))
        row = request_id, topic_id, queue_id, zlib.crc32(blob), blob, key_version
        if may_move:
            self.pending.movable.add(request_id)
        elif may_repeat:
            self.pending.repeatable[request_id] = (row,)
        self.batching.add(APPEND, row)
        return request_id

    def ack(
        self,
        group_id: int,
        topic_id: int,
        deliveries: Collection[HandleFields],
        *,
        owner: int = NO_OWNER,
        timeout_ms: int,
    ) -> Coroutine[None, None, list[int]]:
        """Settle deliveries of a user; return an AckResult or UNKNOWN_ACK for each, in order.

        `owner` is the id of the user, 0 for none.
        """
        future: asyncio.Future[list[int]] = self._loop.create_future()
        request_id = self.ack_for(
            future, group_id, topic_id, deliveries, owner=owner, timeout_ms=timeout_ms
        )
        return self._reply(request_id, future)

    def ack_for(
        self,
        waiter: Waiter,
        group_id: int,
        topic_id: int,
        deliveries: Collection[HandleFields],
        *,
        owner: int,
        timeout_ms: int,
    ) -> int:
        """Do as `ack`, but pass the results to `waiter`; return the id for `withdraw`."""
        request_id = self.pending.begin_for(waiter, ACK, timeout_ms, ACK_BYTES * len(deliveries))
        # All under one id: they travel in one frame, and so do their results.
        rows = [
            (request_id, group_id, topic_id, slot, delivery_id, index, visible_at_ms, owner)
            for slot, delivery_id, visible_at_ms, index in deliveries
        ]
        self.pending.repeatable[request_id] = rows
        self.batching.add_all(ACK, rows)
        return request_id

    def pop(
        self, request: link_pb2.PopRequest, *, timeout_ms: int
    ) -> Coroutine[None, None, link_pb2.PopReply]:
        """Pop messages. If the caller is cancelled, popped messages are given back."""
        future: asyncio.Future[link_pb2.PopReply]
        if request.sql:
            self.check_serves_sql()
        request_id, future = self.pending.begin(POP, timeout_ms)
        request.request_id = request_id
        if self._pops.are_released:
            request.poll_duration_ms = 0
        row = request_id, request
        self.pending.repeatable[request_id] = (row,)
        self.batching.add(POP, row)
        self._pops.add(request_id, request)
        return self._reply(request_id, future)

    async def _reply(self, request_id: int, future: asyncio.Future[Result]) -> Result:
        """Wait for the reply to a request. If the caller is cancelled, withdraw the request."""
        try:
            result = await future
        except (asyncio.CancelledError, BrokerTimeout):
            if self._pops.is_in_flight(request_id):
                self._metrics.messages_returned += self._pops.withdraw(request_id, future)
            else:
                self.withdraw(request_id)
            raise
        finally:
            # An error keeps its frames: the future that keeps the error may not be in one.
            del future
            self._pops.remove(request_id)
        if self.pending.slow and (slow := self.pending.slow.pop(request_id, None)):
            note_parts(*slow)
        return result

    def stop_pop(self, request_id: int) -> None:
        """End a pop empty at once: its caller no longer needs it."""
        self._pops.stop(request_id)

    def notify(
        self, request: link_pb2.NotificationRequest, *, timeout_ms: int
    ) -> asyncio.Future[link_pb2.NotificationReply]:
        """Ask whether messages are ready. The future fails if the link is lost."""
        future: asyncio.Future[link_pb2.NotificationReply]
        if request.sql:
            self.check_serves_sql()
        request.request_id, future = self.pending.begin(NOTIFICATION, timeout_ms)
        self.batching.add(NOTIFICATION, (request.request_id, request))
        return future

    def check_serves_sql(self) -> None:
        """Raise VersionUnsupported if the broker would ignore an SQL filter."""
        if not self.configuration.serves_sql_filters:
            raise self._lacks_sql()

    def _lacks_sql(self) -> VersionUnsupported:
        name = self.configuration.broker_name
        return VersionUnsupported(f"broker group {name} needs a newer version for SQL filters")

    def stop_notification(self, request_id: int) -> None:
        """Cancel a notification. Its future does not end."""
        self._pops.stop_notification(request_id)

    def give_back(
        self,
        group_id: int,
        topic_id: int,
        batches: Iterable[link_pb2.Batch | PoppedBatch],
        *,
        skip: int = 0,
    ) -> None:
        """Make all messages but the first `skip` visible again soon: no client has them."""
        pop = PopInFlight(group_id, topic_id)
        self._metrics.messages_returned += self._pops.give_back(pop, batches, skip=skip)

    def report_alive(self, client: ClientKey, now_ms: int) -> None:
        """Report soon that a consumer lives, by monotonic time."""
        if self._reports.add_alive(client, now_ms):
            self.batching.send_reports()

    def report_handovers(self, deliveries: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Report soon that a client has received deliveries, by slot and identity."""
        self._reports.add_handovers(deliveries, now_ms)
        self.batching.send_reports()

    def report_subscription(self, group: str, topic: str) -> None:
        """Report soon that a consumer subscribes to a topic that its group has not begun to read.

        If the broker does not know one of them, the first poll of the consumer creates it.
        """
        known_group = self.configuration.groups.get(group)
        known_topic = self.configuration.topics.get(topic)
        if known_group is None or known_topic is None:
            return
        homes_id = known_topic.home_id or known_topic.id
        is_begun = any(begun.topic_id == homes_id for begun in known_group.begun)
        if not is_begun and self._reports.add_subscription(known_group.id, known_topic.id):
            self.batching.send_reports()

    async def wait_reported(self) -> None:
        """Wait until the broker has all reports about clients."""
        await self.batching.wait_reported()

    def report_ended(self, client: ClientKey) -> None:
        """Report that a consumer has ended."""
        self._reports.add_ended(client)
        self.batching.send_reports()

    def report_revoked(self, client: ClientKey, lost: Collection[Resource]) -> None:
        """Report that a consumer has lost its rights on resources; without any, all of them."""
        if not lost:
            self._reports.add_ended(client)
        for revoked in revoked_rights(client, lost):
            self._reports.add_revoked(revoked)
        self.batching.send_reports()

    def report_disconnected(self, client: ClientKey) -> None:
        """Report that a consumer has had no connection to this proxy for some seconds."""
        self._reports.add_disconnected(client)
        self.batching.send_reports()

    def release_polls(self) -> None:
        """End every parked pop empty, and every later one at once: the process stops."""
        self._pops.release()
        for observer in self._observers:
            observer.on_released()

    def _expire(self, request_ids: Collection[int]) -> None:
        unsent = self.batching.withdraw(set(request_ids))
        for request_id in request_ids:
            was_sent = request_id not in unsent or self.pending.was_sent(request_id)
            outcome = _UNKNOWN if was_sent else _NOT_SENT
            self.pending.fail(request_id, BrokerTimeout(outcome), result="timeout")

    # ------------------------------------------------------------ replies

    def _receive(self, reply: link_pb2.ReplyFrame) -> None:
        """Apply one frame. Its configuration comes first, since its replies rely on it."""
        if reply.HasField("config"):
            self._configure(reply.config)
        if reply.HasField("sends_rejected"):
            self._note_rejection(reply.sends_rejected)
        if reply.answered_sequence:
            self.batching.mark_answered(reply.answered_sequence)
        for field, replies in reply.ListFields():
            command = _BY_REPLY_FIELD.get(field.name)
            if command is not None:
                results = command.unpack(replies)
                if reply.HasField("times") and command not in _PARKED:
                    results = self.pending.timed(results, reply.times)
                unclaimed = self.pending.resolve(command, results)
                if command is POP:
                    for _, pop in unclaimed:
                        self._metrics.messages_returned += self._pops.give_back_unclaimed(pop)
                elif command is CHANGE_INVISIBLE:
                    self._pops.forget_returns([request_id for request_id, _ in unclaimed])
        for failure in reply.failures:
            self._pops.forget_rejected(failure.request_id)
            self.pending.fail(failure.request_id, error_of(failure))

    def _note_rejection(self, why: str) -> None:
        """Refuse messages that were never sent, for as long as the broker can confirm none.

        Sent messages wait for their replies: the broker may have stored them.
        """
        self._why_rejected = why
        if not why:
            return
        rows = self.batching.rows_of(APPEND)
        unsent = {row[0] for row in rows if not self.pending.was_sent(row[0])}
        error = TooFewInSync.of(self.configuration.broker_name, why)
        for request_id in self.batching.withdraw(unsent):
            self.pending.fail(request_id, error)

    def _log_change(self, config: link_pb2.ConfigUpdate) -> None:
        """Log a change of the configuration."""
        log.debug(
            "configuration changed",
            topics=[topic.name for topic in config.topics[:LOGGED_NAMES_MAX]],
            groups=[group.name for group in config.groups[:LOGGED_NAMES_MAX]],
            topic_count=len(config.topics),
            group_count=len(config.groups),
            deleted_topic_ids=list(config.deleted_topic_ids[:LOGGED_NAMES_MAX]),
            deleted_group_ids=list(config.deleted_group_ids[:LOGGED_NAMES_MAX]),
        )

    def _configure(self, config: link_pb2.ConfigUpdate) -> None:
        known_secret = self.configuration.handle_secret
        self.configuration.apply(config)
        self.pending.broker = self.configuration.broker_name
        if LEVEL.is_debug:
            self._log_change(config)
        if config.is_complete:
            if known_secret not in {b"", self.configuration.handle_secret}:
                self.pending.fail_all("the store of the broker was replaced; retry")
                self.batching.clear()
                self._pops.clear()
                self._reports.forget_store()
            if not self.configuration.serves_sql_filters:
                self._pops.fail_sql_filters(self._lacks_sql())
            self._is_greeted = True
        if self._is_greeted and not self.is_connected and self.configuration.security.is_complete:
            self._open()
        self.on_change()

    def _open(self) -> None:
        """Send requests from here on: the configuration has arrived.

        The first stream waits for all security items. A later one begins with those from before.
        """
        self._pops.shorten_waits()
        self.pending.open()
        self.batching.open()
        self.configured.set()
        configuration = self.configuration
        log.info(
            "broker connected",
            address=self.address,
            broker=configuration.broker_name,
            topics=len(configuration.topics),
            groups=len(configuration.groups),
        )
        for observer in self._observers:
            observer.on_connected()

    def _close(self, reason: str) -> bool:
        """Keep requests that can wait and fail the others; return whether there was a link."""
        was_connected = self.is_connected
        self._is_greeted, self._why_rejected = False, ""
        if was_connected:
            log.warning(
                "broker lost", address=self.address, reason=reason, pending=len(self.pending)
            )
        self._pops.close()
        for request_id in self.batching.withdraw(self.pending.movable):
            self.pending.fail(request_id, BrokerUnreachable(_NOT_SENT))
        unsent = self.batching.close()
        repeated = self.pending.close(unsent, silent_since_s=self._stream.heard_at_s)
        returns = self._pops.unanswered_returns(unsent)
        self.batching.add_again([*repeated, (CHANGE_INVISIBLE, returns)])
        if was_connected:
            for observer in self._observers:
                observer.on_lost()
        return was_connected
