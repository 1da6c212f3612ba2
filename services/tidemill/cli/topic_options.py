"""Parameters of the commands with a topic."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.rest import in_namespace
from tidemill.common.rest_client import Json
from tidemill.common.sizes import SIZE, size_bytes
from tidemill.common.times import DURATION, duration_ms

FOREVER: Final = "forever"  # values of --retention
DEFAULT: Final = "default"

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Name = Annotated[
    str,
    typer.Argument(help="Name of the topic.", callback=in_namespace, autocompletion=complete_topic),
]
Queues = Annotated[
    int | None,
    typer.Option(help="Number of queues, which bounds how far FIFO spreads; 8 by default."),
]


class TopicTypeName(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


Type = Annotated[
    TopicTypeName | None,
    typer.Option(
        "--type",
        case_sensitive=False,
        help="Messages it takes; a new topic is MIXED by default: NORMAL, FIFO and DELAY.",
    ),
]


class Acked(StrEnum):
    """What happens with messages that all consumer groups have settled."""

    KEEP = "keep"
    FREE = "free"


Spread = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION,
        help="Maximum extra delay of a delayed message if its second is full; 0s: none.",
    ),
]
Retention = Annotated[
    str | None,
    typer.Option(
        metavar=f"{DURATION}|{FOREVER}|{DEFAULT}",
        help=f"Time to keep messages, 1m to 400d; {FOREVER}; {DEFAULT}: as the broker.",
    ),
]
RetentionBytes = Annotated[
    str | None,
    typer.Option(
        metavar=f"{SIZE}|{DEFAULT}",
        help=f"Size of the messages to keep per broker group, from 1MiB; {DEFAULT}: no limit.",
    ),
]
RetentionAcked = Annotated[
    Acked | None,
    typer.Option(
        help="free: remove messages that all consumer groups have settled."
        f" Default: {Acked.KEEP.value}."
    ),
]
FirstCheck = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION, help="Time from a half message to its first check, 1s to 1h. Default: 6s."
    ),
]
CheckPeriod = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION,
        help="Time between two checks, and from the last one to the expiry, 1s to 1h."
        " Default: 30s.",
    ),
]
CheckAttempts = Annotated[
    int | None,
    typer.Option(min=1, max=100, help="Checks of a half message before it expires. Default: 15."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Change the type even of a topic with messages.")
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="TOPIC",
        help="Take the settings of this topic, without its messages. Other options precede them.",
        callback=in_namespace,
        autocompletion=complete_topic,
    ),
]


def retention_body(ms: str | None, size: str | None, acked: Acked | None) -> dict[str, Json]:
    """Return the retention as REST expects it. null: the default of the broker."""
    body: dict[str, Json] = {}
    if ms is not None:
        body["ms"] = {FOREVER: -1, DEFAULT: None}.get(ms, 0)
        if ms not in {FOREVER, DEFAULT}:
            body["ms"] = duration_ms(ms)
    if size is not None:
        body["bytes"] = None if size == DEFAULT else size_bytes(size)
    if acked is not None:
        body["acked"] = acked.value
    return body


def checks_body(
    first_check: str | None, period: str | None, attempts: int | None
) -> dict[str, Json]:
    """Return the given settings of the checks of half messages as REST expects them."""
    body: dict[str, Json] = {
        "firstCheckMs": None if first_check is None else duration_ms(first_check),
        "periodMs": None if period is None else duration_ms(period),
        "attempts": attempts,
    }
    return {key: value for key, value in body.items() if value is not None}
