"""Errors as RFC 9457 problem documents. The table of codes has the status of each error."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tidemill.common.errors import (
    CODES,
    INTERNAL,
    BadRequest,
    IdempotencyMismatch,
    ServiceError,
    codes_of,
)

MEDIA_TYPE = "application/problem+json"
BLANK: Final = "about:blank"  # type of a problem that its status tells
RETRY_AFTER_S = "1"  # for temporary errors
# Errors that a program handles by their type, since others have the same status.
TYPES: Final[dict[type[ServiceError], str]] = {IdempotencyMismatch: "idempotency-mismatch"}
# Number of errors of a request in its answer.
REASONS_MAX = 5
REASON_CHARS_MAX = 500  # of each error, including names from the request

_JSON = re.compile(r"application/(.*\+)?json\s*(;.*)?", re.IGNORECASE)

log = structlog.get_logger()


class ProblemView(BaseModel):
    """An error in the format of RFC 9457."""

    type: str = Field(BLANK, description="Kind of problem, as defined by RFC 9457.")
    title: str = Field(description="Name of the error.")
    status: int = Field(description="HTTP status of the response.")
    detail: str = Field(description="What failed, why, and what to do.")
    code: int = Field(description="Code of apache.rocketmq.v2 for the same error.")


# Reference to the schema of problem documents, for answers with a status of their own.
PROBLEM_SCHEMA: Final = {"$ref": "#/components/schemas/ProblemView"}
# The error answer of all routes, for the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "A problem document.", "model": ProblemView}
}


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error with a problem document."""

    @app.exception_handler(ServiceError)
    async def on_service_error(_request: Request, error: ServiceError) -> JSONResponse:
        codes = codes_of(error)
        return problem(
            codes.http,
            type(error).__name__,
            error.message,
            codes.rocketmq,
            type_=TYPES.get(type(error), BLANK),
        )

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        content_type = request.headers.get("content-type", "")
        is_body_invalid = any(item["loc"][0] == "body" for item in error.errors())
        if is_body_invalid and not _JSON.fullmatch(content_type):
            # Other types are not read, since a form on a foreign web page can send them.
            detail = (
                f"Content-Type {content_type[:REASON_CHARS_MAX]!r} is not JSON; send the body with"
                " the header Content-Type: application/json"
            )
            status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            return problem(status, status.phrase, detail, status * 100)
        errors = error.errors()
        reasons = [
            f"{'.'.join(str(part) for part in item['loc'][1:]) or 'body'}: {item['msg']}"[
                :REASON_CHARS_MAX
            ]
            for item in errors[:REASONS_MAX]
        ]
        if len(errors) > REASONS_MAX:
            reasons.append(f"and {len(errors) - REASONS_MAX} more")
        code = CODES[BadRequest].rocketmq
        return problem(HTTPStatus.BAD_REQUEST, "BadRequest", "; ".join(reasons), code)

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        status, detail = HTTPStatus(error.status_code), str(error.detail)
        headers = dict(error.headers or {})
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            template = request.app.state.paths.find(request.scope["path"])
            if template is not None:
                # The router names the methods of one route; several may match the path.
                headers["Allow"] = ", ".join(template.methods)
            detail = f"this path does not allow {request.method}; allowed: {headers['Allow']}"
        if status is HTTPStatus.NOT_FOUND and detail == status.phrase:
            detail = "nothing is served at this path; see /openapi.json for the paths"
        response = problem(status, status.phrase, detail, status * 100)
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", error=type(error).__name__, exc_info=error)
        return problem(
            INTERNAL.http,
            "Internal",
            "internal error; see the log of the admin process",
            INTERNAL.rocketmq,
        )


def problem(
    status: HTTPStatus, title: str, detail: str, code: int, *, type_: str = BLANK
) -> JSONResponse:
    """Render a problem document."""
    document = ProblemView(type=type_, title=title, status=status, detail=detail, code=code)
    headers = {"Retry-After": RETRY_AFTER_S} if status in _RETRIABLE else None
    return JSONResponse(document.model_dump(), status, headers, MEDIA_TYPE)


_RETRIABLE = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
