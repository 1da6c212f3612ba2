"""The ledger: the effect of each fault on clients in its last run, as JSON and as a page.

Each number of nodes has its own table, as a cluster of one node is a different test than one of
three. Every fault has a row. If a fault did not run, its row has "not run" and the reason, without
figures. The ledger counts consecutive runs without a broken promise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.figures import CALLS, Figures, percentile

ROOT = Path(__file__).parents[2]
LEDGER = Path(__file__).parent / "ledger.json"
PAGE = ROOT / "docs" / "kubernetes" / "ledger.md"
NEVER = {"result": "not run", "reason": "nobody has run it yet"}
P99 = 0.99
REASON_MAX = 300  # Characters of an error on the page.

Row = dict[str, Any]
Tables = dict[int, dict[str, Row]]  # By number of nodes and name of the fault.

HEAD = """\
# What faults cost

This page shows the measured effect of faults on the clients of a release. `make cluster-test`
generates it from `tests/chaos/ledger.json`. The run installs the chart into a new namespace, runs
official clients, causes each fault and judges the clients' history (`tests/chaos`;
[testing.md](../testing.md#on-a-cluster) describes the run).

The release has one broker group **of one replica**, two proxies and an admin process. While the
broker is down, no message is stored and clients wait. If a row mentions a master, the group has
three replicas. Clients in each language send NORMAL, DELAY and FIFO messages. They receive them
as simple and as push consumers, ordered and unordered. The figures are those of the machine of
the run; its nodes may share the machine with other work.

The columns:

- *Lost*: messages stored with OK and not acked by the end, per consumer group.
- *Duplicated*: messages delivered again after an ack with OK, without a lost answer. The number in
  brackets counts deliveries that a lost answer explains.
- *Application errors*: errors of sends / receives / acks after the client's own retries.
- *Seconds without a send*, *without a receive*: the longest time of all clients together without a
  successful send or a received message, from the fault to the recovery. For several runs it is the
  99th percentile, which is the worst of twenty.
- *Until whole*: seconds until every pod is ready again. They depend on the platform and on the
  start of a process.
- *Kept*: no message lost, duplicated, early or out of order, no error that the fault does not
  permit, and no longer without a send than promised. The number of consecutive kept runs follows if
  it is above one.
- *Audited*: the audit of the data pipeline read the log after the fault and found the same missing,
  early and duplicated messages as the clients' history. The number in brackets counts deliveries
  that no client reported because their answer was lost.
- *Load*: the load average of the machine during the run.
"""
COLUMNS = (
    "fault",
    "times",
    "result",
    "lost",
    "duplicated",
    "early",
    "out of order",
    "application errors",
    "seconds without a send",
    "without a receive",
    "until whole",
    "audited",
    "load",
    "date",
    "commit",
)


def row_of(fault: Fault, found: Figures, about: Mapping[str, Any]) -> Row:
    """Return the row of a fault that ran."""
    is_kept = found.is_clean_but_for_losses if fault.loses else found.is_clean
    is_kept = is_kept and not is_late(fault, found.without_send_s)
    opinion = about.get("audit", {})
    is_kept = is_kept and not opinion.get("differences")
    result = "not judged" if is_kept and "failed" in opinion else "kept" if is_kept else "broken"
    return {"result": result, **dataclasses.asdict(found), **about}


def is_late(fault: Fault, without_send_s: Sequence[float]) -> bool:
    """Return whether a promised time without a send was exceeded."""
    return bool(fault.promised_s) and percentile(without_send_s, P99) > (fault.promised_s or 0)


def row_not_run(reason: str, about: Mapping[str, Any]) -> Row:
    """Return the row of a fault that did not run."""
    return {"result": "not run", "reason": reason, **about}


def row_failed(reason: str, about: Mapping[str, Any]) -> Row:
    """Return the row of a fault after which the release or its clients did not recover."""
    return {"result": "failed", "reason": reason, **about}


def read() -> Tables:
    """Return the ledger's tables."""
    found: dict[str, dict[str, Row]] = json.loads(LEDGER.read_text()) if LEDGER.exists() else {}
    return {int(nodes): rows for nodes, rows in found.items()}


def enter(tables: Tables, fault: Fault, row: Row) -> None:
    """Replace the fault's row in the table of its number of nodes."""
    rows = tables.setdefault(row["nodes"], {})
    before = rows.get(fault.name, NEVER)
    is_kept = row["result"] == "kept"
    rows[fault.name] = row | {"in_a_row": before.get("in_a_row", 0) + 1 if is_kept else 0}


def write(tables: Tables) -> None:
    """Write the ledger and its page."""
    ordered = {
        nodes: {fault.name: tables[nodes][fault.name] for fault in FAULTS if fault.name in rows}
        for nodes, rows in sorted(tables.items(), reverse=True)
    }
    LEDGER.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(page(FAULTS, ordered))


def page(faults: Sequence[Fault], tables: Tables) -> str:
    """Return the page, with the largest cluster first."""
    parts = [table(faults, nodes, rows) for nodes, rows in sorted(tables.items(), reverse=True)]
    return HEAD + "".join(parts)


def table(faults: Sequence[Fault], nodes: int, rows: Mapping[str, Row]) -> str:
    """Return the table of the runs on `nodes` nodes, with its notes."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    notes = []
    for fault in faults:
        row = rows.get(fault.name, NEVER)
        lines.append(f"| {' | '.join(cells(fault, row))} |")
        notes += [f"- {fault.what}: {note}" for note in notes_of(fault, row)]
    head = f"\n## On {nodes} {'node' if nodes == 1 else 'nodes'}\n\n"
    below = "".join(f"{note}\n" for note in notes)
    return head + "\n".join(lines) + "\n" + (f"\n{below}" if below else "") + where(rows.values())


def where(rows: Iterable[Row]) -> str:
    """Return the machines of the rows, with their load, which explains some figures."""
    done = [row for row in rows if "load_average" in row]
    if not done:
        return ""
    loads = [row["load_average"] for row in done]
    versions = sorted({row["kubernetes"] for row in done})
    clients = sorted({tuple(sorted(row["clients"])) for row in done}, key=len)
    fewer = "".join(
        f" ({'; '.join(row_names(done, few))}: only in {in_words(few)})" for few in clients[:-1]
    )
    cores = sorted({row["cores"] for row in done})
    return (
        f"\nMeasured on Kubernetes {', '.join(versions)}, by clients in"
        f" {in_words(clients[-1])}{fewer}. The machine of the test had a load average of"
        f" {min(loads):g} to {max(loads):g} meanwhile, on {listed(cores)} cores.\n"
    )


def in_words(names: Sequence[str]) -> str:
    """Return names as an English list."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def row_names(rows: Iterable[Row], clients: Sequence[str]) -> list[str]:
    """Return the commits of the rows with these clients."""
    return sorted({f"commit {row['commit']}" for row in rows if set(row["clients"]) == {*clients}})


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as a list of alternatives."""
    return " or ".join(map(str, numbers))


def cells(fault: Fault, row: Row) -> list[str]:
    """Return the cell of each column."""
    if "reason" in row:
        result = (
            f"not run: {row['reason']}" if row["result"] == "not run" else f"**{row['result']}**"
        )
        empty = [""] * (len(COLUMNS) - 5)
        return [fault.what, "", result, *empty, row.get("date", ""), row.get("commit", "")]
    runs = f", {row['in_a_row']} in a row" if row.get("in_a_row", 0) > 1 else ""
    promised = f" of {fault.promised_s:g} promised" if fault.promised_s else ""
    return [
        fault.what,
        str(len(row["without_send_s"])),
        f"{row['result']}{runs}" if row["result"] == "kept" else f"**{row['result']}**",
        f"{row['lost']} of {row['stored']}",
        f"{row['duplicated']} ({row['explained']})",
        str(row["early"]),
        str(row["out_of_order"]),
        " / ".join(str(row["errors"][call]) for call in CALLS),
        f"{percentile(row['without_send_s'], P99):g}{promised}",
        f"{percentile(row['without_receive_s'], P99):g}",
        f"{percentile(row['whole_s'], P99):g}",
        audited(row),
        f"{row['load_average']:g}" if "load_average" in row else "",
        row.get("date", ""),
        row.get("commit", ""),
    ]


def audited(row: Row) -> str:
    """Return the result of the audit, "" without an audit."""
    if "audit" not in row:
        return ""
    audit = row["audit"]
    if "failed" in audit:
        return "**could not judge**"
    return (
        f"**differs** ({audit['answers_lost']})"
        if audit["differences"]
        else f"the same ({audit['answers_lost']})"
    )


def notes_of(fault: Fault, row: Row) -> list[str]:
    """Return the notes of a row."""
    notes = [fault.loses] if fault.loses else []
    if row["result"] == "failed":
        return [*notes, f"`{shortened(row['reason'])}`"]
    if "reason" in row:
        return notes
    worst_s = percentile(row["without_send_s"], P99)
    if is_late(fault, row["without_send_s"]):
        notes.append(
            f"{worst_s:g} s without a send are more than the {fault.promised_s:g} s promised."
        )
    if row["unpromised_errors"]:
        error = json.loads(row["findings"]["errors"][0])["error"]
        notes.append(
            f"{row['unpromised_errors']} errors at applications, where none is permitted, such as"
            f" `{shortened(error)}`"
        )
    if row["errors_before"]:
        notes.append(f"{row['errors_before']} errors while the clients started, not counted above.")
    if why := row.get("audit", {}).get("failed"):
        notes.append(f"The audit could not judge: `{shortened(why)}`")
    if differences := row.get("audit", {}).get("differences"):
        notes.append(
            f"{len(differences)} findings of one of history and audit alone, such as"
            f" `{shortened(differences[0])}`"
        )
    if row["unexpected"]:
        notes.append(f"{row['unexpected']} messages came that nobody had sent.")
    if row["result"] == "broken" and "load_average" in row:
        # The reader needs the load of the machine to judge the errors.
        notes.append(
            f"The load average was {row['load_average']:g} on {row['cores']} cores meanwhile."
        )
    return notes


def shortened(text: str) -> str:
    """Return the begin of an error text, on one line."""
    return " ".join(text.replace("`", "'").split())[:REASON_MAX]
