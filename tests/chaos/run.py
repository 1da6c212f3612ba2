"""Disturb a release on a real cluster while official clients work, and write the ledger.

    KUBECONFIG=... python -m tests.chaos.run [--faults broker-deleted,proxy-drained] [--times N]

The program installs the chart into its own namespace and deletes the namespace afterwards.
docs/testing.md lists the variables; tests/chaos/faults.py is the table of faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.chaos import audit, ledger
from tests.chaos.cluster import VALUES, Cluster, FaultUnavailable
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.figures import DISTURBED, figures
from tests.chaos.load import ENDPOINT, LANGUAGES, Clients, create_user, load
from tests.support.clients.client_process import Fact
from tests.support.clients.looping_clients import Disturbance
from tests.support.clients.message_kinds import BASIC_TOPICS, roles_of

FACTS = ledger.ROOT / "build" / "chaos"


def main() -> int:
    """Run the command line; the status is 1 if a row breaks its promise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default="", help="names, with commas; all when empty")
    parser.add_argument("--times", type=int, default=0, help="how often instead of the table's")
    parser.add_argument("--namespace", default="tidemill-chaos")
    parser.add_argument("--image", default="tidemill:dev", help="repository:tag of the processes")
    parser.add_argument("--load-image", default="tidemill-load:dev", help="that of the clients")
    parser.add_argument("--clients", default=",".join(LANGUAGES), help="languages, with commas")
    parser.add_argument("--endpoint", default=ENDPOINT, help="where clients find the proxies")
    parser.add_argument("--values", default="", help="a values file of this cluster")
    parser.add_argument("--no-audit", action="store_true", help="save a minute a fault")
    parser.add_argument("--keep", action="store_true", help="use what is installed, and leave it")
    options = parser.parse_args()
    chosen = chosen_of(options.faults)
    cluster = Cluster(
        namespace=options.namespace,
        image=options.image,
        hook_program=os.environ.get("CLUSTER_FAULTS", ""),
        more_values=options.values,
    )
    clients = Clients(
        image=options.load_image, languages=options.clients.split(","), endpoint=options.endpoint
    )
    is_audited = not options.no_audit
    if is_audited and not audit.is_possible():
        raise SystemExit("Spark is not installed: make setup-pipeline, or say --no-audit")
    tables = ledger.read()
    results = set()
    with installed(cluster, keep=options.keep):
        about = about_of(cluster, clients)
        for number, fault in enumerate(chosen, 1):
            say(f"[{number}/{len(chosen)}] {fault.name}: {fault.what}")
            times = options.times or fault.times
            try:
                with release_of(cluster, fault) as own:
                    row = tried(own, fault, times, clients, about, is_audited=is_audited)
            except (AssertionError, subprocess.SubprocessError) as why:
                # The next fault may succeed. It fails if the release is not complete.
                row = ledger.row_failed(str(why), about)
            ledger.enter(tables, fault, row)
            results.add(row["result"])
            # After each fault, so that an interrupted run keeps its results.
            ledger.write(tables)
            say(f"    {summary(fault, row)}")
    return int(bool(results & {"broken", "failed", "not judged"}))


def chosen_of(names: str) -> Sequence[Fault]:
    """Return the faults of these names, in the table's order."""
    wanted = set(filter(None, names.split(",")))
    if unknown := wanted - {fault.name for fault in FAULTS}:
        known = ", ".join(fault.name for fault in FAULTS)
        raise SystemExit(f"no fault is called {', '.join(sorted(unknown))}; there are {known}")
    return [fault for fault in FAULTS if not wanted or fault.name in wanted]


@contextmanager
def installed(cluster: Cluster, *, keep: bool) -> Iterator[None]:
    """Install the release for the block."""
    if keep:
        cluster.settle()
        yield
        return
    say(f"installing {cluster.image} into {cluster.namespace}")
    cluster.create()
    try:
        cluster.helm("install")
        cluster.settle()
        yield
    finally:
        cluster.remove()


@contextmanager
def release_of(cluster: Cluster, fault: Fault) -> Iterator[Cluster]:
    """Yield the release for a fault. Most faults share one."""
    if not fault.values:
        yield cluster
        return
    own = dataclasses.replace(
        cluster,
        namespace=f"{cluster.namespace}-{fault.name}",
        layout_values=str(VALUES.parent / fault.values),
    )
    with installed(own, keep=False):
        yield own


def about_of(cluster: Cluster, clients: Clients) -> dict[str, Any]:
    """Return a row's facts about its cluster and machine."""
    inside = cluster.kubectl("exec", "deployment/tidemill-admin", "--", "printenv")
    variables = dict(line.split("=", 1) for line in inside.splitlines() if "=" in line)
    # The commit of the image, which may differ from the working tree.
    commit = variables.get("TIDEMILL_COMMIT", "unknown")
    nodes = cluster.objects("nodes")
    return {
        "commit": commit[:10],
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "kubernetes": nodes[0]["status"]["nodeInfo"]["kubeletVersion"],
        "nodes": len(nodes),
        "clients": list(clients.languages),
    }


def tried(
    cluster: Cluster,
    fault: Fault,
    times: int,
    clients: Clients,
    about: dict[str, Any],
    *,
    is_audited: bool,
) -> ledger.Row:
    """Run a fault under load; return its row: the result, or the reason why it did not run."""
    if reason := missing(cluster, fault, about["nodes"]):
        return ledger.row_not_run(reason, about)
    disturbances: list[Disturbance] = []
    whole_s: list[float] = []
    # Names distinguish the messages from those of another load.
    name = f"{fault.name}-{time.time_ns() // 1_000_000:x}"
    user = create_user(cluster)
    with load(cluster, name, dataclasses.replace(clients, user=user)) as loaded:
        for number in range(1, times + 1):
            begun, begun_s = loaded.now_us(), time.monotonic()
            try:
                fault.act(cluster)
            except FaultUnavailable as why:
                return ledger.row_not_run(str(why), about)
            whole_s.append(round(time.monotonic() - begun_s, 1))
            loaded.progress()
            disturbances.append(Disturbance(fault.name, begun, loaded.now_us(), fault.fails))
            say(f"    {number} of {times}: {loaded.report}")
        loaded.end()
        kept = keep_facts(fault, loaded.report.facts, disturbances, cluster.events())
        found = figures(loaded.report.facts, disturbances, loses=bool(fault.loses))
        if found.lost:
            kept.with_suffix(".deliveries").write_text(deliveries_of(cluster))
        # The first shows the platform's share of a gap, the last the load of this machine.
        measured: dict[str, Any] = {
            "whole_s": whole_s,
            "load_average": round(os.getloadavg()[1], 1),
            "cores": os.cpu_count(),
        }
        # An audit of the new log has no events of the deleted log.
        if is_audited and not fault.loses:
            measured["audit"] = audit.opinion(cluster, kept, user)
        return ledger.row_of(fault, found, about | measured)


def keep_facts(
    fault: Fault, facts: Sequence[Fact], disturbances: Sequence[Disturbance], events: str
) -> Path:
    """Store the actions and the reports of clients and Kubernetes; return the file of the facts."""
    done = [
        {"fact": DISTURBED, **one._asdict(), "fails": sorted(one.fails)} for one in disturbances
    ]
    FACTS.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(fact)}\n" for fact in [*facts, *done])
    kept = FACTS / f"{fault.name}.jsonl"
    kept.write_text(lines)
    kept.with_suffix(".events").write_text(events)
    return kept


def deliveries_of(cluster: Cluster) -> str:
    """Return the backlog of each group and the messages in flight of each client, as JSON lines.

    They show whether a message that no client reported is in the log, or with a client that hangs.
    """

    found = [cluster.tidemill("group", "show", role) for role in roles_of(BASIC_TOPICS)]
    clients = cluster.tidemill("client", "list")["clients"]
    found += [cluster.tidemill("client", "show", one["clientId"]) for one in clients]
    return "\n".join(map(json.dumps, found))


def missing(cluster: Cluster, fault: Fault, nodes: int) -> str:
    """Return the missing requirement of a fault, "" if there is none."""
    if "hook" in fault.needs and not cluster.hook_program:
        return "CLUSTER_FAULTS names no program"
    if "second node" in fault.needs and nodes < 2:  # `needs` is a text.
        return "there is one node"
    return ""


def summary(fault: Fault, row: ledger.Row) -> str:
    """Return a row as one line for the terminal."""
    named = zip(ledger.COLUMNS[1:], ledger.cells(fault, row)[1:], strict=True)
    return ", ".join(f"{column} {cell}" for column, cell in named if cell)


def say(line: str) -> None:
    """Print the progress."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, subprocess.SubprocessError) as failed:
        sys.exit(f"{failed}")
