"""The header Idempotency-Key of calls that begin an operation."""

from __future__ import annotations

import re
from hashlib import blake2s
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request

from tidemill.admin.http.problems import MEDIA_TYPE, PROBLEM_SCHEMA
from tidemill.admin.http.request_access import access_of
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
