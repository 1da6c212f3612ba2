"""The one error tree, and its one map to the codes of the outside.

    ServiceError
    ├─ RequestError        the caller must change the request; never retried
    │  ├─ IllegalName, IllegalTopic, IllegalGroup, TopicNotFound, MessageBodyTooLarge, ...
    └─ UnavailableError    the same request may succeed later; retried with back-off
       ├─ Overloaded, Draining, GroupDraining, DiskFull, TooFewInSync, ...

Split by who must act. A handler raises; only the boundary of a process (the gRPC server, the REST
server, the broker link) turns an error into a code, and it does so through `CODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus


class ServiceError(Exception):
    """An outcome that is answered with a code and a sentence that says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(ServiceError):
    """The caller must change the request."""


class UnavailableError(ServiceError):
    """The same request may succeed later."""


class BadRequest(RequestError):
    """The request contradicts itself or the protocol."""


class ClientIdRequired(RequestError):
    """The x-mq-client-id header is missing."""


class UnrecognizedClientType(RequestError):
    """The client type is unspecified, or nobody knows it."""


class IllegalAccessPoint(RequestError):
    """The endpoints of the request cannot be used."""


class IllegalTopic(RequestError):
    """The topic name breaks the naming rules, or belongs to the system."""


class IllegalGroup(RequestError):
    """The consumer group name breaks the naming rules."""


class IllegalTag(RequestError):
    """The message tag breaks the naming rules."""


class IllegalKey(RequestError):
    """A message key breaks the naming rules."""


class IllegalMessageGroup(RequestError):
    """The message group breaks the naming rules."""


class IllegalPropertyKey(RequestError):
    """A user property is reserved or holds control characters."""


class IllegalMessageId(RequestError):
    """The message id is blank or too long."""


class IllegalFilter(RequestError):
    """The filter expression cannot be understood."""


class IllegalInvisibleDuration(RequestError):
    """The invisible duration is outside its limits."""


class IllegalDeliveryTime(RequestError):
    """The delivery time is outside its limits."""


class IllegalPollingTime(RequestError):
    """Too little time is left before the deadline for a long poll."""


class IllegalOffset(RequestError):
    """The offset is outside the queue."""


class OffsetNotFound(RequestError):
    """The queue begins behind the offset: what was there is gone, or nothing was kept."""


class InvalidReceiptHandle(RequestError):
    """The receipt handle does not name a live delivery of this group."""


class MessageTypeConflict(RequestError):
    """The message's type does not fit the topic, or its own properties."""


class MessageCorrupted(RequestError):
    """The messages of the request do not make sense together."""


class MessageBodyEmpty(RequestError):
    """The message has no body."""


class MessageBodyTooLarge(RequestError):
    """The message body is over the limit."""


class PropertiesTooLarge(RequestError):
    """The message's properties are over their limits."""


class Forbidden(RequestError):
    """The resource exists and does not permit the operation."""


class TopicNotFound(RequestError):
    """There is no such topic, and it may not be created by use."""


class GroupNotFound(RequestError):
    """There is no such consumer group, and it may not be created by use."""


class BrokerGroupNotFound(RequestError):
    """There is no such broker group."""


class LogChanged(RequestError):
    """A position is one of another log than the broker group has now."""


class ClientNotFound(RequestError):
    """No proxy knows such a client."""


class ProxyNotFound(RequestError):
    """No such proxy is connected to this broker."""


class ClientMute(RequestError):
    """The client lives, and has no telemetry stream over which it could be asked."""

    @classmethod
    def of(cls, client_id: str) -> ClientMute:
        """Return the error of one client, which both who looks and who asks may meet."""
        return cls(
            f"client {client_id} lives, but has no telemetry stream open to be asked over; it opens"
            f" one within minutes"
        )


class ClientCannot(RequestError):
    """The client cannot do what it was asked for: it says so, or is of another kind."""


class MessageNotFound(RequestError):
    """There is no such message, or none is available."""


class ConnectionBufferFull(MessageNotFound):
    """None is given to a poll: its connection has too much unread for what there may be."""


class Conflict(RequestError):
    """The change contradicts the present state of the resource."""


class NotBuilt(RequestError):
    """The feature belongs to the protocol and is not built yet."""


class Overloaded(UnavailableError):
    """A named limit is reached; the request was not begun."""


class Draining(UnavailableError):
    """The process is about to stop."""


class NotMaster(UnavailableError):
    """Another replica of the broker group is its master, or none is."""


class GroupDraining(UnavailableError):
    """The broker group takes no new messages: it is to leave."""


class DiskFull(UnavailableError):
    """Free space is below the watermark; sends are refused first."""


class TooFewInSync(UnavailableError):
    """Too few replicas of the broker group are in sync to confirm anything: nothing was stored."""


class Repairing(UnavailableError):
    """A damaged file that the request needs is being derived again."""

    def __init__(
        self,
        message: str = "a damaged file is being made again from the log; try again in a moment",
    ) -> None:
        super().__init__(message)


class BrokerUnreachable(UnavailableError):
    """There is no connection to the broker; the outcome of a request in flight is unknown."""


class BrokerGroupUnreachable(UnavailableError):
    """A broker group that the request needs is away; what was done, or not, is said."""


class BrokerTimeout(UnavailableError):
    """The broker did not answer before the deadline; the outcome is unknown unless it says so."""


class ProxyUnreachable(UnavailableError):
    """A proxy that was asked has gone, or does not answer."""


class ClientTimeout(UnavailableError):
    """The client did not answer in time; what it was asked for may have been done."""


@dataclass(frozen=True, slots=True)
class Codes:
    """How an error is shown: the code of `apache.rocketmq.v2`, and the HTTP status."""

    rocketmq: int
    http: HTTPStatus


INTERNAL = Codes(50001, HTTPStatus.INTERNAL_SERVER_ERROR)

CODES: dict[type[ServiceError], Codes] = {
    BadRequest: Codes(40000, HTTPStatus.BAD_REQUEST),
    IllegalAccessPoint: Codes(40001, HTTPStatus.BAD_REQUEST),
    IllegalTopic: Codes(40002, HTTPStatus.BAD_REQUEST),
    IllegalGroup: Codes(40003, HTTPStatus.BAD_REQUEST),
    IllegalTag: Codes(40004, HTTPStatus.BAD_REQUEST),
    IllegalKey: Codes(40005, HTTPStatus.BAD_REQUEST),
    IllegalMessageGroup: Codes(40006, HTTPStatus.BAD_REQUEST),
    IllegalPropertyKey: Codes(40007, HTTPStatus.BAD_REQUEST),
    IllegalMessageId: Codes(40009, HTTPStatus.BAD_REQUEST),
    IllegalFilter: Codes(40010, HTTPStatus.BAD_REQUEST),
    IllegalInvisibleDuration: Codes(40011, HTTPStatus.BAD_REQUEST),
    IllegalDeliveryTime: Codes(40012, HTTPStatus.BAD_REQUEST),
    InvalidReceiptHandle: Codes(40013, HTTPStatus.BAD_REQUEST),
    MessageTypeConflict: Codes(40014, HTTPStatus.BAD_REQUEST),
    UnrecognizedClientType: Codes(40015, HTTPStatus.BAD_REQUEST),
    MessageCorrupted: Codes(40016, HTTPStatus.BAD_REQUEST),
    ClientIdRequired: Codes(40017, HTTPStatus.BAD_REQUEST),
    IllegalPollingTime: Codes(40018, HTTPStatus.BAD_REQUEST),
    IllegalOffset: Codes(40019, HTTPStatus.BAD_REQUEST),
    Forbidden: Codes(40300, HTTPStatus.FORBIDDEN),
    MessageNotFound: Codes(40401, HTTPStatus.NOT_FOUND),
    ConnectionBufferFull: Codes(40401, HTTPStatus.NOT_FOUND),
    TopicNotFound: Codes(40402, HTTPStatus.NOT_FOUND),
    GroupNotFound: Codes(40403, HTTPStatus.NOT_FOUND),
    OffsetNotFound: Codes(40404, HTTPStatus.NOT_FOUND),
    BrokerGroupNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    LogChanged: Codes(40019, HTTPStatus.CONFLICT),
    ClientNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    ProxyNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    ClientMute: Codes(42800, HTTPStatus.CONFLICT),
    ClientCannot: Codes(50100, HTTPStatus.NOT_IMPLEMENTED),
    MessageBodyTooLarge: Codes(41301, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    MessageBodyEmpty: Codes(41302, HTTPStatus.BAD_REQUEST),
    Conflict: Codes(42800, HTTPStatus.CONFLICT),
    Overloaded: Codes(42900, HTTPStatus.TOO_MANY_REQUESTS),
    PropertiesTooLarge: Codes(43101, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    DiskFull: Codes(50001, HTTPStatus.INSUFFICIENT_STORAGE),
    TooFewInSync: Codes(50002, HTTPStatus.SERVICE_UNAVAILABLE),
    Draining: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    NotMaster: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    GroupDraining: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    Repairing: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    BrokerUnreachable: Codes(50001, HTTPStatus.BAD_GATEWAY),
    BrokerGroupUnreachable: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    ProxyUnreachable: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    ClientTimeout: Codes(50400, HTTPStatus.GATEWAY_TIMEOUT),
    NotBuilt: Codes(50100, HTTPStatus.NOT_IMPLEMENTED),
    BrokerTimeout: Codes(50400, HTTPStatus.GATEWAY_TIMEOUT),
}

BY_NAME: dict[str, type[ServiceError]] = {error.__name__: error for error in CODES}


def codes_of(error: ServiceError) -> Codes:
    """Return how `error` is shown outside."""
    return CODES[type(error)]


def from_wire(name: str, message: str) -> ServiceError:
    """Rebuild an error that another process of ours named by its class."""
    return BY_NAME[name](message)
