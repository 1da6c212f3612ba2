"""Parameters of the commands with a consumer group."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_group
from tidemill.cli.rest import in_namespace

STRICT_FACTOR: Final = 100  # priority factor without a share for low levels

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Name = Annotated[
    str,
    typer.Argument(
        help="Name of the consumer group.", callback=in_namespace, autocompletion=complete_group
    ),
]


class Order(StrEnum):
    """Delivery order of a consumer group."""

    CONCURRENT = "CONCURRENT"
    FIFO = "FIFO"


class TopicEnd(StrEnum):
    """An end of a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


DeliveryOrder = Annotated[
    Order | None,
    typer.Option(
        "--order", case_sensitive=False, help="Delivery order; FIFO: one batch per queue at a time."
    ),
]
MaxAttempts = Annotated[
    int | None, typer.Option(help="Deliveries before a message is a dead letter. New group: 17.")
]
RetryMs = Annotated[
    list[int] | None,
    typer.Option(
        help="Wait before a retry, in ms. Repeat the option for the next retries. New group: 16"
        " waits from 10 s to 2 h."
    ),
]
StartFrom = Annotated[
    TopicEnd | None,
    typer.Option(help="Start of a group that has read nothing yet. Default: earliest."),
]
PriorityFactor = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=STRICT_FACTOR,
        help="Percentage of messages of a PRIORITY topic by priority; the others are the oldest of"
        " lower levels. New group: 90.",
    ),
]
