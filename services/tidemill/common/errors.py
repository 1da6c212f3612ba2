"""The error tree of all processes, and the API code and HTTP status of each error.

    ServiceError
    ├─ QueryFailed          a defect; nothing has changed, and the log of the broker has the error
    ├─ RequestError        the caller must change the request; never retried
    │  ├─ IllegalTopic, IllegalGroup, TopicNotFound, MessageBodyTooLarge, ...
    └─ UnavailableError    the same request may succeed later; retried with back-off
       ├─ Overloaded, Draining, GroupDraining, DiskFull, TooFewInSync, ...

The tree is split by the side that must act. A handler raises an error. Only the boundary of a
process (the gRPC server, the REST server, the broker link) turns it into a code, with `CODES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

# In refusals of a call that the controllers do not know yet, such as a dry run.
OLDER_CONTROLLER: Final = "has an older version without this call"


class ServiceError(Exception):
    """An outcome that the client receives as a code and a sentence with the necessary action."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class QueryFailed(ServiceError):
    """A read met an unexpected error. Nothing has changed, and other requests are not affected."""


class RequestError(ServiceError):
    """The caller must change the request."""


class UnavailableError(ServiceError):
    """The same request may succeed later."""


class BadRequest(RequestError):
    """The request contradicts itself or the protocol."""


class ClientIdRequired(RequestError):
    """The x-mq-client-id header is missing."""


class UnrecognizedClientType(RequestError):
    """The client type is unspecified or unknown."""


class IllegalAccessPoint(RequestError):
    """The endpoints of the request are not usable."""


class IllegalTopic(RequestError):
    """The topic name breaks the naming rules or is a system name."""


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
    """The filter expression is not valid."""


class FilterBeyondLimit(IllegalFilter):
    """The filter expression is longer, deeper or larger than a limit."""


class IllegalInvisibleDuration(RequestError):
    """The invisible duration is outside its limits."""


class IllegalDeliveryTime(RequestError):
    """The delivery time is outside its limits."""


class IllegalPollingTime(RequestError):
    """The time until the deadline is too short for a long poll."""


class IllegalOffset(RequestError):
    """The offset is outside the queue."""


class OffsetNotFound(RequestError):
    """The queue begins after the offset: the message expired or was never stored."""


class InvalidReceiptHandle(RequestError):
    """The receipt handle does not name a delivery in flight of this consumer group."""


class InvalidTransactionId(RequestError):
    """The transaction has another final state, or its id is of another topic or message."""


class TransactionNotFound(RequestError):
    """The transaction is unknown: its id is wrong, its topic was deleted, or it ended long ago."""


class MessageTypeConflict(RequestError):
    """The type of the message does not fit the topic or the message's own properties."""


class MessageCorrupted(RequestError):
    """The messages of the request contradict each other, or a body contradicts its digest."""


class MessageBodyEmpty(RequestError):
    """The message has no body."""


class MessageBodyTooLarge(RequestError):
    """The message body is larger than the limit."""


class PropertiesTooLarge(RequestError):
    """The message properties are larger than their limits."""


class Forbidden(RequestError):
    """The resource exists and does not permit the operation."""


class TopicNotFound(RequestError):
    """The topic does not exist, and clients may not create it by using it."""


class GroupNotFound(RequestError):
    """The consumer group does not exist, and clients may not create it by using it."""


class QueueNotFound(RequestError):
    """The topic has no queue with this number."""


class BrokerGroupNotFound(RequestError):
    """The broker group does not exist."""


class UserNotFound(RequestError):
    """The user does not exist."""


class TokenNotFound(RequestError):
    """The token of the security configuration does not exist."""


class RoleNotFound(RequestError):
    """The role does not exist."""


class Unauthorized(RequestError):
    """The call shows no valid credentials, or its user lacks a right."""

    # Of a user that has shown correct credentials and may not use them.
    user_id = 0
    user_name = ""
    via = ""  # kind and name of the credential, if it is not a secret
    claimed_user = ""  # the access key of a wrong signature; only the audit log has it
    identities: tuple[str, ...] = ()  # that the call has proven, if no single user lists one


class WrongCredentials(Unauthorized):
    """The user is unknown, or the signature is wrong."""


class TokenEnded(Unauthorized):
    """A token of a service account has ended. Its client usually has a newer one."""


class AlreadyExists(RequestError):
    """The resource exists, and the request may only create it."""


class PreconditionFailed(RequestError):
    """The resource has another version than the request expects."""


class Banned(Unauthorized):
    """An operator has banned the user, the client or the address."""


class QuotaNotFound(RequestError):
    """The quota does not exist."""


class DedupKeyNotFound(RequestError):
    """The dedup key is free: no message has it, or its window is over."""


class IdempotencyMismatch(RequestError):
    """Another message already has the dedup key, with another body."""


class OperationNotFound(RequestError):
    """The operation does not exist, or it ended so long ago that it is forgotten."""


class BanNotFound(RequestError):
    """The ban does not exist."""


class LogChanged(RequestError):
    """A position belongs to a different log than the broker group has now."""


class ClientNotFound(RequestError):
    """The client is not connected to any proxy."""


class ProxyNotFound(RequestError):
    """The proxy is not connected to this broker."""


class ProcessNotFound(RequestError):
    """The cluster has no process with this name."""


class ClientMute(RequestError):
    """The client is connected and has no telemetry stream for a question."""

    @classmethod
    def of(cls, client_id: str) -> ClientMute:
        """Return the error of one client, for listings and for questions."""
        return cls(
            f"client {client_id} is connected and has no telemetry stream; it opens one within"
            f" minutes, so try again later"
        )


class ClientCannot(RequestError):
    """The client does not support the operation."""


class MessageNotFound(RequestError):
    """The message does not exist, or no message is available."""


class ConnectionBufferFull(MessageNotFound):
    """A poll gets no message because its connection already holds too many unread bytes."""


class Conflict(RequestError):
    """The change contradicts the current state of the resource."""


class NotBuilt(RequestError):
    """The protocol has this feature, and this release does not implement it."""


class VersionUnsupported(RequestError):
    """A broker group runs a version that lacks the feature."""


class Overloaded(UnavailableError):
    """A named limit is reached; the request was not started."""


class KeyMissing(UnavailableError):
    """The process cannot decrypt the secrets of users."""


class SecurityStale(UnavailableError):
    """The users and rights that this process knows are too old."""


class Draining(UnavailableError):
    """The process is stopping."""


class NotMaster(UnavailableError):
    """The replica is not the master of its broker group, or the group has no master."""


class GroupDraining(UnavailableError):
    """The broker group accepts no new messages because an operator drains it."""


class KeyOwnerChanged(UnavailableError):
    """The broker group does not own the dedup key; the sender does not know the owner yet."""


class DiskFull(UnavailableError):
    """Free disk space is below the watermark; the broker rejects sends first."""


class TooFewInSync(UnavailableError):
    """The broker group cannot confirm a message; nothing was stored."""

    @classmethod
    def of(cls, broker_group: str, why: str) -> TooFewInSync:
        """Return the error of one broker group, for its master and for proxies."""
        return cls(
            f"broker group {broker_group} cannot confirm a message: {why}; nothing was stored, so"
            f" send it again later (see `tidemill replica list`)"
        )


class Repairing(UnavailableError):
    """The request needs a damaged file that the broker is rebuilding."""

    def __init__(
        self, message: str = "a damaged file is being rebuilt from the log; try again in a moment"
    ) -> None:
        super().__init__(message)


class BrokerUnreachable(UnavailableError):
    """The broker is disconnected; the outcome of a request in flight is unknown."""


class BrokerGroupUnreachable(UnavailableError):
    """A broker group is unreachable; the error text states what was done."""


class BrokerTimeout(UnavailableError):
    """The broker did not answer before the deadline; the text states the outcome if it is known."""


class ProxyUnreachable(UnavailableError):
    """The proxy is disconnected or does not answer."""


class ProcessUnreachable(UnavailableError):
    """The process does not answer."""


class ClientTimeout(UnavailableError):
    """The client did not answer in time; it may have performed the operation."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of an error: that of `apache.rocketmq.v2`, and the HTTP status."""

    rocketmq: int
    http: HTTPStatus


INTERNAL = Codes(50001, HTTPStatus.INTERNAL_SERVER_ERROR)

CODES: dict[type[ServiceError], Codes] = {
    QueryFailed: INTERNAL,
    BadRequest: Codes(40000, HTTPStatus.BAD_REQUEST),
    IllegalAccessPoint: Codes(40001, HTTPStatus.BAD_REQUEST),
    IllegalTopic: Codes(40002, HTTPStatus.BAD_REQUEST),
    IllegalGroup: Codes(40003, HTTPStatus.BAD_REQUEST),
    IllegalTag: Codes(40004, HTTPStatus.BAD_REQUEST),
    IllegalKey: Codes(40005, HTTPStatus.BAD_REQUEST),
    IllegalMessageGroup: Codes(40006, HTTPStatus.BAD_REQUEST),
    IllegalPropertyKey: Codes(40007, HTTPStatus.BAD_REQUEST),
    InvalidTransactionId: Codes(40008, HTTPStatus.CONFLICT),
    TransactionNotFound: Codes(40008, HTTPStatus.NOT_FOUND),
    IllegalMessageId: Codes(40009, HTTPStatus.BAD_REQUEST),
    IllegalFilter: Codes(40010, HTTPStatus.BAD_REQUEST),
    FilterBeyondLimit: Codes(40010, HTTPStatus.BAD_REQUEST),
    IllegalInvisibleDuration: Codes(40011, HTTPStatus.BAD_REQUEST),
    # Both depend on more than the request: the time and limit of the broker, the type of the topic.
    IllegalDeliveryTime: Codes(40012, HTTPStatus.CONFLICT),
    InvalidReceiptHandle: Codes(40013, HTTPStatus.BAD_REQUEST),
    MessageTypeConflict: Codes(40014, HTTPStatus.CONFLICT),
    UnrecognizedClientType: Codes(40015, HTTPStatus.BAD_REQUEST),
    MessageCorrupted: Codes(40016, HTTPStatus.BAD_REQUEST),
    ClientIdRequired: Codes(40017, HTTPStatus.BAD_REQUEST),
    IllegalPollingTime: Codes(40018, HTTPStatus.BAD_REQUEST),
    IllegalOffset: Codes(40019, HTTPStatus.BAD_REQUEST),
    UserNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    TokenNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    RoleNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    QuotaNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    BanNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    DedupKeyNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    OperationNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    IdempotencyMismatch: Codes(42800, HTTPStatus.UNPROCESSABLE_ENTITY),
    WrongCredentials: Codes(40100, HTTPStatus.UNAUTHORIZED),
    Banned: Codes(40100, HTTPStatus.UNAUTHORIZED),
    TokenEnded: Codes(40100, HTTPStatus.UNAUTHORIZED),
    Unauthorized: Codes(40100, HTTPStatus.UNAUTHORIZED),
    Forbidden: Codes(40300, HTTPStatus.FORBIDDEN),
    MessageNotFound: Codes(40401, HTTPStatus.NOT_FOUND),
    ConnectionBufferFull: Codes(40401, HTTPStatus.NOT_FOUND),
    TopicNotFound: Codes(40402, HTTPStatus.NOT_FOUND),
    GroupNotFound: Codes(40403, HTTPStatus.NOT_FOUND),
    OffsetNotFound: Codes(40404, HTTPStatus.NOT_FOUND),
    QueueNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    BrokerGroupNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    LogChanged: Codes(40019, HTTPStatus.CONFLICT),
    ClientNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    ProxyNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    ProcessNotFound: Codes(40400, HTTPStatus.NOT_FOUND),
    ClientMute: Codes(42800, HTTPStatus.CONFLICT),
    ClientCannot: Codes(50100, HTTPStatus.NOT_IMPLEMENTED),
    MessageBodyTooLarge: Codes(41301, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    MessageBodyEmpty: Codes(41302, HTTPStatus.BAD_REQUEST),
    Conflict: Codes(42800, HTTPStatus.CONFLICT),
    AlreadyExists: Codes(42800, HTTPStatus.CONFLICT),
    PreconditionFailed: Codes(42800, HTTPStatus.PRECONDITION_FAILED),
    Overloaded: Codes(42900, HTTPStatus.TOO_MANY_REQUESTS),
    PropertiesTooLarge: Codes(43101, HTTPStatus.BAD_REQUEST),
    DiskFull: Codes(50001, HTTPStatus.INSUFFICIENT_STORAGE),
    TooFewInSync: Codes(50002, HTTPStatus.SERVICE_UNAVAILABLE),
    KeyMissing: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    SecurityStale: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    Draining: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    NotMaster: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    GroupDraining: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    KeyOwnerChanged: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    Repairing: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    BrokerUnreachable: Codes(50001, HTTPStatus.BAD_GATEWAY),
    BrokerGroupUnreachable: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    ProxyUnreachable: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    ProcessUnreachable: Codes(50001, HTTPStatus.SERVICE_UNAVAILABLE),
    ClientTimeout: Codes(50400, HTTPStatus.GATEWAY_TIMEOUT),
    VersionUnsupported: Codes(50501, HTTPStatus.CONFLICT),
    NotBuilt: Codes(50100, HTTPStatus.NOT_IMPLEMENTED),
    BrokerTimeout: Codes(50400, HTTPStatus.GATEWAY_TIMEOUT),
}

BY_NAME: dict[str, type[ServiceError]] = {error.__name__: error for error in CODES}


def codes_of(error: ServiceError) -> Codes:
    """Return the codes that clients receive for `error`."""
    return CODES[type(error)]


def from_wire(name: str, message: str) -> ServiceError:
    """Return the error that another process of Tidemill sent by its class name."""
    return BY_NAME[name](message)
