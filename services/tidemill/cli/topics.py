"""`tidemill topic ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.rest import call, call_pages, say, segment, show

app = typer.Typer(no_args_is_help=True, help="Create, list, show and delete topics.")

Name = Annotated[str, typer.Argument(help="Name of the topic.")]
Queues = Annotated[
    int | None, typer.Option(help="Number of queues: how far consumption can be spread.")
]


class TopicType(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


Type = Annotated[
    TopicType | None, typer.Option("--type", case_sensitive=False, help="Messages it takes.")
]


@app.command("list")
def list_topics(context: typer.Context) -> None:
    """List all topics.

    Example: tidemill topic list
    """
    topics = call_pages(context, "/topics", "topics")
    rows = [(topic["name"], topic["messageType"], topic["queues"]) for topic in topics]
    show(context, topics, ("TOPIC", "TYPE", "QUEUES"), rows)


@app.command("create")
def create_topic(
    context: typer.Context, name: Name, kind: Type = None, queues: Queues = None
) -> None:
    """Create a topic, or change one.

    Example: tidemill topic create orders --type FIFO --queues 4
    """
    body = {"messageType": kind.value if kind else None, "queues": queues}
    given = {key: value for key, value in body.items() if value is not None}
    topic = call(context, "PUT", f"/topics/{segment(name)}", body=given)
    say(context, topic, f"topic {name}: {topic['messageType']}, {topic['queues']} queues")


@app.command("show")
def show_topic(context: typer.Context, name: Name) -> None:
    """Show a topic and what its queues hold.

    Example: tidemill topic show orders
    """
    topic = call(context, "GET", f"/topics/{segment(name)}")
    rows = [
        (name, topic["messageType"], q["queueId"], q["minOffset"], q["maxOffset"])
        for q in topic["queueStatus"]
    ]
    show(context, topic, ("TOPIC", "TYPE", "QUEUE", "FIRST", "NEXT"), rows)


@app.command("delete")
def delete_topic(
    context: typer.Context,
    name: Name,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a topic with its messages.

    Example: tidemill topic delete orders --yes
    """
    if not is_sure:
        typer.confirm(f"Delete topic {name} and all its messages?", abort=True, err=True)
    call(context, "DELETE", f"/topics/{segment(name)}")
    say(context, {}, f"topic {name} is deleted")
