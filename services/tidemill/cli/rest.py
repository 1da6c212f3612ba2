"""Calls and errors of the commands that use the REST API."""

from __future__ import annotations

import functools
import getpass
import socket
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import typer

from tidemill.cli.contexts import ClusterContext
from tidemill.cli.credentials import UserCredentials, credentials_file, read_credential
from tidemill.cli.output import Output, OutputFormat
from tidemill.common.addresses import is_loopback
from tidemill.common.errors import OLDER_CONTROLLER, BadRequest
from tidemill.common.exit_codes import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE
from tidemill.common.prompts import fail, warn
from tidemill.common.rest_client import (
    Json,
    RestClient,
    RestOptionError,
    RestRejection,
    RestUnreachable,
)
from tidemill.message.namespaces import check_namespace, full_name
from tidemill.security.identities import NEEDS_SUPER
from tidemill.security.tokens import PREFIX

ADMIN_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0  # longer than the timeout of the API for a broker
PAGE_SIZE = 1000  # the limit of the API
CLIENTS_SHOWN = 5  # in a warning
NAME_TEXT = "names are not empty, are not . or .., and have no /"
# Nouns whose commands have names of topics and consumer groups.
NAMESPACED = frozenset(
    {
        "topic",
        "group",
        "pull-offset",
        "delivery",
        "message",
        "timer",
        "transaction",
        "dead-letter",
        "dedup-key",
        "client",
    }
)
# They change nothing with any method.
READING_PATHS = frozenset({"/access:check", "/definitions:convert", "/support-bundles"})
CONFIRMED = "tidemill.confirmed"  # in the memory of a command: the user has typed the context
# Whether a part of an answer to the running command is missing.
_has_partial_answer: ContextVar[bool] = ContextVar("has_partial_answer", default=False)
T = TypeVar("T")
# The reasons that versions of OpenSSL give for bytes that are not TLS.
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the root command."""

    admin: str
    output: OutputFormat
    has_color: bool = True
    is_quiet: bool = False  # no sentences about changes
    token: str = ""
    credentials: UserCredentials | None = None  # a token precedes them
    ca_file: Path | None = None  # authorities that signed the certificate of the API
    is_insecure: bool = False  # accepts any certificate of the API
    sends_plain_token: bool = False  # over plain HTTP, also to another machine
    namespace: str = ""  # of topics and consumer groups
    context: ClusterContext | None = None  # in effect
    context_name: str = ""  # given by an option or a variable
    confirmed: str = ""  # name of the protected context that may change


def call(
    context: typer.Context,
    method: str,
    path: str,
    *,
    body: Json = None,
    query: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
    may_miss: bool = False,
    may_be_forbidden: bool = False,
    on_refusal: Callable[[], None] = lambda: None,
    is_for_question: bool = False,
) -> Json:
    """Call the API and return its answer. After an error, print the reason and exit.

    With `may_miss`, return None if the API answers 404, and with `may_be_forbidden` if it answers
    403. `on_refusal` is called if the API refuses
    the call, so that it has changed nothing. `is_for_question` marks the dry run before a question,
    which controllers of an older version do not have.
    """
    options = options_of(context)
    if method != "GET" and path not in READING_PATHS and not _is_dry(body, query):
        confirm_context(context, on_refusal)
    try:
        return connect(context).call(method, path, body=body, query=query, headers=headers)
    except RestOptionError as error:
        raise typer.BadParameter(str(error)) from error
    except RestUnreachable as error:
        fail(
            f"cannot reach the admin API at {options.admin}: {error}\n{_remedy(options, error)}",
            EXIT_UNREACHABLE,
        )
    except RestRejection as error:
        accepted = {HTTPStatus.NOT_FOUND} if may_miss else set()
        accepted |= {HTTPStatus.FORBIDDEN} if may_be_forbidden else set()
        if error.problem is not None and error.status in accepted:
            return None
        if error.problem is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            on_refusal()
        reason = _reason(options, error)
        if is_for_question and OLDER_CONTROLLER in reason:
            reason += ", or add --yes, which changes without a question and without its dry run"
        fail(reason, EXIT_REFUSED)


def _is_dry(body: Json, query: dict[str, str] | None) -> bool:
    in_body = isinstance(body, dict) and body.get("dryRun") is True
    return in_body or (query or {}).get("dryRun") == "true"


def confirm_context(context: typer.Context, on_refusal: Callable[[], None] = lambda: None) -> None:
    """Ask for the name of a protected context, once per command, before its first change."""
    options = options_of(context)
    protected = options.context
    if protected is None or not protected.is_protected or protected.name == options.confirmed:
        return
    if context.meta.setdefault(CONFIRMED, False):
        return
    if not sys.stdin.isatty():
        on_refusal()
        fail(
            f"context {protected.name} is protected, and standard input is not a terminal; add"
            f" --confirm {protected.name}",
            EXIT_USAGE,
        )
    question = f"Context {protected.name} is protected. Type its name to change {options.admin}"
    if typer.prompt(question, err=True, default="", show_default=False) != protected.name:
        on_refusal()
        fail(f"this is not the name {protected.name}; nothing is changed", EXIT_USAGE)
    context.meta[CONFIRMED] = True


def connect(context: typer.Context, *, timeout_s: float = TIMEOUT_S) -> RestClient:
    """Return a client of the API with the options of the root command. It connects per call."""
    options = options_of(context)
    return client_of(options, find_sendable(options), user=_user(), timeout_s=timeout_s)


def client_of(
    options: Options, known: UserCredentials | None, *, user: str, timeout_s: float
) -> RestClient:
    """Return a client with the token of the options, or with known credentials."""
    saved = known.secret if known is not None and known.is_token else ""
    return RestClient(
        url=options.admin,
        user=user,
        token=options.token or saved,
        credentials=None if known is None or saved else known.pair,
        ca_file=options.ca_file,
        is_insecure=options.is_insecure,
        timeout_s=timeout_s,
        on_unconfirmed=_warn_unconfirmed,
    )


def _warn_unconfirmed(names: str) -> None:
    warn(f"the change is stored, but not confirmed within a second: {names}")


def find_sendable(options: Options) -> UserCredentials | None:
    """Return the credentials to send; None without any, or if the options have a token.

    End the command before it sends a token or a named secret unencrypted to another machine. The
    saved credentials are only left out then, and at another API than their own.
    """
    url, known = urlsplit(options.admin), options.credentials
    if known is not None and not known.is_for(options.admin):
        known = None
    is_here = is_loopback(url.hostname or "")
    is_private = url.scheme != "http" or is_here
    if is_private or options.sends_plain_token:
        if options.token:
            return None
        if known is not None and not (known.is_named or known.address or is_here):
            _warn_unbound(options.admin)
        return known
    if options.token or (known is not None and known.is_named):
        what = "token" if options.token else "secret"
        fail(
            f"the {what} would go to {url.hostname} unencrypted; use --admin https://..., or"
            " --plain-token (TIDEMILL_ADMIN_PLAIN_TOKEN=true) if the network is private",
            EXIT_USAGE,
        )
    return None


@functools.cache  # Once, although a command may make several calls.
def _warn_unbound(address: str) -> None:
    warn(
        f"the saved credentials name no admin API, so they go to {address}; add it as the last line"
        f" of {credentials_file()}"
    )


def _remedy(options: Options, error: RestUnreachable) -> str:
    """Return the remedy for an address without an answer."""
    is_tls = options.admin.startswith("https://")
    rest = options.admin.partition("://")[2]
    cause = error.tls_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            "Its certificate is not trusted for this name. Give the authority that signed it with"
            " --admin-ca-file (TIDEMILL_ADMIN_CA_FILE), and use a name in the certificate."
        )
    if is_tls and cause is not None and cause.reason in _NO_TLS:
        return f"The server does not use TLS; try --admin http://{rest}"
    if not is_tls and error.is_other_protocol:
        return (
            "The server does not answer plain HTTP. If it uses TLS, try"
            f" --admin https://{rest}. Otherwise another program has this port."
        )
    return "Is it running? Start one with `tidemill standalone`, or name another with --admin."


def _user() -> str:
    """Return the user and host of this command, for the log of the broker."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"  # A container need not have a name for its user.
    return f"{user}@{socket.gethostname()}".encode("ascii", "replace").decode()


def read_token(token: str, file: Path | None) -> str:
    """Return the token or the content of its file; "" without any.

    If the file is unreadable or empty, end the command.
    """
    if token or file is None:
        return token
    content = read_credential(file, "the token").strip()
    if not content:
        raise typer.BadParameter(f"{file} has no token")
    return content


def check_is_sure(command: str, *, is_sure: bool) -> None:
    """End a dangerous command that cannot ask: no --yes, and standard input is not a terminal."""
    if not is_sure and not sys.stdin.isatty():
        fail(
            f"{command} needs a confirmation, but standard input is not a terminal; add --yes",
            EXIT_USAGE,
        )


def call_pages(context: typer.Context, path: str, key: str, **filters: str) -> list[Json]:
    """Collect all pages of a list."""
    items: list[Json] = []
    query = {"pageSize": str(PAGE_SIZE), **filters}
    while True:
        page = call(context, "GET", path, query=query)
        items.extend(page[key])
        if (unreachable := page.get("unreachable")) and "pageToken" not in query:
            _has_partial_answer.set(True)
            warn(f"{', '.join(unreachable)} is unreachable; its part of the list is missing")
        if not (token := page.get("nextPageToken")):
            return items
        query["pageToken"] = token


def check_filled(context: typer.Context, value: str | None) -> str | None:
    """Return a value that is not empty; the callback of options that narrow a change.

    The admin API reads an empty value as no limit, and a shell makes one of an unset variable.
    """
    if value is not None and not value.strip() and not context.resilient_parsing:
        raise typer.BadParameter("the value is empty; give one, or omit the option")
    return value


def in_namespace(context: typer.Context, name: str | None) -> str | None:
    """Return the full name of a topic or consumer group; the callback of each such parameter."""
    if name is None or context.resilient_parsing:
        return name
    if not name.strip():
        raise typer.BadParameter(f"{name!r} is not a name: {NAME_TEXT}")
    return full_name(options_of(context).namespace, name)


def all_in_namespace(context: typer.Context, names: list[str]) -> list[str]:
    """Return full names of topics; the callback of an option with several."""
    if context.resilient_parsing:
        return names
    return [full_name(options_of(context).namespace, name) for name in names]


def without_namespace(context: typer.Context, value: T) -> T:
    """End the command if it has a namespace: the callback of an id that belongs to none."""
    if not context.resilient_parsing and options_of(context).namespace:
        path = context.command_path.partition(" ")[2]
        raise typer.BadParameter(
            f"--namespace has no effect on `tidemill {path}`, which takes an id; omit it"
        )
    return value


def of_namespace(context: typer.Context) -> dict[str, str]:
    """Return the filter of lists for the namespace, if there is one."""
    namespace = options_of(context).namespace
    return {"namespace": namespace} if namespace else {}


def read_namespace(namespace: str, noun: str | None) -> str:
    """Return the option --namespace. End the command if it is illegal, or has no effect."""
    if namespace and noun not in NAMESPACED:
        remedy = "; use --option namespace=NAME" if noun == "pipeline" else ""
        raise typer.BadParameter(f"--namespace has no effect on `tidemill {noun}`{remedy}")
    try:
        check_namespace(namespace)
    except BadRequest as error:
        raise typer.BadParameter(error.message) from error
    return namespace


def segment(name: str) -> str:
    """Return `name` as one segment of a path; names may contain % and |.

    End the command if `name` is not one segment, because it would change the path.
    """
    if not name.strip() or name in {".", ".."} or "/" in name:
        raise typer.BadParameter(f"{name!r} is not a name: {NAME_TEXT}")
    return quote(name, safe="")


def output_of(context: typer.Context) -> Output:
    """Return the output of the command, in the format of the root command."""
    options = options_of(context)
    return Output(options.output, has_color=options.has_color, is_quiet=options.is_quiet)


def is_text(context: typer.Context) -> bool:
    """Whether a person reads the output, so that more tables and sentences may follow."""
    return options_of(context).output.is_text


def show(
    context: typer.Context,
    answer: Json,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    items: Sequence[Json] | None = None,
    names: Iterable[object] | None = None,
) -> None:
    """Print an answer in the wanted format; see `Output.show`."""
    output_of(context).show(answer, columns, rows, items=items, names=names)


def show_table(
    context: typer.Context, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print one more table, below that of `show`, for a person."""
    output_of(context).table(columns, rows)


def say(context: typer.Context, answer: Json, sentence: str) -> None:
    """Print the result of a change; see `Output.say`."""
    output_of(context).say(answer, sentence)


@contextmanager
def partial_answers() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a part of an answer is missing since the begin."""
    token = _has_partial_answer.set(False)
    try:
        yield _has_partial_answer.get
    finally:
        _has_partial_answer.reset(token)


def warn_unreachable(answer: Json, effect: str = "its part of the answer is missing") -> None:
    """Warn about unreachable broker groups or proxies, whose part of the answer is missing.

    The command exits with 5 then, unless it fails.
    """
    if unreachable := answer.get("unreachable"):
        warn_partial(f"{', '.join(unreachable)} is unreachable; {effect}")


def warn_partial(text: str) -> None:
    """Warn that a part of the work is not done or unknown. The command exits with 5 then."""
    _has_partial_answer.set(True)
    warn(text)


def warn_clients(deletion: Json) -> None:
    """Warn about the connected clients of a deleted topic or consumer group."""
    if clients := deletion["clients"]:
        names = ", ".join(clients[:CLIENTS_SHOWN])
        more = f" and {len(clients) - CLIENTS_SHOWN} more" if len(clients) > CLIENTS_SHOWN else ""
        warn(f"these clients use it, and their requests fail afterwards: {names}{more}")


def has_several(items: Sequence[Json]) -> bool:
    """Whether the items belong to several broker groups."""
    return len({item["broker"] for item in items}) > 1


def admin_url(address: str) -> str:
    """Return the base URL of the API; plain HTTP if `address` has no scheme."""
    url = address.rstrip("/")
    return url if "://" in url else f"http://{url}"


def options_of(context: typer.Context) -> Options:
    """Return the options of the root command."""
    options = context.obj
    assert isinstance(options, Options)
    return options


def _reason(options: Options, rejection: RestRejection) -> str:
    problem = rejection.problem
    if problem is None:
        return (
            f"{options.admin} answered {rejection.status} {rejection.reason_phrase}, which is not"
            " an answer of the admin API; give the address of the API with --admin"
        )
    if rejection.status == HTTPStatus.FORBIDDEN and options.credentials and not options.token:
        if NEEDS_SUPER in problem.detail:
            remedy = "name a super user with --user and --secret-file"
        else:
            remedy = (
                "use another user with --user and --secret-file, or let a super user allow it:"
                " tidemill acl allow"
            )
        return f"{problem.title}: {problem.detail}; {remedy}"
    if rejection.status != HTTPStatus.UNAUTHORIZED:
        return f"{problem.title}: {problem.detail}"
    if options.token.startswith(PREFIX):
        return f"{problem.title}: {problem.detail}; check --token-file and --token"
    if options.token:
        return (
            f"{problem.title}: the API at {options.admin} has another token; check --token-file,"
            " --token, and the setting admin_token_file of the API"
        )
    known = options.credentials
    if known is not None and not known.is_for(options.admin):
        return (
            f"{problem.title}: the saved credentials are for {known.address}, so they were not sent"
            f" to {options.admin}; use --user and --secret-file, or change the last line of"
            f" {credentials_file()}"
        )
    if known is not None:
        what = "saved token" if known.is_token else f"user {known.user}"
        return (
            f"{problem.title}: {problem.detail}; the API at {options.admin} refused the {what};"
            " check --user and --secret-file, or the file ~/.config/tidemill/credentials"
        )
    return (
        f"{problem.title}: the API at {options.admin} requires a token or a user; give the file of"
        " a token with --token-file (TIDEMILL_ADMIN_TOKEN_FILE), or --user and --secret-file"
    )
