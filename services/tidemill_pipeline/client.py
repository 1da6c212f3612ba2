"""The gRPC client of the pipeline: one per process.

A call that may succeed later is retried at the next proxy, after a pause that doubles. The option
`maxRetries` limits the retries. A rejected call raises `ClusterRejection`.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import grpc

from tidemill.message import limits
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc
from tidemill_pipeline.channel import Credentials, open_channel
from tidemill_pipeline.cluster_state import BrokerLog, ClusterState, OmittedItems
from tidemill_pipeline.errors import ClusterRejection, NoAnswer, QueueLoss
from tidemill_pipeline.namespace import NamespaceNames
from tidemill_pipeline.offsets import Incarnation, QueueEnds, QueueName, SourceQueue
from tidemill_pipeline.options import EVERY_TOPIC, ConnectionOptions, TopicSelection

CALL_S: Final = 30.0  # timeout of calls without messages; 1000 queues take one second
NAMES_MAX: Final = limits.NAMES.limit  # per call
EVENTS_S: Final = 120.0  # timeout for 64 MiB of a log
BACKOFF_MS_MAX: Final = 5_000  # longest pause between retries
EVENT_LOG_BYTES: Final = 64 << 20  # of the log per call, the limit of the cluster
_AGAIN: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)
# Error names of a broker for a log or a queue that no longer exists.
_LOG_CHANGED: Final = "LogChanged"
_GONE: Final = frozenset({_LOG_CHANGED, "TopicNotFound"})
_BEHIND_END: Final = "IllegalOffset"
_ERROR_KEY: Final = "tidemill-error"  # trailer with the error name
_SERVER_TROUBLE: Final = 50_000  # Protocol codes from here on are server errors.

A = TypeVar("A")


class _ClusterBusy(Exception):
    """A temporary error of the cluster."""


class ClusterClient:
    """Calls of one process. Not safe for concurrent threads.

    It is one class because it has one method per RPC of the cluster, and they share retries.
    """

    def __init__(self, connection: ConnectionOptions) -> None:
        self._connection = connection
        self._credentials = Credentials(connection)
        self._names = NamespaceNames(connection.namespace)
        self._client_id = f"tidemill-pipeline@{socket.gethostname()}@{os.getpid()}"
        # Distribute executors over the proxies.
        self._at = os.getpid() % len(connection.endpoints)
        self._channel: grpc.Channel | None = None

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # ------------------------------------------------------------ states and offsets

    def cluster(self, topics: TopicSelection, *, with_groups: bool = False) -> ClusterState:
        """Return begin and end of the queues of topics. Does not read messages."""
        # The cluster supports only wildcards, so the regular expression is applied here.
        request = pb.GetQueuesRequest(
            topics=map(self._names.full, topics.names),
            topic_pattern=self._names.glob(topics.pattern),
            without_queues=not topics.names and not topics.pattern,
            with_groups=with_groups,
        )
        answers: list[pb.GetQueuesReply] = self._again(
            lambda: list(
                self._source().GetQueues(request, timeout=CALL_S, metadata=self._headers())
            )
        )
        queues: dict[SourceQueue, QueueEnds] = {}
        logs: dict[str, BrokerLog] = {}
        groups: dict[str, frozenset[str]] = {}
        for group in (group for answer in answers for group in answer.groups):
            own = {self._names.bare(each) for each in group.groups if self._names.have(each)}
            groups[group.broker] = groups.get(group.broker, frozenset()).union(own)
            logs[group.broker] = BrokerLog(
                broker=group.broker,
                log_id=group.log_id,
                log_min=group.log_min,
                log_end=group.log_end,
                error=group.error,
            )
            for each in group.queues:
                topic = self._names.bare(each.topic)
                if not (self._names.have(each.topic) and topics.have(topic)):
                    continue
                incarnation = Incarnation(group.log_id, each.topic_id)
                queue = SourceQueue(topic, group.broker, each.queue_id, incarnation)
                queues[queue] = QueueEnds(
                    queue=queue,
                    min_offset=each.min_offset,
                    max_offset=each.max_offset,
                    bytes=each.bytes,
                    dedup_window_ms=each.dedup_window_ms,
                )
        return ClusterState(queues=queues, logs=logs, groups=groups)

    def whole_cluster(self, topics: TopicSelection, *, with_groups: bool = False) -> ClusterState:
        """Return the state of all broker groups, as `cluster`.

        If one broker group does not answer, ask all again. Raises NoAnswer.
        """

        def ask() -> ClusterState:
            cluster = self.cluster(topics, with_groups=with_groups)
            missing = sorted(cluster.unreachable)
            if missing:
                why = "; ".join(f"{name}: {cluster.logs[name].error}" for name in missing)
                raise _ClusterBusy(f"{why}. The read needs the state of all broker groups")
            return cluster

        return self._again(ask)

    def offset_at(self, name: QueueName | SourceQueue, at_ms: int) -> int:
        """Return the first offset stored at `at_ms` or later; the queue's end if there is none."""
        request = service.QueryOffsetRequest(
            message_queue=self._queue(name), query_offset_policy=v2.TIMESTAMP
        )
        request.timestamp.FromMilliseconds(at_ms)

        def ask() -> int:
            answer: service.QueryOffsetResponse = self._public().QueryOffset(
                request, timeout=CALL_S, metadata=self._headers()
            )
            _check(answer.status, str(name))
            return answer.offset

        return self._again(ask)

    def update_offset(self, group: str, name: QueueName | SourceQueue, offset: int) -> None:
        """Set the pull offset of a group in a queue. It is independent of pops."""
        request = service.UpdateOffsetRequest(
            group=self.topic(group), message_queue=self._queue(name), offset=offset
        )

        def ask() -> None:
            answer: service.UpdateOffsetResponse = self._public().UpdateOffset(
                request, timeout=CALL_S, metadata=self._headers()
            )
            _check(answer.status, str(name))

        self._again(ask)

    def progress(
        self, broker: str, groups: Iterable[str], *, left: OmittedItems | None = None
    ) -> list[pb.Progress]:
        """Return the progress of groups in the queues of a broker group.

        Missing groups go into `left`; without it they raise ClusterRejection.
        """
        requested = [self._names.full(each) for each in groups]
        pages = self._pages(
            lambda cursor: self._source().ListProgress(
                pb.ListProgressRequest(
                    broker=broker, groups=requested, cursor=cursor, skips_missing=left is not None
                ),
                timeout=CALL_S,
                metadata=self._headers(),
            ),
            left,
        )
        return list(pages)

    # ------------------------------------------------------------ reading

    def messages(
        self,
        queue: SourceQueue,
        *,
        start: int,
        end: int,
        tags: str = "*",
        with_bodies: bool = True,
        quota_group: str = "",
        timeout_ms: int,
    ) -> Iterator[pb.ReadMessagesReply]:
        """Yield the messages of a range in pages, each with the offset of the next page.

        While the dispatch quota of `quota_group` holds the read, pages without messages come. They
        show that the proxy works, so a held call that ends at its timeout is not a failed attempt.

        After a broken or slow call, the next call continues after the last page. Raises QueueLoss
        if the broker has no queue of that name, or another incarnation of it.
        """
        log_id, topic_id = queue.incarnation
        at, attempt = start, 0
        while at < end:
            request = pb.ReadMessagesRequest(
                namespace=self._connection.namespace,
                topic=queue.topic,
                broker=queue.broker,
                queue_id=queue.queue_id,
                from_offset=at,
                until_offset=end,
                filter=tags,
                without_bodies=not with_bodies,
                log_id=log_id,
                topic_id=topic_id,
                quota_group=quota_group,
            )
            is_answered = False
            try:
                for page in self._source().ReadMessages(
                    request, timeout=timeout_ms / 1000, metadata=self._headers()
                ):
                    at, attempt, is_answered = max(at, page.next_offset), 0, True
                    yield page
            except grpc.RpcError as error:
                if quota_group and is_answered and _is_timeout(error):
                    continue  # A quota holds the read, perhaps for longer than one call.
                if _name_of(error) in _GONE:
                    raise QueueLoss(
                        f"{queue} is not there any more: {error_text(error)}. Its topic was"
                        " deleted, or the store of the broker group was created again"
                    ) from error
                if _name_of(error) == _BEHIND_END:
                    return  # The caller expects a later end, and asks again.
                attempt += 1
                self._recover(error, attempt)
            else:
                return

    def events(
        self,
        broker: str,
        *,
        start: int,
        index: int = 0,
        until: int = 0,
        log_id: str = "",
        topics: Iterable[str] = (),
    ) -> Iterator[pb.ReadEventsReply]:
        """Yield events from a log position on, within its record from an index on.

        One call reads at most `EVENT_LOG_BYTES` of the log, up to its current end. After a broken
        call, the next call continues after the last answer. Raises QueueLoss if the broker has
        another log or a shorter one.
        """
        position, attempt, log_bytes = start, 0, EVENT_LOG_BYTES
        requested = [self._names.full(each) for each in topics]
        while True:
            request = pb.ReadEventsRequest(
                broker=broker,
                from_position=position,
                log_id=log_id,
                until_position=until,
                log_bytes_max=log_bytes,
                topics=requested,
                from_index=index,
            )
            try:
                for answer in self._source().ReadEvents(
                    request, timeout=EVENTS_S, metadata=self._headers()
                ):
                    self._names.shorten_events(answer)
                    yield answer
                    log_bytes -= max(0, answer.next_position - position)
                    position, index, attempt = answer.next_position, answer.next_index, 0
            except grpc.RpcError as error:
                if _name_of(error) == _LOG_CHANGED:
                    raise QueueLoss(f"{broker}: {error_text(error)}") from error
                attempt += 1
                self._recover(error, attempt)
                if log_bytes <= 0:
                    return
            else:
                return

    def pending(
        self,
        broker: str,
        *,
        topics: Sequence[str],
        from_ms: int = 0,
        until_ms: int | None = None,
        with_messages: bool = False,
        left: OmittedItems | None = None,
    ) -> Iterator[pb.Pending]:
        """Yield the pending delayed messages of topics; without topics, of all.

        One call names at most `NAMES_MAX` topics. Within a call, messages come in order of timer
        ids. Missing topics go into `left`; without it they raise ClusterRejection.
        """
        assert until_ms is None or until_ms > 0, "nothing is due before 1970"
        for i in range(0, max(1, len(topics)), NAMES_MAX):
            request = pb.ListPendingRequest(
                broker=broker,
                topics=map(self._names.full, topics[i : i + NAMES_MAX]),
                due_from_ms=from_ms,
                due_until_ms=until_ms or 0,
                with_messages=with_messages,
                skips_missing=left is not None,
            )
            # Each call reports the damaged timers of all topics. Count those of the first call.
            of_part = left if not i or left is None else OmittedItems(missing=left.missing)
            yield from self._pages(functools.partial(self._list_pending, request), of_part)

    def _list_pending(
        self, request: pb.ListPendingRequest, cursor: str
    ) -> Iterator[pb.ListPendingReply]:
        request.cursor = cursor
        return iter(self._source().ListPending(request, timeout=CALL_S, metadata=self._headers()))

    def in_flight(
        self, broker: str, groups: Iterable[str], *, left: OmittedItems | None = None
    ) -> Iterator[pb.InFlight]:
        """Yield the deliveries of groups in flight.

        Missing groups go into `left`; without it they raise ClusterRejection.
        """
        requested = [self._names.full(each) for each in groups]
        yield from self._pages(
            lambda cursor: self._source().ListInFlight(
                pb.ListInFlightRequest(
                    broker=broker, groups=requested, cursor=cursor, skips_missing=left is not None
                ),
                timeout=CALL_S,
                metadata=self._headers(),
            ),
            left,
        )

    def _pages(
        self, ask: Callable[[str], Iterable[Any]], left: OmittedItems | None
    ) -> Iterator[Any]:
        """Yield the items of pages. After a broken call, continue after the last page."""
        cursor, attempt = "", 0
        while True:
            try:
                for answer in ask(cursor):
                    yield from self._names.items(answer.items)
                    if left is not None:
                        left.missing.update(map(self._names.bare, answer.missing))
                        left.damaged_count += getattr(answer, "damaged_count", 0)
                    if not answer.cursor:
                        return
                    assert answer.cursor != cursor, "a cursor goes on"
                    cursor, attempt = answer.cursor, 0
            except grpc.RpcError as error:
                attempt += 1
                self._recover(error, attempt)

    # ------------------------------------------------------------ writing

    def start_send(self, messages: list[v2.Message], *, timeout_ms: int) -> Any:
        """Send messages of one topic once. Return the call; its `result()` is the answer."""
        return self._public().SendMessage.future(
            service.SendMessageRequest(messages=messages),
            timeout=timeout_ms / 1000,
            metadata=self._headers(),
        )

    def topic(self, name: str) -> v2.Resource:
        """Return the resource of a topic or a group for a call."""
        return v2.Resource(resource_namespace=self._connection.namespace, name=name)

    def is_retryable(self, error: grpc.RpcError) -> bool:
        """Return whether a failed call may succeed later."""
        call: Any = error  # The errors that grpcio raises are also the calls.
        return call.code() in _AGAIN

    def pause(self, attempt: int) -> None:
        """Wait before a retry, longer each time, and switch to the next proxy."""
        longest = min(BACKOFF_MS_MAX, self._connection.retry_backoff_ms * 2 ** min(attempt - 1, 16))
        # Randomize half of the pause, so that many tasks do not retry at once.
        time.sleep(longest / 1000 * random.uniform(0.5, 1.0))
        if len(self._connection.endpoints) > 1:
            self._at = (self._at + 1) % len(self._connection.endpoints)
            self.close()

    # ------------------------------------------------------------ the connection

    def _again(self, ask: Callable[[], A]) -> A:
        attempt = 0
        while True:
            try:
                return ask()
            except (grpc.RpcError, _ClusterBusy) as error:
                attempt += 1
                self._recover(error, attempt)

    def _recover(self, error: Exception, attempt: int) -> None:
        """Wait before a retry, or raise the final error."""
        if isinstance(error, grpc.RpcError) and not self.is_retryable(error):
            raise ClusterRejection(error_text(error)) from error
        if attempt > self._connection.max_retries:
            where = ", ".join(self._connection.endpoints)
            raise NoAnswer(
                f"no answer from {where} after {attempt} attempts: {error_text(error)};"
                f" {_proxy_hint(error)}"
            ) from error
        self.pause(attempt)

    def _open(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = open_channel(self._connection, self._connection.endpoints[self._at])
        return self._channel

    def _public(self) -> service_pb2_grpc.MessagingServiceStub:
        return service_pb2_grpc.MessagingServiceStub(self._open())

    def _source(self) -> pipeline_pb2_grpc.PipelineSourceStub:
        return pipeline_pb2_grpc.PipelineSourceStub(self._open())

    def _headers(self) -> tuple[tuple[str, str], ...]:
        return (
            ("x-mq-client-id", self._client_id),
            ("x-mq-namespace", self._connection.namespace),
            ("x-mq-language", "PYTHON"),
            ("x-mq-client-version", "5.1.2"),
            ("x-mq-protocol", "v2"),
            *self._credentials.headers(),
        )

    def _queue(self, name: QueueName | SourceQueue) -> v2.MessageQueue:
        return v2.MessageQueue(
            topic=self.topic(name.topic), id=name.queue_id, broker=v2.Broker(name=name.broker)
        )


_clients: dict[tuple[int, ConnectionOptions], ClusterClient] = {}


def _is_timeout(error: grpc.RpcError) -> bool:
    call: Any = error  # The errors that grpcio raises are also the calls.
    return call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def connect(connection: ConnectionOptions) -> ClusterClient:
    """Return this process's client. The tasks of a worker use it one after the other."""
    # A forked worker cannot use its parent's connections.
    key = (os.getpid(), connection)
    if key not in _clients:
        _clients[key] = ClusterClient(connection)
    return _clients[key]


def ordinary_topics(client: ClusterClient) -> set[str]:
    """Return all topics except internal ones."""
    return client.cluster(TopicSelection(pattern=EVERY_TOPIC)).topics


def _check(status: v2.Status, what: str) -> None:
    if status.code == v2.OK:
        return
    if status.code >= _SERVER_TROUBLE or status.code == v2.TOO_MANY_REQUESTS:
        raise _ClusterBusy(f"{what}: {status.message}")
    raise ClusterRejection(f"{what}: {status.message} ({v2.Code.Name(status.code)})")


def _proxy_hint(error: Exception) -> str:
    if "http1.x" in str(error):  # gRPC's text for an HTTP/1.1 reply.
        return "the address is an HTTP/1.1 server such as the admin API; proxies use port 8081"
    return "check that --endpoints (TIDEMILL_ENDPOINTS) is a running proxy, port 8081"


def error_text(error: Exception) -> str:
    """Return the text of a failed call on one line."""
    if not isinstance(error, grpc.RpcError):
        return str(error)
    call: Any = error
    return f"{call.details()} ({_name_of(error) or call.code().name})"


def _name_of(error: grpc.RpcError) -> str:
    call: Any = error
    return str(dict(call.trailing_metadata() or ()).get(_ERROR_KEY, ""))
