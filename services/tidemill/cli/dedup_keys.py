"""`tidemill dedup-key ...`, and the deduplication of a topic in `tidemill topic ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final
from urllib.parse import quote

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.rest import (
    call,
    check_is_sure,
    in_namespace,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm
from tidemill.common.rest_client import Json
from tidemill.common.sizes import SIZE, size_bytes
from tidemill.common.times import DURATION, age, duration_ms, from_now, span, utc

OFF, SHARED = "off", "shared"  # values of --dedup-window and --dedup-memory
_SOURCES: Final = {
    "property": "the property dedup-key, and a message without it is not checked",
    "messageId": "the message id",
    "propertyOrMessageId": "the property dedup-key, else the message id",
}
_MIB: Final = 1 << 20

app = typer.Typer(no_args_is_help=True, help="Show the message of a dedup key, and free the key.")

Topic = Annotated[
    str,
    typer.Argument(help="Topic of the key.", callback=in_namespace, autocompletion=complete_topic),
]
Key = Annotated[str, typer.Argument(help="The key. It may contain slashes.")]
MessageGroup = Annotated[
    str | None, typer.Option(help="Message group of the messages. Default: messages without one.")
]


class KeyFromName(StrEnum):
    """Origin of the dedup key of a message."""

    PROPERTY = "property"
    MESSAGE_ID = "messageId"
    PROPERTY_OR_MESSAGE_ID = "propertyOrMessageId"


class DedupModeName(StrEnum):
    """What happens with a message that repeats a dedup key."""

    FIRST = "first"
    REPLACE = "replace"


Window = Annotated[
    str | None,
    typer.Option(
        metavar=f"{DURATION}|{OFF}",
        help="Store each dedup key once within this time, 1s to 24h. Default: 2m. Each --dedup"
        f" option turns the deduplication on. {OFF}: turn it off and forget all keys of the topic.",
    ),
]
KeySource = Annotated[
    KeyFromName | None,
    typer.Option(
        help="Origin of the dedup key. Default: propertyOrMessageId, the property dedup-key, else"
        " the message id."
    ),
]
RepeatMode = Annotated[
    DedupModeName | None,
    typer.Option(
        help="first: a repeat is not stored. replace: it replaces a pending delayed message."
        f" Default: {DedupModeName.FIRST.value}."
    ),
]
MaxWait = Annotated[
    str | None,
    typer.Option(
        metavar=DURATION,
        help="In the mode replace: time from the first schedule of a key to its delivery at the"
        " latest, from 1s.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar=f"{SIZE}|{SHARED}",
        help="Own memory for dedup keys per broker group, from 1MiB."
        f" Default: {SHARED} with other topics, which does not turn the deduplication on.",
    ),
]


def dedup_body(
    window: str | None,
    key_from: KeyFromName | None,
    mode: DedupModeName | None,
    max_wait: str | None,
    memory: str | None,
    *,
    is_on: bool,
) -> dict[str, Json]:
    """Return the deduplication as a field of a topic in REST; empty if no option is given.

    `is_on` says whether the topic has deduplication. Raises BadParameter if `off` has further
    options, and for `shared` alone if the deduplication is off.
    """
    fields: dict[str, Json] = {}
    if window not in {None, OFF}:
        fields["windowMs"] = duration_ms(str(window))
    if key_from is not None:
        fields["keyFrom"] = key_from.value
    if mode is not None:
        fields["mode"] = mode.value
    if max_wait is not None:
        fields["maxWaitMs"] = duration_ms(max_wait)
    if memory is not None:
        fields["memoryBytes"] = None if memory == SHARED else size_bytes(memory)
    if window == OFF:
        if fields:
            raise typer.BadParameter(f"--dedup-window {OFF} excludes the other --dedup options")
        return {"dedup": None}
    if not is_on and fields == {"memoryBytes": None}:
        raise typer.BadParameter(
            f"--dedup-memory {SHARED} changes a topic with deduplication; to turn it on, add"
            f" --dedup-window"
        )
    return {"dedup": fields} if fields else {}


def describe_dedup(topic: Json) -> str:
    """Return the deduplication of a topic as text."""
    dedup = topic.get("dedup")
    if dedup is None:
        pending = ", ".join(topic.get("dedupOffPending", []))
        return f"off, except for keys that {pending} may still know" if pending else "off"
    parts = [f"within {span(dedup['windowMs'])} by {_SOURCES[dedup['keyFrom']]}"]
    if dedup["mode"] == DedupModeName.REPLACE:
        parts.append(f"delayed messages replaced for at most {span(dedup['maxWaitMs'])}")
    if "memoryBytes" in dedup:
        parts.append(f"own memory of {dedup['memoryBytes'] / _MIB:.1f} MiB")
    return "; ".join(parts)


def show_dedup(context: typer.Context, topic: Json) -> None:
    """Print the deduplication of a topic, and its keys at all broker groups."""
    typer.echo(f"Deduplication: {describe_dedup(topic)}.")
    if "dedup" not in topic:
        return
    if "movingFrom" in topic["dedup"]:
        owners, before = (", ".join(topic["dedup"][key]) for key in ("brokerGroups", "movingFrom"))
        typer.echo(f"Keys move from {before} to {owners}.")
    found = call(context, "GET", f"/topics/{segment(topic['name'])}/dedup")
    oldest = age(found.get("oldestAtMs"), SystemClock().wall_ms())
    since = f", the oldest {oldest} old" if oldest else ""
    typer.echo(
        f"Dedup keys: {found['keys']} ({found['pendingKeys']} pending){since};"
        f" {found['bytes'] / _MIB:.1f} of {found['bytesMax'] / _MIB:.1f} MiB."
    )
    typer.echo(
        f"Repeats since the start: {found['hits']}, with another body: {found['mismatches']},"
        f" replaced: {found['replaced']}, rejected: {found['rejected']}."
    )
    warn_unreachable(found)


@app.command("show")
def show_key(
    context: typer.Context, topic: Topic, key: Key, message_group: MessageGroup = None
) -> None:
    """Show the first message with a dedup key, and the end of its window.

    Example: tidemill dedup-key show orders order-17
    """
    found = call(context, "GET", _path(topic, key), query=_query(message_group))
    now_ms = SystemClock().wall_ms()
    end = f"{utc(found['windowEndMs'])} ({from_now(found['windowEndMs'], now_ms)})"
    rows = [
        ("key", found["key"]),
        ("message group", found.get("messageGroup")),
        ("message id", found.get("messageId", "(freed by retention)")),
        ("stored at", utc(found["storedAtMs"])),
        ("window ends at", end),
        ("pending timer", found.get("timerId")),
        ("open transaction", found.get("transactionId")),
        ("broker", found["broker"]),
    ]
    show(context, found, ("NAME", "VALUE"), [row for row in rows if row[1] is not None])
    warn_unreachable(found)


@app.command("delete")
def delete_key(
    context: typer.Context,
    topic: Topic,
    key: Key,
    message_group: MessageGroup = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Free a dedup key, so that the next message with it is stored.

    The key of a pending delayed message or of an open half message stays: cancel its timer, or roll
    its transaction back instead.

    Example: tidemill dedup-key delete orders order-17 --yes
    """
    path, query = _path(topic, key), _query(message_group)
    if not is_dry:
        check_is_sure("dedup-key delete", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query={**query, "dryRun": "true"})
        first = f"message {planned.get('messageId', '(freed by retention)')}"
        warn_unreachable(planned)
        if is_dry:
            say(context, planned, f"key {key} of {first} would be free")
            return
        confirm(f"Free key {key} of {first}? A repeat of the message is then stored again.")
    freed = call(context, "DELETE", path, query=query)
    say(context, freed, f"key {key} of topic {topic} is free")
    if is_sure:
        warn_unreachable(freed)


def _path(topic: str, key: str) -> str:
    if key in {"", ".", ".."}:
        raise typer.BadParameter(f"{key!r} is not a key, or cannot be a segment of a path")
    return f"/topics/{segment(topic)}/dedup/{quote(key, safe='')}"


def _query(message_group: str | None) -> dict[str, str]:
    return {} if message_group is None else {"messageGroup": message_group}
