"""`tidemill client ...`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

import typer

from tidemill.cli.completion_names import complete_group, complete_topic
from tidemill.cli.conflicts import conflict_text
from tidemill.cli.messages import printable
from tidemill.cli.rest import (
    call,
    connect,
    in_namespace,
    of_namespace,
    say,
    segment,
    show,
    warn_unreachable,
    without_namespace,
)
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json, RestRejection, RestUnreachable
from tidemill.common.times import DURATION, duration_ms, span

app = typer.Typer(no_args_is_help=True, help="List connected clients, ask one of them, kick it.")

ClientId = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the client.", callback=without_namespace)
]
Timeout = Annotated[
    str,
    typer.Option(metavar=DURATION, help="Time to wait for the answer of the client; at most 20s."),
]
TIMEOUT = "5s"
TOPICS_SHOWN = 3  # topics per cell of the table
LISTED_MAX = 1_000  # clients of the table; filters find clients beyond that


@app.command("list")
def list_clients(
    context: typer.Context,
    group: Annotated[
        str | None,
        typer.Option(
            help="Only consumers of this group.",
            callback=in_namespace,
            autocompletion=complete_group,
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Only clients of this topic.", callback=in_namespace, autocompletion=complete_topic
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=LISTED_MAX, help="Maximum number of clients.")
    ] = 100,
) -> None:
    """List clients that sent something within the last two minutes.

    Example: tidemill client list --group billing
    """
    query = {"pageSize": str(limit), **of_namespace(context)}
    query |= {"group": group} if group else {}
    query |= {"topic": topic} if topic else {}
    page = call(context, "GET", "/clients", query=query)
    rows: list[tuple[Any, ...]] = [
        (
            client["clientId"],
            client["kind"],
            client.get("group"),
            _topics(client),
            f"{client['language']} {client['version']}".strip(),
            client["proxies"][0]["address"],
            ", ".join(proxy["name"] for proxy in client["proxies"]),
            span(client["connectedMs"]),
            span(client["silentMs"]),
        )
        for client in page["clients"]
    ]
    columns: tuple[str, ...] = (
        "CLIENT",
        "KIND",
        "GROUP",
        "TOPICS",
        "LANGUAGE",
        "ADDRESS",
        "PROXY",
        "FOR",
        "SILENT",
    )
    if any(client.get("users") for client in page["clients"]):
        columns = *columns, "USER"
        users = [", ".join(client.get("users") or ()) for client in page["clients"]]
        rows = [(*row, user) for row, user in zip(rows, users, strict=True)]
    clients = page["clients"]
    names = [client["clientId"] for client in clients]
    cells = [tuple(map(_text, row)) for row in rows]
    show(context, page, columns, cells, items=clients, names=names)
    warn_unreachable(page)
    for text in sorted({conflict_text(each) for c in page["clients"] for each in _conflicts(c)}):
        warn(text)
    if page.get("nextPageToken"):
        warn(f"there are more than {limit} clients; use --group, --topic or --limit")


@app.command("show")
def show_client(context: typer.Context, client_id: ClientId) -> None:
    """Show a client: its settings, its proxies, and its messages in flight.

    Example: tidemill client show host@4711@0@abc
    """
    client = call(context, "GET", f"/clients/{segment(client_id)}")
    rows = [
        ("users", ", ".join(client.get("users") or ()) or None),
        ("kind", client["kind"]),
        ("group", client.get("group")),
        ("language", client["language"]),
        ("version", client["version"]),
        ("host", client.get("host")),
        ("in flight", client.get("inFlight")),
        ("connected", f"{span(client['connectedMs'])} ago"),
        ("last heard", f"{span(client['silentMs'])} ago"),
    ]
    subscriptions = client.get("subscriptions") or ()
    rows += [
        ("subscription", f"{s['topic']} {s['filterType']} {s['expression']}") for s in subscriptions
    ]
    if not subscriptions:
        rows += [("topic", topic) for topic in client.get("topics") or ()]
    for proxy in client["proxies"]:
        can = "can be asked" if proxy["hasStream"] else "cannot be asked"
        rows.append(("proxy", f"{proxy['name']} from {proxy['address']}, {can}"))
    rows += [("conflict", conflict_text(each)) for each in _conflicts(client)]
    show(
        context,
        client,
        ("CLIENT", printable(client_id)),
        [(name, _text(value)) for name, value in rows if value is not None],
    )
    warn_unreachable(client)


@app.command("stack")
def print_stack(context: typer.Context, client_id: ClientId, timeout: Timeout = TIMEOUT) -> None:
    """Print the stack of each thread of a client. Java and Go clients can do this.

    Example: tidemill client stack host@4711@0@abc
    """
    query = {"timeoutMs": str(duration_ms(timeout))}
    answer = call(context, "POST", f"/clients/{segment(client_id)}:stack", query=query)
    lines = answer["stack"].expandtabs().splitlines()
    say(context, answer, "\n".join(map(printable, lines)))


@app.command("kick")
def kick_client(
    context: typer.Context,
    client_id: ClientId,
    user: Annotated[
        str | None, typer.Option(help="Only the client of this user. Default: of all users.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the effect and change nothing.")
    ] = False,
) -> None:
    """End a client: its polls and streams. Its messages go to others, and it may come back.

    Example: tidemill client kick host@4711@0@abc
    """
    query = {"user": user} if user else {}
    query |= {"dryRun": "true"} if dry_run else {}
    answer = call(context, "POST", f"/clients/{segment(client_id)}:kick", query=query)
    polls = sum(proxy["polls"] for proxy in answer["proxies"])
    streams = sum(proxy["streams"] for proxy in answer["proxies"])
    names = ", ".join(proxy["name"] for proxy in answer["proxies"])
    verb = "would be kicked" if dry_run else "kicked"
    say(
        context,
        answer,
        f"client {printable(client_id)}: {verb} at {names} (polls {polls}, streams {streams})",
    )
    warn_unreachable(answer)


def is_unknown_client(context: typer.Context, client_id: str) -> bool:
    """Whether no client has this id; False if that is unknown."""
    if "/" in client_id:
        return False  # It is no segment of a path, so REST cannot look it up.
    try:
        connect(context).call("GET", f"/clients/{segment(client_id)}")
    except RestRejection as error:
        return error.status == HTTPStatus.NOT_FOUND
    except RestUnreachable:
        return False  # The change itself fails then, with its own error.
    return False


def warn_of_stranger(client_id: str) -> None:
    """Warn that an id may be misspelt."""
    warn(
        f"client {printable(client_id)} is not connected; `tidemill client list` lists all clients"
    )


def _conflicts(client: Json) -> list[Json]:
    return client.get("conflicts") or []


def _topics(client: Json) -> str:
    topics = client.get("topics") or []
    more = len(topics) - TOPICS_SHOWN
    shown = ", ".join(topics[:TOPICS_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def _text(value: object) -> str | None:
    """Return a text of a client without control characters."""
    return None if value is None else printable(str(value))
