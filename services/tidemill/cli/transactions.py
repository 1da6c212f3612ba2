"""`tidemill transaction ...`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.pages import read_pages
from tidemill.cli.rest import (
    call,
    check_is_sure,
    has_several,
    in_namespace,
    is_text,
    say,
    segment,
    show,
    warn_unreachable,
    without_namespace,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm, warn
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, age, duration_ms, from_now, utc
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC

app = typer.Typer(
    no_args_is_help=True,
    help="List, show, commit, roll back, check and recover transactional messages. A producer sends"
    " a half message, runs its local transaction, and then commits or rolls back. Without a"
    " decision the broker asks producers of the topic (a check). After the last check the message"
    f" expires: it goes to {HALF_DEAD_LETTER_TOPIC} and can be recovered for 72 hours.",
)


class State(StrEnum):
    """The states that a list can show."""

    OPEN = "open"
    EXPIRED = "expired"


Id = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="Id of the transaction, as `transaction list` and the producer show it.",
        callback=without_namespace,
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(metavar=DURATION, help="Only those that were sent longer ago, such as 10m."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS = ("TRANSACTION", "STATE", "AGE", "TOPIC", "CHECKS", "NEXT CHECK", "MESSAGE ID", "BROKER")


@app.command("list")
def list_transactions(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Option(help="Only this topic.", callback=in_namespace, autocompletion=complete_topic),
    ] = None,
    state: Annotated[
        State | None,
        typer.Option(
            case_sensitive=False,
            help="open: without a decision. expired: of the last 72 hours. Default: both.",
        ),
    ] = None,
    older_than: OlderThan = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of transactions.")] = 100,
) -> None:
    """List open and expired transactions, the oldest first.

    Examples:
    * `tidemill transaction list --topic orders --older-than 10m`
    * `tidemill transaction list --state expired --limit 1000 -o json`
    """
    query = {"topic": topic, "state": state.name if state else None}
    given = {name: value for name, value in query.items() if value is not None}
    if older_than is not None:
        given["olderThanMs"] = str(duration_ms(older_than))
    found, has_more, unreachable = read_pages(context, "transactions", given, limit)
    now_ms = SystemClock().wall_ms()
    count = len(COLUMNS) if has_several(found) else len(COLUMNS) - 1
    show(context, found, COLUMNS[:count], [_row(one, now_ms)[:count] for one in found])
    warn_unreachable({"unreachable": unreachable})
    if has_more:
        typer.echo(f"there are more than these {limit}; see --limit", err=True)


@app.command("show")
def show_transaction(context: typer.Context, transaction: Id) -> None:
    """Show a transaction, also one that ended not long ago.

    The broker remembers a decision for 1 hour, and an expiry for 72 hours.

    Example: tidemill transaction show AQABAAAAAAAAAGTnQzWbq2Vc9g
    """
    shown = call(context, "GET", _path(transaction))
    now_ms = SystemClock().wall_ms()
    rows = [
        ("state", _state(shown)),
        ("topic", _topic(shown)),
        ("message id", shown.get("messageId")),
        ("sent", _instant(shown.get("sentAtMs"), now_ms)),
        ("sent by", shown.get("clientId")),
        ("checks", f"{shown['checks']} of {shown['checksMax']}"),
        ("next check", _instant(shown.get("nextCheckAtMs"), now_ms)),
        ("ended", _instant(shown.get("endedAtMs"), now_ms)),
        ("broker", shown["broker"]),
    ]
    show(context, shown, ("TRANSACTION", transaction), rows)


@app.command("commit")
def commit_transaction(
    context: typer.Context, transaction: Id, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Commit an open transaction: consumers receive its message.

    Look at the data of the application first. Only they tell whether the local transaction is done.
    A repeated commit succeeds.

    Example: tidemill transaction commit AQABAAAAAAAAAGTnQzWbq2Vc9g --dry-run
    """
    question = "Commit it? Consumers receive the message"
    _change(context, transaction, "commit", question, is_dry=is_dry, is_sure=is_sure)


@app.command("rollback")
def roll_back_transaction(
    context: typer.Context, transaction: Id, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Roll an open transaction back: its message is never delivered.

    A repeated rollback succeeds.

    Example: tidemill transaction rollback AQABAAAAAAAAAGTnQzWbq2Vc9g --dry-run
    """
    question = "Roll it back? The message is never delivered then"
    _change(context, transaction, "rollback", question, is_dry=is_dry, is_sure=is_sure)


@app.command("check")
def check_transaction(
    context: typer.Context, transaction: Id, is_dry: DryRun = False, is_sure: Yes = False
) -> None:
    """Ask a producer of the topic for the decision now, not at the next check.

    The check counts as an attempt.

    Example: tidemill transaction check AQABAAAAAAAAAGTnQzWbq2Vc9g --yes
    """
    question = "Check it now? The check counts as an attempt"
    done = _change(context, transaction, "check", question, is_dry=is_dry, is_sure=is_sure)
    if not done["hasProducer"]:
        topic = done["transaction"].get("topic", "(unknown)")
        warn(f"no producer of topic {topic} is connected; the check waits for one")


@app.command("recover")
def recover_transactions(
    context: typer.Context,
    transaction: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Id of an expired transaction. Or give --topic."),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            help="Recover up to 1,000 expired transactions of this topic.",
            callback=in_namespace,
            autocompletion=complete_topic,
        ),
    ] = None,
    older_than: OlderThan = None,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Open expired transactions again, so that producers get new checks.

    A recovered transaction has a new id. Its old id stays expired, marked as recovered.

    Examples:
    * `tidemill transaction recover AQABAAAAAAAAAGTnQzWbq2Vc9g`
    * `tidemill transaction recover --topic orders --older-than 1h --dry-run`
    """
    if (transaction is None) == (topic is None):
        raise typer.BadParameter("give either ID or --topic")
    if transaction is not None:
        without_namespace(context, transaction)
        if older_than is not None:
            raise typer.BadParameter("--older-than needs --topic")
        question = "Open it again under a new id"
        done = _change(context, transaction, "recover", question, is_dry=is_dry, is_sure=is_sure)
        if is_text(context) and not is_dry:
            typer.echo(f"its new id is {done['recovered']['transactionId']}")
        return
    body: dict[str, Json] = {"topic": topic}
    if older_than is not None:
        body["olderThanMs"] = duration_ms(older_than)
    path = "/transactions:recover"
    if not is_dry:
        check_is_sure("transaction recover", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body, query={"dryRun": "true"})
        warn_unreachable(planned)
        if is_dry:
            _show_recovery(context, planned, "would be recovered")
            return
        confirm(f"Recover {_count(planned)} of topic {topic}?")
    done = call(context, "POST", path, body=body)
    _show_recovery(context, done, "are open again")
    warn_unreachable(done)
    if "stoppedBy" in done:
        warn(f"the recovery ended early: {done['stoppedBy']}")
    elif done["hasMore"]:
        warn("more transactions are expired; repeat the command for them")


def _change(
    context: typer.Context,
    transaction: str,
    verb: str,
    question: str,
    *,
    is_dry: bool,
    is_sure: bool,
) -> Json:
    """Change one transaction after a confirmation, and return the answer."""
    path = f"{_path(transaction)}:{verb}"
    if not is_dry:
        check_is_sure(f"transaction {verb}", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, query={"dryRun": "true"})
        message = _message_of(planned["transaction"])
        if is_dry:
            say(context, planned, f"{verb} is possible: {message}")
            return planned
        confirm(f"{message}. {question}?")
    done = call(context, "POST", path)
    before, after = done["stateBefore"], done["transaction"]["state"]
    if verb == "check":
        result = "its check is due now"
    elif before == after:
        result = f"is {_words(after)} already"
    else:
        result = f"{_words(before)} -> {_words(after)}"
    say(context, done, f"transaction {transaction}: {result}")
    return done


def _show_recovery(context: typer.Context, done: Json, verb: str) -> None:
    say(context, done, f"{_count(done)} of topic {done['topic']} {verb}")
    if not is_text(context):
        return
    for one in done["transactions"]:
        typer.echo(f"  {one.get('transactionId', '(unknown id)')}  {_message_of(one)}")
    hidden = done["count"] - len(done["transactions"])
    if hidden:
        typer.echo(f"  and {hidden} more")


def _count(found: Json) -> str:
    count = found["count"]
    return f"{count} expired transaction{'' if count == 1 else 's'}"


def _path(transaction: str) -> str:
    return f"/transactions/{segment(transaction)}"


def _row(transaction: Json, now_ms: int) -> tuple[object, ...]:
    next_ms = transaction.get("nextCheckAtMs")
    return (
        transaction.get("transactionId", "(unknown)"),
        _words(transaction["state"]),
        age(transaction.get("sentAtMs"), now_ms),
        _topic(transaction),
        f"{transaction['checks']}/{transaction['checksMax']}",
        None if next_ms is None else _due(next_ms, now_ms),
        transaction.get("messageId"),
        transaction["broker"],
    )


def _due(at_ms: int, now_ms: int) -> str:
    """Return when a check is due. An overdue one waits for a producer."""
    return from_now(at_ms, now_ms) if at_ms > now_ms else "waits for a producer"


def _instant(at_ms: int | None, now_ms: int) -> str | None:
    return None if at_ms is None else f"{utc(at_ms)} ({from_now(at_ms, now_ms)})"


def _topic(transaction: Json) -> str:
    topic = str(transaction.get("topic", "(unknown)"))
    return f"{topic} (deleted)" if transaction["topicDeleted"] else topic


def _words(state: str) -> str:
    return state.lower().replace("_", " ")


def _state(shown: Json) -> str:
    """Return the state, with the place of an expired message."""
    state = _words(shown["state"])
    if shown["state"] == "EXPIRED":
        return f"{state}: its message is on {HALF_DEAD_LETTER_TOPIC}"
    if shown["state"] == "RECOVERED":
        return f"{state}: it had expired, and its message is open again under another id"
    return state


def _message_of(transaction: Json) -> str:
    """Return in one line which message a transaction has."""
    message_id = transaction.get("messageId", "(unknown)")
    sent_at_ms = transaction.get("sentAtMs")
    sent = "" if sent_at_ms is None else f", sent {utc(sent_at_ms)}"
    return (
        f"message {message_id} of topic {_topic(transaction)}{sent}, {_words(transaction['state'])}"
    )
