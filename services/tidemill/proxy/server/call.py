"""The seam before gRPC: an RPC as its method sees it.

A method takes a `Call` and the bytes of its request. Nothing on this side of the seam imports a
gRPC library, so tests call the methods without a server.

    unary       async def recall_message(call, request) -> response
    plain       def send_message(call, request) -> None, or a function that returns the response
    streaming   async def receive_message(call, request, responses) -> None
    telemetry   async def telemetry(call, requests, responses) -> None

A plain method answers most calls without a task (ADR 0106): it returns None and calls `respond` or
`fail` of the call later. It returns a coroutine function if the answer needs a task.

A send returns when its messages are handed over. It raises DisconnectError if the client has
disconnected. If the client cancels the call, the method is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from tidemill.common.addresses import host_of_peer
from tidemill.common.errors import (
    ClientIdRequired,
    InvalidReceiptHandle,
    ServiceError,
    Unauthorized,
    codes_of,
)
from tidemill.message import limits
from tidemill.message.client_key import NO_OWNER, ClientKey
from tidemill.message.resources import ResourceName, resource_name
from tidemill.proxy.message_codec import encode_status
from tidemill.proxy.shares import sharer_of
from tidemill.security.acl import (
    Action,
    Resource,
    ResourceType,
    SourceAddress,
    group_resource,
    parse_address,
    topic_resource,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from tidemill.proxy.server.access import AccessGate
    from tidemill.proxy.server.gated_call import Caller, StreamWatch

UnaryMethod = Callable[["Call", bytes], Awaitable[bytes]]
Answer: TypeAlias = Callable[[], Awaitable[bytes]]  # answers a call in a task
PlainMethod = Callable[["Call", bytes], Answer | None]
StreamingMethod = Callable[["Call", bytes, "Responses"], Awaitable[None]]
BidirectionalMethod = Callable[["Call", AsyncIterator[bytes], "Responses"], Awaitable[None]]

_SUB = (Action.SUB,)

CLIENT_ID = "x-mq-client-id"
CLIENT_ID_LOGGED_CHARS_MAX = 256
NAMESPACE = "x-mq-namespace"
CLIENT_LANGUAGE = "x-mq-language"
CLIENT_VERSION = "x-mq-client-version"


def _last_of(metadata: Mapping[str, str], name: str) -> str:
    """Return the last of the values, which commas join, as RocketMQ's proxy does.

    For each retry of a send the Go client adds all its metadata again.
    """
    return metadata.get(name, "").rpartition(",")[2]


class Responses(Protocol):
    """The response side of a stream."""

    @property
    def connection(self) -> Hashable:
        """Key of the connection: equal for all streams of one connection."""

    def drain_connection(self) -> None:
        """Ask the client to leave its connection, and end its streams of requests."""

    @property
    def sent_count(self) -> int:
        """Number of messages sent so far, including those of a send that was cancelled."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether the client's connection has this much room and no other call waits for it."""

    def hold(self, size_bytes: int) -> bool:
        """Reserve room for responses until the call ends. Return False if there is none."""

    async def hold_in_turn(self, size_bytes: int, *, timeout_s: float) -> bool:
        """Do as `hold`, but wait in turn for room."""

    def release(self, size_bytes: int) -> None:
        """Release reserved room that is not needed."""

    def when_read(self, notify: Callable[[], None]) -> None:
        """Call `notify` once the client has certainly read the whole answer."""

    async def send(self, message: bytes) -> None:
        """Hand over one message."""

    async def send_all(self, messages: Sequence[bytes]) -> None:
        """Hand over messages, together if possible."""


class Reply(Protocol):
    """The response of a call without a task; `RpcCall` is one."""

    on_cancel: Callable[[], None] | None  # called if the call ends before its response

    def respond(self, response: bytes) -> None:
        """Answer the call."""

    def answer_in_task(self, answering: Coroutine[Any, Any, bytes]) -> None:
        """Answer the call in a task."""


class PlainBoundary(Protocol):
    """The end of a call of a plain method; `Boundary` is one."""

    def respond(self, call: Call, response: bytes, /) -> None:
        """Answer the call."""

    def fail(self, call: Call, error: Exception, /) -> None:
        """Answer the call with an error."""

    def answer_in_task(self, call: Call, answer: Answer, /) -> None:
        """Answer the call in a task."""

    def note_cancelled(self, call: Call, /) -> None:
        """Count the call as cancelled."""


class Call:
    """One RPC as its method sees it."""

    __slots__ = (
        "_deadline_at",
        "_gate",
        "boundary",
        "caller",
        "certificate_names",
        "client_id",
        "connection",
        "failure",
        "group",
        "is_long_polling",
        "is_short_polling_hit",
        "metadata",
        "method",
        "peer",
        "reply",
        "response_code",
        "started_at",
        "topic",
        "watch",
    )

    def __init__(
        self,
        metadata: Mapping[str, str],
        *,
        peer: Callable[[], str],
        connection: Hashable,
        time_remaining_s: float | None,
        gate: AccessGate | None = None,
        certificate_names: Sequence[str] = (),
        reply: Reply | None = None,
    ) -> None:
        """Without a `gate`, the call needs no rights. Without a `reply`, a task answers it."""
        self._gate = gate
        self.reply = reply
        self.boundary: PlainBoundary | None = None  # of a plain method
        self.caller: Caller | None = None  # the gate's; of the last check
        self.failure: tuple[int, ServiceError] | None = None  # the same
        self.watch: StreamWatch | None = None  # the gate's; of a stream
        self.method = ""  # label in metrics; the boundary sets it
        self.metadata = metadata
        self.certificate_names = certificate_names  # in that of the client
        self.connection = connection  # key of the connection: equal for all its calls
        self.client_id = _last_of(metadata, CLIENT_ID)  # of the client instance
        self.peer = peer
        self.started_at = time.monotonic()
        self._deadline_at = None if time_remaining_s is None else self.started_at + time_remaining_s
        # Labels of this call in metrics; the method corrects them.
        self.response_code: int = v2.OK
        self.topic = self.group = ""  # for the debug log, if the method knows them
        self.is_long_polling = ""
        self.is_short_polling_hit = ""

    @property
    def client(self) -> ClientKey:
        """The client that calls, as far as its user is known."""
        caller = self.caller
        return ClientKey(self.client_id, NO_OWNER if caller is None else caller.known.user.id)

    @property
    def user(self) -> str:
        """The name of the user; empty if it is not known."""
        return "" if self.caller is None else self.caller.known.user.name

    @property
    def sharer(self) -> str:
        """The key of its shares of limited resources: its user, or its address without one."""
        return sharer_of(self.user, self.peer())

    def check(self) -> None:
        """Check the client's id and the credentials.

        Raises ClientIdRequired, BadRequest, Unauthorized, KeyMissing.
        """
        if not self.client_id.strip():
            raise ClientIdRequired(f"the header {CLIENT_ID} is missing")
        limits.CLIENT_ID.check_text(self.client_id)
        self.authenticate()

    def has_unknown_key(self) -> bool:
        """Whether the Kubernetes token of the call names a key that this process does not know."""
        gate = self._gate
        if gate is None or not gate.needs_credentials:
            return False
        accounts = gate.credentials.accounts
        return accounts is not None and accounts.has_unknown_key(self)

    async def read_unknown_key(self) -> None:
        """Wait until the keys of the issuer have been read again, unless they were just read."""
        accounts = None if self._gate is None else self._gate.credentials.accounts
        if accounts is not None:
            await accounts.keys.read_for_unknown()

    def authenticate(self) -> None:
        """Check the credentials. Raises Unauthorized, KeyMissing."""
        if self._gate is not None and self._gate.is_checking:
            self._gate.authenticate(self)

    def find_address(self) -> SourceAddress | None:
        """Return the address of the connection; None if it has none."""
        return parse_address(host_of_peer(self.peer()))

    def require(self, resource: Resource, *actions: Action) -> None:
        """Check that the user has one of the rights on a resource.

        Raises Unauthorized, KeyMissing; IllegalTopic or IllegalGroup for a malformed name.
        """
        if self._gate is not None:
            self._gate.require(self, actions, resource)

    def require_all(self, type_: ResourceType, action: Action) -> None:
        """Check a right on each resource of a type. Raises as `require`."""
        if self._gate is not None:
            self._gate.require_all(self, action, type_)

    def check_while_open(self, check: Callable[[], None]) -> None:
        """Check the rights of a stream now, and after each change while it is open.

        `check` calls `require` and its siblings, and raises as they do. It replaces the former
        check of the stream: a client that sends new settings no longer uses the old ones.
        """
        if self.watch is not None:
            self.watch.check_rights = check
        check()

    def require_topic(self, topic: str, *actions: Action) -> None:
        """Check one of the rights on a topic. Raises as `require`."""
        if self._gate is not None and self._gate.is_checking:
            self._gate.require(self, actions, topic_resource(topic))

    def require_consumer(self, group: str, topic: str) -> None:
        """Check the rights of a consumer of a topic in a group. Raises as `require`."""
        if self._gate is not None:
            self._gate.require(self, _SUB, group_resource(group))
            self._gate.require(self, _SUB, topic_resource(topic))

    async def watched(self, answering: Awaitable[None]) -> None:
        """Await the answer to a stream; end it when its user loses the rights.

        Raises Unauthorized.
        """
        if self._gate is None:
            await answering
        else:
            await self._gate.streams.watched(self, answering)

    async def delay_refusal(self, error: Exception, *, repeats: bool = False) -> None:
        """Delay the answer to a refused call, if the client repeats it at once, or for secrecy."""
        if self._gate is not None and isinstance(error, Unauthorized):
            await self._gate.delay_refusal(self, error, repeats=repeats)

    def may_create(self, resource: Resource) -> bool:
        """Whether the first use of a name creates it. Raises as `check`."""
        return self._gate is None or self._gate.allows(self, Action.CREATE, resource)

    @property
    def language(self) -> str:
        """Language that the client reports, cut; a label in metrics."""
        return _last_of(self.metadata, CLIENT_LANGUAGE)[: limits.CLIENT_TEXT_CHARS_MAX]

    @property
    def version(self) -> str:
        """Version that the client reports, cut."""
        return _last_of(self.metadata, CLIENT_VERSION)[: limits.CLIENT_TEXT_CHARS_MAX]

    @property
    def namespace(self) -> str:
        """Namespace of resources that have none: Node.js clients omit it in several calls."""
        return _last_of(self.metadata, NAMESPACE)

    def name_of(self, resource: v2.Resource) -> str:
        """Return the full name of a topic or consumer group: with its namespace, if it has one."""
        return self.resource_name(resource).full

    def resource_name(self, resource: v2.Resource) -> ResourceName:
        """Return the name of a topic or consumer group, and the namespace for the answer."""
        return resource_name(resource, self.namespace)

    def respond(self, response: bytes) -> None:
        """Answer a call of a plain method."""
        assert self.boundary is not None, "the boundary begins each call"
        self.boundary.respond(self, response)

    def fail(self, error: Exception) -> None:
        """Answer a call of a plain method with an error."""
        assert self.boundary is not None, "the boundary begins each call"
        self.boundary.fail(self, error)

    def answer_in_task(self, answer: Answer) -> None:
        """Answer a call of a plain method, which needs a task after all."""
        assert self.boundary is not None, "the boundary begins each call"
        self.boundary.answer_in_task(self, answer)

    def cancel(self) -> None:
        """Note that a call of a plain method has no client any more."""
        assert self.boundary is not None, "the boundary begins each call"
        self.boundary.note_cancelled(self)

    def time_remaining_ms(self) -> int | None:
        """Return the time until the client's deadline; None without a deadline."""
        if self._deadline_at is None:
            return None
        return int((self._deadline_at - time.monotonic()) * 1000)


class CallStatus(NamedTuple):
    """The outcome of a call in its response."""

    code: v2.Code.ValueType
    message: str

    def encode(self) -> bytes:
        """Return a response, of any type, with this status alone."""
        return encode_status(self.code, self.message)


def status_of(error: ServiceError) -> CallStatus:
    """Return the status of a response for an error."""
    message = error.message
    if isinstance(error, InvalidReceiptHandle):
        # Applications written for the reference server search the text for this name.
        message = f"INVALID_RECEIPT_HANDLE: {message}"
    return CallStatus(v2.Code.ValueType(codes_of(error).rocketmq), message)
