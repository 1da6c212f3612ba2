"""`tidemill group ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.equal_objects import put, say_exists
from tidemill.cli.group_options import (
    STRICT_FACTOR,
    DeliveryOrder,
    DryRun,
    MaxAttempts,
    Name,
    PriorityFactor,
    RetryMs,
    StartFrom,
    Yes,
)
from tidemill.cli.group_positions import reset_group, unlock_queue
from tidemill.cli.group_show import NEVER_POLLED, retry_text, show_group
from tidemill.cli.numbers import (
    GroupPrefix,
    GroupSort,
    dead_numbers,
    list_query,
    number,
    warn_unknown,
)
from tidemill.cli.rest import (
    call,
    call_pages,
    check_is_sure,
    of_namespace,
    say,
    segment,
    show,
    warn_clients,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import age, duration_ms, from_now, utc

app = typer.Typer(
    no_args_is_help=True,
    help="Create, list, show, change, pause, resume, reset, unlock and delete consumer groups.",
)

app.command("show")(show_group)
app.command("unlock")(unlock_queue)
app.command("reset")(reset_group)


@app.command("list")
def list_groups(context: typer.Context, sort: GroupSort = None, prefix: GroupPrefix = None) -> None:
    """List consumer groups with their state, lag, consumers and dead letters.

    The numbers are up to 5 s old. An unknown number is shown as `?`. `tidemill group show` has the
    settings.

    Examples:
    * `tidemill group list`
    * `tidemill group list --sort -lag`
    """
    query = of_namespace(context) | list_query(sort, prefix)
    groups = call_pages(context, "/groups", "groups", **query)
    now_ms = SystemClock().wall_ms()
    rows = [
        (
            g["name"],
            g["deliveryOrder"],
            g.get("state", "?"),
            "-" if g.get("state") == NEVER_POLLED else number(g.get("lag")),
            age(g.get("oldestUnackedAtMs"), now_ms) if g.get("lag") is not None else "-",
            number(g.get("inPerSecond")),
            number(g.get("outPerSecond")),
            number(g.get("consumers")),
            *dead_numbers(g),
        )
        for g in groups
    ]
    columns = (
        *("GROUP", "ORDER", "STATE", "LAG", "OLDEST", "IN/S", "OUT/S", "CONSUMERS"),
        *("DEAD", "DEAD 1H"),
    )
    show(context, groups, columns, rows)
    warn_unknown(groups)


@app.command("create")
def create_group(
    context: typer.Context,
    name: Name,
    order: DeliveryOrder = None,
    max_attempts: MaxAttempts = None,
    retry_ms: RetryMs = None,
    start_from: StartFrom = None,
    priority_factor: PriorityFactor = None,
    is_dry: DryRun = False,
) -> None:
    """Create a consumer group. If a group with these settings exists, nothing changes.

    Example: tidemill group create billing --order FIFO --max-attempts 5
    """
    given = _given(order, max_attempts, retry_ms, start_from, priority_factor)
    # The home alone answers, so other broker groups may be down.
    known = call(context, "GET", f"/groups/{segment(name)}", may_miss=True)
    if known is not None:
        say_exists(context, "group", name, known, given)
    else:
        _put(context, name, given, is_dry=is_dry, is_new_only=True)


@app.command("set")
def set_group(
    context: typer.Context,
    name: Name,
    order: DeliveryOrder = None,
    max_attempts: MaxAttempts = None,
    retry_ms: RetryMs = None,
    start_from: StartFrom = None,
    priority_factor: PriorityFactor = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Change a consumer group; ask before attempts are reduced. Settings without an option stay.

    A message that has used up the new number of attempts becomes a dead letter when it is due.

    Examples:
    * `tidemill group set billing --priority-factor 90`
    * `tidemill group set billing --max-attempts 3 --dry-run`
    """
    given = _given(order, max_attempts, retry_ms, start_from, priority_factor)
    known = call(context, "GET", f"/groups/{segment(name)}")  # Ends the command if it is missing.
    if not is_dry and max_attempts is not None and max_attempts < known["maxAttempts"]:
        check_is_sure("group set with fewer attempts", is_sure=is_sure)
        if not is_sure:
            confirm(
                f"Reduce the attempts of group {name} from {known['maxAttempts']} to"
                f" {max_attempts}? A message that has used them up becomes a dead letter when it is"
                f" due."
            )
    _put(context, name, given, is_dry=is_dry)


def _given(
    order: DeliveryOrder,
    max_attempts: MaxAttempts,
    retry_ms: RetryMs,
    start_from: StartFrom,
    priority_factor: PriorityFactor,
) -> dict[str, Json]:
    """Return the given settings as REST expects them."""
    settings = {
        "deliveryOrder": order.value if order else None,
        "maxAttempts": max_attempts,
        "retry": {"customized": {"nextMs": retry_ms}} if retry_ms else None,
        "startFrom": start_from.value if start_from else None,
        "priorityFactor": priority_factor,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _put(
    context: typer.Context, name: str, given: Json, *, is_dry: bool, is_new_only: bool = False
) -> None:
    group = put(context, "group", name, given, is_dry=is_dry, is_new_only=is_new_only)
    if group is None:
        return
    before = None if group["isNew"] else group.get("before", group)
    say(context, group, f"group {name}: {change_of(before, group)}")
    if before is not None and before["retry"] != group["retry"]:
        warn("running push consumers may keep their former retry waits until they are restarted")
    if group.get("priorityFactor") == STRICT_FACTOR:
        warn(f"with factor {STRICT_FACTOR}, messages of low priority can wait without end")


def change_of(before: Json, group: Json) -> str:
    """Describe a consumer group, with old values where they differ."""
    if before is None:
        return f"new: {group['deliveryOrder']}, {group['maxAttempts']} attempts"
    attempts = f"{group['maxAttempts']} attempts"
    if before["maxAttempts"] != group["maxAttempts"]:
        attempts = f"{before['maxAttempts']} -> {attempts}"
    retry = ""
    if before["retry"] != group["retry"]:
        retry = f", retry {retry_text(before['retry'])} -> {retry_text(group['retry'])}"
    factor = ""
    if before.get("priorityFactor") != group.get("priorityFactor"):
        factor = f", priority factor {before['priorityFactor']} -> {group['priorityFactor']}"
    word = "changed" if "->" in attempts + retry + factor else "is there, unchanged"
    return f"{word}: {group['deliveryOrder']}, {attempts}{retry}{factor}"


@app.command("pause")
def pause_group(
    context: typer.Context,
    name: Name,
    duration: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="Time of the pause, at most 30d.")
    ] = "1d",
    reason: Annotated[str, typer.Option(help="Reason, for other operators.")] = "",
    is_dry: DryRun = False,
) -> None:
    """Stop the delivery of messages to a consumer group for some time.

    Push and simple consumers stay connected and receive nothing; pull consumers go on. Consumers
    may still ack what they have. Messages wait, and count in the lag. A second pause changes the
    end. All broker groups need feature level 5.

    Examples:
    * `tidemill group pause billing --for 2h --reason "database moves"`
    * `tidemill group resume billing`
    """
    now_ms = SystemClock().wall_ms()
    end_ms = now_ms + duration_ms(duration)
    body = {"untilMs": end_ms, "reason": reason}
    group = _act(context, name, "pause", body, is_dry=is_dry)
    until_ms = group["paused"]["untilMs"] if "paused" in group else end_ms
    verb = "would be" if is_dry else "is"
    sentence = f"group {name} {verb} paused until {utc(until_ms)} ({from_now(until_ms, now_ms)})"
    say(context, group, sentence)


@app.command("resume")
def resume_group(context: typer.Context, name: Name, is_dry: DryRun = False) -> None:
    """End the pause of a consumer group at once.

    Example: tidemill group resume billing
    """
    group = _act(context, name, "resume", None, is_dry=is_dry)
    say(context, group, f"group {name} {'would receive' if is_dry else 'receives'} messages")


def _act(context: typer.Context, name: str, verb: str, body: Json, *, is_dry: bool) -> Json:
    query = {"dryRun": "true"} if is_dry else {}
    return call(context, "POST", f"/groups/{segment(name)}:{verb}", body=body, query=query)


@app.command("delete")
def delete_group(
    context: typer.Context, name: Name, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Delete a consumer group with its progress; its dead letters stay.

    Example: tidemill group delete billing --yes
    """
    path = f"/groups/{segment(name)}"
    if not is_dry:
        check_is_sure("group delete", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "DELETE", path, query={"dryRun": "true"})
        loss = (
            f"its progress in {len(planned['topics'])} topics ({planned['lag']} messages unacked)"
        )
        if is_dry:
            say(context, planned, f"group {name} would be deleted, with {loss}")
            warn_unreachable(planned)
            warn_clients(planned)
            return
        warn_unreachable(planned)
        warn_clients(planned)
        confirm(f"Delete group {name} and {loss}?")
    deleted = call(context, "DELETE", path)
    say(context, deleted, f"group {name} is deleted")
    if is_sure:
        warn_clients(deleted)
