"""The REST application. Its clients are parameters, so that a test can pass fakes."""

from __future__ import annotations

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.http.browser_pages import add_pages
from tidemill.admin.http.problems import RESPONSES, add_problem_handlers
from tidemill.admin.http.query_parameters import KnownParameters
from tidemill.admin.http.route_templates import RouteTemplates
from tidemill.admin.messages.compose import Composer
from tidemill.admin.routes import (
    broker_groups,
    clients,
    consumer_groups,
    deliveries,
    messages,
    replicas,
    scaling,
    timers,
    topics,
)
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.common.clock import SystemClock

PREFIX = "/api/v1"
API_VERSION = "1"  # Of the API, so that a release does not change the document.
# For the OpenAPI document and the button of its page; `http/access.py` checks the token.
BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="Required if admin_token_file is set."
)

ROUTES = (
    topics,
    deliveries,
    scaling,
    consumer_groups,
    messages,
    timers,
    clients,
    broker_groups,
    replicas,
)


def create_app(
    brokers: Brokers, demands: DemandQueries, controllers: ControllerClients | None = None
) -> FastAPI:
    """Return the application for these broker groups."""
    clock = SystemClock()
    app = FastAPI(
        title="Tidemill admin API",
        version=API_VERSION,
        description="Topics, consumer groups, messages, timers, clients and broker groups of a"
        " Tidemill cluster.",
        responses=RESPONSES,
        # The pages of FastAPI load files from the internet, and it renders the document each time.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.brokers, app.state.demands = brokers, demands
    app.state.controllers = controllers or ControllerClients([])
    app.state.composer = Composer(clock)
    routers = [routes.router for routes in ROUTES]
    of_all = [Depends(BEARER), Depends(KnownParameters(PREFIX))]
    for router in routers:
        app.include_router(router, prefix=PREFIX, dependencies=of_all)
    add_pages(app)
    app.state.paths = RouteTemplates(
        (PREFIX + route.path, route.methods or ())
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    )
    add_problem_handlers(app)
    return app
