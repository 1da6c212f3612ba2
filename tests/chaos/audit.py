"""Check the client reports of a fault with the audit of the data pipeline.

    python -m tests.chaos.audit build/chaos/broker-deleted.jsonl --to DIR --endpoints HOST:PORT

HOST:PORT is a proxy of the running release. If Spark is installed, `make cluster-test` runs this
after each fault. The status is 1 if the audit and the history differ. The output lists deliveries
that only the log has because their answer was lost.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.figures import DISTURBED
from tests.support.clients import history_against_audit as second_opinion
from tests.support.clients.client_process import Fact
from tests.support.clients.history_against_audit import (
    Comparison,
    Delivery,
    LostAnswerSpan,
    Witness,
    compare,
    witness_of,
)
from tests.support.clients.looping_clients import (
    EFFECT_US,
    US_PER_MS,
    Disturbance,
    histories_of,
    judge,
)
from tests.support.clients.message_kinds import FILTERED_ROLES, is_rolled_back

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.chaos.cluster import Cluster

PROXY_PORT = 8081
AUDIT_S = 600.0  # For Spark to start and to read all logs of the release.
FOREVER_MS = 2**53


def main() -> int:
    """Run the command line."""
    from tidemill_pipeline.jobs.running import session

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path, help="reports of the clients, from build/chaos")
    parser.add_argument("--to", required=True, help="a folder for the audit's tables and its page")
    parser.add_argument("--endpoints", required=True, help="HOST:PORT of a proxy")
    parser.add_argument("--user", default="", help="a user of the release, if it has users")
    parser.add_argument("--secret-file", default="", help="its secret")
    options = parser.parse_args()
    facts = [json.loads(line) for line in options.facts.read_text().splitlines()]
    with session("audit of a fault", None) as spark:
        connection = {"endpoints": options.endpoints}
        if options.user:
            connection["auth.accessKey"] = options.user
            connection["auth.secretKeyFile"] = options.secret_file
        found = audited(spark, facts, to=options.to, connection=connection)
    sys.stdout.writelines(f"answer lost: {line}\n" for line in found.lost_answers)
    sys.stdout.writelines(f"differs: {line}\n" for line in found.differences)
    counts = len(found.differences), len(found.lost_answers)
    sys.stdout.write("{} differences, {} answers lost\n".format(*counts))
    return int(bool(found.differences))


def opinion(cluster: Cluster, facts: Path, user: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the audit's result for a fault's facts. The release must be running.

    The audit runs in its own process, so that the processes of Spark end with it. If the audit
    fails, the result has only `failed`, with the reason.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster.forwarded("service/tidemill-proxy", PROXY_PORT) as address,
    ):
        signed = []
        if user is not None:
            secret_file = Path(folder) / "secret"
            secret_file.write_text(user[1])
            signed = [f"--user={user[0]}", f"--secret-file={secret_file}"]
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "tests.chaos.audit",
                    str(facts),
                    f"--to={folder}/audit",
                    f"--endpoints={address}",
                    *signed,
                ],
                capture_output=True,
                text=True,
                timeout=AUDIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {AUDIT_S:.0f} s"}
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].endswith("answers lost"):
        # The last line has the reason. Spark's warnings come before it.
        return {"failed": (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]}
    return {
        "differences": [one.partition(": ")[2] for one in lines if one.startswith("differs: ")],
        "answers_lost": sum(one.startswith("answer lost: ") for one in lines),
    }


def is_possible() -> bool:
    """Return whether Spark is installed."""
    return importlib.util.find_spec("pyspark") is not None


def audited(
    spark: SparkSession, facts: Sequence[Fact], *, to: str, connection: Mapping[str, str]
) -> Comparison:
    """Run the audit and compare it with the history."""
    return compared(facts, *found_by_events(spark, facts, to=to, connection=connection))


def found_by_events(
    spark: SparkSession, facts: Sequence[Fact], *, to: str, connection: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[Delivery]]:
    """Run the audit; return its findings and the deliveries, by message key."""
    from tidemill.common.clock import SystemClock
    from tidemill_pipeline.jobs import audit
    from tidemill_pipeline.jobs import events as events_of
    from tidemill_pipeline.jobs.group_progress import read_progress

    given = dict(connection)
    topics = sorted({str(fact["topic"]) for fact in facts if fact["fact"] == "send"})
    reader = spark.read.format("rocketmq").options(**given).option("topic", ",".join(topics))
    # Clients choose the message ids. The body is the key.
    key_of: dict[str, str] = {
        row["message_id"]: bytes(row["body"]).decode()
        for row in reader.load().select("message_id", "body").collect()
    }
    sends = Path(to) / "sends.jsonl"
    sends.parent.mkdir(parents=True, exist_ok=True)
    sends.write_text("".join(f"{json.dumps(one)}\n" for one in acknowledged(facts, key_of)))
    settings = audit.AuditSettings(
        to=to, given=given, sends=str(sends), grace_s=0, filtered_groups=FILTERED_ROLES
    )
    progress = read_progress(spark, given)
    events = events_of.read_events(spark, given)
    audit.judge(
        spark,
        events,
        settings,
        now_ms=SystemClock().wall_ms(),
        begins_at_ms=max(
            events_of.complete_from_ms(given), events_of.removed_at_ms(spark, events, given)
        ),
        progress=progress,
    )
    return second_opinion.audited(spark, events, to, key_of)


def acknowledged(facts: Sequence[Fact], key_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the list of acknowledged sends. A message that is not stored is listed by its key.

    The list has one send of each dedup key, and no send whose message is rolled back.
    """
    id_of = {key: message_id for message_id, key in key_of.items()}
    sends = {
        str(fact["key"]): fact
        for fact in facts
        if fact["fact"] == "send"
        and not fact["error"]
        and not is_rolled_back(fact["topic"], fact["key"])
    }
    return [
        {
            "message_id": id_of.get(key, key),
            "topic": fact["topic"],
            "at_ms": fact["ended"] // US_PER_MS,
        }
        for key, fact in sends.items()
    ]


def compared(
    facts: Sequence[Fact], findings: Iterable[Mapping[str, Any]], deliveries: Iterable[Delivery]
) -> Comparison:
    """Compare the findings for this fault's messages. The release also has other messages."""
    ours = {fact["key"] for fact in facts if fact["fact"] == "send"}
    return compare(
        witnesses_of(facts),
        [finding for finding in findings if finding["message_id"] in ours],
        [one for one in deliveries if one.key in ours],
        slack_ms=EFFECT_US // US_PER_MS,
    )


def witnesses_of(facts: Sequence[Fact]) -> list[Witness]:
    """Return the history of each subscription."""
    disturbances = [
        Disturbance(fact["what"], fact["begun"], fact["ended"], frozenset(fact["fails"]))
        for fact in facts
        if fact["fact"] == DISTURBED
    ]
    again: dict[str, set[str]] = defaultdict(set)
    for line in judge(facts, disturbances).broken["duplicated"]:
        role, _, rest = line.partition(": ")
        again[role].add(rest.partition(" ")[0])
    return [
        witness_of(
            history,
            topic=topic,
            group=role,
            early=early_of(facts, role, topic),
            failed=failed_of(facts, role),
            # An error during a disturbance does not count.
            duplicate=again[role] & history.sends.keys(),
            repeats_itself=role == "ordered-push",
        )
        for (role, topic), history in histories_of(facts).items()
    ]


def early_of(facts: Sequence[Fact], role: str, topic: str) -> set[str]:
    """Return the messages that a subscription received before their due time."""
    due = {fact["key"]: fact["due"] for fact in facts if fact["fact"] == "send"}
    return {
        key
        for fact in facts
        if fact["fact"] == "received" and (fact["role"], fact["topic"]) == (role, topic)
        for key in fact["keys"]
        if fact["at"] < due.get(key, 0) * US_PER_MS
    }


def failed_of(facts: Sequence[Fact], role: str) -> list[LostAnswerSpan]:
    """Return the times of lost answers to the receives of a consumer group.

    Causes are a disturbance, an error and the end of the clients.
    """
    last_us = max((fact["at"] for fact in facts if fact["fact"] == "received"), default=0)
    return [
        LostAnswerSpan(fact["begun"] // US_PER_MS, -(-fact["ended"] // US_PER_MS))
        for fact in facts
        if fact["fact"] == DISTURBED
        or (fact["fact"] == "failed" and (fact["during"], fact["role"]) == ("receive", role))
    ] + [LostAnswerSpan(last_us // US_PER_MS + 1, FOREVER_MS)]


if __name__ == "__main__":
    sys.exit(main())
