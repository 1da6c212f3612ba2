"""`tidemill doctor`: checks of a running cluster, one line and one command each."""

from __future__ import annotations

import socket
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import typer

from tidemill.cli.doctor_checks import (
    CheckResult,
    CheckState,
    Unanswered,
    check_answer,
    check_broker_groups,
    check_certificates,
    check_clocks,
    check_consumers,
    check_dead_letters,
    check_disks,
    check_readiness,
    check_replicas,
    check_settings,
    check_versions,
    checked,
    find_stalled,
)
from tidemill.cli.rest import (
    PAGE_SIZE,
    TIMEOUT_S,
    Options,
    call,
    connect,
    options_of,
    segment,
    show,
)
from tidemill.common.clock import SystemClock
from tidemill.common.exit_codes import EXIT_PARTIAL, EXIT_PROBLEM
from tidemill.common.rest_client import Json, RestClient, RestRejection, RestUnreachable

COLUMNS = ("CHECK", "STATE", "FINDING", "COMMAND")
CONFLICT: Final = 409  # of the controllers, if the cluster has none
HTTPS_PORT: Final = 443
GROUPS: Final = "consumer groups"  # in `hidden` of a session


def examine(context: typer.Context) -> None:
    """Check the cluster: one line per check, with the command that shows more.

    It checks processes, versions, clocks, broker groups, replicas, disks, the certificates of all
    processes, consumer groups without a consumer that polls, open dead letters, and settings that
    differ.

    Open dead letters are a notice, as in `tidemill cluster show`.

    Exit status: 0 if there is no problem, 3 if the admin API is unreachable, 4 if a check found a
    problem, 5 if a check could not finish.

    Examples:
    * `tidemill doctor`
    * `tidemill doctor -o json`
    """
    # First, because without the admin API nothing else can be checked.
    session = call(context, "GET", "/session")
    hidden = session.get("hidden", ())
    found = list(_results(connect(context), options_of(context), hidden))
    counts = Counter(each.state for each in found)
    answer: dict[str, Json] = {
        "checks": [each.as_json() for each in found],
        "problems": counts[CheckState.PROBLEM],
        "unknown": counts[CheckState.UNKNOWN],
    }
    show(
        context,
        answer,
        COLUMNS,
        [(each.name, each.state.value, each.text, each.command) for each in found],
        items=answer["checks"],
    )
    if counts[CheckState.PROBLEM]:
        raise typer.Exit(EXIT_PROBLEM)
    if counts[CheckState.UNKNOWN]:
        raise typer.Exit(EXIT_PARTIAL)


def _results(client: RestClient, options: Options, hidden: Sequence[str]) -> Iterator[CheckResult]:
    """Yield the result of each check; `hidden` are the objects that the caller may not see."""
    now_ms = SystemClock().wall_ms()
    yield checked("admin API", "tidemill process show admin", fine=options.admin, problems=[])
    processes = _ask(client, "/processes")
    listing = "tidemill process list"
    yield check_answer("processes", listing, processes, check_readiness)
    yield check_answer("versions", listing, processes, check_versions)
    yield check_answer("clocks", listing, processes, check_clocks)
    groups = _ask(client, "/broker-groups")
    yield check_answer("broker groups", "tidemill broker-group list", groups, check_broker_groups)
    replicas = _ask(client, "/replicas", missing_status=CONFLICT)
    if replicas is not None:
        yield check_answer("replicas", "tidemill replica list", replicas, check_replicas)
    storage = _ask(client, "/storage", {"pageSize": "1"})
    yield check_answer("disks", "tidemill storage show", storage, check_disks)
    yield check_certificates(_certificate_expiry(options), processes, now_ms=now_ms)
    command = "tidemill group list --sort=-lag"
    unseen = [f"the user may not see all {GROUPS}"] if GROUPS in hidden else []
    groups = _ask_groups(client)
    stalled = [] if isinstance(groups, Unanswered) else find_stalled(groups, now_ms)
    diagnoses = {name: _ask(client, f"/groups/{segment(name)}/diagnosis") for name in stalled}
    check = partial(check_consumers, diagnoses=diagnoses, unseen=unseen)
    yield check_answer("consumers", command, groups, check)
    letters = _ask(client, "/dead-letters/summary")
    command = "tidemill dead-letter summary"
    check = partial(check_dead_letters, unseen=unseen)
    yield check_answer("dead letters", command, letters, check)
    check = partial(_check_settings, _ask_settings(client, processes))
    yield check_answer("settings", listing, processes, check)


def _ask_settings(client: RestClient, processes: Json | Unanswered) -> dict[str, Json | Unanswered]:
    """Return the settings of each process."""
    if isinstance(processes, Unanswered):
        return {"all processes": processes}
    names = [each["name"] for each in processes["items"]]
    settings = {name: _ask(client, f"/processes/{segment(name)}/settings") for name in names}
    return settings | {name: Unanswered("no answer") for name in processes.get("unreachable", ())}


def _check_settings(settings: Mapping[str, Json | Unanswered], processes: Json) -> CheckResult:
    """Compare the settings of processes of the same kind."""
    kinds = {each["name"]: each["kind"] for each in processes["items"]}
    counts = Counter(kinds.values())
    compared = {name: found for name, found in settings.items() if counts[kinds.get(name, "")] != 1}
    return check_settings(kinds, compared)


def _ask(
    client: RestClient,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    missing_status: int | None = None,
) -> Json | Unanswered:
    """Return the answer, the reason of a failure, or None for the status `missing_status`."""
    try:
        return client.call("GET", path, query=query)
    except RestRejection as error:
        if error.status == missing_status:
            return None
        return Unanswered(str(error))
    except RestUnreachable as error:
        return Unanswered(f"{path}: {error}")


def _ask_groups(client: RestClient) -> list[Json] | Unanswered:
    """Return all consumer groups."""
    groups: list[Json] = []
    query = {"pageSize": str(PAGE_SIZE)}
    while True:
        page = _ask(client, "/groups", query)
        if isinstance(page, Unanswered):
            return page
        groups += page["groups"]
        if not (token := page.get("nextPageToken")):
            return groups
        query["pageToken"] = token


def _certificate_expiry(options: Options) -> int | Unanswered | None:
    """Return when the certificate of the admin API expires (Unix, ms); None with plain HTTP."""
    url = urlsplit(options.admin)
    if url.scheme != "https" or url.hostname is None:
        return None
    trust = ssl.create_default_context(cafile=options.ca_file)
    try:
        with (
            socket.create_connection((url.hostname, url.port or HTTPS_PORT), TIMEOUT_S) as plain,
            trust.wrap_socket(plain, server_hostname=url.hostname) as encrypted,
        ):
            certificate = encrypted.getpeercert()
    except OSError as error:
        return Unanswered(f"the certificate of the admin API: {error}")
    assert certificate is not None, "the server has sent a certificate, which was verified"
    return int(ssl.cert_time_to_seconds(str(certificate["notAfter"])) * 1_000)
