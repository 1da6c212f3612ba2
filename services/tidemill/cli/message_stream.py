"""`tidemill message send TOPIC -`: a message per line of standard input, in their order."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Final

import typer

from tidemill.cli.rest import confirm_context, connect, say
from tidemill.common.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
)
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json, RestClient, RestRejection, RestUnreachable

LINE_BYTES_MAX: Final = 8 << 20  # a body of 4 MiB in base64, with properties
ERRORS_KEPT_MAX: Final = 100  # for --output json
ERRORS_SHOWN_MAX: Final = 10  # on standard error
PROGRESS_PERIOD_S: Final = 1.0
KEY_FIELD: Final = "idempotencyKey"  # of a JSON line; REST has it as a header


class WrongLine(Exception):
    """A line that is not a message; the text says why."""


@dataclass(slots=True)
class StreamCounts:
    """What has become of the lines so far."""

    sent: int = 0
    duplicates: int = 0  # of the sent ones: not stored again
    failed: int = 0
    errors: list[Json] = field(default_factory=list)

    def note_failure(self, line: int, reason: str) -> None:
        """Count a line that was not sent, and report the first ones."""
        self.failed += 1
        if self.failed <= ERRORS_SHOWN_MAX:
            warn(f"line {line}: {reason}")
        if len(self.errors) < ERRORS_KEPT_MAX:
            self.errors.append({"line": line, "reason": reason})

    def text(self) -> str:
        """Return the counts as a sentence."""
        repeats = f", {self.duplicates} of them as repeats" if self.duplicates else ""
        return f"{self.sent} messages sent{repeats}, {self.failed} failed"

    def as_json(self) -> Json:
        """Return the document of --output json."""
        return {
            "sent": self.sent,
            "duplicates": self.duplicates,
            "failed": self.failed,
            "errors": self.errors,
        }


def send_lines(
    context: typer.Context,
    path: str,
    common: Json,
    *,
    query: Mapping[str, str] | None,
    is_json: bool,
    rate: float | None,
) -> None:
    """Send each line of standard input to a REST path. `common` has the fields of all messages.

    Exits with 5 if some lines failed, with 1 if all did, and with 3 if the API is unreachable from
    the first line on. It stops at a line without an answer, because it may be stored.
    """
    confirm_context(context)
    counts = StreamCounts()
    progress = _Progress()
    status = 0
    try:
        with connect(context).connected() as client:
            for number, line in _paced(_lines(sys.stdin.buffer), rate):
                try:
                    message = _message(line, common, is_json=is_json)
                    counts.duplicates += bool(_send(client, path, query, message).get("duplicate"))
                    counts.sent += 1
                except (WrongLine, RestRejection) as error:
                    counts.note_failure(number, str(error))
                progress.show(counts)
    except RestUnreachable as error:
        line_text = f"line {counts.sent + counts.failed + 1}"
        warn(f"{line_text}: no answer ({error}); it may be stored. The next lines are not sent")
        status = EXIT_PARTIAL if counts.sent else EXIT_UNREACHABLE
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    progress.end()
    say(context, counts.as_json(), counts.text())
    if not status and counts.failed:
        status = EXIT_PARTIAL if counts.sent else EXIT_REFUSED
    if status:
        raise typer.Exit(status)


def _send(client: RestClient, path: str, query: Mapping[str, str] | None, message: Json) -> Json:
    key = message.pop(KEY_FIELD, None)
    headers = None if key is None else {"Idempotency-Key": key}
    return client.call("POST", path, query=query, body=message, headers=headers)


def _lines(source: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the content of each line; None: the line is too long."""
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        is_whole = line.endswith(b"\n") or len(line) <= LINE_BYTES_MAX
        rest = line
        while not is_whole and rest and not rest.endswith(b"\n"):
            rest = source.readline(LINE_BYTES_MAX)
        yield number, line.removesuffix(b"\n").removesuffix(b"\r") if is_whole else None


def _paced(
    lines: Iterator[tuple[int, bytes | None]], rate: float | None
) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines, at most `rate` per second."""
    due_s = time.monotonic()
    for line in lines:
        if rate is not None:
            now_s = time.monotonic()
            if due_s > now_s:
                time.sleep(due_s - now_s)
            # A slow call is not made up for: the rate is a limit at each time.
            due_s = max(due_s, now_s) + 1 / rate
        yield line


def _message(line: bytes | None, common: Json, *, is_json: bool) -> Json:
    """Return the message of a line. Raises WrongLine."""
    if line is None:
        raise WrongLine(f"longer than {LINE_BYTES_MAX} bytes")
    if is_json:
        return {**common, **_parsed(line)}
    try:
        return {**common, "body": line.decode("utf-8")}
    except UnicodeDecodeError:
        return {**common, "bodyBase64": base64.b64encode(line).decode()}


def _parsed(line: bytes) -> dict[str, Json]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise WrongLine(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise WrongLine("not a JSON object")
    key = fields.get(KEY_FIELD, "-")
    if not isinstance(key, str) or not key.isprintable() or key != key.strip() or not key:
        raise WrongLine(f"{KEY_FIELD} is not a text, or has control characters or spaces at an end")
    return fields


class _Progress:
    """The counts on a terminal, about each second."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._next_at_s = 0.0
        self._has_line = False

    def show(self, counts: StreamCounts) -> None:
        """Print the counts if it is time."""
        now_s = time.monotonic()
        if self._is_shown and now_s >= self._next_at_s:
            self._next_at_s, self._has_line = now_s + PROGRESS_PERIOD_S, True
            typer.echo(f"\r{counts.text()}", err=True, nl=False)

    def end(self) -> None:
        """End the line of the progress."""
        if self._has_line:
            typer.echo(err=True)
