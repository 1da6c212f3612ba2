"""Fields of forms, and the parts of a REST call that their values become."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import QueryParams

from tidemill.admin.http.rest_calls import Document

FIELDS_MAX: Final = 200  # of one form
# [deny] RESOURCE ACTION,ACTION [from RANGE,RANGE]
ENTRY_LINE: Final = re.compile(
    r"(?i:(deny)\s+)?(\S+)\s+([A-Za-z]+(?:\s*,\s*[A-Za-z]+)*)(?:\s+(?i:from)\s+(.+))?"
)
ENTRY_EXAMPLE: Final = "Topic:orders* Pub,Sub"
MINUTE_TEXT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")


class FieldKind(StrEnum):
    """How a field is shown, and which JSON value its text becomes."""

    TEXT = "text"
    LONG_TEXT = "long-text"
    NUMBER = "number"
    FLAG = "flag"
    CHOICE = "choice"
    TIME = "time"
    LIST = "list"
    ENTRIES = "entries"  # of rights, one per line
    DOCUMENT = "document"  # JSON: the whole body of the call


class InvalidField(Exception):  # An input, not a fault.
    """The text of a field does not fit its kind. Has the status and the text of an error page."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form. An empty field is left out of the call."""

    name: str  # of the query parameter, or of the JSON field: `retention.ms` is one in another
    label: str
    kind: FieldKind = FieldKind.TEXT
    help: str = ""
    default: str = ""
    choices: tuple[str, ...] = ()
    no_choice: str = "(no change)"  # the text of the choice ""
    is_required: bool = False
    is_query: bool = False  # a query parameter, not a field of the body
    sends_empty: bool = False  # also without a text: false, or no lines

    def value_of(self, text: str) -> Any:
        """Return the JSON value of a text. Raises InvalidField."""
        if self.kind is FieldKind.FLAG:
            return text == "true"
        if self.kind is FieldKind.NUMBER:
            return self._number_of(text)
        if self.kind is FieldKind.TIME:
            return self._time_ms_of(text)
        if self.kind is FieldKind.LIST:
            return [line.strip() for line in text.splitlines() if line.strip()]
        if self.kind is FieldKind.ENTRIES:
            return [self._entry_of(line) for line in text.splitlines() if line.strip()]
        if self.kind is FieldKind.DOCUMENT:
            return self._document_of(text)
        return text

    def _entry_of(self, line: str) -> Document:
        """Return the entry of a line. REST checks its names."""
        found = ENTRY_LINE.fullmatch(line.strip())
        if found is None:
            raise InvalidField(
                f"{self.label}: {line.strip()!r} is not an entry; write it as {ENTRY_EXAMPLE!r}"
            )
        deny, resource, actions, sources = found.groups()
        return {
            "resource": resource,
            "actions": [each.strip() for each in actions.split(",")],
            "sources": [each.strip() for each in (sources or "").split(",") if each.strip()],
            "decision": "DENY" if deny else "ALLOW",
        }

    def _document_of(self, text: str) -> Document:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidField(f"{self.label}: not JSON: {error}") from None
        if not isinstance(found, dict):
            raise InvalidField(f"{self.label}: write an object with fields, in braces")
        return found

    def _number_of(self, text: str) -> int:
        try:
            return int(text.replace(",", ""))
        except ValueError:
            raise InvalidField(f"{self.label}: {text!r} is not a whole number") from None

    def _time_ms_of(self, text: str) -> int:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidField(
                f"{self.label}: {text!r} is not a time; write it as 2026-01-31T18:00:00"
            ) from None
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def joined(fields: tuple[Field, ...], given: QueryParams) -> dict[str, str]:
    """Return the parameters of a URL. Each value of a list, such as a checkbox, is a line."""
    lists = {each.name for each in fields if each.kind is FieldKind.LIST}
    return {
        name: _lines("\n".join(given.getlist(name)) if name in lists else value)
        for name, value in given.items()
    }


def _lines(text: str) -> str:
    """Return a text as it was typed: browsers send each end of a line as CR and LF."""
    return text.replace("\r\n", "\n")


def texts_of(
    fields: tuple[Field, ...], given: Mapping[str, str], *, is_sent: bool
) -> dict[str, str]:
    """Return the text of each field: the given one, else its default.

    A form that `is_sent` leaves out a flag that is not set.
    """
    texts = {}
    for field in fields:
        is_off = is_sent and field.kind is FieldKind.FLAG
        text = given.get(field.name, "" if is_off else field.default)
        texts[field.name] = _with_seconds(text) if field.kind is FieldKind.TIME else text
    return texts


def entry_line(entry: Document) -> str:
    """Return the line of an entry, as a field of entries reads it."""
    deny = "deny " if entry.get("decision") == "DENY" else ""
    sources = f" from {','.join(entry['sources'])}" if entry.get("sources") else ""
    return f"{deny}{entry['resource']} {','.join(entry['actions'])}{sources}"


def _with_seconds(text: str) -> str:
    """Return a time with its seconds: browsers send 18:00 for 18:00:00."""
    return f"{text}:00" if MINUTE_TEXT.fullmatch(text) else text


def values_of(fields: tuple[Field, ...], texts: Mapping[str, str]) -> tuple[Document, Document]:
    """Return the query and the body of a call. Raises InvalidField."""
    query: Document = {}
    body: Document = {}
    for field in fields:
        text = texts[field.name]
        if field.kind not in {FieldKind.LONG_TEXT, FieldKind.DOCUMENT}:
            text = text.strip()
        if text and field.kind is FieldKind.DOCUMENT:
            body.update(field.value_of(text))
        elif text:
            target, name = query if field.is_query else body, field.name
            while "." in name:
                outer, _, name = name.partition(".")
                target = target.setdefault(outer, {})
            target[name] = field.value_of(text)
        elif field.is_required:
            raise InvalidField(f"{field.label}: fill in this field")
        elif field.sends_empty:
            body[field.name] = field.value_of("")
    return query, body


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a sent form. Of several values of a name, the last counts.

    The access control has limited the size of the body. Raises InvalidField.
    """
    text = (await request.body()).decode("utf-8", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        raise InvalidField(f"a form has at most {FIELDS_MAX} fields") from None
    return {name: _lines(value) for name, value in pairs}
