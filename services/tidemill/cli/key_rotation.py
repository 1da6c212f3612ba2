"""`tidemill security rotate-key`: replace the key that encrypts the secrets of users."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tidemill.cli.rest import call, is_text, say
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.prompts import fail, warn
from tidemill.common.rest_client import Json

LOOK_PERIOD_S = 1.0
# Kubelet passes a changed Secret on within two minutes, and processes read it within 5 s.
WAIT_S = 180.0

WaitTime = Annotated[
    float, typer.Option("--wait-s", min=0, help="Seconds to wait until all proxies have the key.")
]
AwaitKey = Annotated[
    bool, typer.Option("--await-key", help="Wait for a new key in the key file, and add none.")
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Go on without processes that do not answer or lack the key."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")]


def rotate_key(
    context: typer.Context,
    await_key: AwaitKey = False,
    wait_s: WaitTime = WAIT_S,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Encrypt the secrets of users under a new key.

    Adds a first line to the key file, waits until all proxies have it, encrypts all secrets again,
    and lists the keys that encrypt nothing. Clients do not notice it. Repeat it if it was
    interrupted.

    In Kubernetes the key file is a Secret, which the certificate job changes: raise the value
    security.keyRotation, upgrade the release, and give --await-key.

    Examples:
    * `tidemill security rotate-key`
    * `tidemill security rotate-key --await-key`
    """
    query = {"dryRun": "true"} if dry_run else None
    added: Json
    if await_key:
        added = {"keyId": _wait_for_key(context, wait_s), "isNew": False}
    else:
        added = call(context, "POST", "/security:addKey", query=query)
    key_id = added["keyId"]
    if dry_run:
        what = "a key would be added" if added["isNew"] else f"the first key is {key_id}"
        before = call(context, "GET", "/security/keys")
        count = sum(each["secrets"] for each in before["keys"] if each["id"] != key_id)
        say(context, before, f"{what}, and {count} secrets would be encrypted under it")
        return
    _say(context, f"key       {key_id}  {'added' if added['isNew'] else 'was there already'}")
    _wait_for_proxies(context, key_id, wait_s, force=force)
    encrypted = _encrypt_all(context, key_id, force=force)
    after = call(context, "GET", "/security/keys")
    unused = [each["id"] for each in after["keys"] if not each["secrets"] and each["id"] != key_id]
    lines = [f"secrets   {encrypted} encrypted under {key_id}"]
    if unused:
        lines.append(
            f"unused    {' '.join(unused)}  Remove their lines from all key files, when all of"
            f" them have {key_id}. A backup of the log needs them."
        )
    say(context, after, "\n".join(lines))


def _wait_for_key(context: typer.Context, wait_s: float) -> str:
    """Wait until the first key of the admin process does not encrypt all secrets; return its id."""
    end_s = time.monotonic() + wait_s
    while True:
        known = call(context, "GET", "/security/keys")
        held = [key for key in known["keys"] if key["held"]]
        if not held[0]["secrets"] or any(key["secrets"] for key in held[1:]):
            return str(known["firstKeyId"])
        if time.monotonic() >= end_s:
            fail(
                f"the key file of the admin process has no new key within {wait_s:g} s; its first"
                f" one is {known['firstKeyId']}",
                EXIT_REFUSED,
            )
        time.sleep(LOOK_PERIOD_S)


def _wait_for_proxies(context: typer.Context, key_id: str, wait_s: float, *, force: bool) -> None:
    """Wait until the admin process and all proxies have the key. End the command if one has not."""
    end_s, shown = time.monotonic() + wait_s, ""
    while True:
        known = call(context, "GET", "/security/keys")
        lacking = list(known["lacking"])
        if known["firstKeyId"] != key_id:
            lacking.insert(0, "the admin process")
        names = ", ".join(lacking)
        if not lacking:
            _say(context, "proxies   all have it")
            return
        if time.monotonic() >= end_s:
            break
        if names != shown:
            _say(context, f"waiting   {names}")
            shown = names
        time.sleep(LOOK_PERIOD_S)
    if not force or known["firstKeyId"] != key_id:
        fail(
            f"{names}: no report of the key {key_id} within {wait_s:g} s. Their key files need its"
            " line. Then repeat this command, or add --force if these processes are gone",
            EXIT_REFUSED,
        )
    warn(f"going on without {names}")


def _encrypt_all(context: typer.Context, key_id: str, *, force: bool) -> int:
    """Encrypt the secrets of all users; return their number."""
    body: Json = {"keyId": key_id, "force": force}
    encrypted = 0
    while True:
        page = call(context, "POST", "/security:encryptSecrets", body=body)
        encrypted += int(page["encrypted"])
        if names := page["undecryptable"]:
            warn(f"no key decrypts a secret of {', '.join(names)}; rotate their secrets")
        if not (token := page.get("nextPageToken")):
            return encrypted
        body["pageToken"] = token
        _say(context, f"secrets   {encrypted} encrypted so far")


def _say(context: typer.Context, line: str) -> None:
    """Print a line of progress, unless the output is JSON."""
    if is_text(context):
        typer.echo(line)
