"""`tidemill group unlock` and `group reset`: the position of a consumer group."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.group_options import DryRun, Name, TopicEnd, Yes
from tidemill.cli.messages import printable
from tidemill.cli.rest import (
    all_in_namespace,
    call,
    check_is_sure,
    has_several,
    in_namespace,
    say,
    segment,
    show,
)
from tidemill.common.prompts import confirm
from tidemill.common.rest_client import Json
from tidemill.common.times import INSTANT, instant_ms

QUEUES_SHOWN_MAX: Final = 8  # queues in the question before a reset
QUEUE_OFFSET: Final = re.compile(
    r"(?:(?P<broker>[^/=]+)/)?(?P<queue>[0-9]{1,10})=(?P<offset>[0-9]{1,16})", re.ASCII
)


def unlock_queue(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str,
        typer.Option(
            help="Topic of the locked queue.", callback=in_namespace, autocompletion=complete_topic
        ),
    ],
    queue: Annotated[int, typer.Option(min=0, help="Number of the locked queue.")],
    broker: Annotated[
        str | None,
        typer.Option(
            help="Broker group of the queue, if several have a locked queue of this number."
        ),
    ] = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Unlock a queue of a FIFO group: another consumer gets its messages at once.

    Examples:
    * `tidemill group unlock billing --topic orders --queue 3 --dry-run`
    * `tidemill group unlock billing --topic orders --queue 3`
    """
    path = f"/groups/{segment(name)}:releaseLock"
    body = {"topic": topic, "queue": queue} | ({"broker": broker} if broker else {})
    if not is_dry:
        check_is_sure("group unlock", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
        words = _lock_words(planned["released"])
        if is_dry:
            say(context, planned, f"would be unlocked: {words}")
            return
        confirm(
            f"Unlock queue {queue} of {topic} for another consumer of {name}? It has {words}."
            f" Messages that the consumer still works on are then processed twice."
        )
    done = call(context, "POST", path, body=body)
    say(context, done, f"queue {queue} of {topic} is unlocked: {_lock_words(done['released'])}")


def _lock_words(lock: Json) -> str:
    holder = printable(lock.get("clientId", "(unknown)"))
    return (
        f"{lock['messages']} messages from offset {lock['offset']}, held by {holder}, and"
        f" {lock['waiting']} behind them"
    )


QueueOffsets = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        metavar="[BROKER/]QUEUE=OFFSET",
        help="An exact offset of one queue; repeatable. Other queues stay as they are.",
    ),
]


def reset_group(
    context: typer.Context,
    name: Name,
    topics: Annotated[
        list[str],
        typer.Option(
            "--topic",
            help="Topic of the reset; repeatable.",
            callback=all_in_namespace,
            autocompletion=complete_topic,
        ),
    ],
    to: Annotated[TopicEnd | None, typer.Option(help="An end of the topic.")] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar=INSTANT, help="The first message stored at this time or later."),
    ] = None,
    timestamp_ms: Annotated[
        int | None, typer.Option(help="The same, as Unix time in milliseconds.")
    ] = None,
    offset: Annotated[int | None, typer.Option(help="The same offset in every queue.")] = None,
    queue_offsets: QueueOffsets = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Move the position of a consumer group in one topic, in several, or in single queues.

    Examples:
    * `tidemill group reset billing --topic orders --to earliest --dry-run`
    * `tidemill group reset billing --topic orders --at 2027-01-01T08:00:00Z`
    * `tidemill group reset billing --topic orders --topic refunds --to latest`
    * `tidemill group reset billing --topic orders --queue broker-0/3=17 --queue broker-1/0=4`
    """
    targets = (to, at, timestamp_ms, offset, queue_offsets or None)
    if sum(target is not None for target in targets) != 1:
        raise typer.BadParameter(
            "give exactly one of --to, --at, --timestamp-ms, --offset and --queue"
        )
    if queue_offsets and len(topics) > 1:
        raise typer.BadParameter("--queue needs exactly one --topic")
    body: dict[str, Json] = {"topics": topics} if len(topics) > 1 else {"topic": topics[0]}
    target: dict[str, Json] = {
        "to": to and to.value,
        "timestampMs": timestamp_ms if at is None else instant_ms(at),
        "offset": offset,
        "queues": [_queue_offset_of(text) for text in queue_offsets or ()] or None,
    }
    body |= {key: value for key, value in target.items() if value is not None}
    path = f"/groups/{segment(name)}:resetOffset"
    if not is_dry:
        check_is_sure("group reset", is_sure=is_sure)
    if not is_dry and not is_sure:
        planned = call(context, "POST", path, body=body | {"dryRun": True})
        _say_plan(planned["queues"], topics)
        words = "topic" if len(topics) == 1 else "topics"
        confirm(f"Move the position of group {name} in {words} {', '.join(topics)}?")
    done = call(context, "POST", path, body=body | {"dryRun": is_dry})
    queues = done["queues"]
    rows = [
        (_topic_of(q, topics), q["queueId"], q.get("fromOffset"), q["toOffset"], q["broker"])
        for q in queues
    ]
    columns = ("TOPIC", "QUEUE", "FROM", "WOULD MOVE TO" if is_dry else "MOVED TO", "BROKER")
    first = 0 if len(topics) > 1 else 1
    last = len(columns) if has_several(queues) else len(columns) - 1
    show(context, done, columns[first:last], [row[first:last] for row in rows], items=queues)


def _queue_offset_of(text: str) -> Json:
    """Return the JSON of a value of `--queue`. Raises BadParameter."""
    found = QUEUE_OFFSET.fullmatch(text)
    if found is None:
        raise typer.BadParameter(
            f"{text!r} is not BROKER/QUEUE=OFFSET or QUEUE=OFFSET, such as broker-0/3=17"
        )
    broker = {"broker": found["broker"]} if found["broker"] else {}
    return broker | {"queue": int(found["queue"]), "offset": int(found["offset"])}


def _topic_of(queue: Json, topics: list[str]) -> str:
    """Return the topic of a queue; an older admin process resets one topic and does not name it."""
    return str(queue.get("topic", topics[0]))


def _say_plan(queues: list[Json], topics: list[str]) -> None:
    is_several = has_several(queues)
    for queue in queues[:QUEUES_SHOWN_MAX]:
        begin = queue.get("fromOffset", "the start offset of the group")
        where = f"{_topic_of(queue, topics)}, queue {queue['queueId']}"
        where += f" of {queue['broker']}" if is_several else ""
        typer.echo(f"{where}: from {begin} to {queue['toOffset']}", err=True)
    if len(queues) > QUEUES_SHOWN_MAX:
        typer.echo(f"and {len(queues) - QUEUES_SHOWN_MAX} queues more", err=True)
