"""Batches of messages: NDJSON with a message per line, and an outcome per line."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any, Final

import grpc
from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import ValidationError

from tidemill.admin.cluster.brokers import UNREACHABLE_ERRORS, Brokers
from tidemill.admin.http.access import OTHER_BODY_BYTES_MAX
from tidemill.admin.json.messages import BatchLine, BatchOutcomeView, LineOutcome, LineOutcomeView
from tidemill.admin.routes import (
    Access,
    ChangeAuthor,
    Cluster,
    MessageComposer,
    OwnTopicName,
    SendLimits,
)
from tidemill.admin.routes.messages import TOKENS_MAX, Creation, has_many_tokens, send_message
from tidemill.common.errors import INTERNAL, BadRequest, ServiceError, codes_of
from tidemill.message.resource_names import check_topic

router = APIRouter(tags=["messages"])

BATCHES: Final = re.compile(r"/api/v1/topics/[^/]+/messages:batch")
BATCH_BYTES_MAX: Final = 8 << 20
LINES_MAX: Final = 256
MEDIA_TYPE: Final = "application/x-ndjson"
REASON_CHARS_MAX: Final = 500
_BODY: Final[dict[str, Any]] = {
    "required": True,
    "content": {
        MEDIA_TYPE: {
            "schema": {
                "type": "string",
                "minLength": 1,
                "pattern": "[^\\n]",
                "description": "One JSON object per line: the fields of a message, and optionally"
                " `idempotencyKey`, which is the header Idempotency-Key of a single send.",
            },
            "example": '{"body": "first"}\n{"body": "second", "idempotencyKey": "order-17"}\n',
        }
    },
}


@router.post(
    "/topics/{topic}/messages:batch",
    response_model_exclude_none=True,
    openapi_extra={"requestBody": _BODY},
)
async def send_messages(
    topic: OwnTopicName,
    request: Request,
    cluster: Cluster,
    access: Access,
    composer: MessageComposer,
    author: ChangeAuthor,
    quotas: SendLimits,
    create: Creation = False,
) -> BatchOutcomeView:
    """Send up to 256 messages, 8 MiB in all, in the order of their lines.

    Each line has its own outcome, and a refused line does not stop the next ones. Messages with the
    outcome STORED are durable. If the broker does not answer, the line has the outcome UNKNOWN, and
    the next lines are not sent.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != MEDIA_TYPE:
        # Other types are not read, since a form on a foreign web page can send them.
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type is not {MEDIA_TYPE}; send one JSON object per line with this header",
        )
    check_topic(topic)  # Otherwise each line would be refused.
    body = await request.body()
    if not body.strip(b"\n"):
        raise BadRequest("the body has no line; send one JSON object per line")
    lines = body.removesuffix(b"\n").split(b"\n", LINES_MAX)
    if len(lines) > LINES_MAX:
        raise BadRequest(f"the body has more than {LINES_MAX} lines; send them in several batches")
    outcomes: list[LineOutcomeView] = []
    is_stopped = False
    for line in lines:
        if is_stopped:
            outcomes.append(LineOutcomeView(outcome=LineOutcome.NOT_SENT))
            continue
        await asyncio.sleep(0)  # Refused lines have no other await, and take milliseconds each.
        outcome = await _send(line, topic, cluster, access, composer, author, quotas, create=create)
        is_stopped = outcome.outcome is LineOutcome.UNKNOWN
        outcomes.append(outcome)
    return BatchOutcomeView(
        sent=sum(one.message is not None for one in outcomes), outcomes=outcomes
    )


async def _send(
    line: bytes,
    topic: str,
    cluster: Brokers,
    access: Access,
    composer: MessageComposer,
    author: ChangeAuthor,
    quotas: SendLimits,
    *,
    create: bool,
) -> LineOutcomeView:
    """Send the message of a line, as a single send does."""
    try:
        message = _read(line)
        key = message.idempotency_key
        sent = await send_message(
            topic, message, cluster, access, composer, author, quotas, key, Response(), create
        )
    except ServiceError as error:
        is_unknown = isinstance(error, UNREACHABLE_ERRORS)
        return LineOutcomeView(
            outcome=LineOutcome.UNKNOWN if is_unknown else LineOutcome.REFUSED,
            title=type(error).__name__,
            detail=error.message,
            code=codes_of(error).rocketmq,
        )
    except grpc.aio.AioRpcError as error:
        # Without an outcome for this line, the caller would lose those of the stored lines.
        return LineOutcomeView(
            outcome=LineOutcome.UNKNOWN,
            title="Internal",
            detail=f"the call of the broker failed ({_reason_of(error)}); the message may be"
            " stored, so check before you send it again",
            code=INTERNAL.rocketmq,
        )
    outcome = LineOutcome.DUPLICATE if sent.duplicate else LineOutcome.STORED
    return LineOutcomeView(outcome=outcome, message=sent)


def _reason_of(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"[:REASON_CHARS_MAX]


def _read(line: bytes) -> BatchLine:
    """Return the message of a line. Raises BadRequest."""
    if len(line) > OTHER_BODY_BYTES_MAX and has_many_tokens(line):
        raise BadRequest(
            f"the line has more than {TOKENS_MAX} strings and commas; send fewer keys and"
            " properties"
        )
    try:
        return BatchLine.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "line"
        raise BadRequest(f"{place}: {first['msg']}"[:REASON_CHARS_MAX]) from None
