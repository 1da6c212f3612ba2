"""The tables of docs/clients.md: the scenarios of the official clients, and deliberate differences.

Each cell names the test that proves it. `tests/unit/tools/test_client_table.py` checks that these
tests exist, so a scenario works only with a test. The test of a cell that does not work asserts the
answer that the client gets, or the version of the client that lacks the call. This test fails when
the scenario begins to work, and the cell has to change.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "clients.md"
E2E = ROOT / "tests" / "e2e"
CLIENTS = ("Java", "Go", "Python", "Node.js", "Rust")
# A person has inspected these versions for missing calls.
INSPECTED_VERSIONS = {"Rust": "5.0.0"}


class Support(StrEnum):
    """The support of a scenario."""

    WORKS = "works"
    NOT_YET = "not yet"
    NEVER = "never"


class Cell(NamedTuple):
    """One scenario with one client."""

    support: Support
    test: str  # the id of a test, below tests/
    reason: str = ""  # if it does not work


class Scenario(NamedTuple):
    """One row: a scenario and its cell for each client."""

    name: str
    cells: dict[str, Cell]


class Difference(NamedTuple):
    """A deliberate difference from Apache RocketMQ."""

    subject: str
    rocketmq: str
    tidemill: str
    test: str  # the id of a test, below tests/


def _works(**tests: str) -> dict[str, Cell]:
    """Return the cells of clients that pass these tests."""
    return {_client(name): Cell(Support.WORKS, test) for name, test in tests.items()}


def _of_each(test: str, *clients: str) -> dict[str, Cell]:
    """Return the cells of a test with the client as its parameter."""
    return _works(**{client: f"{test}[{client}]" for client in clients})


def _lacks(call: str) -> dict[str, Cell]:
    """Return the cell of the Rust client if it lacks a call."""
    test = "unit/tools/test_client_table.py::test_the_inspected_version_is_in_use[Rust]"
    reason = f"The client {INSPECTED_VERSIONS['Rust']} has no {call}."
    return {"Rust": Cell(Support.NOT_YET, test, reason)}


def _client(name: str) -> str:
    return "Node.js" if name == "node" else name.capitalize()


_ALL = ("java", "go", "python", "node", "rust")
_ALL_BUT_RUST = _ALL[:-1]
_FILE = "e2e/test_{}_client.py::{}"
_SHARED = "e2e/test_client_scenarios.py::{}"
_REDELIVERY = "test_unacked_and_released_messages_are_redelivered"
_SENT = "test_messages_of_every_kind_and_size_come_as_they_were_sent"
_PUSH = "test_a_push_consumer_acks_successes_and_gets_failures_again"
_PRIORITY = "test_priority_0_is_level_0_and_higher_priorities_come_first"
_ORDER = _SHARED.format(
    "test_message_groups_keep_their_order_and_a_failing_message_becomes_a_dead_letter"
)
_DELAY = "test_a_delayed_message_comes_when_it_is_due_unless_it_is_recalled"
_OLD_HANDLES = "test_a_message_that_is_not_acked_comes_back_and_its_old_handles_are_void"
_DEAD = "test_a_message_goes_to_the_dead_letter_topic_after_its_last_attempt"
_DEDUP = "test_a_dedup_key_is_stored_once"
_LITE = _SHARED.format("test_a_send_to_a_lite_topic_gets_not_implemented")


def _delayed() -> dict[str, Cell]:
    return _of_each(_SHARED.format(_DELAY), "java", "go") | _works(
        python=_FILE.format("python", _DELAY), node=_FILE.format("node", _DELAY)
    )


def _in_file(test: str, *clients: str) -> dict[str, Cell]:
    """Return the cells of tests with one name, in the files of several clients."""
    return _works(**{client: _FILE.format(client, test) for client in clients})


SCENARIOS = (
    Scenario(
        "Send and receive: bodies, tags, keys, properties",
        _in_file(_SENT, "java", "go", "python", "rust")
        | _in_file("test_messages_of_every_kind_come_as_they_were_sent", "node"),
    ),
    Scenario(
        "Simple consumer: ack, and a new delivery without an ack",
        _in_file(_REDELIVERY, "java", "go", "node")
        | _in_file(_OLD_HANDLES, "python")
        | _in_file("test_a_message_that_is_not_acked_comes_back", "rust"),
    ),
    Scenario(
        "ChangeInvisibleDuration",
        _in_file(_REDELIVERY, "java", "go", "node")
        | _in_file("test_a_prolonged_delivery_outlives_its_first_duration", "python")
        | _lacks("change of invisible durations"),
    ),
    Scenario("Push consumer", _in_file(_PUSH, *_ALL_BUT_RUST) | _lacks("push consumer")),
    Scenario(
        "FIFO: message groups keep their order",
        _of_each(_ORDER, "java", "go")
        | _in_file("test_an_ordered_push_consumer_keeps_the_order_of_message_groups", "node")
        | _in_file(
            "test_message_groups_are_received_in_the_order_in_which_they_were_sent", "python"
        )
        | _in_file("test_message_groups_come_in_their_order", "rust"),
    ),
    Scenario(
        "Delayed messages",
        _delayed() | _in_file("test_a_delayed_message_comes_when_it_is_due", "rust"),
    ),
    Scenario("Recall of a delayed message", _delayed() | _lacks("recall")),
    Scenario(
        "Transactions, and checks of half messages",
        _of_each("e2e/test_transactions.py::test_official_clients_decide_and_answer_checks", *_ALL),
    ),
    Scenario(
        "Tag filter",
        _of_each(
            _SHARED.format("test_a_push_consumer_gets_the_messages_with_its_tags"), *_ALL_BUT_RUST
        )
        | _in_file("test_a_tag_filter_passes_only_the_named_tags", "rust"),
    ),
    Scenario(
        "SQL filter",
        _of_each(
            "e2e/test_sql_filters.py::test_a_push_consumer_gets_the_messages_that_match",
            *_ALL_BUT_RUST,
        )
        | _in_file("test_an_sql_filter_passes_only_what_matches", "rust"),
    ),
    Scenario(
        "Priority",
        _in_file(_PRIORITY, "java", "go", "python")
        | _in_file(f"test_node_js_{_PRIORITY.removeprefix('test_')}", "node")
        | _lacks("priority"),
    ),
    Scenario(
        "Deduplicated sends",
        _of_each(_SHARED.format(_DEDUP), *_ALL_BUT_RUST) | _in_file(_DEDUP, "rust"),
    ),
    Scenario(
        "Dead letters after the last attempt",
        _of_each(_ORDER, "java", "go")
        | _in_file(_DEAD, "python", "node")
        | _in_file(_DEAD, "rust"),
    ),
    Scenario(
        "ForwardMessageToDeadLetterQueue by a FIFO push consumer",
        _of_each(_ORDER, "go")
        | _in_file("test_a_fifo_push_consumer_goes_on_after_a_repeated_forward", "java")
        | _in_file("test_a_push_consumer_goes_on_after_a_repeated_forward", "python")
        | _in_file(
            "test_an_ordered_push_consumer_dead_letters_a_failing_message_and_continues", "node"
        )
        | _lacks("push consumer"),
    ),
    Scenario(
        "Namespace",
        _works(
            java="e2e/test_namespaces.py::test_a_java_client_stays_in_its_namespace",
            go="e2e/test_namespaces.py::test_a_go_client_stays_in_its_namespace",
            python="e2e/test_namespaces.py::test_push_consumers_of_one_group_name_share_nothing",
            node="e2e/test_namespaces.py::test_a_node_client_stays_in_its_namespace",
        )
        | _lacks("option for a namespace"),
    ),
    Scenario(
        "Access key and signature",
        _of_each(
            "e2e/test_signed_clients.py::test_a_client_with_the_secret_sends_and_receives", *_ALL
        ),
    ),
    Scenario(
        "TLS",
        _works(
            java="e2e/test_tls_clients.py::test_a_java_client_with_tls_is_served",
            go="e2e/test_tls_clients.py::test_a_go_client_with_tls_is_served",
            python="e2e/test_tls_clients.py::test_a_python_client_with_tls_is_served",
            node="e2e/test_tls_clients.py::test_a_node_client_with_tls_is_served",
        )
        | _lacks("working option for TLS"),
    ),
    Scenario(
        "Lite topics",
        {
            _client(client): Cell(
                Support.NOT_YET, f"{_LITE}[{client}]", "A send gets `NOT_IMPLEMENTED`."
            )
            for client in _ALL_BUT_RUST
        }
        | _lacks("lite topics"),
    ),
)

# Calls that no client of the table uses. Their tests call the stubs of the protocol.
CALLS = (
    (
        "PullMessage",
        Cell(
            Support.WORKS,
            "e2e/test_pulling.py::test_a_queue_is_pulled_by_offset_and_nothing_is_consumed",
        ),
    ),
    (
        "QueryOffset",
        Cell(Support.WORKS, "e2e/test_pulling.py::test_offsets_of_begin_end_and_a_time"),
    ),
    (
        "GetOffset, UpdateOffset",
        Cell(
            Support.WORKS,
            "e2e/test_pulling.py::test_a_group_says_how_far_it_has_pulled_and_its_pops_stay",
        ),
    ),
    (
        "SyncLiteSubscription",
        Cell(
            Support.NOT_YET,
            "e2e/test_status_codes.py::test_a_method_that_is_not_served_answers_with_a_status",
            "The answer is `NOT_IMPLEMENTED`.",
        ),
    ),
    (
        "SendMessage to a queue of the client's choice (`queue_id`)",
        Cell(
            Support.NEVER,
            "component/proxy/test_protocol_fields.py::test_each_field_is_used_or_listed[SendMessage]",
            "The proxy chooses the queue.",
        ),
    ),
    (
        "ReceiveMessage from one queue (`message_queue.id`)",
        Cell(
            Support.NEVER,
            "component/proxy/test_protocol_fields.py"
            "::test_each_field_is_used_or_listed[ReceiveMessage]",
            "A receive gets messages of all queues.",
        ),
    ),
)

DIFFERENCES = (
    Difference(
        "acks of a FIFO batch without an ack of the first message",
        "delivers all messages of the batch again",
        "delivers only the messages without an ack again",
        "property/invariants/test_duplicates.py"
        "::test_invariant_12_an_acked_message_is_never_delivered_again[fifo]",
    ),
    Difference(
        "longest delay of a message",
        "24 hours by default",
        "400 days by default",
        "e2e/test_status_codes.py::test_a_send_is_answered_with_its_code[delivery in 399 days]",
    ),
    Difference(
        "shortest invisible duration",
        "10 seconds",
        "1 second",
        "e2e/test_status_codes.py::test_a_call_is_answered_with_its_code[a second]",
    ),
    Difference(
        "tag with a blank at an end",
        "stores it, and no tag filter selects it",
        "rejects it: `ILLEGAL_MESSAGE_TAG`",
        "e2e/test_status_codes.py"
        "::test_a_send_is_answered_with_its_code[tag with a blank at its end]",
    ),
    Difference(
        "largest body",
        "4 MiB",
        "4,191,232 bytes by default, so that every client can receive it",
        "e2e/test_node_client.py::test_the_largest_message_arrives_and_the_small_ones_beside_it",
    ),
)


def versions() -> dict[str, str]:
    """Return the version of each client that the tests run, from the locks of its language."""
    node = json.loads((E2E / "node" / "package.json").read_text("utf-8"))["dependencies"]
    found = {
        "Java": _version(
            E2E / "java" / "pom.xml", r"rocketmq-client-java</artifactId>\s*<version>"
        ),
        "Go": _version(E2E / "go" / "go.mod", r"rocketmq-clients/golang/v5 v"),
        "Python": _version(ROOT / "requirements.lock", r"rocketmq-python-client=="),
        "Node.js": str(node["rocketmq-client-nodejs"]),
        "Rust": _version(E2E / "rust" / "Cargo.lock", r'name = "rocketmq"\nversion = "'),
    }
    return {client: found[client] for client in CLIENTS}


def _version(file: Path, before: str) -> str:
    found = re.search(before + r"([\d.]+)", file.read_text("utf-8"))
    assert found, f"{file} does not name the client"
    return found[1]


def clients_page() -> str:
    """Return docs/clients.md with current tables between their marks."""
    page = PAGE.read_text("utf-8")
    for name, table in (("scenarios", _scenarios()), ("differences", _differences())):
        begin, end = f"<!-- {name}: made by `make docs` -->\n", f"<!-- end of {name} -->\n"
        before, begun, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        assert begun, f"{PAGE} has no line {begin}"
        assert ended, f"{PAGE} has no line {end}"
        page = f"{before}{begin}{table}{end}{after}"
    return page


def _scenarios() -> str:
    reasons: list[str] = []

    def shown(cell: Cell) -> str:
        if cell.support is Support.WORKS:
            return cell.support
        if cell.reason not in reasons:
            reasons.append(cell.reason)
        return f"{cell.support} ({reasons.index(cell.reason) + 1})"

    columns = [f"{client} {version}" for client, version in versions().items()]
    rows = [
        [scenario.name, *(shown(scenario.cells[client]) for client in CLIENTS)]
        for scenario in SCENARIOS
    ]
    calls = [[call, shown(cell)] for call, cell in CALLS]
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return (
        _table(["scenario", *columns], rows)
        + "\nNone of these clients uses the following calls.\n\n"
        + _table(["call", "stubs of the protocol"], calls)
        + "\n"
        + "".join(f"{note}\n" for note in notes)
    )


def _differences() -> str:
    rows = [[one.subject, one.rocketmq, one.tidemill] for one in DIFFERENCES]
    return _table(["subject", "Apache RocketMQ", "Tidemill"], rows)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
