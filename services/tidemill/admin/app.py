"""The REST application. Made with its client, so that a test can hand in one of its own."""

from __future__ import annotations

from fastapi import FastAPI

from tidemill.admin.broker_client import BrokerClient
from tidemill.admin.problems import RESPONSES, add_problem_handlers
from tidemill.admin.routes import groups, messages, topics
from tidemill.common.metrics import version

PREFIX = "/api/v1"


def create_app(broker: BrokerClient) -> FastAPI:
    """Return the application over `broker`."""
    app = FastAPI(
        title="Tidemill admin API",
        version=version() or "0",
        description="Topics, consumer groups and messages of a Tidemill cluster.",
        responses=RESPONSES,
    )
    app.state.broker = broker
    add_problem_handlers(app)
    for routes in (topics, groups, messages):
        app.include_router(routes.router, prefix=PREFIX)
    return app
