"""Dead letters: the list, one of them with its body, replay, discard and a changed copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlencode

from tidemill.admin.console.actions import PageAction, Rows
from tidemill.admin.console.forms import Field, FieldKind
from tidemill.admin.console.page import Page, PageCall, Values, url
from tidemill.admin.console.pages.messages import BODY_CHARS_MAX
from tidemill.admin.console.rendering import bytes_text, number_text
from tidemill.admin.http.rest_calls import Document

ROWS: Final = 50  # per page
STATES: Final = ("OPEN", "REPLAYED", "DISCARDED")
REASONS: Final = ("ATTEMPTS_EXHAUSTED", "FORWARDED_BY_CLIENT", "DAMAGED")
ALL: Final = "all"  # of a filter: the word that is not a value of the REST API


async def load_dead_letters(call: PageCall) -> Values:
    """Read a page of dead letters, and the numbers of their groups."""
    kept = {name: call.get(name) for name in ("group", "topic", "reason", "tag")}
    # Most visits look for open ones.
    state = call.get("state") or "OPEN"
    times = {"fromMs": call.instant_ms("from"), "toMs": call.instant_ms("to")}
    found = await call.api.get(
        "/dead-letters",
        pageSize=ROWS,
        pageToken=call.get("pageToken"),
        state=None if state == ALL else state,
        **kept,
        **times,
    )
    summary = await call.api.get("/dead-letters/summary", causes="false")
    given = {**kept, "state": state, "from": call.get("from"), "to": call.get("to")}
    token = found.get("nextPageToken")
    lacking = {*found.get("unreachable", []), *summary.get("unreachable", [])}
    return {
        "letters": found["deadLetters"],
        "groups": summary["groups"],
        "deleted_from_at_ms": summary.get("deletedFromAtMs"),
        "filter": {name: text or "" for name, text in given.items()},
        "states": (*STATES, ALL),
        "reasons": REASONS,
        "unreachable": sorted(lacking),
        "next": url("/dead-letters", **given, pageToken=token) if token else "",
        "all_found": _all_found(call),
    }


def _all_found(call: PageCall) -> str:
    """Return the query of a change of all open dead letters that a search finds."""
    names = {"topic": "topic", "reason": "reason", "tag": "tag", "from": "fromMs", "to": "toMs"}
    given = {f"filter.{field}": call.get(name) for name, field in names.items()}
    return urlencode({name: text for name, text in given.items() if text})


async def load_dead_letter(call: PageCall) -> Values:
    """Read a dead letter with its message."""
    group, letter_id = call.path["group"], call.path["letter_id"]
    letter = await call.api.get(f"/groups/{group}/dead-letters/{letter_id}")
    return {"letter": letter, "body_chars_max": BODY_CHARS_MAX}


def _outcomes(found: Document) -> Rows:
    counts = Counter(each.get("outcome", "unknown") for each in found["outcomes"])
    rows = [(name.replace("_", " ").lower(), number_text(n)) for name, n in counts.items()]
    rows += [("Warning", warning) for warning in found.get("warnings", [])]
    if "stoppedBy" in found:
        rows.append(("Stopped by", found["stoppedBy"]))
    return rows


def _copied(found: Document) -> Rows:
    rows = [("Topic", found["topic"]), ("Receivers", ", ".join(found["receivers"]) or "none")]
    if "messageId" in found:
        rows.append(("Message id", found["messageId"]))
    if "outcome" in found:
        rows.append(("Dead letter", found["outcome"].replace("_", " ").lower()))
    return rows + [("Warning", warning) for warning in found.get("warnings", [])]


def _copy_button(found: Document, path: Mapping[str, str]) -> str:
    if "outcome" in found and found["receivers"] == [path["group"]]:
        return f"Replay the changed message to {path['group']} only"
    return f"Send the copy to {found['topic']}: {len(found['receivers'])} groups receive it"


def _texts_of(letter: Document) -> dict[str, str]:
    texts = {"body": letter.get("bodyText", ""), "tag": letter.get("tag", "")}
    return {**texts, "keys": "\n".join(letter.get("keys", []))}


_IDS: Final = Field("ids", "Dead letters", FieldKind.LIST, "One id in each line.", is_required=True)
_FILTER: Final = (
    Field("filter.topic", "Topic"),
    Field("filter.reason", "Reason", FieldKind.CHOICE, choices=("", *REASONS), no_choice="(all)"),
    Field("filter.tag", "Tag"),
    Field("filter.fromMs", "Dead from", FieldKind.TIME),
    Field("filter.toMs", "Dead before", FieldKind.TIME),
    Field("ratePerSecond", "Most per second", FieldKind.NUMBER, "Default: 2,000."),
)


def _matches(found: Document) -> Rows:
    rows = [("Dead letters", number_text(found["count"]))]
    if "bytes" in found:
        rows.append(("Messages", bytes_text(found["bytes"])))
    return rows + [("Warning", warning) for warning in found.get("warnings", [])]


_LIST: Final = "/dead-letters?group={group}"
PAGES: Final = (
    Page("/dead-letters", "dead_letters", load_dead_letters, is_live=False),
    Page(
        "/groups/{group}/dead-letters/{letter_id}", "dead_letter", load_dead_letter, is_live=False
    ),
)
ACTIONS: Final = (
    PageAction(
        path="/groups/{group}/dead-letters/replay",
        method="POST",
        rest="/groups/{group}/dead-letters:replay",
        title="Replay dead letters of {group}",
        about="Only this group gets them again, each once, with all attempts.",
        back=_LIST,
        fields=(_IDS,),
        rows=_outcomes,
        button=lambda found, path: f"Replay {found['count']} messages to {path['group']} only",
    ),
    PageAction(
        path="/groups/{group}/dead-letters/discard",
        method="POST",
        rest="/groups/{group}/dead-letters:discard",
        title="Discard dead letters of {group}",
        about="They count as done, and cannot be replayed. Retention deletes them later.",
        back=_LIST,
        fields=(_IDS,),
        rows=_outcomes,
        button=lambda found, path: f"Discard {found['count']} dead letters of {path['group']}",
        is_loss=True,
    ),
    PageAction(
        path="/groups/{group}/dead-letters/replay-all",
        method="POST",
        rest="/groups/{group}/dead-letters:replay",
        title="Replay all open dead letters of {group} that match",
        about="Only this group gets them again, each once, with all attempts. An operation does it"
        " in the background, and shows its progress.",
        back=_LIST,
        fields=_FILTER,
        rows=_matches,
        button=lambda found, path: (
            f"Replay {number_text(found['count'])} messages to {path['group']} only"
            if found["count"]
            else ""
        ),
        begins_operation=True,
    ),
    PageAction(
        path="/groups/{group}/dead-letters/discard-all",
        method="POST",
        rest="/groups/{group}/dead-letters:discard",
        title="Discard all open dead letters of {group} that match",
        about="They count as done, and cannot be replayed. Retention deletes them later.",
        back=_LIST,
        fields=_FILTER,
        rows=_matches,
        button=lambda found, path: (
            f"Discard {number_text(found['count'])} dead letters of {path['group']}"
            if found["count"]
            else ""
        ),
        is_loss=True,
        begins_operation=True,
    ),
    PageAction(
        path="/groups/{group}/dead-letters/{letter_id}/copy",
        method="POST",
        rest="/groups/{group}/dead-letters/{letter_id}:copy",
        title="Edit and replay {letter_id}",
        about="A new message with these changes. To the group it is a replay, which no other group"
        " gets. To a topic, all groups of the topic get it.",
        back="/groups/{group}/dead-letters/{letter_id}",
        current="/groups/{group}/dead-letters/{letter_id}",
        texts_of=_texts_of,
        fields=(
            Field("body", "Body", FieldKind.LONG_TEXT),
            Field("tag", "Tag"),
            Field("keys", "Keys", FieldKind.LIST, "One key in each line."),
            Field("to", "To", FieldKind.CHOICE, choices=("group", "topic")),
            Field("topic", "Topic", help="Of a copy to a topic. Empty: that of the message."),
            Field("discard", "Discard the dead letter after a copy to a topic", FieldKind.FLAG),
        ),
        rows=_copied,
        button=_copy_button,
    ),
)
