"""The audit page: findings with the journey of each message, and curves."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidemill_pipeline.jobs.page import curve, page, table
from tidemill_pipeline.jobs.verdict import AuditVerdict, count_of, headlines
from tidemill_pipeline.transforms.audit import COUNTS
from tidemill_pipeline.transforms.findings import KINDS

SHOWN_MAX: Final = 500  # findings on the page; the table has all


def audit_page(
    verdict: AuditVerdict, late: Sequence[Any], waits: Sequence[Any], *, now_ms: int
) -> str:
    """Return the page. `late`, `waits`: points of the curves from `transforms.audit`."""
    groups = sorted({row.consumer_group for row in waits})
    parts = [
        *(f"<p class='{name}'>{html.escape(text)}</p>" for name, text in headlines(verdict)),
        table(("finding", "how many"), [(kind, verdict.counts[kind]) for kind in KINDS]),
        "<h2>By topic and group</h2>",
        table(
            ("topic", "group", *COUNTS),
            [
                (
                    row["topic"] or "",
                    row["consumer_group"] or "",
                    *(count_of(row, name) for name in COUNTS),
                )
                for row in verdict.totals
            ],
        ),
        "<h2>Lateness of delayed messages</h2>",
        curve(
            {
                name: [(row.window.timestamp(), row[name]) for row in late]
                for name in ("p50", "p99", "max")
            },
            unit="ms",
        ),
        "<h2>From stored to delivered, P99 by group</h2>",
        curve(
            {
                group: [(r.window.timestamp(), r.p99) for r in waits if r.consumer_group == group]
                for group in groups
            },
            unit="ms",
        ),
        f"<h2>Findings{_of(verdict)}</h2>",
        table(
            ("finding", "topic", "group", "broker", "queue", "offset", "message", "at", "what"),
            [_row(found) for found in verdict.findings],
            details=[_journey(found) for found in verdict.findings],
        ),
    ]
    return page("Audit", parts, now_ms=now_ms)


def _of(verdict: AuditVerdict) -> str:
    total = sum(verdict.counts.values())
    return f", the first {SHOWN_MAX} of {total}" if total > SHOWN_MAX else ""


def _row(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        "" if found[name] is None else found[name]
        for name in (
            "kind",
            "topic",
            "consumer_group",
            "broker",
            "queue_id",
            "queue_offset",
            "message_id",
            "at",
            "detail",
        )
    )


def _journey(found: Mapping[str, Any]) -> str:
    steps = json.loads(found["journey"] or "[]")
    lines = [
        " ".join(
            str(step[name])
            for name in ("at", "event", "stands_on", "consumer_group", "attempt", "detail")
            if step.get(name) is not None
        )
        for step in steps
    ]
    return "<br>".join(html.escape(line) for line in lines)
