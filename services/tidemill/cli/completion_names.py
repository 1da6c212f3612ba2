"""Names of topics, groups, processes and contexts, for the completion in a shell.

A shell waits for them, so a call takes at most `NAMES_TIMEOUT_S`. A file keeps the answer for
`CACHE_S`, also that there was none. An error gives no names and no output.

    ~/.cache/tidemill/names-HASH.json     the names; HASH is of the address, the user and the list
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Final, cast

import typer

from tidemill.cli.contexts import read_contexts
from tidemill.cli.output import OutputFormat
from tidemill.cli.rest import ADMIN_URL, PAGE_SIZE, Options, connect, of_namespace
from tidemill.cli.root_options import RootValues, read_options
from tidemill.common.private_files import make_private_folder, read_private, replace_private
from tidemill.message.namespaces import without_namespace

NAMES_TIMEOUT_S: Final = 0.4  # a start of the command line takes some tenths of a second too
CACHE_S: Final = 5.0
CACHE_BYTES_MAX: Final = 1 << 20
# Shells insert names as they are, so a name with a special character is not completed.
SAFE: Final = re.compile(r"[A-Za-z0-9%_.:@/+-]+")


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin with the incomplete word."""
    return _complete(context, incomplete, "topics", "topics")


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """Return the consumer groups that begin with the incomplete word."""
    return _complete(context, incomplete, "groups", "groups")


def complete_process(context: typer.Context, incomplete: str) -> list[str]:
    """Return the processes that begin with the incomplete word."""
    return _complete(context, incomplete, "processes", "items")


def complete_broker_group(context: typer.Context, incomplete: str) -> list[str]:
    """Return the broker groups that begin with the incomplete word."""
    return _complete(context, incomplete, "broker-groups", "items")


def complete_context(incomplete: str) -> list[str]:
    """Return the contexts that begin with the incomplete word."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _matching(list(read_contexts().by_name), incomplete)
    except Exception:  # noqa: BLE001  # The shell would print it into the line of the user.
        return []


def _complete(context: typer.Context, incomplete: str, path: str, key: str) -> list[str]:
    try:
        # Options of the command line can be wrong while the user types.
        with contextlib.redirect_stderr(io.StringIO()):
            return _matching(_names(context, path, key), incomplete)
    except Exception:  # noqa: BLE001  # The same. `typer.Exit` is an Exception, too.
        return []


def _matching(names: list[str], incomplete: str) -> list[str]:
    return [name for name in sorted(names) if name.startswith(incomplete) and SAFE.fullmatch(name)]


def _names(context: typer.Context, path: str, key: str) -> list[str]:
    """Return the names of the cache, or else those of the admin API."""
    root = cast("typer.Context", context.find_root())
    root.obj = _options(context)
    file = _cache_file(root.obj, path)
    cached = _cached(file)
    if cached is not None:
        return cached
    names = _ask(root, path, key)
    with contextlib.suppress(OSError):  # The next completion asks again.
        make_private_folder(file.parent)
        replace_private(file, json.dumps(names))
    return names


def _options(context: typer.Context) -> Options:
    """Return the options of the root command, which shells complete without calling it."""
    root = cast("typer.Context", context.find_root())
    below = context
    while below.parent is not None and below.parent is not root:
        below = cast("typer.Context", below.parent)
    root.invoked_subcommand = below.info_name
    given = {each.name: root.params.get(each.name) for each in fields(RootValues)}
    given["admin"] = given["admin"] or ADMIN_URL
    given["output"] = OutputFormat.TABLE
    texts = {name: given[name] or "" for name in ("context_name", "token", "user", "namespace")}
    values = RootValues(**{**given, **texts, "confirmed": ""})  # type: ignore[arg-type]  # parsed
    return read_options(root, values)


def _cache_file(options: Options, path: str) -> Path:
    user = options.credentials.user if options.credentials else ""
    secret = options.token or (options.credentials.secret if options.credentials else "")
    text = json.dumps([options.admin, user, secret, options.namespace, path])
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "tidemill"
    return folder / f"names-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _cached(file: Path) -> list[str] | None:
    """Return the names of a fresh file; None if it is missing, old or damaged."""
    try:
        if not 0 <= time.time() - file.stat().st_mtime < CACHE_S:
            return None
        names = json.loads(read_private(str(file), bytes_max=CACHE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return names if isinstance(names, list) else None


def _ask(context: typer.Context, path: str, key: str) -> list[str]:
    """Return the first names of a list of the admin API; none if it is too slow, or refuses."""
    options: Options = context.obj
    found: list[str] = []

    def ask() -> None:
        query = {"pageSize": str(PAGE_SIZE)} if path in {"topics", "groups"} else {}
        query |= of_namespace(context) if query else {}
        with contextlib.suppress(Exception):
            answer = connect(context, timeout_s=NAMES_TIMEOUT_S).call(
                "GET", f"/{path}", query=query
            )
            found.extend(without_namespace(options.namespace, one["name"]) for one in answer[key])

    # The timeout of a connection is per operation, so the thread bounds the sum of them.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(NAMES_TIMEOUT_S)
    return [] if thread.is_alive() else found
