"""`tidemill timer histogram`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.rest import call, in_namespace, output_of, show, warn_unreachable
from tidemill.common.times import utc

BAR_CHARS: Final = 40  # of the fullest row


class HistogramStepName(StrEnum):
    """The width of a row, and with it the time that a histogram covers."""

    SECOND = "1s"
    TEN_MINUTES = "10m"
    HOUR = "1h"
    DAY = "1d"


def show_histogram(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Only timers of this topic.", callback=in_namespace, autocompletion=complete_topic
        ),
    ] = None,
    step: Annotated[
        HistogramStepName,
        typer.Option(
            case_sensitive=False,
            help="Width of a row: 1s covers 2 minutes, 10m a day, 1h 30 days and 1d 400 days.",
        ),
    ] = HistogramStepName.HOUR,
) -> None:
    """Count pending timers by their due time. Rows without timers are left out.

    Examples:
    * `tidemill timer histogram --step 10m`
    * `tidemill timer histogram --topic payments --step 1d`
    """
    query = {"step": step.value}
    if topic is not None:
        query["topic"] = topic
    found = call(context, "GET", "/timers/histogram", query=query)
    top = max(found["counts"], default=0)
    buckets = [
        {"fromMs": found["fromMs"] + number * found["stepMs"], "timers": count}
        for number, count in enumerate(found["counts"])
        if count
    ]
    rows = [
        (utc(each["fromMs"]), each["timers"], "#" * max(each["timers"] * BAR_CHARS // top, 1))
        for each in buckets
    ]
    show(context, found, ("FROM", "TIMERS", "SHARE"), rows, items=buckets)
    if output_of(context).is_text and (found["overdue"] or found["later"]):
        typer.echo(f"{found['overdue']} overdue, {found['later']} later", err=True)
    warn_unreachable(found)
