"""One file a resource: validate, call the broker, render."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from tidemill.admin.broker_client import BrokerClient


def broker_of(request: Request) -> BrokerClient:
    """Return the client that the application was made with."""
    broker = request.app.state.broker
    assert isinstance(broker, BrokerClient)
    return broker


Broker = Annotated[BrokerClient, Depends(broker_of)]
