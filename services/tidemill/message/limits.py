"""What a request may hold: every field whose size, and every list whose length, a client chooses.

One row each, checked where the request is read, before anything is done with what it bounds: before
a cache, a log line, a command of the link. docs/limits.md is generated from it.

    limits.ATTEMPT_ID.check_text(parsed.attempt_id)
    limits.MESSAGES.check_count(len(messages))

How large a request may be as a whole, by its method, is known before it is read at all: `REQUESTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, final

from tidemill.common.errors import (
    BadRequest,
    IllegalAccessPoint,
    IllegalFilter,
    IllegalMessageGroup,
    IllegalMessageId,
    InvalidReceiptHandle,
    MessageBodyTooLarge,
    PropertiesTooLarge,
    RequestError,
)

_UTF8_BYTES_MAX: Final = 4  # of a character


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLimit:
    """The most of one thing, and how a request with more of it is refused."""

    what: str  # in the sentence that refuses, at its beginning
    where: str  # field of the protocol
    most: int
    unit: Literal["bytes", "entries"]
    error: type[RequestError]
    why: str

    def check_text(self, text: str) -> None:
        """Raise the error for a text of more bytes."""
        # The second count is the one that matters; the first is at hand.
        if len(text) * _UTF8_BYTES_MAX > self.most:
            self.check_count(len(text.encode()))

    def check_count(self, count: int) -> None:
        """Raise the error for more bytes or entries."""
        if count > self.most:
            raise self.error(f"{self.what} has at most {self.most} {self.unit}, not {count}")


CLIENT_ID: Final = FieldLimit(
    what="the header x-mq-client-id",
    where="metadata `x-mq-client-id`",
    most=255,
    unit="bytes",
    error=BadRequest,
    why="remembered of 100,000 clients; official ones send under 100",
)
NAMESPACE: Final = FieldLimit(
    what="a resource namespace",
    where="`Resource.resource_namespace`",
    most=127,
    unit="bytes",
    error=BadRequest,
    why="every queue of a route and every message of a receive repeats it",
)
ENDPOINTS: Final = FieldLimit(
    what="an access point",
    where="`Endpoints.addresses`",
    most=16,
    unit="entries",
    error=IllegalAccessPoint,
    why="every queue of a route repeats them",
)
HOST: Final = FieldLimit(
    what="a host",
    where="`Address.host`",
    most=255,
    unit="bytes",
    error=IllegalAccessPoint,
    why="as long as a name of DNS",
)
HOSTS: Final = FieldLimit(
    what="the list of hosts of an access point, together,",
    where="`Endpoints.addresses`",
    most=640,
    unit="bytes",
    error=IllegalAccessPoint,
    why="each of 1,024 queues of a route repeats them; 16 addresses of IPv6",
)
MESSAGES: Final = FieldLimit(
    what="a request",
    where="`SendMessageRequest.messages`",
    most=256,
    unit="entries",
    error=BadRequest,
    why="they are checked and stored in one turn, some 12 ms",
)
BODY: Final = FieldLimit(
    what="a message body",
    where="`Message.body`",
    most=4_194_304,
    unit="bytes",
    error=MessageBodyTooLarge,
    why="of the protocol; Node.js, C# and Rust receive no more",
)
MESSAGE_ID: Final = FieldLimit(
    what="a message id",
    where="`SystemProperties.message_id`",
    most=1_024,
    unit="bytes",
    error=IllegalMessageId,
    why="a position in the stored message is 16 bits",
)
MESSAGE_GROUP: Final = FieldLimit(
    what="a message group",
    where="`SystemProperties.message_group`",
    most=63,
    unit="bytes",
    error=IllegalMessageGroup,
    why="of the protocol",
)
KEYS: Final = FieldLimit(
    what="the list of keys of a message",
    where="`SystemProperties.keys`",
    most=128,
    unit="entries",
    error=PropertiesTooLarge,
    why="each is an entry of the index",
)
USER_PROPERTIES: Final = FieldLimit(
    what="the user properties of a message",
    where="`Message.user_properties`",
    most=128,
    unit="entries",
    error=PropertiesTooLarge,
    why="of the protocol",
)
PROPERTIES: Final = FieldLimit(
    what="user properties, tag and keys together",
    where="`Message`",
    most=16_384,
    unit="bytes",
    error=PropertiesTooLarge,
    why="of the protocol",
)
SYSTEM_PROPERTIES: Final = FieldLimit(
    what="the system properties of all messages of a request",
    where="`Message.system_properties`",
    most=1 << 20,
    unit="bytes",
    error=PropertiesTooLarge,
    why="parsed they take some ten times that, in the worst case",
)
BORN_HOST: Final = FieldLimit(
    what="a born host",
    where="`SystemProperties.born_host`",
    most=255,
    unit="bytes",
    error=BadRequest,
    why="its encoding is cached, of 4,096 hosts",
)
TRACE_CONTEXT: Final = FieldLimit(
    what="a trace context",
    where="`SystemProperties.trace_context`",
    most=4_096,
    unit="bytes",
    error=PropertiesTooLarge,
    why="stored and delivered with its message; 55 in W3C's format",
)
ATTEMPT_ID: Final = FieldLimit(
    what="an attempt id",
    where="`ReceiveMessageRequest.attempt_id`",
    most=255,
    unit="bytes",
    error=BadRequest,
    why="stored with its size in one byte; official clients send a UUID",
)
FILTER: Final = FieldLimit(
    what="a tag filter",
    where="`FilterExpression.expression`",
    most=4_096,
    unit="bytes",
    error=IllegalFilter,
    why="the broker keeps it while the poll waits",
)
FILTER_TAGS: Final = FieldLimit(
    what="a tag filter",
    where="`FilterExpression.expression`",
    most=128,
    unit="entries",
    error=IllegalFilter,
    why="the broker keeps each, some 100 bytes, while the poll waits",
)
RECEIPT_HANDLE: Final = FieldLimit(
    what="a receipt handle",
    where="`receipt_handle`",
    most=512,
    unit="bytes",
    error=InvalidReceiptHandle,
    why="ours take under 100",
)
RECALL_HANDLE: Final = FieldLimit(
    what="a recall handle",
    where="`RecallMessageRequest.recall_handle`",
    most=4_096,
    unit="bytes",
    error=BadRequest,
    why="ours hold a message id",
)
ACK_ENTRIES: Final = FieldLimit(
    what="an ack",
    where="`AckMessageRequest.entries`",
    most=1_024,
    unit="entries",
    error=BadRequest,
    why="a frame of the link should not be filled by one; clients send one",
)
SETTINGS_ENTRIES: Final = FieldLimit(
    what="the settings of a client",
    where="`Publishing.topics`, `Subscription.subscriptions`",
    most=1_024,
    unit="entries",
    error=BadRequest,
    why="the answer repeats them",
)
USER_AGENT: Final = FieldLimit(
    what="a field of a user agent",
    where="`UA.version`, `UA.platform`, `UA.hostname`",
    most=1_024,
    unit="bytes",
    error=BadRequest,
    why="the answer repeats them; official clients send under 100",
)

NAMES: Final = FieldLimit(
    what="the list of topics, or of consumer groups, of a request",
    where="`topics`, `groups` of GetQueues and of the listings of `PipelineSource`",
    most=4_096,
    unit="entries",
    error=BadRequest,
    why="each page looks all of them up, about a millisecond",
)
TOPIC_PATTERN: Final = FieldLimit(
    what="a pattern of topics",
    where="`GetQueuesRequest.topic_pattern`",
    most=127,
    unit="bytes",
    error=BadRequest,
    why="as long as a name; it is compared with that of every topic",
)
EVENT_TOPICS: Final = FieldLimit(
    what="the list of topics of which events are read",
    where="`ReadEventsRequest.topics`",
    most=1_024,
    unit="entries",
    error=BadRequest,
    why="the broker is sent them with each page",
)
EVENT_KINDS: Final = FieldLimit(
    what="the list of kinds of events",
    where="`ReadEventsRequest.kinds`",
    most=1_024,
    unit="entries",
    error=BadRequest,
    why="the broker is sent them with each page",
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
    FILTER,
    FILTER_TAGS,
    RECEIPT_HANDLE,
    RECALL_HANDLE,
    ACK_ENTRIES,
    SETTINGS_ENTRIES,
    USER_AGENT,
    NAMES,
    TOPIC_PATTERN,
    EVENT_TOPICS,
    EVENT_KINDS,
)

# Bytes of a whole request, inflated; one of more is refused by its first bytes.
OTHER_REQUESTS_BYTES: Final = 128 << 10  # names, a filter, a handle: a kilobyte or two
REQUESTS: Final[Mapping[str, int]] = {
    "SendMessage": 16 << 20,  # four of the largest bodies
    "AckMessage": 512 << 10,  # the most entries
    # A stack trace that an operator asked for, of a thousand threads. Anything else has 64 KiB
    # (`outline.check_telemetry`): the most topics with names as long as most, under 4 KiB in fact.
    "Telemetry": 1 << 20,
}
# A telemetry message over its limit is thrown away as it comes, and its stream goes on, up to this
# size: stack traces of some thousands of threads. A larger one ends the stream.
TELEMETRY_SKIPPED_BYTES: Final = 4 << 20


def request_bytes_max(method: str) -> int:
    """Return how large a request of a method may be."""
    return REQUESTS.get(method, OTHER_REQUESTS_BYTES)


# Of what clients tell of themselves, this much is kept; whatever they tell, they are served.
TOLD_CHARS_MAX: Final = 64
