"""The changes that make a cluster as a file defines it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from tidemill.admin.definitions.export import (
    CurrentDefinitions,
    Definition,
    Settings,
    group_settings,
    quota_settings,
    role_settings,
    topic_settings,
    user_settings,
)
from tidemill.admin.json.definitions import DefinitionAction, DefinitionKind, Definitions
from tidemill.admin.json.security import EntryView
from tidemill.admin.routes.security import entries_of, entry_views
from tidemill.common.errors import Conflict
from tidemill.common.slices import run_in_turns

OBJECTS_MAX: Final = 10_000  # of a kind in one call: their dry runs take half a minute
# Parts of settings that a missing field of the part leaves as they are.
_MERGED: Final = frozenset({"retention", "transaction", "dedup"})
_NAMES: Final = frozenset({"name", "kind", "subject"})
_DEDUP: Final = "dedup"
_UNORDERED: Final = frozenset({"roles", "serviceAccounts", "certificates"})


class DefinitionType(NamedTuple):
    """How the REST API serves a kind of objects."""

    kind: DefinitionKind
    field: str  # of the file, and of the path
    name: Callable[[Definition], str]
    settings_of: Callable[[Settings], Settings]  # from a document of the API


def _name(one: Definition) -> str:
    return str(one["name"])


def _quota_name(one: Definition) -> str:
    return f"{one['kind']}/{one['subject']}"


# The order of their creation: a user needs its roles, and a quota its subject.
TYPES: Final = (
    DefinitionType(DefinitionKind.ROLE, "roles", _name, role_settings),
    DefinitionType(DefinitionKind.USER, "users", _name, user_settings),
    DefinitionType(DefinitionKind.TOPIC, "topics", _name, topic_settings),
    DefinitionType(DefinitionKind.GROUP, "groups", _name, group_settings),
    DefinitionType(DefinitionKind.QUOTA, "quotas", _quota_name, quota_settings),
)
# A PUT of the other kinds replaces all fields.
_PARTIAL: Final = frozenset({DefinitionKind.TOPIC, DefinitionKind.GROUP, DefinitionKind.USER})


class PlannedChange(NamedTuple):
    """A change of one object, as a call of the REST API."""

    type: DefinitionType
    name: str
    action: DefinitionAction
    body: Settings | None  # None: a deletion
    before: Settings | None  # None: it is new
    tag: str = ""  # ETag of the version that the plan has compared; "": it is new

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The headers that refuse an object which another operator has changed since the plan."""
        if self.before is None:
            return {b"if-none-match": b"*"}
        return {b"if-match": self.tag.encode()} if self.tag else {}

    @property
    def path(self) -> str:
        """The path of the object in the REST API."""
        return f"/{self.type.field}/{self.name}"

    @property
    def title(self) -> str:
        """The kind and the name, for errors."""
        return f"{self.type.kind} {self.name}"


async def planned_changes(
    current: CurrentDefinitions, wanted: Definitions, *, prune: bool
) -> list[PlannedChange]:
    """Return the changes in the order of their execution. Raises Conflict."""
    changes: list[PlannedChange] = []
    await run_in_turns(planning(current, wanted, changes, prune=prune))
    return changes


def planning(
    current: CurrentDefinitions, wanted: Definitions, changes: list[PlannedChange], *, prune: bool
) -> Iterator[None]:
    """Add the changes in the order of their execution. A step looks at one object."""
    deletions: list[PlannedChange] = []
    for type_ in TYPES:
        listed = getattr(wanted, type_.field)
        if listed is None:
            continue
        if len(listed) > OBJECTS_MAX:
            raise Conflict(f"{len(listed)} {type_.field}; apply at most {OBJECTS_MAX} at once")
        known: dict[str, Definition] = {}
        for found in getattr(current.file, type_.field) or ():
            definition = _dumped(found)
            known[type_.name(definition)] = definition
            yield
        kept: set[str] = set()
        for put in _puts(type_, listed, known, kept):
            if put is not None:
                tag = current.tags.get((type_.field, put.name), "")
                changes.append(put._replace(tag=tag))
            yield
        for name, one in known.items() if prune else ():
            if name not in kept:
                tag = current.tags.get((type_.field, name), "")
                delete = DefinitionAction.DELETE
                deletions.append(PlannedChange(type_, name, delete, None, _settings(one), tag))
            yield
    changes += deletions[::-1]


def _puts(
    type_: DefinitionType, listed: Sequence[BaseModel], known: dict[str, Definition], seen: set[str]
) -> Iterator[PlannedChange | None]:
    """Yield the change of each object, or None; add the names to `seen`."""
    for one in map(_dumped, listed):
        name = type_.name(one)
        if name in seen:
            raise Conflict(f"the file defines the {type_.kind} {name} twice; keep one of them")
        seen.add(name)
        if not name or ("/" in name and type_.kind is not DefinitionKind.QUOTA):
            raise Conflict(f"the file has a {type_.kind} with the name {name!r}, which has no path")
        given = _settings(one)
        if name not in known:
            yield PlannedChange(type_, name, DefinitionAction.CREATE, given, None)
            continue
        before = _settings(known[name])
        changed = {
            field: value
            for field, value in given.items()
            if _merged(field, before.get(field), value) != _sorted(field, before.get(field))
        }
        if changed:
            body = changed if type_.kind in _PARTIAL else {**before, **given}
            yield PlannedChange(type_, name, DefinitionAction.CHANGE, body, before)
        else:
            yield None


def _dumped(one: BaseModel) -> Definition:
    """Return an object as JSON, with the fields that are given."""
    return one.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _settings(one: Definition) -> Settings:
    """Return a definition without its name, with its entries as the API shows them.

    A field with null is missing, except `dedup`, where null means off.
    """
    settings = {
        field: value
        for field, value in one.items()
        if field not in _NAMES and (value is not None or field == _DEDUP)
    }
    if "entries" in settings:
        settings["entries"] = _canonical_entries(settings["entries"])
    return settings


def _merged(field: str, before: Any, given: Any) -> Any:
    """Return the value of a field after the change."""
    if field in _MERGED and isinstance(before, dict) and isinstance(given, dict):
        return {**before, **given}
    return _sorted(field, given)


def _sorted(field: str, value: Any) -> Any:
    return sorted(value) if field in _UNORDERED and isinstance(value, list) else value


def _canonical_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries as the API shows them, so that equal ones compare as equal."""
    views = [EntryView.model_validate(each) for each in entries]
    return [view.model_dump(mode="json") for view in entry_views(entries_of(views))]
