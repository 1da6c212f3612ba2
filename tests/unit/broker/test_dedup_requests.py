"""Dedup keys through the link and the admin calls of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tests.support.audit_changes import records_of
from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.metadata.dedup_policy import DEDUP_LEVEL
from tidemill.broker.server.admin.dedup_keys import DedupAdmin
from tidemill.broker.server.round.rpc import ERROR_KEY
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

AUTHOR = pb.ChangeAuthor(user="ops", call="DELETE /topics/{topic}/dedup/{key}", action="Delete")


class DedupRounds(RoundWorld):
    """A broker in memory with a topic that has dedup keys."""

    world_type = DedupWorld

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.world, DedupWorld)
        self.keyed = self.world
        self.keyed.turn_on()
        self.admin = DedupAdmin(self.rounds)


async def error_of(call: Awaitable[object]) -> str:
    with pytest.raises(RpcError) as failed:
        await call
    return dict(failed.value.trailers)[ERROR_KEY]


def test_repeat_waits_for_the_first_commit() -> None:
    async def run() -> None:
        world = DedupRounds()
        world.syncs.gate.clear()
        async with world.running(), world.proxy() as proxy:
            await proxy.send(world.append_frame("a", first_id=1))
            await idle()
            await proxy.send(world.append_frame("a", first_id=2))
            await idle()
            assert proxy.replies.empty(), "nothing is durable"
            world.syncs.gate.set()
            appends = [(await proxy.reply()).appends for _ in range(2)]
            assert [list(one.request_ids) for one in appends] == [[1], [2]]
            assert [list(one.queue_offsets) for one in appends] == [[0], [0]]
            [repeat] = appends[1].repeats
            assert (repeat.request_id, repeat.message_id) == (2, "id-a")
            assert world.world.engine.deduplication.hits[world.topic_id, "in_flight"] == 1
            assert not appends[0].repeats

    asyncio.run(run())


def test_a_repeated_request_of_a_lost_link_is_found_by_its_key() -> None:
    async def run() -> None:
        world = DedupRounds()
        async with world.running(), world.proxy() as proxy:
            await proxy.send(world.append_frame("a", first_id=1))
            await proxy.reply()
            again = world.append_frame("a", first_id=2)
            again.repeated_ids.append(2)
            await proxy.send(again)
            [repeat] = (await proxy.reply()).appends.repeats
            assert repeat.message_id == "id-a"

    asyncio.run(run())


def test_a_repeated_request_of_a_lost_link_is_found_after_the_window_of_its_key() -> None:
    async def run() -> None:
        world = DedupRounds()
        world.keyed.turn_on(window_ms=1_000)
        async with world.running(), world.proxy() as proxy:
            await proxy.send(world.append_frame("a", first_id=1))
            await proxy.reply()
            world.clock.advance(1_000)
            again = world.append_frame("a", first_id=2)
            again.repeated_ids.append(2)
            await proxy.send(again)
            assert list((await proxy.reply()).appends.queue_offsets) == [0]
            # A new request with the same key is a new message.
            await proxy.send(world.append_frame("a", first_id=3))
            assert list((await proxy.reply()).appends.queue_offsets) == [1]

    asyncio.run(run())


@pytest.mark.parametrize("is_message_id", [True, False])
def test_a_lookup_finds_a_key_of_its_origin(is_message_id: bool) -> None:
    async def run() -> None:
        world = DedupRounds()
        due_at_ms = world.world.now_ms + 60_000
        if is_message_id:
            sent = world.keyed.store("a", message_id="k", due_at_ms=due_at_ms)
        else:
            sent = world.keyed.store("a", key="k", due_at_ms=due_at_ms)
        topic = world.world.engine.catalog.topics[world.topic_id]
        lookups = [
            pb.KeyLookup(
                request_id=n,
                topic_id=topic.id,
                key=b"k",
                placement=pb.KeyPlacement(version=version),
                is_message_id=of_id,
            )
            for n, (of_id, version) in enumerate(
                [
                    (is_message_id, topic.placement.version),
                    (not is_message_id, topic.placement.version),
                    (is_message_id, topic.placement.version - 1),
                ]
            )
        ]
        lookups.append(pb.KeyLookup(request_id=3, topic_id=topic.id))
        lookups.append(pb.KeyLookup(request_id=4, topic_id=99, key=b"k"))
        async with world.running(), world.proxy() as proxy:
            await proxy.send(pb.RequestFrame(key_lookups=lookups))
            reply = await proxy.reply()
        known, unknown = reply.key_lookups
        assert (known.request_id, known.repeat.message_id) == (0, sent.message_id)
        assert (known.queue_offset, known.due_at_ms) == (sent.queue_offset, sent.due_at_ms)
        assert unknown == pb.KeyLookupReply(request_id=1)
        errors = {one.request_id: one.error for one in reply.failures}
        assert errors == {2: "KeyOwnerChanged", 3: "BadRequest", 4: "TopicNotFound"}

    asyncio.run(run())


def test_the_keys_of_a_topic_are_shown() -> None:
    async def run() -> None:
        world = DedupRounds()
        world.keyed.store("a", key="k")
        world.keyed.repeat("b", key="k")
        async with world.running():
            shown = await world.admin.GetDedup(pb.GetDedupRequest(topic=TOPIC))
            assert (shown.keys, shown.hits, shown.mismatches) == (1, 1, 1)
            assert 0 < shown.memory_bytes < shown.memory_bytes_max
            one = await world.admin.GetDedupKey(pb.GetDedupKeyRequest(topic=TOPIC, key="k"))
            assert (one.message_id, one.stored_at_ms) == ("id-a", world.world.now_ms)
            assert one.window_end_ms == world.world.now_ms + WINDOW_MS
            missing = world.admin.GetDedupKey(pb.GetDedupKeyRequest(topic=TOPIC, key="x"))
            assert await error_of(missing) == "DedupKeyNotFound"

    asyncio.run(run())


def test_a_freed_key_is_stored_again_and_audited() -> None:
    async def run() -> None:
        world = DedupRounds()
        world.keyed.store("a", key="k")
        pending = world.keyed.store("b", key="later", due_at_ms=world.world.now_ms + 60_000)

        def free(key: str, *, is_dry: bool = False) -> Awaitable[pb.DedupKeyStatus]:
            return world.admin.FreeDedupKey(
                pb.FreeDedupKeyRequest(topic=TOPIC, key=key, dry_run=is_dry, audit=AUTHOR)
            )

        async with world.running():
            assert (await free("k", is_dry=True)).message_id == "id-a"
            assert (await free("k")).message_id == "id-a"
            assert await error_of(free("k")) == "DedupKeyNotFound"
            assert await error_of(free("later")) == "Conflict"
        [record] = records_of(world.world.engine)
        assert record["call"] == AUTHOR.call
        assert (record["before"]["key"], record["before"]["messageId"]) == ("k", "id-a")
        world.keyed.store("c", key="k")
        world.keyed.restart()
        world.keyed.repeat("d", key="k")
        world.keyed.cancel(pending.queue_offset)

    asyncio.run(run())


def test_a_topic_without_deduplication_has_no_keys() -> None:
    async def run() -> None:
        world = DedupRounds()
        world.keyed.turn_off()
        async with world.running():
            request = world.admin.GetDedup(pb.GetDedupRequest(topic=TOPIC))
            assert await error_of(request) == "Conflict"

    asyncio.run(run())


def test_the_broker_groups_that_may_still_know_keys_are_named() -> None:
    async def run() -> None:
        world = DedupRounds()
        own_name = world.world.engine.catalog.broker_name
        groups = {name: f"{name}:1" for name in (own_name, "b1")}
        world.world.engine.broker_groups.found(groups, world.world.now_ms)
        world.keyed.turn_off()
        world.world.engine.broker_groups.feature_levels["b1"] = DEDUP_LEVEL
        world.keyed.turn_on()
        world.keyed.turn_off()
        async with world.running():
            with pytest.raises(RpcError, match="when b1 has received that it is off"):
                await world.admin.GetDedup(pb.GetDedupRequest(topic=TOPIC))

    asyncio.run(run())
