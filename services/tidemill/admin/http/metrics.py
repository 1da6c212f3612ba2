"""Metrics of the REST API: number and duration of requests by route."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, final

from prometheus_client.core import CounterMetricFamily

from tidemill.common.histogram import Histogram
from tidemill.common.metrics import histogram_family

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tidemill.admin.http.route_templates import RouteTemplates

NO_ROUTE: Final = "(none)"  # for pages and unknown paths
# Clients may send any word as method. Only these have their own series.
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "OTHER"
UNANSWERED: Final = 499  # the client disconnected before an answer
MS_PER_S: Final = 1_000


@final
class AdminMetrics:
    """The metrics of the REST API. The number of routes, methods and statuses is small."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()  # by route, method, status
        self.durations_ms: Histogram[tuple[str, str]] = Histogram()  # by route, method

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        requests = CounterMetricFamily(
            "rocketmq_admin_http_requests_total",
            "Requests of the REST API, by route template.",
            labels=("route", "method", "code"),
        )
        for (route, method, status), count in self.requests.items():
            requests.add_metric((route, method, str(status)), count)
        yield requests
        yield histogram_family(
            "rocketmq_admin_http_seconds",
            "Seconds from the head of a request to the end of its answer.",
            ("route", "method"),
            self.durations_ms,
            lambda labels: labels,
            divisor=MS_PER_S,
        )


@final
class RequestCounter:
    """An ASGI application that counts the requests to another one."""

    def __init__(self, app: ASGIApp, metrics: AdminMetrics, paths: RouteTemplates) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began_at_s = UNANSWERED, time.monotonic()

        is_disconnected = False  # before an answer

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and not is_disconnected:
                status = message["status"]
            await send(message)

        async def receive_and_note_disconnect() -> Message:
            nonlocal is_disconnected
            message = await receive()
            is_disconnected |= message["type"] == "http.disconnect" and status == UNANSWERED
            return message

        try:
            await self._app(scope, receive_and_note_disconnect, send_and_note_status)
        finally:
            template = self._paths.find(scope["path"])
            route = template.path if template else NO_ROUTE
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._metrics.requests[route, method, status] += 1
            duration_ms = (time.monotonic() - began_at_s) * MS_PER_S
            self._metrics.durations_ms.observe((route, method), duration_ms)
