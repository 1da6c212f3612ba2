"""`tidemill message send TOPIC -`: a message per line of standard input, in their order."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import typer

from tidemill.cli.line_source import LINE_BYTES_MAX, LineBatches, LineSource
from tidemill.cli.rest import confirm_context, connect, say
from tidemill.common.exit_codes import (
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
)
from tidemill.common.prompts import warn
from tidemill.common.rest_client import Json, RestClient, RestRejection, RestUnreachable

BATCH_BYTES_MAX: Final = 8 << 20  # as of the REST API
ERRORS_KEPT_MAX: Final = 100  # for --output json
ERRORS_SHOWN_MAX: Final = 10  # on standard error
PROGRESS_PERIOD_S: Final = 1.0
KEY_FIELD: Final = "idempotencyKey"  # of a JSON line


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
            sender = _BatchSender(client, path, query, counts)
            for batch in LineBatches(LineSource(sys.stdin.buffer), rate):
                for line in batch:
                    try:
                        message = _message(line.content, common, is_json=is_json)
                        sender.add(line.number, _encoded(message))
                    except WrongLine as error:
                        sender.send()  # The failures are reported in the order of the lines.
                        counts.note_failure(line.number, str(error))
                sender.send()
                progress.show(counts)
    except StreamStopped as error:
        warn(f"{error}. The next lines are not sent")
        status = EXIT_PARTIAL if counts.sent else error.status
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    progress.end()
    say(context, counts.as_json(), counts.text())
    if not status and counts.failed:
        status = EXIT_PARTIAL if counts.sent else EXIT_REFUSED
    if status:
        raise typer.Exit(status)


class StreamStopped(Exception):
    """A line may be stored or not, so the next ones are not sent; the text says which and why."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status  # of the command, if no line was sent before


class _BatchSender:
    """Sends messages in batches, and counts the outcome of each line."""

    def __init__(
        self, client: RestClient, path: str, query: Mapping[str, str] | None, counts: StreamCounts
    ) -> None:
        self._client = client
        self._path = path
        self._query = query
        self._counts = counts
        self._lines: list[tuple[int, bytes]] = []  # number and message
        self._size_bytes = 0

    def add(self, number: int, message: bytes) -> None:
        """Add a line to the batch. Send the batch first if it has no room for the line."""
        if self._size_bytes + len(message) > BATCH_BYTES_MAX:
            self.send()
        self._lines.append((number, message))
        self._size_bytes += len(message)

    def send(self) -> None:
        """Send the lines of the batch. Raises StreamStopped."""
        lines, self._lines, self._size_bytes = self._lines, [], 0
        if lines:
            self._send(lines)

    def _send(self, lines: list[tuple[int, bytes]]) -> None:
        try:
            answer = self._client.call(
                "POST",
                f"{self._path}:batch",
                query=self._query,
                content=b"".join(message for _, message in lines),
                headers={"Content-Type": "application/x-ndjson"},
            )
        except RestRejection as error:
            if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE and len(lines) > 1:
                # The admin process has a lower limit than the one of the API.
                middle = len(lines) // 2
                self._send(lines[:middle])
                self._send(lines[middle:])
                return
            for number, _ in lines:
                self._counts.note_failure(number, str(error))
            return
        except RestUnreachable as error:
            is_single = len(lines) == 1
            names = f"line {lines[0][0]}" if is_single else f"lines {lines[0][0]} to {lines[-1][0]}"
            raise StreamStopped(
                f"{names}: no answer ({error}); {'it' if is_single else 'they'} may be stored",
                EXIT_UNREACHABLE,
            ) from error
        for (number, _), outcome in zip(lines, answer["outcomes"], strict=True):
            self._note(number, outcome)

    def _note(self, number: int, outcome: Json) -> None:
        match outcome["outcome"]:
            case "STORED" | "DUPLICATE" as stored:
                self._counts.sent += 1
                self._counts.duplicates += stored == "DUPLICATE"
            case "UNKNOWN":
                raise StreamStopped(
                    f"line {number}: {outcome['detail']} (the outcome is unknown; the line may be"
                    " stored)",
                    EXIT_PARTIAL,
                )
            case _:
                self._counts.note_failure(number, outcome["detail"])


def _encoded(message: Json) -> bytes:
    """Return a message as a line of a batch. Raises WrongLine."""
    try:
        return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise WrongLine("a text contains half a character (a lone surrogate)") from error


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
