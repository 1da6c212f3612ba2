"""Admin and tenancy: who asks the REST API for what."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles, ratio

_REQUESTS = Row(
    "REST API",
    (
        panel(
            "Requests",
            "Requests a second, by route.",
            Query(
                "sum by (method, route) (rate(rocketmq_admin_http_requests_total{HERE}[RATE]))",
                "{{method}} {{route}}",
            ),
            unit="reqps",
            look=Look.STACKED,
        ),
        panel(
            "Errors",
            "Part of the requests that failed in the server (5xx).",
            ratio(
                'sum(rate(rocketmq_admin_http_requests_total{HERE, code=~"5.."}[RATE])) or vector(0)',
                "sum(rate(rocketmq_admin_http_requests_total{HERE}[RATE]))",
            ),
            unit="percentunit",
        ),
        panel(
            "Refused",
            "Requests a second that were refused (4xx), by status. 499: the caller had gone.",
            Query(
                "sum by (code) "
                '(rate(rocketmq_admin_http_requests_total{HERE, code=~"4.."}[RATE])) or vector(0)',
                "{{code}}",
            ),
            unit="reqps",
        ),
        panel(
            "Duration",
            "Seconds from a request's head to the end of its answer.",
            *quantiles("rocketmq_admin_http_seconds"),
            unit="s",
        ),
        panel(
            "Slow requests",
            "Requests a second that took over a second.",
            "sum(rate(rocketmq_admin_http_seconds_count{HERE}[RATE])) - "
            'sum(rate(rocketmq_admin_http_seconds_bucket{HERE, le=~"1|1\\\\.0"}[RATE]))',
            unit="reqps",
        ),
        panel(
            "Brokers reachable",
            "1 while the admin process reaches a broker; what it cannot reach is missing in its answers.",
            Query(
                'min by (broker) (rocketmq_broker_reachable{HERE, node_type="admin"})', "{{broker}}"
            ),
            look=Look.STATES,
            alerts=("BrokerDown",),
        ),
    ),
)

_RESOURCES = Row(
    "What there is",
    (
        panel(
            "Topics",
            "Topics of the cluster: every broker group has all of them.",
            "max(rocketmq_topic_number{HERE})",
            look=Look.NUMBER,
        ),
        panel(
            "Consumer groups",
            "Consumer groups of the cluster.",
            "max(rocketmq_consumer_group_number{HERE})",
            look=Look.NUMBER,
        ),
        panel(
            "Label sets folded",
            "Series in the last hour that were counted as `__overflow__`, since a metric was full.",
            "sum(increase(rocketmq_metrics_overflow_total{HERE}[1h])) or vector(0)",
            look=Look.NUMBER,
            alerts=("MetricsOverflow",),
            warns_at=1,
        ),
        panel(
            "Seconds until a certificate expires",
            "Of the first one that does; empty without TLS is shown as a year.",
            "min(rocketmq_tls_certificate_expires_at_seconds{HERE}) - time() or vector(31536000)",
            unit="s",
            look=Look.NUMBER,
            alerts=("CertificateExpires",),
        ),
    ),
)

PAGE: Final = Page(
    name="admin-and-tenancy",
    title="Tidemill / Admin and tenancy",
    description="Who asks the REST API for what, and how many things there are.",
    rows=(_REQUESTS, _RESOURCES),
)
