"""The ledger and its page show the faults that ran, with their true results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.chaos import ledger
from tests.chaos.cluster import Cluster, FaultUnavailable, pod_of
from tests.chaos.faults import ALL, FAULTS, Fault
from tests.chaos.figures import Figures
from tests.chaos.load import own
from tests.chaos.run import chosen_of, missing
from tests.support.clients.message_kinds import BASIC_TOPICS

CLEAN = Figures(
    stored=100,
    received=400,
    lost=0,
    duplicated=0,
    explained=2,
    early=0,
    out_of_order=0,
    unexpected=0,
    errors={"send": 1, "receive": 2, "ack": 3},
    unpromised_errors=0,
    errors_before=0,
    without_send_s=[1.0, 4.5],
    without_receive_s=[2.0, 6.25],
)
FAULT = Fault(name="it", what="it is done", act=lambda _: None, promised_s=5)
ABOUT = {"commit": "abc", "date": "2027-01-02", "whole_s": [3.0, 4.5]}


def line_of(row: ledger.Row) -> str:
    page = ledger.page([FAULT], {3: {"it": row}})
    [line] = [line for line in page.splitlines() if line.startswith("| it is done |")]
    return line


def test_the_page_in_the_repository_is_made_of_the_ledger() -> None:
    assert ledger.PAGE.read_text() == ledger.page(FAULTS, ledger.read())


def test_a_row_has_every_figure_of_a_fault_that_was_done() -> None:
    place = {"kubernetes": "v1.33.1", "clients": ["go"], "cores": 2, "load_average": 9.5}
    line = line_of(ledger.row_of(FAULT, CLEAN, ABOUT | place))
    assert line == (
        "| it is done | 2 | kept | 0 of 100 | 0 (2) | 0 | 0 | 1 / 2 / 3 "
        "| 4.5 of 5 promised | 6.25 | 4.5 |  | 9.5 | 2027-01-02 | abc |"
    )


def test_an_audit_difference_breaks_a_row() -> None:
    audit = {"differences": ["missing: k is found by the audit alone"], "answers_lost": 2}
    row = ledger.row_of(FAULT, CLEAN, ABOUT | {"audit": audit})
    assert row["result"] == "broken"
    assert "| **differs** (2) |" in line_of(row)
    assert any("k is found by the audit alone" in note for note in ledger.notes_of(FAULT, row))
    agreed = ledger.row_of(FAULT, CLEAN, ABOUT | {"audit": {"differences": [], "answers_lost": 2}})
    assert agreed["result"] == "kept"
    assert "| the same (2) |" in line_of(agreed)
    nobody = ledger.row_of(FAULT, CLEAN, ABOUT | {"audit": {"failed": "no answer"}})
    assert nobody["result"] == "not judged"
    assert "| **not judged** |" in line_of(nobody)
    assert "| **could not judge** |" in line_of(nobody)


def test_runs_that_followed_each_other_are_counted_for_each_number_of_nodes() -> None:
    tables: ledger.Tables = {}
    kept = ledger.row_of(FAULT, CLEAN, ABOUT | {"nodes": 3})
    broken = ledger.row_of(FAULT, dataclasses.replace(CLEAN, lost=1), ABOUT | {"nodes": 3})
    ledger.enter(tables, FAULT, kept)
    ledger.enter(tables, FAULT, kept | {"nodes": 1})
    assert "in a row" not in ledger.page([FAULT], tables).partition("##")[2]
    ledger.enter(tables, FAULT, kept)
    page = ledger.page([FAULT], tables)
    assert page.index("## On 3 nodes") < page.index("| kept, 2 in a row |")
    assert page.index("| kept, 2 in a row |") < page.index("## On 1 node\n")
    ledger.enter(tables, FAULT, broken)
    ledger.enter(tables, FAULT, kept)
    assert tables[3]["it"]["in_a_row"] == 1


def test_a_row_that_broke_a_promise_says_so() -> None:
    found = dataclasses.replace(CLEAN, lost=1)
    assert "| **broken** | 1 of 100 |" in line_of(ledger.row_of(FAULT, found, ABOUT))


def test_a_fault_that_loses_messages_breaks_no_promise_by_that_alone() -> None:
    losing = dataclasses.replace(FAULT, loses="all is gone.")
    found = dataclasses.replace(CLEAN, lost=7)
    row = ledger.row_of(losing, found, ABOUT)
    assert row["result"] == "kept"
    assert "- it is done: all is gone." in ledger.page([losing], {3: {"it": row}})
    early = dataclasses.replace(found, early=1)
    assert ledger.row_of(losing, early, ABOUT)["result"] == "broken"


def test_a_duration_over_its_promise_breaks_a_row_and_has_a_note() -> None:
    late = dataclasses.replace(CLEAN, without_send_s=[1.0, 38.7])
    row = ledger.row_of(FAULT, late, ABOUT | {"load_average": 30.5, "cores": 2})
    assert row["result"] == "broken"
    notes = ledger.notes_of(FAULT, row)
    assert "38.7 s without a send are more than the 5 s promised." in notes
    assert "The load average was 30.5 on 2 cores meanwhile." in notes


def test_an_error_that_no_application_should_have_seen_is_shown() -> None:
    findings = {"errors": ['{"fact": "send", "error": "refused\\n\\tby `one`"}']}
    found = dataclasses.replace(CLEAN, unpromised_errors=1, findings=findings)
    page = ledger.page([FAULT], {3: {"it": ledger.row_of(FAULT, found, ABOUT)}})
    assert "1 errors at applications, where none is permitted, such as `refused by 'one'`" in page


def test_the_page_names_the_cluster_and_the_load_of_the_machine() -> None:
    place = {"kubernetes": "v1.33.1", "nodes": 2, "clients": ["go"], "cores": 4}
    quiet = ledger.row_of(FAULT, CLEAN, ABOUT | place | {"load_average": 1.5})
    busy = quiet | {"load_average": 9.0}
    other = dataclasses.replace(FAULT, name="other")
    assert (
        "Kubernetes v1.33.1, by clients in go. The machine of the test had a load"
        " average of 1.5 to 9 meanwhile, on 4 cores."
    ) in ledger.page([FAULT, other], {2: {"it": quiet, "other": busy}})
    assert "Measured" not in ledger.page([FAULT], {3: {}})


def test_a_row_that_broke_a_promise_says_how_busy_its_machine_was() -> None:
    place = {"kubernetes": "v1.33.1", "nodes": 2, "clients": ["go"], "cores": 4}
    about = ABOUT | place | {"load_average": 36.5}
    line = "- it is done: The load average was 36.5 on 4 cores meanwhile."
    broken = ledger.row_of(FAULT, dataclasses.replace(CLEAN, lost=1), about)
    assert line in ledger.page([FAULT], {2: {"it": broken}})
    assert line not in ledger.page([FAULT], {2: {"it": ledger.row_of(FAULT, CLEAN, about)}})


def test_a_fault_that_was_not_done_has_no_figures() -> None:
    line = line_of(ledger.row_not_run("there is one node", ABOUT))
    assert line.startswith("| it is done |  | not run: there is one node |  |")
    assert "kept" not in line
    assert "not run: nobody has run it yet" in ledger.page([FAULT], {3: {}})


def test_a_release_that_did_not_recover_is_reported() -> None:
    row = ledger.row_failed("not within\n 300 ms", ABOUT)
    assert "| **failed** |" in line_of(row)
    assert "- it is done: `not within 300 ms`" in ledger.page([FAULT], {3: {"it": row}})


def test_without_a_program_of_hooks_such_a_fault_is_not_run() -> None:
    cluster = Cluster(namespace="one", image="tidemill:dev")
    needing = [fault for fault in FAULTS if "hook" in fault.needs]
    assert needing
    for fault in needing:
        assert missing(cluster, fault, nodes=3) == "CLUSTER_FAULTS names no program"
    with pytest.raises(FaultUnavailable):
        cluster.hook("node", "one", "cut")


def test_a_second_node_is_asked_for_where_one_is_lost() -> None:
    cluster = Cluster(namespace="one", image="tidemill:dev", hook_program="hook")
    [crash] = [fault for fault in FAULTS if fault.name == "node-crashed"]
    assert missing(cluster, crash, nodes=1) == "there is one node"
    assert not missing(cluster, crash, nodes=2)


def test_a_hook_gets_the_documented_arguments_and_may_decline(tmp_path: Path) -> None:
    called = tmp_path / "called"
    hook = tmp_path / "hook"
    hook.write_text(
        f'#!/bin/sh\necho "$@" >>{called}\n[ "$1" = signal ] || {{ echo no >&2; exit 3; }}\n'
    )
    hook.chmod(0o755)
    cluster = Cluster(namespace="one", image="tidemill:dev", hook_program=str(hook))
    pod = pod_of(
        {
            "metadata": {
                "name": "a-0",
                "uid": "u",
                "labels": {"app.kubernetes.io/component": "broker"},
            },
            "spec": {"containers": [{"name": "broker"}]},
            "status": {},
        }
    )
    cluster.signal("KILL", pod)
    with pytest.raises(FaultUnavailable, match="no"):
        cluster.hook("node", "n", "cut")
    assert called.read_text() == "signal KILL one a-0 broker\nnode n cut\n"


def test_names_of_faults_match_the_table() -> None:
    assert [fault.name for fault in chosen_of("proxy-drained,broker-deleted")] == [
        "broker-deleted",
        "proxy-drained",
    ]
    assert list(chosen_of("")) == list(FAULTS)
    with pytest.raises(SystemExit, match="no fault is called x"):
        chosen_of("x,broker-deleted")


def test_the_table_names_calls_that_clients_tell_of() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {*BASIC_TOPICS, "receive", "ack"} == ALL
    assert all(fault.fails <= ALL for fault in FAULTS)


def test_a_history_excludes_messages_of_another_load() -> None:
    mixed = {"fact": "received", "role": "push", "keys": ["b-go/1", "a-go/1"], "attempts": [2, 1]}
    assert own(mixed, "a") == mixed | {"keys": ["a-go/1"], "attempts": [1]}
    assert own(mixed, "c") is None
    assert own({"fact": "ack", "key": "b-go/1"}, "a") is None
    assert own({"fact": "ready"}, "a") == {"fact": "ready"}
