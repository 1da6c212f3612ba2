"""Messages: send, find, read and trace them without consuming them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.routing import APIRoute

from tidemill.admin.audit.access_reports import note_access
from tidemill.admin.audit.author import PUB
from tidemill.admin.cluster import calls
from tidemill.admin.cluster.brokers import BrokerAnswers, Brokers
from tidemill.admin.http.access import OTHER_BODY_BYTES_MAX
from tidemill.admin.http.problems import MEDIA_TYPE, PROBLEM_SCHEMA
from tidemill.admin.http.request_access import READS, RequestAccess
from tidemill.admin.json.messages import (
    MessageListView,
    MessageTraceView,
    MessageView,
    NewMessage,
    QueueMessagesView,
    SentMessageView,
)
from tidemill.admin.json.schema import EXACT_MAX
from tidemill.admin.messages.store import check_takes_keys, create_topic, store
from tidemill.admin.messages.trace import CURSOR_CHARS_MAX, CURSOR_PATTERN, trace
from tidemill.admin.messages.views import message_of
from tidemill.admin.routes import (
    Access,
    BrokerName,
    ChangeAuthor,
    Cluster,
    MessageComposer,
    OwnAccessLog,
    OwnTopicName,
    SendLimits,
    TopicName,
)
from tidemill.common.errors import (
    BadRequest,
    BrokerGroupUnreachable,
    IdempotencyMismatch,
    MessageNotFound,
    TopicNotFound,
)
from tidemill.message.recall_handle import RecallFields
from tidemill.message.resource_names import check_own_topic
from tidemill.security.acl import Action, topic_resource
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Strings and commas of the JSON of a message. A message has at most three thousand fields, keys and
# properties. Parsing a token takes fifty times its size, and its error document as much again.
TOKENS_MAX: Final = 8_192
# The paths with large bodies: of the API, and of the form of the console.
MESSAGES: Final = re.compile(r"/api/v1/topics/[^/]+/messages|/ui/topics/[^/]+/send")
_TOKENS: Final = re.compile(rb'"(?:[^"\\]+|\\.)*+"|,', re.DOTALL)


class MessageRoute(APIRoute):
    """A route that checks a large body before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        serve = super().get_route_handler()

        async def check(request: Request) -> Response:
            body = await request.body()
            if len(body) > OTHER_BODY_BYTES_MAX and has_many_tokens(body):
                raise BadRequest(
                    f"the body has more than {TOKENS_MAX} strings and commas; send fewer keys and"
                    " properties"
                )
            return await serve(request)

        return check


def has_many_tokens(body: bytes) -> bool:
    """Whether a JSON body has more strings and commas than any valid message."""
    return next(islice(_TOKENS.finditer(body), TOKENS_MAX, None), None) is not None


router = APIRouter(tags=["messages"], route_class=MessageRoute)

COPIES_MAX = 64  # per message id: the original, its retries, its dead letter
Key = Annotated[str, Query(min_length=1, description="One of the keys set by the producer.")]
Limit = Annotated[int, Query(ge=1, le=256, description="Maximum number of messages.")]
READ_BYTES_MAX = 4 << 20  # limit of the broker for one read of a queue
QueueId = Annotated[int, Path(ge=0, le=2**31, description="Number of the queue, from 0.")]
FromOffset = Annotated[
    int,
    Query(
        alias="fromOffset",
        ge=0,
        le=EXACT_MAX,
        description="The first offset. Expired messages are skipped.",
    ),
]
Creation = Annotated[
    bool, Query(description="Create the topic if it is missing. Needs the right to create it.")
]
MaxBytes = Annotated[
    int,
    Query(
        alias="maxBytes",
        ge=1,
        le=READ_BYTES_MAX,
        description="The answer ends with the first message that exceeds this size.",
    ),
]


def note_read(topic: TopicName, access: Access, author: ChangeAuthor, own: OwnAccessLog) -> None:
    """Note a read of message bodies in the access log."""
    if access.allows_topic(Action.SUB, topic):
        note_access(own, author.actor, author.call, resource=f"Topic:{topic}", action="Sub")


IDEMPOTENCY_KEY: Final = "Idempotency-Key"
NotedRead = Annotated[None, Depends(note_read)]
MessageId = Annotated[str, Path(description="Id of the message, as the producer received it.")]


def idempotency_key_of(
    request: Request,
    header: Annotated[
        str | None,
        Header(
            alias=IDEMPOTENCY_KEY,
            description="Dedup key of the message: 1 to 255 bytes of UTF-8 without control"
            " characters. It must equal the property `dedup-key` of the body, if that is there, and"
            " the topic must have deduplication.",
            examples=["order-17"],
        ),
    ] = None,
) -> str | None:
    """Return the only header Idempotency-Key, which is UTF-8. Raises BadRequest."""
    count = len(request.headers.getlist(IDEMPOTENCY_KEY))
    if count > 1:
        raise BadRequest(f"the request has {count} headers {IDEMPOTENCY_KEY}; send one")
    try:
        return None if header is None else header.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise BadRequest("the header Idempotency-Key is not UTF-8") from None


IdempotencyKey = Annotated[str | None, Depends(idempotency_key_of)]


@router.post(
    "/topics/{topic}/messages",
    response_model_exclude_none=True,
    responses={
        201: {
            "description": "A message with an `Idempotency-Key` is stored.",
            "model": SentMessageView,
        },
        422: {
            "description": "Another message has the dedup key, with another body: a problem"
            " document of the type `idempotency-mismatch`. Nothing was stored.",
            "content": {MEDIA_TYPE: {"schema": PROBLEM_SCHEMA}},
        },
    },
)
async def send_message(
    topic: OwnTopicName,
    message: NewMessage,
    cluster: Cluster,
    access: Access,
    composer: MessageComposer,
    author: ChangeAuthor,
    quotas: SendLimits,
    idempotency_key: IdempotencyKey,
    response: Response,
    create: Creation = False,
) -> SentMessageView:
    """Send a message for immediate or delayed delivery.

    After an answer, the message is durable. Without an answer, it may be stored or not. A message
    with a message group goes to the broker group of that message group, others to any one. A
    message over a quota of the user, the topic or a prefix is refused with 429. A missing topic is
    an error, since its name may be a typing error; `create=true` creates it.

    On a topic with deduplication, the header `Idempotency-Key` makes repeats safe: the message is
    stored once within the window. The first call answers 201. A repeat answers 200 with the first
    answer and `duplicate`, also if it arrives while the first call is in progress.
    """
    composed = composer.compose(topic, message, dedup_key=idempotency_key)
    if quotas is not None:
        await quotas.admit(
            user=access.user,
            user_id=access.user_id,
            topic=topic,
            size_bytes=len(composed.blob),
            is_delayed=composed.is_delayed,
        )
    if idempotency_key is not None:
        await check_takes_keys(cluster, topic)
    request = pb.StoreMessageRequest(
        topic=topic,
        blob=composed.blob,
        delay_ms=composed.delay_ms,
        existence=pb.EXISTENCE_MUST_EXIST,
        audit=author.of(f"Topic:{topic}", PUB),
    )
    stored = functools.partial(
        store,
        cluster,
        request,
        message.message_group or "",
        message_id=composed.message_id,
        dedup_key=composed.dedup_key,
    )
    try:
        name, reply = await stored()
    except TopicNotFound:
        if not create:
            raise _missing_topic(topic) from None
        access.require(Action.CREATE, topic_resource(topic))
        await create_topic(cluster, topic, composed, author.of(f"Topic:{topic}"))
        name, reply = await stored()
    sent = SentMessageView(message_id=composed.message_id, broker=name, queue_id=reply.queue_id)
    if reply.HasField("repeat"):
        _note_repeat(sent, reply.repeat, topic)
    elif idempotency_key is not None:
        response.status_code, sent.duplicate = HTTPStatus.CREATED, False
    if reply.due_at_ms:
        await _note_timer(sent, topic, cluster, reply)
    else:
        sent.queue_offset = reply.queue_offset
    return sent


async def _note_timer(
    sent: SentMessageView, topic: str, cluster: Brokers, reply: pb.StoreMessageReply
) -> None:
    """Add the timer of a delayed message to an answer, and the handle that recalls it."""
    sent.timer_id, sent.deliver_at_ms = reply.queue_offset, reply.due_at_ms
    recall = RecallFields(reply.queue_offset, reply.due_at_ms, sent.message_id)
    signer = await (await cluster.member(sent.broker)).client.recall_signer()
    sent.recall_handle = signer.sign(topic, recall)


def _missing_topic(topic: str) -> TopicNotFound:
    """Return the error of a topic that can be created. Raises IllegalTopic for another one."""
    check_own_topic(topic)
    return TopicNotFound(
        f"there is no topic {topic!r}, so nothing was stored; run `tidemill topic create {topic}`,"
        " or send with --create (REST: create=true)"
    )


def _note_repeat(sent: SentMessageView, repeat: pb.RepeatedKey, topic: str) -> None:
    """Make an answer that of the first message. Raises IdempotencyMismatch."""
    if repeat.is_mismatch:
        raise IdempotencyMismatch(
            f"message {repeat.message_id} of topic {topic} has this dedup key and another body, so"
            f" this message is not stored; send another body with another key"
        )
    # Retention may have freed the first message. Its id is then unknown.
    sent.message_id, sent.duplicate = repeat.message_id or sent.message_id, True


@router.get("/topics/{topic}/messages", response_model_exclude_none=True)
async def find_messages(
    topic: TopicName,
    key: Key,
    cluster: Cluster,
    access: Access,
    _noted: NotedRead,
    limit: Limit = 32,
) -> MessageListView:
    """Find messages by key, newest first."""
    request = pb.FindMessagesRequest(topic=topic, key=key, max_messages=limit)
    async with cluster.large_read():
        found = await cluster.call_all(calls.FIND_MESSAGES, request)
        return _list_of(found, topic, limit, access)


@router.get("/topics/{topic}/messages/{message_id}", response_model_exclude_none=True)
async def peek_message(
    topic: TopicName, message_id: MessageId, cluster: Cluster, access: Access, _noted: NotedRead
) -> MessageListView:
    """Show a message and its copies on retry and dead-letter topics."""
    request = pb.FindMessagesRequest(topic=topic, message_id=message_id, max_messages=COPIES_MAX)
    async with cluster.large_read():
        answers = await cluster.call_all(calls.FIND_MESSAGES, request)
        found = _list_of(answers, topic, COPIES_MAX, access)
    if not found.messages and found.unreachable:
        raise BrokerGroupUnreachable(
            f"{', '.join(found.unreachable)} cannot be reached, and no other broker group has"
            f" message {message_id}; retry later"
        )
    if not found.messages:
        raise MessageNotFound(f"topic {topic} has no message {message_id}")
    return found


@router.get("/messages/{message_id}/trace", response_model_exclude_none=True)
async def trace_message(
    message_id: MessageId,
    cluster: Cluster,
    access: Access,
    request: Request,
    cursor: Annotated[
        str,
        Query(
            max_length=CURSOR_CHARS_MAX,
            pattern=CURSOR_PATTERN,
            description="`cursor` of the previous answer.",
        ),
    ] = "",
) -> MessageTraceView:
    """List the events of a message, from its storage on.

    A call reads up to 64 MiB of log and returns the events found so far. Repeat it with `cursor`
    until the answer has no cursor. Each broker group reads its log from the first record of the
    message. Events of consumer groups that the user may not read are left out.
    """
    await request.body()  # Only after the body is the disconnect of the client reported.
    return await trace(cluster, message_id, cursor, access, is_gone=request.is_disconnected)


@router.get("/topics/{topic}/queues/{queue}/messages", response_model_exclude_none=True)
async def read_messages(
    topic: TopicName,
    queue: QueueId,
    cluster: Cluster,
    access: Access,
    _noted: NotedRead,
    broker: BrokerName = None,
    from_offset: FromOffset = 0,
    limit: Limit = 32,
    max_bytes: MaxBytes = READ_BYTES_MAX,
) -> QueueMessagesView:
    """Read messages of one queue in order, without consuming them.

    Without `broker`, the queue is one of the home.
    """
    members = await cluster.members()
    member = members[0] if broker is None else await cluster.member(broker)
    async with cluster.large_read():
        reply = await member.client.call(
            calls.READ_MESSAGES,
            pb.ReadMessagesRequest(
                topic=topic,
                queue_id=queue,
                from_offset=from_offset,
                max_messages=limit,
                max_bytes=max_bytes,
            ),
        )
        return QueueMessagesView(
            messages=[_view(message, topic, member.name, access) for message in reply.messages],
            next_offset=reply.next_offset,
            min_offset=reply.min_offset,
            max_offset=reply.max_offset,
        )


def _view(message: pb.FoundMessage, topic: str, broker: str, access: RequestAccess) -> MessageView:
    is_hidden = not access.allows_topic(Action.SUB, message.stored_topic or topic)
    return message_of(message, topic=topic, broker=broker, is_hidden=is_hidden)


def _list_of(
    found: BrokerAnswers[pb.FindMessagesReply], topic: str, limit: int, access: RequestAccess
) -> MessageListView:
    messages = [
        _view(message, topic, broker, access)
        for broker, reply in found.answers
        for message in reply.messages
        # A retry or a dead letter belongs to its consumer group.
        if access.allows_topic(READS, message.stored_topic or topic)
    ]
    # Each broker already sorts its messages, newest first.
    if len(found.answers) > 1:
        messages.sort(key=lambda message: -message.stored_at_ms)
    return MessageListView(messages=messages[:limit], unreachable=found.unreachable or None)
