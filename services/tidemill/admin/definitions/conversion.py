"""What the conversions of foreign files share: names of ours, and the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from pydantic import ValidationError

from tidemill.admin.json.definitions import (
    ConversionOutcome,
    ConversionView,
    ConvertedObjectView,
    Definitions,
    ForeignFile,
)
from tidemill.admin.json.topics import RETENTION_MS_MAX, RETENTION_MS_MIN
from tidemill.common.errors import Conflict, ServiceError
from tidemill.message.resource_names import check_group, check_own_topic

FOREIGN_OBJECTS_MAX: Final = 50_000  # of a kind in a foreign file
_STRANGE: Final = re.compile("[^A-Za-z0-9_%|-]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_STRANGE_USER: Final = re.compile("[^A-Za-z0-9._@-]")

Foreign = Mapping[str, Any]


@final
class Report:
    """The rows of a conversion, and the objects of our file by kind and name."""

    def __init__(self) -> None:
        self.rows: list[ConvertedObjectView] = []
        self.objects: dict[str, dict[str, dict[str, Any]]] = {
            kind: {}
            for kind in ("users", "topics", "groups")  # as in our file
        }

    def converted(self, source: str, target: str) -> None:
        """Report an object that works as before."""
        self._add(source, ConversionOutcome.CONVERTED, target, None)

    def changed(self, source: str, target: str, *reasons: str) -> None:
        """Report an object that works differently; without a reason it works as before."""
        given = "; ".join(reason for reason in reasons if reason)
        outcome = ConversionOutcome.CHANGED if given else ConversionOutcome.CONVERTED
        self._add(source, outcome, target, given or None)

    def skipped(self, source: str, reason: str) -> None:
        """Report an object that is not in our file."""
        self._add(source, ConversionOutcome.SKIPPED, None, reason)

    def _add(
        self, source: str, outcome: ConversionOutcome, target: str | None, reason: str | None
    ) -> None:
        self.rows.append(
            ConvertedObjectView(source=source, outcome=outcome, target=target, reason=reason)
        )

    def view(self) -> ConversionView:
        """Return the answer. Raises Conflict if a value cannot be used here."""
        listed = {
            kind: [{"name": name, **settings} for name, settings in sorted(found.items())]
            for kind, found in self.objects.items()
        }
        try:
            definitions = Definitions.model_validate(listed)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise Conflict(
                f"a value of the file cannot be used here: {place}: {first['msg']}"
            ) from error
        return ConversionView(definitions=definitions, report=self.rows)


def own_topic(name: str) -> tuple[str, str]:
    """Return our name of a topic, and the reason if it differs. Raises ServiceError."""
    own = _STRANGE.sub("-", name)
    check_own_topic(own)
    return own, _renamed(name, own)


def own_group(name: str) -> tuple[str, str]:
    """Return our name of a consumer group, and the reason if it differs. Raises ServiceError."""
    own = _STRANGE.sub("-", name)
    check_group(own)
    return own, _renamed(name, own)


def own_user(name: str) -> tuple[str, str]:
    """Return our name of a user, and the reason if it differs."""
    own = _STRANGE_USER.sub("-", name)[:64]
    return own, _renamed(name, own)


def retention_of(ms: int) -> tuple[int, str]:
    """Return a retention within our bounds, and the reason if it differs."""
    own = min(max(ms, RETENTION_MS_MIN), RETENTION_MS_MAX)
    if own == ms:
        return own, ""
    return own, f"a retention is {RETENTION_MS_MIN} to {RETENTION_MS_MAX} ms, not {ms}"


def check_texts(exported: ForeignFile) -> None:
    """Check that all texts of a foreign file can be encoded. Raises Conflict."""
    left: list[Any] = [exported]
    while left:
        value = left.pop()
        if isinstance(value, str) and _SURROGATE.search(value):
            shown = value.encode(errors="backslashreplace").decode()[:64]
            raise Conflict(f"a text of the file is not valid Unicode: {shown}")
        if isinstance(value, dict):
            left += value
            left += value.values()
        elif isinstance(value, list):
            left += value


def listed(exported: ForeignFile, field: str) -> Iterator[Foreign]:
    """Yield the objects of a list in a foreign file. Raises Conflict."""
    objects = exported.get(field, [])
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise Conflict(f"{field!r} of the file is not a list of objects")
    if len(objects) > FOREIGN_OBJECTS_MAX:
        raise Conflict(f"{len(objects)} {field}; at most {FOREIGN_OBJECTS_MAX} are converted")
    for each in objects:
        if isinstance(each, dict):
            yield each


def text(one: Foreign, field: str) -> str:
    """Return a text of a foreign object; "" if it is missing. Raises Conflict."""
    value = one.get(field, "")
    if not isinstance(value, str):
        raise Conflict(f"{field!r} of the file is not a text: {str(value)[:64]}")
    return value


def number(one: Foreign, field: str) -> int | None:
    """Return a whole number of a foreign object; None if it is missing. Raises Conflict."""
    value = one.get(field)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise Conflict(f"{field!r} of the file is not a whole number: {str(value)[:64]}")


def part(one: Foreign, field: str) -> Foreign:
    """Return an object within a foreign one; an empty one if it is missing. Raises Conflict."""
    value = one.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Conflict(f"{field!r} of the file is not an object")
    return value


def reason_of(error: ServiceError) -> str:
    """Return why a name cannot be used here."""
    return f"{error.message}; create it by hand with another name"


def _renamed(name: str, own: str) -> str:
    return "" if own == name else f"a name has letters, digits, - and _, so {name} is {own}"
