"""The root of the command line: `tidemill NOUN VERB`.

`root` is one piece because each of its options is a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli import (
    acl,
    audit,
    bans,
    bench,
    broker_groups,
    clients,
    cluster,
    completion,
    context_commands,
    dead_letters,
    dedup_keys,
    definitions,
    deliveries,
    doctor,
    filters,
    groups,
    messages,
    operations,
    process_commands,
    pull_offsets,
    quotas,
    release,
    replicas,
    roles,
    security,
    storage,
    store,
    support_bundle,
    timers,
    tokens,
    top,
    topics,
    transactions,
    users,
)
from tidemill.cli.completion_names import complete_context
from tidemill.cli.output import OutputFormat
from tidemill.cli.processes import PROCESSES
from tidemill.cli.rest import ADMIN_URL
from tidemill.cli.root_group import WITH_VALUE, RootGroup, move_shared
from tidemill.cli.root_options import CONTEXT_NOUN, RootValues, read_options
from tidemill.common.exit_codes import EXIT_USAGE
from tidemill.common.prompts import fail
from tidemill.common.times import DURATION
from tidemill.common.version import version

app = typer.Typer(
    name="tidemill",
    cls=RootGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""A message broker that official Apache RocketMQ 5 clients use unmodified.

Start one on this machine, then look at it from another terminal:

* `tidemill standalone --data-dir ./data`
* `tidemill topic create orders --type FIFO --queues 4`
* `tidemill group create billing --order FIFO`
* `tidemill group show billing`
* `tidemill message send reminders "call back" --delay 1h30m`
* `tidemill timer list`
* `tidemill transaction list`
* `tidemill dead-letter list --group billing`
* `tidemill dedup-key show orders order-17`
* `tidemill delivery list billing`
* `tidemill client list --group billing`
* `tidemill cluster show`
* `tidemill storage show`
* `tidemill doctor`
* `tidemill top`
* `tidemill bench send --proxy 127.0.0.1:8081`
* `source <(tidemill completion bash)`
* `tidemill context create prod https://prod:8080 --protected`
* `tidemill security enable`
* `tidemill user create orders --producer orders --consumer billing:orders`
* `tidemill audit list --since 1h`
* `tidemill store copy ./data ./backup`
* `tidemill pipeline archive --to ./archive`
""",
)
app.add_typer(topics.app, name="topic")
app.add_typer(groups.app, name="group")
app.add_typer(pull_offsets.app, name="pull-offset")
app.add_typer(deliveries.app, name="delivery")
app.add_typer(messages.app, name="message")
app.add_typer(timers.app, name="timer")
app.add_typer(transactions.app, name="transaction")
app.add_typer(dead_letters.app, name="dead-letter")
app.add_typer(operations.app, name="operation")
app.add_typer(definitions.app, name="definitions")
app.add_typer(dedup_keys.app, name="dedup-key")
app.add_typer(filters.app, name="filter")
app.add_typer(clients.app, name="client")
app.add_typer(broker_groups.app, name="broker-group")
app.add_typer(replicas.app, name="replica")
app.add_typer(cluster.app, name="cluster")
app.add_typer(context_commands.app, name=CONTEXT_NOUN)
app.add_typer(process_commands.app, name="process")
app.add_typer(storage.app, name="storage")
app.add_typer(store.app, name="store")
app.add_typer(security.app, name="security")
app.add_typer(users.app, name="user")
app.add_typer(tokens.app, name="token")
app.add_typer(roles.app, name="role")
app.add_typer(acl.app, name="acl")
app.add_typer(bans.app, name="ban")
app.add_typer(quotas.app, name="quota")
app.add_typer(audit.app, name="audit")

app.add_typer(release.app, name="release", hidden=True)
app.command("doctor")(doctor.examine)
app.add_typer(bench.app, name="bench")
app.command("top")(top.show_top)
app.command("support-bundle")(support_bundle.make_bundle)
app.command("completion")(completion.print_script)


# Distributions that may be missing, with the command that each of them adds.
_OPTIONAL = {"pipeline": "tidemill-pipeline"}


def add_commands(root: typer.Typer, found: Iterable[EntryPoint]) -> None:
    """Add the commands of other distributions, entry points of the group `tidemill.commands`.

    If a known distribution is missing, its command names it and exits with 2.
    """
    names = set()
    for entry_point in found:
        root.add_typer(entry_point.load(), name=entry_point.name)
        names.add(entry_point.name)
    for name in _OPTIONAL.keys() - names:
        root.command(
            name,
            help=f"Not installed. Run: pip install {_OPTIONAL[name]}",
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            add_help_option=False,
        )(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    def report() -> None:
        fail(
            f"`tidemill {name}` is not installed; install {_OPTIONAL[name]}: "
            f"pip install {_OPTIONAL[name]}",
            EXIT_USAGE,
        )

    return report


add_commands(app, entry_points(group="tidemill.commands"))


for _noun in (
    topics,
    groups,
    deliveries,
    messages,
    timers,
    transactions,
    dead_letters,
    operations,
    dedup_keys,
    clients,
    broker_groups,
    replicas,
    cluster,
    process_commands,
    pull_offsets,
):
    for _command in _noun.app.registered_commands:
        _command.epilog = "Options for the admin API, such as --admin: see tidemill --help."


def run(arguments: Sequence[str]) -> None:
    """Run a command and exit, or complete one for a shell and exit."""
    if completion.is_completing():
        completion.prepare_completion(move_shared, WITH_VALUE)
        app([], prog_name=completion.PROGRAM)
    app(list(arguments))


def show_version(*, value: bool) -> None:
    """Print the version and exit."""
    if value:
        typer.echo(f"tidemill {version()}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    context_name: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            envvar="TIDEMILL_CONTEXT",
            autocompletion=complete_context,
            help="Cluster of the command. Default: of `tidemill context use`.",
        ),
    ] = "",
    confirmed: Annotated[
        str,
        typer.Option(
            "--confirm", metavar="NAME", help="Name of the protected context that may change."
        ),
    ] = "",
    admin: Annotated[
        str, typer.Option(envvar="TIDEMILL_ADMIN", help="Address of the admin API.")
    ] = ADMIN_URL,
    token: Annotated[
        str,
        typer.Option(
            envvar="TIDEMILL_ADMIN_TOKEN",
            show_envvar=True,
            help="Token of the admin API, or a named token; others on this machine can see it in a"
            " command line.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(envvar="TIDEMILL_ADMIN_TOKEN_FILE", help="File with that token.")
    ] = None,
    user: Annotated[str, typer.Option(envvar="TIDEMILL_USER", help="User of the admin API.")] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="TIDEMILL_SECRET_FILE",
            help="File with the secret of that user, or with two lines: a user and its secret."
            " Default: the user and the secret, or the named token, in"
            " ~/.config/tidemill/credentials.",
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--admin-ca-file",
            envvar="TIDEMILL_ADMIN_CA_FILE",
            help="Certificate authorities (PEM) that signed the certificate of the admin API.",
        ),
    ] = None,
    sends_plain_token: Annotated[
        bool,
        typer.Option(
            "--plain-token",
            envvar="TIDEMILL_ADMIN_PLAIN_TOKEN",
            help="Send the token over plain HTTP also to another machine.",
        ),
    ] = False,
    is_insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Accept any certificate of the admin API. For tests only."),
    ] = False,
    namespace: Annotated[
        str, typer.Option(help="Namespace of the topics and consumer groups. Default: none.")
    ] = "",
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Format of the output.")
    ] = OutputFormat.TABLE,
    has_no_color: Annotated[
        bool, typer.Option("--no-color", help="Print no colours, as with the variable NO_COLOR.")
    ] = False,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no sentence about a change that is done.")
    ] = False,
    is_watched: Annotated[  # noqa: ARG001  # The root group reads it.
        bool,
        typer.Option("--watch", "-w", help="Repeat a command that shows something, until Ctrl-C."),
    ] = False,
    interval: Annotated[  # noqa: ARG001  # The root group reads it.
        str, typer.Option(metavar=DURATION, help="Time between two repetitions.")
    ] = "1s",
    is_version: Annotated[  # noqa: ARG001  # Its callback does the work.
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Store the options of the root command."""
    values = RootValues(
        admin=admin,
        context_name=context_name,
        confirmed=confirmed,
        token=token,
        token_file=token_file,
        user=user,
        secret_file=secret_file,
        ca_file=ca_file,
        sends_plain_token=sends_plain_token,
        namespace=namespace,
        output=output,
        has_no_color=has_no_color,
        is_quiet=is_quiet,
        is_insecure=is_insecure,
    )
    context.obj = read_options(context, values)


def _add_process(name: str) -> None:
    """List a process among the commands; `tidemill.__main__` starts it without coming here."""

    @app.command(
        name,
        help=f"{PROCESSES[name].__doc__} See `tidemill {name} --help`.",
        rich_help_panel="Processes",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,
    )
    def start(context: typer.Context) -> None:
        sys.exit(PROCESSES[name](context.args))


for _name in PROCESSES:
    _add_process(_name)
