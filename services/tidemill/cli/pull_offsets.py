"""`tidemill pull-offset ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.group_options import DryRun, Name, Yes
from tidemill.cli.rest import (
    call,
    check_is_sure,
    in_namespace,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.common.prompts import confirm
from tidemill.common.rest_client import Json

app = typer.Typer(
    no_args_is_help=True,
    help="""List and delete pull offsets.

A consumer group that pulls, such as an archive, reports its offset in each queue. Retention can
wait for these offsets (`archive_gate_group`).
""",
)


@app.command("list")
def list_pull_offsets(context: typer.Context, name: Name) -> None:
    """List the topics that a consumer group pulls, with the messages behind its offsets.

    Example: tidemill pull-offset list archive
    """
    progress = call(context, "GET", f"/groups/{segment(name)}/progress")
    pulled = progress.get("pulled") or []
    rows = [(each["topic"], each["queues"], each["behind"]) for each in pulled]
    show(context, pulled, ("TOPIC", "QUEUES", "BEHIND"), rows)
    warn_unreachable(progress)


@app.command("delete")
def delete_pull_offsets(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        str,
        typer.Option(
            help="Topic that the group no longer pulls.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ],
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Delete the pull offsets of a consumer group in a topic, after the end of its archive.

    If archive_gate_group names this group, brokers then apply the retention to the topic again.
    First remove the topic from `tidemill pipeline archive --gate`, because its next run would
    report the offsets again. Archived messages stay, and pop consumers are not affected.

    Examples:
    * `tidemill pull-offset delete archive --topic orders --dry-run`
    * `tidemill pull-offset delete archive --topic orders`
    """
    path = f"/groups/{segment(name)}:forgetPullOffsets"
    body: dict[str, Json] = {"topic": topic}
    if not is_dry:
        check_is_sure("pull-offset delete", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body | {"dryRun": True})
        if is_dry:
            say(context, planned, f"would be deleted: {_pull_offset_words(planned)}")
            return
        confirm(f"Delete {_pull_offset_words(planned)}?")
    done = call(context, "POST", path, body=body)
    say(context, done, f"deleted: {_pull_offset_words(done)}")


def _pull_offset_words(answer: Json) -> str:
    queues = answer["queues"]
    if not queues:
        return f"nothing: {answer['group']} has no pull offsets in {answer['topic']}"
    behind = sum(queue["behind"] for queue in queues)
    return (
        f"pull offsets of {answer['group']} in {len(queues)} queues of {answer['topic']}, with"
        f" {behind} messages behind them"
    )
