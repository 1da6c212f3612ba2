"""Errors as RFC 9457 problem documents. The table of codes has the status of each error."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from tidemill.admin.http.nearest import NAME_CHARS_MAX, UnknownField
from tidemill.admin.http.preconditions import current_of
from tidemill.admin.http.request_access import READS, access_of
from tidemill.common.errors import (
    CODES,
    INTERNAL,
    BadRequest,
    GroupNotFound,
    IdempotencyMismatch,
    PreconditionFailed,
    ServiceError,
    TopicNotFound,
    codes_of,
)
from tidemill.message.similar_names import find_similar

MEDIA_TYPE = "application/problem+json"
BLANK: Final = "about:blank"  # type of a problem that its status tells
RETRY_AFTER_S: Final = 1  # for temporary errors
# Errors that a program handles by their type, since others have the same status.
TYPES: Final[dict[type[ServiceError], str]] = {IdempotencyMismatch: "idempotency-mismatch"}
# Number of errors of a request in its answer.
REASONS_MAX = 5
REASON_CHARS_MAX = 500  # of each error, including names from the request

_JSON = re.compile(r"application/(.*\+)?json\s*(;.*)?", re.IGNORECASE)

_COMMAND: Final = re.compile(r"`(tidemill [^`]+)`")
_QUOTED: Final = re.compile(r"'([^']+)'")

log = structlog.get_logger()


class ProblemView(BaseModel):
    """An error in the format of RFC 9457."""

    model_config = ConfigDict(populate_by_name=True)

    type: str = Field(BLANK, description="Kind of problem, as defined by RFC 9457.")
    title: str = Field(description="Name of the error.")
    status: int = Field(description="HTTP status of the response.")
    detail: str = Field(description="What failed, why, and what to do.")
    code: int = Field(description="Code of apache.rocketmq.v2 for the same error.")
    field: str | None = Field(None, description="The first wrong field or parameter, if one is.")
    retry_after_ms: int | None = Field(
        None,
        alias="retryAfterMs",
        description="Time after which the same request may succeed. Missing if it never does.",
    )
    command: str | None = Field(None, description="The command that helps, if there is one.")
    current: dict[str, Any] | None = Field(
        None,
        description="With 412: the present document of the resource. Missing if it does not exist,"
        " or if the caller may not see it.",
    )


# Reference to the schema of problem documents, for answers with a status of their own.
PROBLEM_SCHEMA: Final = {"$ref": "#/components/schemas/ProblemView"}
# The error answer of all routes, for the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "A problem document.", "model": ProblemView}
}


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error with a problem document."""

    @app.exception_handler(ServiceError)
    async def on_service_error(request: Request, error: ServiceError) -> JSONResponse:
        codes = codes_of(error)
        return problem(
            codes.http,
            type(error).__name__,
            with_nearest_name(request, error),
            codes.rocketmq,
            type_=TYPES.get(type(error), BLANK),
            current=await current_of(request) if isinstance(error, PreconditionFailed) else None,
        )

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        is_body_invalid = any(item["loc"][0] == "body" for item in error.errors())
        if is_body_invalid and (detail := find_other_type(request)):
            status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            return problem(status, status.phrase, detail, status * 100)
        errors = error.errors()
        reasons = [
            f"{_place(item) or 'body'}: {item['msg']}"[:REASON_CHARS_MAX]
            for item in errors[:REASONS_MAX]
        ]
        if len(errors) > REASONS_MAX:
            reasons.append(f"and {len(errors) - REASONS_MAX} more")
        code = CODES[BadRequest].rocketmq
        field = _place(errors[0], with_unknown=True)[:NAME_CHARS_MAX] or None
        detail = "; ".join(reasons)
        return problem(HTTPStatus.BAD_REQUEST, "BadRequest", detail, code, field=field)

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
        wait_s = int(headers.get("Retry-After", RETRY_AFTER_S))
        response = problem(status, status.phrase, detail, status * 100, retry_after_s=wait_s)
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


def find_other_type(request: Request) -> str:
    """Return the reason why a body is not read: its type is not JSON. Empty if it is JSON.

    A form on a foreign web page can send other types.
    """
    content_type = request.headers.get("content-type", "")
    if _JSON.fullmatch(content_type):
        return ""
    return (
        f"Content-Type {content_type[:REASON_CHARS_MAX]!r} is not JSON; send the body with the"
        " header Content-Type: application/json"
    )


def problem(
    status: HTTPStatus,
    title: str,
    detail: str,
    code: int,
    *,
    type_: str = BLANK,
    field: str | None = None,
    current: dict[str, Any] | None = None,
    retry_after_s: int = RETRY_AFTER_S,
) -> JSONResponse:
    """Render a problem document. Only temporary errors have `retry_after_s`."""
    command = _COMMAND.search(detail)
    document = ProblemView(
        type=type_,
        title=title,
        status=status,
        detail=detail,
        code=code,
        field=field,
        retry_after_ms=retry_after_s * 1_000 if status in _RETRIABLE else None,
        command=command and command.group(1),
        current=current,
    )
    headers = {"Retry-After": str(retry_after_s)} if status in _RETRIABLE else None
    shown = document.model_dump(by_alias=True, exclude_none=True)
    return JSONResponse(shown, status, headers, MEDIA_TYPE)


_RETRIABLE = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}


def _place(error: Mapping[str, Any], *, with_unknown: bool = False) -> str:
    """Return the path of a wrong field in the request. Optionally with the unknown name itself."""
    parts = [str(part) for part in error["loc"][1:]]
    cause = error.get("ctx", {}).get("error")
    if with_unknown and isinstance(cause, UnknownField):
        parts.append(cause.name)
    return ".".join(parts)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The names that a caller may see."""

    names: Container[str]
    may_see: Callable[[str], bool]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.names and self.may_see(name)


def with_nearest_name(request: Request, error: ServiceError) -> str:
    """Return the text of an error about a missing topic or consumer group, with the nearest name.

    Only names that the caller may see are compared.
    """
    is_topic = isinstance(error, TopicNotFound)
    named = _QUOTED.search(error.message)
    numbers = request.app.state.activity.read().numbers
    if named is None or numbers is None or not (is_topic or isinstance(error, GroupNotFound)):
        return error.message
    access = access_of(request)
    may_see = access.allows_topic if is_topic else access.allows_group
    known = _Shown(
        numbers.topics if is_topic else numbers.groups, functools.partial(may_see, READS)
    )
    near = find_similar(named.group(1), known)
    return error.message if near is None else f"{error.message}; did you mean {near!r}?"
