"""Messages built from send requests of the REST API."""

from __future__ import annotations

import base64
import binascii
import socket
from typing import NamedTuple

from google.protobuf.timestamp_pb2 import Timestamp

from tidemill.admin.json.messages import NewMessage
from tidemill.admin.messages.message_ids import MessageIds
from tidemill.common.clock import Clock
from tidemill.common.errors import BadRequest
from tidemill.message.dedup_key import DEDUP_PROPERTY, check_key
from tidemill.message.encoding import encode_stored
from tidemill.message.rules import check_item, check_message, message_type
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000
# The delays of the levels 1 to 18, which older clients use.
DELAY_LEVELS_MS = (
    *(n * _SECOND_MS for n in (1, 5, 10, 30)),
    *(n * _MINUTE_MS for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(n * _HOUR_MS for n in (1, 2)),
)


class ComposedMessage(NamedTuple):
    """A message in its stored encoding."""

    message_id: str
    blob: bytes
    delay_ms: int | None  # None: not delayed, or until the instant in the blob
    is_delayed: bool
    dedup_key: str | None  # the user property
    has_priority: bool


class Composer:
    """Builder of messages with unique ids."""

    def __init__(self, clock: Clock, *, item_bytes_max: int) -> None:
        """Reject messages that clients would receive as more than `item_bytes_max`."""
        self._clock = clock
        self._item_bytes_max = item_bytes_max
        self._ids = MessageIds(clock.wall_ms())
        self._host = socket.gethostname()

    def compose(
        self, topic: str, new: NewMessage, *, dedup_key: str | None = None
    ) -> ComposedMessage:
        """Build a message and check it as a message of a client. Raises ServiceError.

        `dedup_key` must equal the user property of the message, if that has one.
        """
        message_id = self._ids.make()
        properties = v2.SystemProperties(
            message_id=message_id,
            tag=new.tag,
            keys=new.keys,
            message_group=new.message_group,
            body_encoding=v2.IDENTITY,
            born_host=self._host,
        )
        if new.priority is not None:
            properties.priority = new.priority
        delay_ms = _delay_ms(new)
        is_delayed = delay_ms is not None or new.due_at_ms is not None
        if is_delayed:
            # A relative delay starts when the broker stores the message, so the time is 0 here.
            properties.delivery_timestamp.CopyFrom(_timestamp(new.due_at_ms or 0))
        message = v2.Message(
            topic=v2.Resource(name=topic),
            user_properties=_properties_of(new, dedup_key),
            system_properties=properties,
            body=_body(new),
        )
        check_message(message)
        kind = message_type(properties)
        blob = encode_stored(message, message_type=kind, now_ms=self._clock.wall_ms())
        check_item(blob, self._item_bytes_max)
        key = message.user_properties.get(DEDUP_PROPERTY)
        return ComposedMessage(
            message_id, blob, delay_ms, is_delayed, key, new.priority is not None
        )


def _properties_of(new: NewMessage, dedup_key: str | None) -> dict[str, str]:
    if dedup_key is None:
        return new.properties
    check_key(dedup_key.encode())
    own = new.properties.get(DEDUP_PROPERTY, dedup_key)
    if own != dedup_key:
        raise BadRequest(
            f"the header Idempotency-Key is {dedup_key!r}, and the property {DEDUP_PROPERTY} of the"
            f" body is {own!r}; give one of them, or the same value"
        )
    return {**new.properties, DEDUP_PROPERTY: dedup_key}


def _delay_ms(new: NewMessage) -> int | None:
    if new.delay_level is not None:
        return DELAY_LEVELS_MS[min(new.delay_level, len(DELAY_LEVELS_MS)) - 1]
    return new.delay_ms


def _timestamp(at_ms: int) -> Timestamp:
    seconds, fraction_ms = divmod(at_ms, 1000)
    return Timestamp(seconds=seconds, nanos=fraction_ms * 1_000_000)


def _body(new: NewMessage) -> bytes:
    if new.body_base64 is None:
        return (new.body or "").encode()
    try:
        return base64.b64decode(new.body_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"bodyBase64 is not valid base64: {error}") from None
