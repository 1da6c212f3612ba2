"""One file a resource: validate, call the broker, render."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Header, Query, Request
from fastapi.responses import JSONResponse

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.json.schema import Schema
from tidemill.admin.messages.compose import Composer
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.common.errors import Forbidden

USER_CHARS_MAX = 128  # of who somebody says to be, in a line of the log
_UNPRINTABLE = re.compile(r"[^ -~]")


def brokers_of(request: Request) -> Brokers:
    """Return the broker groups that the application was made with."""
    brokers = request.app.state.brokers
    assert isinstance(brokers, Brokers)
    return brokers


def demand_queries_of(request: Request) -> DemandQueries:
    """Return what knows how much there is to do."""
    demands = request.app.state.demands
    assert isinstance(demands, DemandQueries)
    return demands


def composer_of(request: Request) -> Composer:
    """Return what makes the application's messages."""
    composer = request.app.state.composer
    assert isinstance(composer, Composer)
    return composer


def json_of(answer: Schema) -> JSONResponse:
    """Render an answer of a route that usually has none."""
    return JSONResponse(answer.model_dump(mode="json", by_alias=True, exclude_none=True))


def refuse_foreign_pages(request: Request) -> None:
    """Raise Forbidden for what a web page of another origin sends through its reader's browser."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise Forbidden(f"a page of {origin} may not do this")


def caller_of(
    request: Request,
    user: Annotated[
        str,
        Header(
            alias="Tidemill-User",
            description="Who asks, for the log of the broker. Nobody checks it: the address that it"
            " came from is written beside it.",
        ),
    ] = "",
) -> str:
    """Return who asks: what it says of itself, and where it is."""
    address = request.client.host if request.client else "an unknown address"
    name = _UNPRINTABLE.sub("?", user)[:USER_CHARS_MAX]
    return f"{name} at {address}" if name else address


Cluster = Annotated[Brokers, Depends(brokers_of)]
ScalingQueries = Annotated[DemandQueries, Depends(demand_queries_of)]
MessageComposer = Annotated[Composer, Depends(composer_of)]
Caller = Annotated[str, Depends(caller_of)]
BrokerName = Annotated[
    str | None, Query(alias="broker", description="Name of the broker group that has it.")
]
DryRun = Annotated[
    bool,
    Query(
        alias="dryRun",
        description="Check everything, do nothing, and answer 200 with what would be lost.",
    ),
]
