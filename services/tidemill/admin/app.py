"""The REST application. Its clients are parameters, so that a test can pass fakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPBasic, HTTPBearer
from pydantic.alias_generators import to_camel
from starlette.types import Receive, Scope, Send

from tidemill.admin.activity.sampler import ActivitySampler
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.own_operations import OwnOperations
from tidemill.admin.cluster.support_bundles import SupportBundles
from tidemill.admin.console.routes import add_console
from tidemill.admin.http.browser_pages import add_pages
from tidemill.admin.http.live import LiveViews
from tidemill.admin.http.problems import MEDIA_TYPE, RESPONSES, add_problem_handlers
from tidemill.admin.http.query_parameters import KnownParameters
from tidemill.admin.http.rights import check_rights
from tidemill.admin.http.route_templates import PREFIX, RouteTemplates, check_method
from tidemill.admin.http.sessions import Sessions
from tidemill.admin.messages.compose import Composer
from tidemill.admin.messages.timer_histogram import TimerHistograms
from tidemill.admin.routes import (
    audit,
    bans,
    broker_groups,
    clients,
    consumer_groups,
    dead_letter_changes,
    dead_letters,
    dedup_keys,
    definitions,
    deliveries,
    diagnosis,
    events,
    group_positions,
    history,
    message_batches,
    messages,
    operations,
    overview,
    processes,
    quotas,
    replicas,
    roles,
    scaling,
    secret_keys,
    security,
    sessions,
    storage,
    support_bundles,
    timer_changes,
    timers,
    tokens,
    topics,
    transactions,
    users,
)
from tidemill.admin.scaling.demand_queries import DemandQueries
from tidemill.common.clock import SystemClock
from tidemill.common.item_bytes import ITEM_BYTES_MAX
from tidemill.security.access_log import AccessLog
from tidemill.security.secret_keys import SecretKeys
from tidemill.security.secret_uses import SecretUses
from tidemill.security.table import Mode

API_VERSION = "1"  # Of the API, so that a release does not change the document.
# For the OpenAPI document and the button of its page; `http/access.py` checks the token.
BEARER = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A named token of a user, or the token of admin_token_file.",
)


class _DocumentedBasic(HTTPBasic):
    """The scheme for the document. The one of FastAPI refuses headers that it cannot decode."""

    async def __call__(self, request: Request) -> None:  # type: ignore[override]  # It returns none.
        """Check nothing."""


BASIC = _DocumentedBasic(
    auto_error=False,
    scheme_name="user",
    description="A user and its secret. Required in the security mode `on` without a token.",
)

ROUTES = (
    overview,
    topics,
    dedup_keys,
    deliveries,
    scaling,
    consumer_groups,
    dead_letters,
    dead_letter_changes,
    diagnosis,
    operations,
    definitions,
    events,
    group_positions,
    history,
    message_batches,
    messages,
    timer_changes,
    timers,
    transactions,
    clients,
    bans,
    quotas,
    broker_groups,
    replicas,
    storage,
    processes,
    support_bundles,
    users,
    tokens,
    roles,
    security,
    secret_keys,
    sessions,
    audit,
)


class AdminApi(FastAPI):
    """The application, with its OpenAPI document."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. HEAD is answered like GET; the server leaves out the body."""
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, with the media type of problem documents."""
        if self.openapi_schema is None:
            # FastAPI writes the media type of the other answers.
            for path in super().openapi()["paths"].values():
                for operation in path.values():
                    content = operation["responses"]["default"]["content"]
                    content[MEDIA_TYPE] = content.pop("application/json")
                    # The token is optional: an API without admin_token_file needs none.
                    operation["security"].append({})
        return super().openapi()


def _with_head(methods: Collection[str]) -> set[str]:
    return {*methods, "HEAD"} if "GET" in methods else {*methods}


def _operation_id(route: APIRoute) -> str:
    """Return the name of a route's function in camelCase: generated clients call it so."""
    return to_camel(route.name)


def create_app(
    brokers: Brokers,
    demands: DemandQueries,
    controllers: ControllerClients | None = None,
    *,
    item_bytes_max: int = ITEM_BYTES_MAX,
    secret_keys: Callable[[], SecretKeys | None] = lambda: None,
    key_file: str = "",
    security_floor: Mode = Mode.OFF,
    access_log: AccessLog | None = None,
    process: str = "admin",
    needs_identity: bool = False,
) -> FastAPI:
    """Return the application for these broker groups, which sends messages up to a size.

    `secret_keys` returns the keys of `key_file`; None without a key file. `process` is the
    name in the audit log, and `access_log` has the refused calls of this process. With
    `needs_identity`, requests that have not passed an identity check are refused.
    """
    clock = SystemClock()
    app = AdminApi(
        title="Tidemill admin API",
        version=API_VERSION,
        description="Topics, consumer groups, messages, dead letters, timers, transactions, clients"
        " and broker groups of a Tidemill cluster.",
        responses=RESPONSES,
        generate_unique_id_function=_operation_id,
        # The pages of FastAPI load files from the internet, and it renders the document each time.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.secret_keys, app.state.key_file = secret_keys, key_file
    app.state.security_floor = security_floor
    app.state.sessions = Sessions(secret_keys, clock.wall_ms)
    app.state.secret_uses = SecretUses(time.monotonic, clock.wall_ms)
    app.state.process, app.state.needs_identity = process, needs_identity
    app.state.access_log = access_log or AccessLog(process, clock.wall_ms, clock.monotonic_ms)
    app.state.brokers, app.state.demands = brokers, demands
    app.state.controllers = controllers or ControllerClients([])
    app.state.activity = ActivitySampler(brokers, clock)  # The process runs it.
    app.state.timer_histograms = TimerHistograms(brokers)  # The process runs it, too.
    app.state.live_views = LiveViews()  # The process ends them before it stops.
    app.state.own_operations = OwnOperations(clock)  # The process ends them.
    app.state.support_bundles = SupportBundles(clock)
    app.state.send_quotas = None  # The process sets them.
    app.state.processes = None  # The same.
    app.state.api = None  # The application behind its access control, which the process sets.
    app.state.composer = Composer(clock, item_bytes_max=item_bytes_max)
    routers = [routes.router for routes in ROUTES]
    of_all = [Depends(BEARER), Depends(BASIC), Depends(check_method)]
    of_all += [Depends(check_rights), Depends(KnownParameters(PREFIX))]
    for router in routers:
        app.include_router(router, prefix=PREFIX, dependencies=of_all)
    add_pages(app)
    add_console(app)
    app.state.paths = RouteTemplates(
        (PREFIX + route.path, _with_head(route.methods or ()))
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    )
    add_problem_handlers(app)
    return app
