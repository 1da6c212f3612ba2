"""Numbers of lists, which may be unknown."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_group, complete_topic
from tidemill.cli.rest import PAGE_SIZE, in_namespace
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json
from tidemill.common.times import span

UNKNOWN: Final = "?"
RATE_MIN: Final = 0.1  # per second: smaller rates are not shown as numbers

TopicSort = Annotated[
    str | None,
    typer.Option(
        metavar="[-]FIELD",
        help="Order by a number, such as -messages for the largest first: messages, bytes,"
        f" inPerSecond, outPerSecond, pendingTimers. Shows {PAGE_SIZE} topics. Default: all, by"
        " name.",
    ),
]
PREFIX_HELP: Final = "Only names that begin with this text. Default: all."
TopicPrefix = Annotated[
    str | None, typer.Option(callback=in_namespace, autocompletion=complete_topic, help=PREFIX_HELP)
]
GroupPrefix = Annotated[
    str | None, typer.Option(callback=in_namespace, autocompletion=complete_group, help=PREFIX_HELP)
]
GroupSort = Annotated[
    str | None,
    typer.Option(
        metavar="[-]FIELD",
        help="Order by a number, such as -lag for the largest first: lag, ready, inFlight, blocked,"
        " oldestUnackedAtMs, inPerSecond, outPerSecond, ackPerSecond, retryPerSecond, consumers,"
        f" lockedQueues, deadLetters. Shows {PAGE_SIZE} groups. Default: all, by name.",
    ),
]


def number(value: float | None) -> str:
    """Return a number of a table; a rate has one decimal. Only 0 is shown as 0."""
    if value is None:
        return UNKNOWN
    if 0 < value < RATE_MIN:
        return f"<{RATE_MIN}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def dead_numbers(group: Json) -> tuple[str, str]:
    """Return the open dead letters of a consumer group, and those of the last hour."""
    found = group.get("deadLetters", {})
    return number(found.get("open")), number(found.get("lastHour"))


def certificate_end(certificate: Json, now_ms: int) -> str:
    """Return the time until a certificate expires, or why it is unknown."""
    if "expiresAtMs" not in certificate:
        return str(certificate.get("unknown", UNKNOWN))
    left_ms = certificate["expiresAtMs"] - now_ms
    return span(left_ms) if left_ms > 0 else "EXPIRED"


def list_query(sort: str | None, prefix: str | None) -> dict[str, str]:
    """Return the query parameters of --sort and --prefix."""
    query = {"sort": sort, "prefix": prefix}
    return {name: value for name, value in query.items() if value is not None}


def warn_unknown(rows: list[Json]) -> None:
    """Warn why numbers of a list are unknown."""
    for reason in sorted({row["unknown"] for row in rows if "unknown" in row}):
        count = sum(row.get("unknown") == reason for row in rows)
        warn(f"unknown numbers of {count} rows: {reason}")
