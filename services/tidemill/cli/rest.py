"""What every command over the REST API shares: calls, errors, and how answers are shown.

Exit status: 0 done, 1 refused by the API, 2 wrong usage, 3 the API cannot be reached.
"""

from __future__ import annotations

import getpass
import json
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote

import typer

from tidemill.common.prompts import EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_USAGE, fail, warn
from tidemill.common.rest_client import (
    Json,
    RestClient,
    RestOptionError,
    RestRejection,
    RestUnreachable,
)

ADMIN_URL = "http://127.0.0.1:8080"
TIMEOUT_S = 30.0  # the API itself gives up on the broker sooner
PAGE_SIZE = 1000  # the largest that the API allows
# Columns of text that nobody has to copy: they are folded where a terminal is narrow. All others
# are names, ids and numbers, which the next command is given: their lines rather run over.
FOLDED = frozenset({"BODY", "TOPICS", "REASON", "RETRY", "LEFT", "KEYS", "TAG"})
FOLDED_WIDTH_MIN = 8  # columns: less is a word a line
UNFOLDED_WIDTH = 10_000  # columns for a program: more than any row has, so that each is one line
# The reasons that versions of OpenSSL give for bytes that are not TLS.
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"}


class OutputFormat(StrEnum):
    """How answers are shown."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is given before the noun."""

    admin: str
    output: OutputFormat
    token: str = ""
    ca_file: Path | None = None  # who has signed the certificate of the API


def call(
    context: typer.Context,
    method: str,
    path: str,
    *,
    body: Json = None,
    query: dict[str, str] | None = None,
    may_miss: bool = False,
) -> Json:
    """Call the API and return its answer; say what is wrong and exit otherwise.

    Returns None for what is not there, where it `may_miss`.
    """
    options = options_of(context)
    client = RestClient(
        url=options.admin,
        user=_user(),
        token=options.token,
        ca_file=options.ca_file,
        timeout_s=TIMEOUT_S,
    )
    try:
        return client.call(method, path, body=body, query=query)
    except RestOptionError as error:
        raise typer.BadParameter(str(error)) from error
    except RestUnreachable as error:
        fail(
            f"cannot reach the admin API at {options.admin}: {error}\n{_remedy(options, error)}",
            EXIT_UNREACHABLE,
        )
    except RestRejection as error:
        if may_miss and error.problem is not None and error.status == HTTPStatus.NOT_FOUND:
            return None
        fail(_reason(options, error), EXIT_REFUSED)


def _remedy(options: Options, error: RestUnreachable) -> str:
    """Return what to do about an address that gave no answer."""
    is_tls = options.admin.startswith("https://")
    rest = options.admin.partition("://")[2]
    cause = error.tls_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            "Its certificate is not one to trust for that name: name who has signed it with"
            " --admin-ca-file (TIDEMILL_ADMIN_CA_FILE), and call it by a name that it holds."
        )
    if is_tls and cause is not None and cause.reason in _NO_TLS:
        return f"It does not speak TLS there: try --admin http://{rest}"
    if not is_tls and error.is_other_protocol:
        return (
            "It listens, and does not answer plain HTTP: if it is served with TLS, try"
            f" --admin https://{rest}; or it is the port of something else."
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
    """Return the token as it is given, or as its file has it; end the command where that fails."""
    if token or file is None:
        return token
    try:
        return file.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read the token: {error}") from error


def check_is_sure(command: str, *, is_sure: bool) -> None:
    """End a command that takes something away where nobody can be asked, and --yes is missing."""
    if not is_sure and not sys.stdin.isatty():
        fail(
            f"{command} asks before it does so, and standard input is no terminal: add --yes (-y)",
            EXIT_USAGE,
        )


def call_pages(context: typer.Context, path: str, key: str, **filters: str) -> list[Json]:
    """Collect all pages of a list."""
    items: list[Json] = []
    query = {"pageSize": str(PAGE_SIZE), **filters}
    while True:
        page = call(context, "GET", path, query=query)
        items.extend(page[key])
        if (away := page.get("unreachable")) and "pageToken" not in query:
            warn(f"{', '.join(away)} could not be reached: this is what the others know")
        if not (token := page.get("nextPageToken")):
            return items
        query["pageToken"] = token


def segment(name: str) -> str:
    """Return `name` as one segment of a path; names may hold % and |.

    Ends the command where `name` cannot be one: it would name another path of the API.
    """
    if not name.strip() or name in {".", ".."} or "/" in name:
        raise typer.BadParameter(
            f"{name!r} is not a name of a topic, a group, a client or a message"
        )
    return quote(name, safe="")


def show(
    context: typer.Context, answer: Json, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print `answer` as JSON, or `rows` as a table."""
    if options_of(context).output is OutputFormat.JSON:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        show_table(columns, rows)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print `rows` as a table."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    has_values = len(columns) == len(("NAME", "VALUE"))  # of one thing: the values are text
    for n, column in enumerate(columns):
        is_folded = column in FOLDED or (has_values and n == 1)
        width_min = min(FOLDED_WIDTH_MIN, len(column)) if is_folded else None
        table.add_column(column, overflow="fold", no_wrap=not is_folded, min_width=width_min)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=UNFOLDED_WIDTH), table)
        console.width = max(console.width, needed.minimum)
    else:
        console.width = UNFOLDED_WIDTH
    console.print(table)


def say(context: typer.Context, answer: Json, sentence: str) -> None:
    """Print `answer` as JSON, or a sentence."""
    if options_of(context).output is OutputFormat.JSON:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        typer.echo(sentence)


def warn_unreachable(answer: Json) -> None:
    """Say on standard error which broker groups, or proxies, an answer knows nothing of."""
    if unreachable := answer.get("unreachable"):
        warn(f"{', '.join(unreachable)} could not be reached: what it has is missing here")


def has_several(items: Sequence[Json]) -> bool:
    """Whether what is listed is of several broker groups, so that their names say something."""
    return len({item["broker"] for item in items}) > 1


def admin_url(address: str) -> str:
    """Return the base of the API's addresses; plain HTTP unless `address` says otherwise."""
    url = address.rstrip("/")
    return url if "://" in url else f"http://{url}"


def options_of(context: typer.Context) -> Options:
    """Return what was given before the noun."""
    options = context.obj
    assert isinstance(options, Options)
    return options


def _reason(options: Options, rejection: RestRejection) -> str:
    problem = rejection.problem
    if problem is None:
        return (
            f"{options.admin} answered {rejection.status} {rejection.reason_phrase}, and not as the"
            " admin API does; if another server has this address, name that of the API with --admin"
        )
    if rejection.status != HTTPStatus.UNAUTHORIZED:
        return f"{problem.title}: {problem.detail}"
    if options.token:
        return (
            f"{problem.title}: the token is not that of the API at {options.admin}; see"
            " --token-file, --token and admin_token_file of the API"
        )
    return (
        f"{problem.title}: the API at {options.admin} wants a token; name its file with"
        " --token-file (TIDEMILL_ADMIN_TOKEN_FILE), or give it with --token"
    )
