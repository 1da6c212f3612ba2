"""The parts of the console that need no process: actions, files, forms, texts."""

from __future__ import annotations

import hashlib
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from tidemill.admin.console.forms import (
    ENTRY_EXAMPLE,
    Field,
    FieldKind,
    InvalidField,
    entry_line,
    texts_of,
    values_of,
)
from tidemill.admin.console.pages.runbooks import FOLDER, html_of
from tidemill.admin.console.rendering import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    age_text,
    bytes_text,
    duration_text,
    rate_text,
    templates,
    time_text,
    until_text,
)
from tidemill.admin.console.routes import ACTIONS, PAGES

STATIC = resources.files("tidemill.admin.console").joinpath("static")
REPOSITORY = Path(__file__).parents[4]
CSS_BYTES_MAX = 8 << 10
EVENT_HANDLER = re.compile(r"\son[a-z]+=|\sstyle=|javascript:", re.IGNORECASE)


def test_each_action_is_an_operation_of_the_api() -> None:
    paths = json.loads((REPOSITORY / "docs" / "openapi.json").read_text())["paths"]
    for action in ACTIONS:
        operation = paths[f"/api/v1{action.rest}"][action.method.lower()]
        parameters = {each["name"] for each in operation.get("parameters", [])}
        assert action.has_dry_run <= ("dryRun" in parameters), action.path
        assert {each.name for each in action.fields if each.is_query} <= parameters


def test_each_page_and_action_has_a_path_of_its_own() -> None:
    paths = [each.path for each in PAGES] + [each.path for each in ACTIONS]
    assert len(set(paths)) == len(paths)


def test_the_list_of_foreign_files_is_complete_and_true() -> None:
    listed = {}
    for line in STATIC.joinpath("FILES").read_text().splitlines():
        if not line.startswith("#"):
            name, _project, _version, _licence, digest = line.split()
            listed[name] = digest
    own = {"FILES", "console.css", "console.js", "icon.svg"}
    found = {each.name: each.read_bytes() for each in STATIC.iterdir() if each.name not in own}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in found.items()} == listed


def test_the_style_sheet_is_small() -> None:
    assert len(STATIC.joinpath("console.css").read_bytes()) <= CSS_BYTES_MAX


def test_no_template_has_inline_script_or_style() -> None:
    for name in templates().list_templates():
        source, _, _ = templates().loader.get_source(templates(), name)  # type: ignore[union-attr]  # It has a loader.
        assert not EVENT_HANDLER.search(source), name
        assert "|safe" not in source.replace(" ", ""), name
        assert "<style" not in source
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", source))


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0.0 s"),
        (9_940, "9.9 s"),
        (12_000, "12 s"),
        (MINUTE_MS, "1 min"),
        (12 * MINUTE_MS + 5_000, "12 min 5 s"),
        (2 * HOUR_MS + 3 * MINUTE_MS + 9_000, "2 h 3 min"),
        (2 * DAY_MS + 59_000, "2 d"),
    ],
)
def test_a_duration_has_at_most_two_units(duration_ms: int, text: str) -> None:
    assert duration_text(duration_ms) == text


def test_times_sizes_and_unknown_values_have_a_text() -> None:
    assert time_text(1_795_750_000_123) == "2026-11-27 03:26:40.123Z"
    assert (age_text(1_000, 61_000), age_text(61_000, 1_000)) == ("1 min ago", "in 1 min")
    assert (until_text(61_000, 1_000), until_text(1_000, 1_000)) == ("in 1 min", "due")
    assert [bytes_text(size) for size in (0, 999, 1_000, 1_536, 1 << 20, 150 << 30)] == [
        "0 B", "999 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "150 GiB",
    ]  # fmt: skip
    assert {time_text(None), age_text(None), bytes_text(None), duration_text(None)} == {"unknown"}


def test_a_rate_has_a_decimal_while_it_is_small() -> None:
    rates = 0.0, 0.04, 0.25, 99.94, 100.4, 12_345.6, None
    assert [rate_text(rate) for rate in rates] == [
        "0", "< 0.1", "0.2", "99.9", "100", "12,346", "unknown",
    ]  # fmt: skip


FIELDS = (
    Field("queues", "Queues", FieldKind.NUMBER),
    Field("retention.ms", "Retention", FieldKind.NUMBER),
    Field("force", "Force", FieldKind.FLAG, default="true", is_query=True),
    Field("before", "Before", FieldKind.TIME),
)


def test_fields_become_the_query_and_the_body_of_a_call() -> None:
    given = {"queues": "1,024", "retention.ms": "-1", "before": "2026-11-27T03:26:40"}
    assert values_of(FIELDS, texts_of(FIELDS, given, is_sent=True)) == (
        {},
        {"queues": 1024, "retention": {"ms": -1}, "before": 1_795_750_000_000},
    )
    assert values_of(FIELDS, texts_of(FIELDS, {}, is_sent=False)) == ({"force": True}, {})


@pytest.mark.parametrize("text", ["2026-12-01T18:00", "2026-12-01T18:00:00"])
def test_a_time_of_a_whole_minute_has_one_text(text: str) -> None:
    fields = (Field("at", "At", FieldKind.TIME),)
    # Chromium leaves out the seconds of a whole minute, and the plan of a form compares texts.
    assert texts_of(fields, {"at": text}, is_sent=True) == {"at": "2026-12-01T18:00:00"}


@pytest.mark.parametrize(
    ("field", "text", "reason"),
    [
        (Field("n", "Count", FieldKind.NUMBER), "many", "Count: 'many' is not a whole number"),
        (Field("t", "Before", FieldKind.TIME), "soon", "write it as 2026-01-31T18:00:00"),
        (Field("k", "Key", is_required=True), " ", "Key: fill in this field"),
    ],
)
def test_a_text_that_does_not_fit_its_field_is_rejected(
    field: Field, text: str, reason: str
) -> None:
    with pytest.raises(InvalidField, match=re.escape(reason)):
        values_of((field,), {field.name: text})


ENTRIES = Field("entries", "Entries", FieldKind.ENTRIES, sends_empty=True)


@pytest.mark.parametrize(
    "line",
    [
        ENTRY_EXAMPLE,
        "deny Topic:payments Pub",
        "* All",
        "deny Group:g* Sub,Get from 10.1.0.0/16,2001:db8::/32",
    ],
)
def test_an_entry_is_read_and_written_as_the_same_line(line: str) -> None:
    [entry] = ENTRIES.value_of(f"  {line}\n\n")
    assert entry_line(entry) == line


def test_an_entry_has_each_part_of_its_line() -> None:
    [entry] = ENTRIES.value_of("DENY Topic:a  Pub , Sub  from 10.0.0.1, 10.1.0.0/16")
    assert entry == {
        "resource": "Topic:a",
        "actions": ["Pub", "Sub"],
        "sources": ["10.0.0.1", "10.1.0.0/16"],
        "decision": "DENY",
    }


@pytest.mark.parametrize("line", ["Topic:a", "Topic:a Pub Sub", "deny Topic:a", "Topic:a Pub from"])
def test_a_line_that_is_no_entry_is_refused_with_an_example(line: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(ENTRY_EXAMPLE)):
        ENTRIES.value_of(line)


def test_no_line_takes_all_entries() -> None:
    assert values_of((ENTRIES,), {"entries": " "}) == ({}, {"entries": []})


def test_a_runbook_is_html_without_markup_of_its_text() -> None:
    shown = html_of(
        "# Title\n\nA <b>word</b>, [own](DiskFull.md) and [other](../limits.md) links.\n\n"
        "```sh\na < b\n```\n\n| a |\n| --- |\n| `<i>` |\n"
    )
    assert "Title" not in shown
    assert "&lt;b&gt;word&lt;/b&gt;" in shown
    assert '<a href="/ui/runbooks/DiskFull">own</a> and other links' in shown
    assert '<pre tabindex="0"><code>a &lt; b\n</code></pre>' in shown
    assert "<code>&lt;i&gt;</code></td>" in shown


def test_each_runbook_leads_only_to_runbooks() -> None:
    names = {path.stem for path in FOLDER.glob("*.md")}
    assert "BrokerDown" in names
    for path in FOLDER.glob("*.md"):
        shown = html_of(path.read_text())
        assert set(re.findall(r'href="/ui/runbooks/(\w+)"', shown)) <= names, path
        assert shown.count("href=") == shown.count('href="/ui/runbooks/'), path
