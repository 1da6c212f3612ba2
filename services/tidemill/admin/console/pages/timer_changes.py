"""Bulk changes of timers as forms: of the selected ones, and of all that a search finds."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.rendering import bytes_text, number_text, time_text
from tidemill.admin.http.rest_calls import Document

HOURS_SHOWN: Final = 24


class _Verb(NamedTuple):
    """A change in the words of the path, the title and the button."""

    path: str
    title: str
    button: str
    about: str
    fields: tuple[Field, ...] = ()
    is_loss: bool = False


_MOVE: Final = (
    Field("dueAtMs", "New due time", FieldKind.TIME),
    Field("delayMs", "Or from now, in ms", FieldKind.NUMBER),
    Field("shiftMs", "Or later by, in ms", FieldKind.NUMBER, "A negative number moves earlier."),
    Field("spreadMs", "Spread over, in ms", FieldKind.NUMBER),
)
_VERBS: Final = (
    _Verb(
        "cancel",
        "Cancel",
        "Cancel",
        "The messages are not delivered. This cannot be undone.",
        is_loss=True,
    ),
    _Verb("reschedule", "Move", "Move", "Fill in one of the new times.", _MOVE),
    _Verb(
        "fire", "Deliver", "Deliver now:", "The messages become ready for their consumers at once."
    ),
)
_IDS: Final = Field("ids", "Timers", FieldKind.LIST, "One id in each line.", is_required=True)
_FILTER: Final = (
    Field("filter.topic", "Topic", help="A topic or a key is required."),
    Field("filter.key", "Key"),
    Field("filter.tag", "Tag"),
    Field("filter.dueFromMs", "Due from", FieldKind.TIME),
    Field("filter.dueToMs", "Due before", FieldKind.TIME),
)
_RATE: Final = Field("ratePerSecond", "Most per second", FieldKind.NUMBER, "Default: 2,500.")


def _outcomes(found: Document) -> Rows:
    counts = Counter(each.get("outcome", "unknown") for each in found["outcomes"])
    rows = [(name.replace("_", " ").lower(), number_text(n)) for name, n in counts.items()]
    rows += [("Warning", warning) for warning in found.get("warnings", [])]
    if "stoppedBy" in found:
        rows.append(("Stopped by", found["stoppedBy"]))
    return rows


def _matches(found: Document) -> Rows:
    rows = [("Timers", number_text(found["count"]))]
    if "bytes" in found:
        rows.append(("Messages", bytes_text(found["bytes"])))
    rows += [
        (f"Topic {each['name']}", number_text(each["timers"])) for each in found.get("topics", [])
    ]
    hours = found.get("hours", [])
    rows += [
        (f"Due from {time_text(each['fromMs'])}", number_text(each["timers"]))
        for each in hours[:HOURS_SHOWN]
    ]
    if len(hours) > HOURS_SHOWN:
        rows.append(("Other hours", number_text(len(hours) - HOURS_SHOWN)))
    return rows + [("Warning", warning) for warning in found.get("warnings", [])]


def _actions(verb: _Verb) -> tuple[PageAction, PageAction]:
    """Return the forms for selected timers, and for all that a filter finds."""

    def text(count: int) -> str:
        return f"{verb.button} {number_text(count)} timers" if count else ""

    selected = PageAction(
        path=f"/timers/{verb.path}",
        method="POST",
        rest=f"/timers:{verb.path}",
        title=f"{verb.title} timers",
        about=verb.about,
        back="/timers",
        fields=(_IDS, *verb.fields),
        rows=_outcomes,
        button=lambda found, _path: text(found["count"]),
        is_loss=verb.is_loss,
    )
    found_ = PageAction(
        path=f"/timers/{verb.path}-all",
        method="POST",
        rest=f"/timers:{verb.path}",
        title=f"{verb.title} all timers of a search",
        about=f"{verb.about} An operation does it in the background, and shows its progress.",
        back="/timers",
        fields=(*_FILTER, *verb.fields, _RATE),
        rows=_matches,
        button=lambda found, _path: text(found["count"]),
        is_loss=verb.is_loss,
        begins_operation=True,
    )
    return selected, found_


ACTIONS: Final = tuple(action for verb in _VERBS for action in _actions(verb))
