"""Messages: sending them, and looking at them without consuming them."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.routing import APIRoute

from tidemill.admin import schemas
from tidemill.admin.door import OTHER_BODY_BYTES_MAX
from tidemill.admin.peek import message_of
from tidemill.admin.routes import Broker, MessageComposer
from tidemill.common.errors import BadRequest, MessageNotFound
from tidemill.message.recall_handle import Recall
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Strings and commas of a message: fields, keys and properties, some three thousand at most. Parsed,
# each may take fifty times its size, and its refusal as much again.
TOKENS_MAX: Final = 8_192
MESSAGES: Final = re.compile(r"/api/v1/topics/[^/]+/messages")  # where bodies may be large
_TOKENS: Final = re.compile(rb'"(?:[^"\\]+|\\.)*+"|,', re.DOTALL)


class MessageRoute(APIRoute):
    """A route that looks at a large body before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request."""
        serve = super().get_route_handler()

        async def check(request: Request) -> Response:
            body = await request.body()
            if len(body) > OTHER_BODY_BYTES_MAX and has_many_tokens(body):
                raise BadRequest("a message has not so many fields, keys and properties")
            return await serve(request)

        return check


def has_many_tokens(body: bytes) -> bool:
    """Whether a body of JSON holds more strings and commas than any message."""
    return next(islice(_TOKENS.finditer(body), TOKENS_MAX, None), None) is not None


router = APIRouter(tags=["messages"], route_class=MessageRoute)

COPIES_MAX = 64  # of one message id: the original, its retries, its dead letter
Key = Annotated[str, Query(min_length=1, description="One of the keys set by the producer.")]
Limit = Annotated[int, Query(ge=1, le=256, description="At most so many of them.")]
Topic = Annotated[str, Path(description="Name of the topic.")]
MessageId = Annotated[str, Path(description="Id that its producer got.")]


@router.post("/topics/{topic}/messages", response_model_exclude_none=True)
async def send_message(
    topic: Topic, message: schemas.NewMessage, broker: Broker, composer: MessageComposer
) -> schemas.SentMessage:
    """Send a message, at once or for a later time.

    An answer says that the message is durable. Without one it may be stored or not.
    """
    composed = composer.compose(topic, message)
    request = pb.StoreMessageRequest(topic=topic, blob=composed.blob, delay_ms=composed.delay_ms)
    reply = await broker.store_message(request)
    sent = schemas.SentMessage(message_id=composed.message_id, queue_id=reply.queue_id)
    if not reply.due_at_ms:
        sent.queue_offset = reply.queue_offset
        return sent
    sent.timer_id, sent.deliver_at_ms = reply.queue_offset, reply.due_at_ms
    recall = Recall(reply.queue_offset, reply.due_at_ms, composed.message_id)
    sent.recall_handle = (await broker.recall_signer()).sign(topic, recall)
    return sent


@router.get("/topics/{topic}/messages", response_model_exclude_none=True)
async def find_messages(
    topic: Topic, key: Key, broker: Broker, limit: Limit = 32
) -> schemas.MessageList:
    """Find messages by key, the newest first."""
    request = pb.FindMessagesRequest(topic=topic, key=key, max_messages=limit)
    reply = await broker.find_messages(request)
    return schemas.MessageList(messages=[message_of(m, topic=topic) for m in reply.messages])


@router.get("/topics/{topic}/messages/{message_id}", response_model_exclude_none=True)
async def peek_message(topic: Topic, message_id: MessageId, broker: Broker) -> schemas.MessageList:
    """Show a message and its copies on retry and dead-letter topics."""
    request = pb.FindMessagesRequest(topic=topic, message_id=message_id, max_messages=COPIES_MAX)
    reply = await broker.find_messages(request)
    if not reply.messages:
        raise MessageNotFound(f"topic {topic} holds no message {message_id}")
    return schemas.MessageList(messages=[message_of(m, topic=topic) for m in reply.messages])
