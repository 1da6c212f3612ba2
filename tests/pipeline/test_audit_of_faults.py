"""The audit of client reports about a fault, on events of a real broker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.audit import audited
from tests.chaos.figures import DISTURBED
from tests.support.clients.api import api, message
from tests.support.clients.history_against_audit import Comparison
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROLES = ("simple", "push")
SENT = 20


def now_us() -> int:
    return time.time_ns() // 1000


async def facts_of(running: Standalone) -> list[dict[str, Any]]:
    """Send, receive and ack like the clients of a fault, and return their reports."""
    facts: list[dict[str, Any]] = []
    async with api(running.grpc) as client:
        for n in range(SENT):
            key, begun = f"fault/normal/{n}", now_us()
            answer = await client.send(message("normal", key.encode(), message_id=f"id-{n}"))
            assert answer.status.code == v2.OK
            facts.append(
                {
                    "fact": "send",
                    "key": key,
                    "topic": "normal",
                    "group": "",
                    "due": 0,
                    "begun": begun,
                    "ended": now_us(),
                    "error": "",
                }
            )
        for role in ROLES:
            left = SENT
            while left:
                got = await client.receive("normal", role, poll_ms=5_000)
                keys = [each.body.decode() for each in got]
                attempts = [each.system_properties.delivery_attempt for each in got]
                facts.append(
                    {
                        "fact": "received",
                        "role": role,
                        "topic": "normal",
                        "keys": keys,
                        "attempts": attempts,
                        "at": now_us(),
                    }
                )
                begun = now_us()
                await client.ack(
                    "normal", role, [each.system_properties.receipt_handle for each in got]
                )
                facts += [
                    {
                        "fact": "ack",
                        "role": role,
                        "topic": "normal",
                        "key": key,
                        "attempt": attempt,
                        "begun": begun,
                        "ended": now_us(),
                        "error": "",
                    }
                    for key, attempt in zip(keys, attempts, strict=True)
                ]
                left -= len(got)
    return facts


def disturbance_of(fact: dict[str, Any]) -> dict[str, Any]:
    begun = fact["at"] - 1_000_000
    return {"fact": DISTURBED, "what": "a kill", "begun": begun, "ended": fact["at"], "fails": []}


def test_client_histories_agree_with_the_audit_and_a_forged_entry_differs(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as running:
        for topic, kind in (("normal", "NORMAL"), ("delayed", "DELAY"), ("ordered", "FIFO")):
            running.put(f"topics/{topic}", messageType=kind, queues=2)
        facts = asyncio.run(facts_of(running))
        # The client reports an ack for a message that was never stored: both audits name it.
        phantom = facts[0] | {"key": "fault/normal/phantom", "ended": now_us()}
        whole = audited(
            spark,
            [*facts, phantom],
            to=str(tmp_path / "whole"),
            connection={"endpoints": running.grpc},
        )
        assert whole == Comparison(differences=[], lost_answers=[])
        # A client does not report a delivery: the audit counts the answer as lost in a disturbance.
        silent = next(fact for fact in facts if fact["fact"] == "received")
        reported = [fact for fact in facts if fact is not silent]
        judged = [
            audited(spark, facts, to=str(tmp_path / name), connection={"endpoints": running.grpc})
            for name, facts in (("lie", reported), ("loss", [*reported, disturbance_of(silent)]))
        ]
    lie, loss = judged
    assert (len(lie.differences), lie.lost_answers) == (len(silent["keys"]), [])
    assert (loss.differences, len(loss.lost_answers)) == ([], len(silent["keys"]))
