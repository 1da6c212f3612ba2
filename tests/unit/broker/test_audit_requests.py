"""FindAudit and RecordAudit, and the records of changes by requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.audit_changes import AUTHOR, change_of, records_of
from tests.support.security_items import put
from tests.support.worlds.engine_world import blob
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.admin import audit as audit_admin
from tidemill.broker.server.admin.audit import AuditAdmin
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.messages import MessageAdmin
from tidemill.broker.server.admin.security import SecurityAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

Scenario = Callable[[RoundWorld, AuditAdmin], Awaitable[None]]


def run(scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        world = RoundWorld(**options)
        async with asyncio.timeout(20), world.running():
            await scenario(world, AuditAdmin(world.rounds))

    asyncio.run(main())


def author(resource: str, call: str = "PUT /topics/{topic}") -> pb.ChangeAuthor:
    return pb.ChangeAuthor(
        user="ops",
        via="token:ci",
        address="10.1.2.3",
        process="admin-0",
        call=call,
        resource=resource,
        action="Update",
    )


async def put_topic(world: RoundWorld, name: str, **options: Any) -> None:
    await TopicAdmin(world.rounds).PutTopic(
        pb.PutTopicRequest(
            name=name,
            type=pb.TOPIC_TYPE_NORMAL,
            audit=author(f"Topic:{name}"),
            **{"queues": 1, **options},
        )
    )


def sequences(reply: pb.FindAuditReply) -> list[int]:
    return [record.sequence for record in reply.records]


def test_pages_and_filters_select_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_admin, "RECORDS_A_ROUND", 3)

    async def scenario(world: RoundWorld, admin: AuditAdmin) -> None:
        for number in range(10):
            await put_topic(world, f"topic-{number % 5}", queues=1 + number // 5)

        async def find(**wanted: Any) -> pb.FindAuditReply:
            return await admin.FindAudit(pb.FindAuditRequest(**wanted))

        assert sequences(await find()) == list(range(10, 0, -1))
        first = await find(limit=4)
        assert (sequences(first), first.has_more) == ([10, 9, 8, 7], True)
        last = await find(limit=6, before_sequence=7)
        assert (sequences(last), last.has_more) == ([6, 5, 4, 3, 2, 1], False)
        assert sequences(await find(resource="Topic:topic-3")) == [9, 4]
        assert sequences(await find(resource="Topic:topic-*", action="create")) == [5, 4, 3, 2, 1]
        assert sequences(await find(user="other")) == []
        assert sequences(await find(kind="refusal")) == []
        at_ms = first.records[0].at_ms
        assert sequences(await find(from_ms=at_ms + 1)) == []
        assert len(sequences(await find(to_ms=at_ms + 1))) == 10
        monkeypatch.setattr(audit_admin, "PAGE_BYTES_MAX", 1)
        assert (sequences(await find()), (await find()).has_more) == ([10], True)

    run(scenario)


def test_a_request_without_an_author_leaves_no_record() -> None:
    async def scenario(world: RoundWorld, admin: AuditAdmin) -> None:
        topics = TopicAdmin(world.rounds)
        await topics.PutTopic(pb.PutTopicRequest(name="t", type=pb.TOPIC_TYPE_NORMAL, queues=1))
        await put_topic(world, "t", queues=2, dry_run=True)
        assert sequences(await admin.FindAudit(pb.FindAuditRequest())) == []

    run(scenario)


def test_secrets_do_not_reach_the_record() -> None:
    async def scenario(world: RoundWorld, _admin: AuditAdmin) -> None:
        user = {**put("shop"), "user": {"secrets": [{"id": 1, "sealed": "c2VjcmV0"}], "roles": []}}
        request = pb.ChangeSecurityRequest(
            items=[json.dumps(user).encode()], audit=author("User:shop")
        )
        await SecurityAdmin(world.rounds).ChangeSecurity(request)
        [record] = records_of(world.rounds.engine)
        assert (record["action"], record["after"]) == (
            "Create",
            {"secrets": [{"id": 1}], "roles": []},
        )
        assert "c2VjcmV0" not in json.dumps(record)

    run(scenario)


@pytest.mark.parametrize(
    ("delay_ms", "encoded"), [(10**13, blob("m")), (1, blob("m")), (None, b"damaged")]
)
def test_a_rejected_send_creates_no_topic_and_no_record(
    delay_ms: int | None, encoded: bytes
) -> None:
    async def scenario(world: RoundWorld, _admin: AuditAdmin) -> None:
        messages = MessageAdmin(world.rounds, Traffic())
        request = pb.StoreMessageRequest(
            topic="fresh",
            blob=encoded,
            delay_ms=delay_ms,
            audit=author("Topic:fresh", "POST /topics/{topic}/messages"),
        )
        with pytest.raises(RpcError):
            await messages.StoreMessage(request)
        engine = world.rounds.engine
        assert engine.catalog.find_topic("fresh") is None
        assert not records_of(engine)

    run(scenario)


def test_a_reset_has_the_offsets_before_and_after_it() -> None:
    async def scenario(world: RoundWorld, _admin: AuditAdmin) -> None:
        await put_topic(world, "t", queues=2)
        groups = ConsumerGroupAdmin(world.rounds)
        await groups.PutGroup(pb.PutGroupRequest(name="g"))
        request = pb.ResetOffsetRequest(group="g", topic="t", latest=True, audit=author("Group:g"))
        await groups.ResetOffset(request)
        record = records_of(world.rounds.engine)[-1]
        assert record["resource"] == "Group:g"

    run(scenario)


def test_a_repeated_record_of_an_action_is_recorded_once() -> None:
    async def scenario(world: RoundWorld, admin: AuditAdmin) -> None:
        for result in ("begun", "begun", "ok", "ok"):
            await admin.RecordAudit(
                pb.RecordAuditRequest(
                    audit=author("Replica:r"), after=b'{"a":1}', result=result, action_id="7"
                )
            )
        found = [
            (one["result"], one["after"], one["actionId"])
            for one in records_of(world.rounds.engine)
        ]
        assert found == [("begun", {"a": 1}, "7"), ("ok", {"a": 1}, "7")]
        with pytest.raises(RpcError):
            await admin.RecordAudit(pb.RecordAuditRequest(result="ok"))

    run(scenario)


def test_the_author_of_a_change_has_all_fields() -> None:
    assert set(json.loads(change_of("Topic:t").encode())) == {
        name for name, text in AUTHOR.items() if text
    } | {"result"}
