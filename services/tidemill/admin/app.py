"""The REST application. Made with its client, so that a test can hand in one of its own."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import RedirectResponse

from tidemill.admin.broker_client import BrokerClient
from tidemill.admin.compose import Composer
from tidemill.admin.problems import RESPONSES, add_problem_handlers
from tidemill.admin.routes import groups, messages, timers, topics
from tidemill.common.clock import SystemClock

PREFIX = "/api/v1"
API_VERSION = "1"  # Of the API, so that a release does not change the document.


def create_app(broker: BrokerClient) -> FastAPI:
    """Return the application over `broker`."""
    clock = SystemClock()
    app = FastAPI(
        title="Tidemill admin API",
        version=API_VERSION,
        description="Topics, consumer groups, messages and timers of a Tidemill cluster.",
        responses=RESPONSES,
    )
    app.state.broker, app.state.clock = broker, clock
    app.state.composer = Composer(clock)
    add_problem_handlers(app)
    for routes in (topics, groups, messages, timers):
        app.include_router(routes.router, prefix=PREFIX)

    @app.get("/", include_in_schema=False)
    async def lead_to_docs() -> RedirectResponse:
        return RedirectResponse("/docs")

    return app
