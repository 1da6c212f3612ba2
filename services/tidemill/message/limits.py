"""Limits of the fields and lists of a request whose size the client chooses.

Each limit is checked where the request is read, before the data reaches a cache, a log line or a
command of the link. docs/limits.md is generated from this module.

    limits.ATTEMPT_ID.check_text(parsed.attempt_id)
    limits.MESSAGES.check_count(len(messages))

The size of a whole request per method is checked before it is read: `REQUESTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, final

from tidemill.common.errors import (
    BadRequest,
    FilterBeyondLimit,
    IllegalAccessPoint,
    IllegalMessageGroup,
    IllegalMessageId,
    IllegalTag,
    InvalidReceiptHandle,
    InvalidTransactionId,
    MessageBodyTooLarge,
    PropertiesTooLarge,
    RequestError,
)

_UTF8_BYTES_MAX: Final = 4  # per character


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLimit:
    """The limit of one field and the error for a request that exceeds it."""

    subject: str  # the beginning of the error text
    field: str  # field of the protocol
    limit: int
    unit: Literal["bytes", "entries"]
    error: type[RequestError]
    reason: str

    def check_text(self, text: str) -> None:
        """Raise the error if the text has too many bytes."""
        # Exact counting is slow. Most texts are too short to need it.
        if len(text) * _UTF8_BYTES_MAX > self.limit:
            self.check_count(len(text.encode()))

    def check_count(self, count: int) -> None:
        """Raise the error if there are too many bytes or entries."""
        if count > self.limit:
            raise self.error(f"{self.subject} has at most {self.limit} {self.unit}, not {count}")


CLIENT_ID: Final = FieldLimit(
    subject="the header x-mq-client-id",
    field="metadata `x-mq-client-id`",
    limit=255,
    unit="bytes",
    error=BadRequest,
    reason="kept for 100,000 clients; official clients send under 100",
)
NAMESPACE: Final = FieldLimit(
    subject="a resource namespace",
    field="`Resource.resource_namespace`, metadata `x-mq-namespace`",
    limit=118,
    unit="bytes",
    error=BadRequest,
    reason="part of each name: a consumer group has 120 characters, two of them `%` and a letter",
)
ENDPOINTS: Final = FieldLimit(
    subject="an access point",
    field="`Endpoints.addresses`",
    limit=16,
    unit="entries",
    error=IllegalAccessPoint,
    reason="each queue of a route repeats them",
)
HOST: Final = FieldLimit(
    subject="a host",
    field="`Address.host`",
    limit=255,
    unit="bytes",
    error=IllegalAccessPoint,
    reason="the longest DNS name",
)
HOSTS: Final = FieldLimit(
    subject="the host list of an access point",
    field="`Endpoints.addresses`",
    limit=640,
    unit="bytes",
    error=IllegalAccessPoint,
    reason="each of 1,024 queues of a route repeats them; fits 16 IPv6 addresses",
)
MESSAGES: Final = FieldLimit(
    subject="a request",
    field="`SendMessageRequest.messages`",
    limit=256,
    unit="entries",
    error=BadRequest,
    reason="one turn of about 12 ms checks and stores them",
)
BODY: Final = FieldLimit(
    subject="a message body",
    field="`Message.body`",
    limit=4_194_304,
    unit="bytes",
    error=MessageBodyTooLarge,
    reason="limit of the protocol; `message_item_bytes_max` allows less by default",
)
MESSAGE_ID: Final = FieldLimit(
    subject="a message id",
    field="`SystemProperties.message_id`",
    limit=1_024,
    unit="bytes",
    error=IllegalMessageId,
    reason="positions in the stored message have 16 bits",
)
MESSAGE_GROUP: Final = FieldLimit(
    subject="a message group",
    field="`SystemProperties.message_group`",
    limit=63,
    unit="bytes",
    error=IllegalMessageGroup,
    reason="limit of the protocol",
)
KEYS: Final = FieldLimit(
    subject="the list of keys of a message",
    field="`SystemProperties.keys`",
    limit=128,
    unit="entries",
    error=PropertiesTooLarge,
    reason="each is an entry of the index",
)
USER_PROPERTIES: Final = FieldLimit(
    subject="the set of user properties of a message",
    field="`Message.user_properties`",
    limit=128,
    unit="entries",
    error=PropertiesTooLarge,
    reason="limit of the protocol",
)
PROPERTIES: Final = FieldLimit(
    subject="the total of user properties, tag and keys",
    field="`Message`",
    limit=16_384,
    unit="bytes",
    error=PropertiesTooLarge,
    reason="limit of the protocol",
)
SYSTEM_PROPERTIES: Final = FieldLimit(
    subject="the total of all system properties of a request",
    field="`Message.system_properties`",
    limit=1 << 20,
    unit="bytes",
    error=PropertiesTooLarge,
    reason="takes up to ten times as much memory when parsed",
)
BORN_HOST: Final = FieldLimit(
    subject="a born host",
    field="`SystemProperties.born_host`",
    limit=255,
    unit="bytes",
    error=BadRequest,
    reason="the encodings of 4,096 hosts are cached",
)
TRACE_CONTEXT: Final = FieldLimit(
    subject="a trace context",
    field="`SystemProperties.trace_context`",
    limit=4_096,
    unit="bytes",
    error=PropertiesTooLarge,
    reason="stored and delivered with each message; W3C's format has 55",
)
ATTEMPT_ID: Final = FieldLimit(
    subject="an attempt id",
    field="`ReceiveMessageRequest.attempt_id`",
    limit=255,
    unit="bytes",
    error=BadRequest,
    reason="its stored size has one byte; official clients send a UUID",
)
TAG: Final = FieldLimit(
    subject="a message tag",
    field="`SystemProperties.tag`",
    limit=PROPERTIES.limit,
    unit="bytes",
    error=IllegalTag,
    reason="the properties of a message have as many together",
)
FILTER: Final = FieldLimit(
    subject="a tag filter",
    field="`FilterExpression.expression`",
    limit=TAG.limit,
    unit="bytes",
    error=FilterBeyondLimit,
    reason="it must be able to name the longest tag; the broker keeps it while the poll waits",
)
SQL_FILTER: Final = FieldLimit(
    subject="an SQL filter",
    field="`FilterExpression.expression`",
    limit=4_096,
    unit="bytes",
    error=FilterBeyondLimit,
    reason="a broker compiles it in about two milliseconds",
)
FILTER_TAGS: Final = FieldLimit(
    subject="a tag filter",
    field="`FilterExpression.expression`",
    limit=128,
    unit="entries",
    error=FilterBeyondLimit,
    reason="the broker keeps about 100 bytes per tag while the poll waits",
)
RECEIPT_HANDLE: Final = FieldLimit(
    subject="a receipt handle",
    field="`receipt_handle`",
    limit=512,
    unit="bytes",
    error=InvalidReceiptHandle,
    reason="handles have under 100 bytes",
)
RECALL_HANDLE: Final = FieldLimit(
    subject="a recall handle",
    field="`RecallMessageRequest.recall_handle`",
    limit=4_096,
    unit="bytes",
    error=BadRequest,
    reason="handles contain a message id",
)
TRANSACTION_ID: Final = FieldLimit(
    subject="a transaction id",
    field="`EndTransactionRequest.transaction_id`",
    limit=512,
    unit="bytes",
    error=InvalidTransactionId,
    reason="ids have 26 bytes",
)
ACK_ENTRIES: Final = FieldLimit(
    subject="an ack",
    field="`AckMessageRequest.entries`",
    limit=1_024,
    unit="entries",
    error=BadRequest,
    reason="one ack must not fill a frame of the link; clients send one entry",
)
SETTINGS_ENTRIES: Final = FieldLimit(
    subject="the topic list of a client's settings",
    field="`Publishing.topics`, `Subscription.subscriptions`",
    limit=1_024,
    unit="entries",
    error=BadRequest,
    reason="the response repeats them",
)
USER_AGENT: Final = FieldLimit(
    subject="a field of a user agent",
    field="`UA.version`, `UA.platform`, `UA.hostname`",
    limit=1_024,
    unit="bytes",
    error=BadRequest,
    reason="the response repeats them; official clients send under 100",
)

NAMES: Final = FieldLimit(
    subject="the list of topics, or of consumer groups, of a request",
    field="`topics`, `groups` of GetQueues and of the listings of `PipelineSource`",
    limit=4_096,
    unit="entries",
    error=BadRequest,
    reason="each page looks up all names, in about a millisecond",
)
TOPIC_PATTERN: Final = FieldLimit(
    subject="a pattern of topics",
    field="`GetQueuesRequest.topic_pattern`",
    limit=127,
    unit="bytes",
    error=BadRequest,
    reason="the longest topic name; it is compared with every topic name",
)
EVENT_TOPICS: Final = FieldLimit(
    subject="the list of topics of an event read",
    field="`ReadEventsRequest.topics`",
    limit=1_024,
    unit="entries",
    error=BadRequest,
    reason="each page sends them to the broker",
)
EVENT_KINDS: Final = FieldLimit(
    subject="the list of kinds of events",
    field="`ReadEventsRequest.kinds`",
    limit=1_024,
    unit="entries",
    error=BadRequest,
    reason="each page sends them to the broker",
)

FIELDS: Final = (
    CLIENT_ID,
    NAMESPACE,
    ENDPOINTS,
    HOST,
    HOSTS,
    MESSAGES,
    BODY,
    MESSAGE_ID,
    MESSAGE_GROUP,
    KEYS,
    USER_PROPERTIES,
    PROPERTIES,
    SYSTEM_PROPERTIES,
    BORN_HOST,
    TRACE_CONTEXT,
    ATTEMPT_ID,
    TAG,
    FILTER,
    FILTER_TAGS,
    SQL_FILTER,
    RECEIPT_HANDLE,
    RECALL_HANDLE,
    TRANSACTION_ID,
    ACK_ENTRIES,
    SETTINGS_ENTRIES,
    USER_AGENT,
    NAMES,
    TOPIC_PATTERN,
    EVENT_TOPICS,
    EVENT_KINDS,
)

# The size in bytes of a whole request, inflated. A larger one is rejected at its prefix.
OTHER_REQUESTS_BYTES: Final = 128 << 10  # names, a filter, a handle: one or two kilobytes
REQUESTS: Final[Mapping[str, int]] = {
    "SendMessage": 16 << 20,  # four of the largest bodies
    "AckMessage": 512 << 10,  # the maximum of entries
    # A requested stack trace of a thousand threads. Other commands have a limit of 64 KiB
    # (`outline.check_telemetry`); even the maximum of topics with ordinary names takes 4 KiB.
    "Telemetry": 1 << 20,
}
# The server discards a telemetry message over its limit while it arrives, and the stream continues.
# Above this size, which is a stack trace of some thousands of threads, the stream ends.
TELEMETRY_SKIPPED_BYTES: Final = 4 << 20


def request_bytes_max(method: str) -> int:
    """Return the size limit of a request of a method."""
    return REQUESTS.get(method, OTHER_REQUESTS_BYTES)


# Characters kept of each text by which a client describes itself. Longer texts are cut.
CLIENT_TEXT_CHARS_MAX: Final = 64
