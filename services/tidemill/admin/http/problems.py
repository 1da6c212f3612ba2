"""Errors as RFC 9457 problem documents, through the one table of codes."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tidemill.common.errors import CODES, INTERNAL, BadRequest, ServiceError, codes_of

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = "1"  # for what may succeed later
# Of all that is wrong with a request, what its answer names: people mend one after the other.
REASONS_MAX = 5
REASON_CHARS_MAX = 500  # of each, with the names that the request has made up

_JSON = re.compile(r"application/(.*\+)?json\s*(;.*)?", re.IGNORECASE)

log = structlog.get_logger()


class ProblemView(BaseModel):
    """An error, as in RFC 9457."""

    type: str = Field("about:blank", description="Kind of problem, as RFC 9457 has it.")
    title: str = Field(description="Name of the error.")
    status: int = Field(description="The status of the response.")
    detail: str = Field(description="What is wrong, and what to do.")
    code: int = Field(description="Code of apache.rocketmq.v2 for the same error.")


# What any route may answer, for the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "A problem document.", "model": ProblemView}
}


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error with a problem document."""

    @app.exception_handler(ServiceError)
    async def on_service_error(_request: Request, error: ServiceError) -> JSONResponse:
        codes = codes_of(error)
        return problem(codes.http, type(error).__name__, error.message, codes.rocketmq)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        content_type = request.headers.get("content-type", "")
        if request.method in {"PUT", "POST"} and not _JSON.fullmatch(content_type):
            # Other types are not read at all: a form on a foreign web page could send those.
            detail = "send the body with the header Content-Type: application/json"
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
            template = request.app.state.paths.find(request.url.path)
            if template is not None:
                # The router names the methods of one route; a path may have several.
                headers["Allow"] = ", ".join(template.methods)
            detail = f"this path has {headers['Allow']}, not {request.method}"
        response = problem(status, status.phrase, detail, status * 100)
        response.headers.update(headers)
        return response

    @app.exception_handler(Exception)
    async def on_bug(_request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", error=type(error).__name__, exc_info=error)
        return problem(
            INTERNAL.http, "Internal", "an error of ours; see the log", INTERNAL.rocketmq
        )


def problem(status: HTTPStatus, title: str, detail: str, code: int) -> JSONResponse:
    """Render a problem document."""
    document = ProblemView(title=title, status=status, detail=detail, code=code)
    headers = {"Retry-After": RETRY_AFTER_S} if status in _RETRIABLE else None
    return JSONResponse(document.model_dump(), status, headers, MEDIA_TYPE)


_RETRIABLE = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
