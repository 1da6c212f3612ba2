"""The header Idempotency-Key of calls that begin an operation."""

from __future__ import annotations

import re
from hashlib import blake2s
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request, Response

from tidemill.admin.http.problems import MEDIA_TYPE, PROBLEM_SCHEMA
from tidemill.admin.http.request_access import access_of
from tidemill.admin.json.bulk_changes import BulkChangeView
from tidemill.admin.messages.operation_starts import BulkCaller
from tidemill.admin.routes import Access, Caller, ChangeAuthor
from tidemill.admin.routes.messages import IDEMPOTENCY_KEY
from tidemill.common.errors import BadRequest

OPERATION_KEY: Final = re.compile("[!-~]{1,64}")
KEY_MISMATCH: Final[dict[str, Any]] = {
    "description": "Another request has begun an operation with this `Idempotency-Key`: a"
    " problem document of the type `idempotency-mismatch`. Nothing has begun.",
    "content": {MEDIA_TYPE: {"schema": PROBLEM_SCHEMA}},
}


def operation_key_of(
    request: Request,
    header: Annotated[
        str | None,
        Header(
            alias=IDEMPOTENCY_KEY,
            description="Identifies the operation of a filter: 1 to 64 visible ASCII characters. A"
            " repeated call by the same user returns the operation that the first one has begun.",
            examples=["replay-17"],
        ),
    ] = None,
) -> str | None:
    """Return the key of the operation: of the header Idempotency-Key and the user.

    The same header of another user is another key, so that no user learns of or joins the operation
    of another user. Raises BadRequest.
    """
    count = len(request.headers.getlist(IDEMPOTENCY_KEY))
    if count > 1:
        raise BadRequest(f"the request has {count} headers {IDEMPOTENCY_KEY}; send one")
    if header is not None and not OPERATION_KEY.fullmatch(header):
        raise BadRequest("the header Idempotency-Key has 1 to 64 visible ASCII characters")
    if header is None:
        return None
    text = f"{access_of(request).user_id} {header}"
    return blake2s(text.encode(), digest_size=16).hexdigest()


OperationKey = Annotated[str | None, Depends(operation_key_of)]


def bulk_caller_of(
    access: Access, caller: Caller, author: ChangeAuthor, key: OperationKey
) -> BulkCaller:
    """Return the caller of a bulk change."""
    return BulkCaller(access, caller, author, key)


CallerOfBulk = Annotated[BulkCaller, Depends(bulk_caller_of)]


def require_no_key(caller: BulkCaller) -> None:
    """Reject a key of a change by ids, which begins no operation. Raises BadRequest."""
    if caller.key is not None:
        raise BadRequest("the header Idempotency-Key belongs to a filter")


def answer_begun(view: BulkChangeView, response: Response) -> None:
    """Answer 202 if an operation has begun."""
    if view.operation is not None:
        response.status_code = HTTPStatus.ACCEPTED


def begun_responses(model: type[BulkChangeView]) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a bulk change by a filter, for the OpenAPI document."""
    begun = {"description": "An operation has begun.", "model": model}
    return {202: begun, 422: KEY_MISMATCH}
