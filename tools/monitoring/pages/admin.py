"""Admin and tenancy: requests to the REST API, calls by gRPC, and numbers of topics and consumer groups."""

from __future__ import annotations

from typing import Final

from tools.monitoring.vocabulary import Look, Page, Query, Row, panel, quantiles, ratio

_REQUESTS = Row(
    "REST API",
    (
        panel(
            "Requests",
            "Requests per second, by route.",
            Query(
                "sum by (method, route) (rate(rocketmq_admin_http_requests_total{HERE}[RATE]))",
                "{{method}} {{route}}",
            ),
            unit="reqps",
            look=Look.STACKED,
        ),
        panel(
            "Errors",
            "Share of requests that failed in the server (5xx).",
            ratio(
                'sum(rate(rocketmq_admin_http_requests_total{HERE, code=~"5.."}[RATE])) or vector(0)',
                "sum(rate(rocketmq_admin_http_requests_total{HERE}[RATE]))",
            ),
            unit="percentunit",
        ),
        panel(
            "Rejected",
            "Rejected requests per second (4xx), by status. 499: the caller disconnected.",
            Query(
                "sum by (code) "
                '(rate(rocketmq_admin_http_requests_total{HERE, code=~"4.."}[RATE])) or vector(0)',
                "{{code}}",
            ),
            unit="reqps",
        ),
        panel(
            "Duration",
            "Seconds from the head of a request to the end of its reply.",
            *quantiles("rocketmq_admin_http_seconds"),
            unit="s",
        ),
        panel(
            "Slow requests",
            "Requests per second that took more than one second.",
            "sum(rate(rocketmq_admin_http_seconds_count{HERE}[RATE])) - "
            'sum(rate(rocketmq_admin_http_seconds_bucket{HERE, le=~"1|1\\\\.0"}[RATE]))',
            unit="reqps",
        ),
        panel(
            "Brokers reachable",
            "1 if the admin process reaches the broker. Replies omit the data of an unreachable broker.",
            Query(
                'min by (broker) (rocketmq_broker_reachable{HERE, node_type="admin"})', "{{broker}}"
            ),
            look=Look.STATES,
            alerts=("BrokerDown",),
        ),
        panel(
            "Members without an answer to the home",
            "Seconds for which a broker group has not answered the home. New topics and consumer groups do not reach it.",
            Query(
                "max by (broker_group) (rocketmq_member_unreachable_seconds{HERE})",
                "{{broker_group}}",
            ),
            unit="s",
            alerts=("MemberUnreachable",),
        ),
    ),
)

_GRPC = Row(
    "gRPC service Admin",
    (
        panel(
            "Calls",
            "Calls per second, by method.",
            Query(
                "sum by (method) (rate(rocketmq_admin_grpc_requests_total{HERE}[RATE]))",
                "{{method}}",
            ),
            unit="reqps",
            look=Look.STACKED,
        ),
        panel(
            "Failed calls",
            "Calls per second that did not succeed, by code: of the response, or the gRPC status.",
            Query(
                "sum by (code) "
                '(rate(rocketmq_admin_grpc_requests_total{HERE, code!="OK"}[RATE])) or vector(0)',
                "{{code}}",
            ),
            unit="reqps",
        ),
        panel(
            "Duration of calls",
            "Seconds from the request of a call to its response.",
            *quantiles("rocketmq_admin_grpc_seconds"),
            unit="s",
        ),
        panel(
            "Calls in progress",
            "Calls in progress. At most 64 run at the same time.",
            "sum(rocketmq_admin_grpc_in_flight{HERE})",
            look=Look.NUMBER,
        ),
    ),
)

_RESOURCES = Row(
    "Resources",
    (
        panel(
            "Topics",
            "Topics of the cluster. Every broker group has all of them.",
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
            "Used quotas",
            "The ten quotas with the largest used part of their limit. At 1, sends wait or are refused.",
            Query(
                "topk(10, max by (quota, limit) (rocketmq_quota_used_ratio{HERE}))",
                "{{quota}} {{limit}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Label sets folded",
            "Series of the last hour that a full metric counted as `__overflow__`.",
            "sum(increase(rocketmq_metrics_overflow_total{HERE}[1h])) or vector(0)",
            look=Look.NUMBER,
            alerts=("MetricsOverflow",),
            warns_at=1,
        ),
        panel(
            "Seconds until a certificate expires",
            "The certificate that expires first. Without TLS the panel shows one year.",
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
    description="Requests to the REST API, and numbers of topics and consumer groups.",
    rows=(_REQUESTS, _GRPC, _RESOURCES),
)
