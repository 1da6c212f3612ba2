"""Judge what clients told of a fault by the audit of the data pipeline as well.

    python -m tests.chaos.audit build/chaos/broker-deleted.jsonl --to DIR --endpoints HOST:PORT

HOST:PORT leads to a proxy of the release, which is still there: `make cluster-test` does this
behind each fault where Spark is installed. The status is 1 where missing, early or delivered after
an ack differ from the history's; deliveries of which only the log knows, since their answer was
lost, are listed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.chaos.figures import DISTURBED
from tests.support.client_process import Fact
from tests.support.looping_clients import (
    EFFECT_US,
    ROLES,
    TOPICS,
    Disturbance,
    histories_of,
    judge,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.chaos.cluster import Cluster

PROXY_PORT = 8081
AUDIT_S = 600.0  # for Spark to start, and to read all that the release has
KINDS = {"missing": "lost", "early": "early", "duplicate": "duplicated"}


def main() -> int:
    """Do what the command line says."""
    from tidemill.pipeline.jobs.running import session

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path, help="what clients told, of build/chaos")
    parser.add_argument("--to", required=True, help="a folder for the audit's tables and its page")
    parser.add_argument("--endpoints", required=True, help="HOST:PORT of a proxy")
    options = parser.parse_args()
    facts = [json.loads(line) for line in options.facts.read_text().splitlines()]
    with session("audit of a fault", None) as spark:
        differences, lost = audited(spark, facts, to=options.to, endpoints=options.endpoints)
    sys.stdout.writelines(f"answer lost: {line}\n" for line in lost)
    sys.stdout.writelines(f"differs: {line}\n" for line in differences)
    sys.stdout.write(f"{len(differences)} differences, {len(lost)} answers lost\n")
    return int(bool(differences))


def opinion(cluster: Cluster, facts: Path) -> dict[str, Any]:
    """Return what the audit says of a fault's facts, while its release is still there.

    In a process of its own: what Spark has started should end with it. Where it could not judge, it
    has nothing but `failed`, with the reason.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.forwarded("service/tidemill-proxy", PROXY_PORT) as address,
    ):
        try:
            done = subprocess.run(
                [
                    sys.executable, "-m", "tests.chaos.audit", str(facts), f"--to={folder}/audit",
                    f"--endpoints={address}",
                ],
                capture_output=True, text=True, timeout=AUDIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {AUDIT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].endswith("answers lost"):
        # Its last line says why; Spark's warnings stand before.
        return {"failed": (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]}
    return {
        "differences": [one.partition(": ")[2] for one in lines if one.startswith("differs: ")],
        "answers_lost": sum(one.startswith("answer lost: ") for one in lines),
    }


def is_possible() -> bool:
    """Whether Spark is installed."""
    return importlib.util.find_spec("pyspark") is not None


def audited(
    spark: SparkSession, facts: Sequence[Fact], *, to: str, endpoints: str
) -> tuple[list[str], list[str]]:
    """Run the audit; return where it differs from the history, and which answers were lost."""
    from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

    from tidemill.common.clock import SystemClock
    from tidemill.pipeline.jobs import audit

    given = {"endpoints": endpoints}
    reader = spark.read.format("rocketmq").options(**given).option("topic", ",".join(TOPICS))
    # Clients make their ids themselves; a body is its key.
    key_of: dict[str, str] = {
        row["message_id"]: bytes(row["body"]).decode()
        for row in reader.load().select("message_id", "body").collect()
    }
    sends = Path(to) / "sends.jsonl"
    sends.parent.mkdir(parents=True, exist_ok=True)
    sends.write_text("".join(f"{json.dumps(one)}\n" for one in acknowledged(facts, key_of)))
    settings = audit.AuditSettings(to=to, given=given, sends=str(sends), grace_s=0)
    events = audit.read_events(spark, given)
    audit.judge(spark, events, settings, now_ms=SystemClock().wall_ms())
    findings = spark.read.parquet(f"{to}/{audit.FOLDER}/findings").collect()
    told = events.where("event = 'delivered'").select(
        "consumer_group", "message_id", "attempt", F.unix_micros("event_ts")
    )
    deliveries = [Delivery(r[0], key_of.get(r[1], r[1]), r[2], r[3]) for r in told.collect()]
    lost, unexplained = untold(facts, deliveries)
    differences = differing(facts, [row.asDict() for row in findings], key_of)
    return differences + [f"delivered: {one} stands in the log alone" for one in unexplained], lost


def acknowledged(facts: Sequence[Fact], key_of: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the list of acknowledged sends; what nobody has stored goes by its key."""
    id_of = {key: message_id for message_id, key in key_of.items()}
    return [
        {"message_id": id_of.get(key := str(fact["key"]), key), "topic": fact["topic"]}
        for fact in facts
        if fact["fact"] == "send" and not fact["error"]
    ]


def differing(
    facts: Sequence[Fact], findings: Sequence[Mapping[str, Any]], key_of: Mapping[str, str]
) -> list[str]:
    """Return what one of the two found alone, of this fault's messages."""
    disturbances = [
        Disturbance(fact["what"], fact["begun"], fact["ended"], frozenset(fact["fails"]))
        for fact in facts
        if fact["fact"] == DISTURBED
    ]
    ours = {fact["key"] for fact in facts if fact["fact"] == "send"}
    broken = judge(facts, disturbances).broken
    received = {
        f"{role}, {topic}": {one.key for one in history.receives}
        for (role, topic), history in histories_of(facts).items()
    }

    def came(subscription: str, key: str) -> bool:
        return key in received[subscription]

    noted: dict[str, set[tuple[str, str]]] = defaultdict(set)  # consumer group and key
    for kind, name in KINDS.items():
        for line in broken[name]:
            of, _, _ = line.rpartition(": ")
            key = line.rpartition(": ")[2].split(" ", 1)[0]
            # What came and was not acked is under way to an audit, and not missing.
            if kind != "missing" or not came(of, key):
                noted[kind].add((of.partition(", ")[0], key))
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for finding in findings:
        kind, group = finding["kind"], finding["consumer_group"]
        key = key_of.get(finding["message_id"], finding["message_id"])
        if key not in ours or group not in {None, *ROLES}:
            continue
        if group is None or kind == "early":
            # The history has what was never stored of each group, and what was early of none.
            found[kind] |= {one for one in noted[kind] if one[1] == key} or {(group or "", key)}
        else:
            found[kind].add((group, key))
    return [
        f"{kind}: {key}{f' of {group}' if group else ''} is found by"
        f" {'the history' if (group, key) in noted[kind] else 'the audit'} alone"
        for kind in KINDS
        for group, key in sorted(noted[kind] ^ found[kind])
    ]


class Delivery(NamedTuple):
    """One that the log has."""

    group: str
    key: str
    attempt: int
    at_us: int  # wall time

    def __str__(self) -> str:
        return f"{self.group}: {self.key}, attempt {self.attempt}"


def untold(facts: Sequence[Fact], deliveries: Sequence[Delivery]) -> tuple[list[str], list[str]]:
    """Return the deliveries of this fault's messages that no client has told.

    First those whose answer was lost: a disturbance or an error of that group's receives met it, or
    its client was ending. Then the others, which nothing explains.
    """
    ours = {fact["key"] for fact in facts if fact["fact"] == "send"}
    received = {
        (fact["role"], key, attempt)
        for fact in facts
        if fact["fact"] == "received"
        for key, attempt in zip(fact["keys"], fact["attempts"], strict=True)
    }
    last_us = max((fact["at"] for fact in facts if fact["fact"] == "received"), default=0)
    spans = [
        (fact.get("role"), fact["begun"], fact["ended"] + EFFECT_US)
        for fact in facts
        if fact["fact"] == DISTURBED
        or (fact["fact"] == "failed" and fact.get("during") == "receive")
    ]
    lost: list[str] = []
    unexplained: list[str] = []
    for one in sorted(deliveries):
        if one.key not in ours or (one.group, one.key, one.attempt) in received:
            continue
        is_explained = one.at_us > last_us or any(
            begun <= one.at_us <= ended for role, begun, ended in spans if role in {None, one.group}
        )
        (lost if is_explained else unexplained).append(str(one))
    return lost, unexplained


if __name__ == "__main__":
    sys.exit(main())
