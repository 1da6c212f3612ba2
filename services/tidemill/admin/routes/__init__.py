"""One file a resource: validate, call the broker, render."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from tidemill.admin.broker_client import BrokerClient
from tidemill.admin.compose import Composer
from tidemill.common.clock import SystemClock
from tidemill.common.errors import Forbidden


def broker_of(request: Request) -> BrokerClient:
    """Return the client that the application was made with."""
    broker = request.app.state.broker
    assert isinstance(broker, BrokerClient)
    return broker


def composer_of(request: Request) -> Composer:
    """Return what makes the application's messages."""
    composer = request.app.state.composer
    assert isinstance(composer, Composer)
    return composer


def now_ms_of(request: Request) -> int:
    """Return the application's time."""
    clock = request.app.state.clock
    assert isinstance(clock, SystemClock)
    return clock.wall_ms()


def refuse_foreign_pages(request: Request) -> None:
    """Raise Forbidden for what a web page of another origin sends through its reader's browser."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise Forbidden(f"a page of {origin} may not do this")


Broker = Annotated[BrokerClient, Depends(broker_of)]
MessageComposer = Annotated[Composer, Depends(composer_of)]
NowMs = Annotated[int, Depends(now_ms_of)]
