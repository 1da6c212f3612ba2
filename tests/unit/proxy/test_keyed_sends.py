"""Sends of messages with dedup keys: lookups, proofs, and changes of the topic in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.clocks import ManualClock
from tests.support.worlds.engine_world import blob
from tests.support.worlds.linked_cluster import LinkedCluster
from tidemill.common.errors import KeyOwnerChanged
from tidemill.message.dedup_key import owner_of_key, read_fields
from tidemill.proxy.cluster.linked_group import LinkedGroup
from tidemill.proxy.link.commands import APPEND, LOOK_UP_KEY, Appended, LinkCommand
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.keyed_sends import LOOKUPS_MAX, KeyedSends
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

KEY = "k"
MESSAGE_ID = "id"
MESSAGE = blob("body", message_id=MESSAGE_ID, properties={"dedup-key": KEY})
TURNS_MAX = 100
SOURCES = {
    "property": pb.DEDUP_KEY_SOURCE_PROPERTY,
    "message id": pb.DEDUP_KEY_SOURCE_MESSAGE_ID,
    "either": pb.DEDUP_KEY_SOURCE_PROPERTY_OR_MESSAGE_ID,
}


class Sending:
    """One send. The test answers its requests."""

    def __init__(self, world: LinkedCluster, message: bytes = MESSAGE, key: str = KEY) -> None:
        self.world, self.message = world, message
        self.answered: set[tuple[str, int]] = set()
        owners, topic = world.cluster.key_owners, world.topic
        target = owners.choose(topic, world.cluster.choose_target(topic, ""), key.encode(), "")
        call = Call({}, peer=lambda: "", connection=0, time_remaining_s=None)
        self.result: asyncio.Task[tuple[LinkedGroup, Appended]] = asyncio.ensure_future(
            KeyedSends(world.cluster, ManualClock()).append(
                call, topic, target, message, may_repeat=False
            )
        )

    async def next_request(self, command: LinkCommand[Any, Any]) -> tuple[str, Any]:
        """Return the next request of a command, and its broker group. It is answered next."""
        for _ in range(TURNS_MAX):
            for address, link in self.world.links.items():
                for row in link.batching.rows_of(command):
                    if (address, row[0]) not in self.answered:
                        self.answered.add((address, row[0]))
                        self._link, self._command, self._id = link, command, row[0]
                        return link.configuration.broker_name, row
            await asyncio.sleep(0)
        raise AssertionError(f"no request {command.name}")

    def answer(self, result: Any) -> None:
        self._link.pending.resolve(self._command, [(self._id, result)])

    def fail(self) -> None:
        self._link.pending.fail(self._id, KeyOwnerChanged("another list"))

    async def lookup(self) -> tuple[str, pb.KeyLookup]:
        name, (_, lookup) = await self.next_request(LOOK_UP_KEY)
        return name, lookup

    async def append(self) -> tuple[str, int]:
        """Return the broker group that gets the message, and the version of the proof."""
        name, (_, _, _, _, message, key_version) = await self.next_request(APPEND)
        assert message == self.message
        return name, key_version


def run(scenario: Callable[[LinkedCluster], Awaitable[None]], **fields: Any) -> None:
    """Run `scenario` with a topic. All its keys move from broker-1 to broker-2."""

    async def main() -> None:
        world = LinkedCluster(["h0:1"])
        world.key_placement = pb.KeyPlacement(
            broker_groups=["broker-2"], version=5, before=["broker-1"]
        )
        world.dedup = pb.DedupPolicy(
            window_ms=1_000, mode=pb.DEDUP_MODE_FIRST, key_from=SOURCES["either"]
        )
        world.dedup.MergeFrom(pb.DedupPolicy(**fields))
        world.send_config(0)
        world.send_all_configs()
        async with asyncio.timeout(20):
            await scenario(world)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("source", "message", "key", "is_message_id"),
    [
        ("either", MESSAGE, KEY, False),
        ("property", MESSAGE, KEY, False),
        ("message id", MESSAGE, MESSAGE_ID, True),
        ("either", blob("body", message_id=MESSAGE_ID), MESSAGE_ID, True),
    ],
)
def test_a_moved_key_is_looked_up_before_the_message_is_stored_with_the_proof(
    source: str, message: bytes, key: str, is_message_id: bool
) -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world, message)
        name, lookup = await sending.lookup()
        assert name == "broker-1"
        lookup.ClearField("request_id")
        assert lookup == pb.KeyLookup(
            topic_id=107,
            key=key.encode(),
            body_crc=read_fields(message).body_crc,
            placement=world.key_placement,
            is_message_id=is_message_id,
        )
        sending.answer(pb.KeyLookupReply())
        assert await sending.append() == ("broker-2", 5)
        sending.answer((3, 0, None))
        broker, appended = await sending.result
        assert (broker.name, appended) == ("broker-2", (3, 0, None))

    run(scenario, key_from=SOURCES[source])


def test_a_known_key_gets_the_answer_of_its_old_owner() -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world)
        await sending.lookup()
        first = pb.RepeatedKey(message_id="first")
        sending.answer(pb.KeyLookupReply(repeat=first, queue_offset=3, due_at_ms=4))
        broker, appended = await sending.result
        assert (broker.name, appended) == ("broker-1", (3, 4, first))

    run(scenario)


def test_a_message_that_replaces_a_pending_one_goes_to_the_old_owner() -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world)
        await sending.lookup()
        sending.answer(pb.KeyLookupReply(is_replaceable=True))
        assert await sending.append() == ("broker-1", 0)
        sending.result.cancel()

    run(scenario)


def test_a_key_is_looked_up_again_if_its_pending_message_was_delivered_in_between() -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world)
        for _ in range(2):
            await sending.lookup()
            sending.answer(pb.KeyLookupReply(is_replaceable=True))
            assert await sending.append() == ("broker-1", 0)
            sending.fail()
        await sending.lookup()
        sending.answer(pb.KeyLookupReply())
        assert await sending.append() == ("broker-2", 5)
        sending.answer((3, 0, None))
        assert (await sending.result)[0].name == "broker-2"

    run(scenario)


def test_a_key_is_not_looked_up_without_end() -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world)
        for _ in range(LOOKUPS_MAX):
            await sending.lookup()
            sending.answer(pb.KeyLookupReply(is_replaceable=True))
            await sending.append()
            sending.fail()
        with pytest.raises(AssertionError, match="no request look_up_key"):
            await sending.lookup()
        # It waits for another list.
        assert not sending.result.done()
        world.key_placement.version += 1
        world.send_all_configs()
        await sending.lookup()
        sending.result.cancel()

    run(scenario)


def test_a_key_that_does_not_move_is_not_looked_up() -> None:
    async def scenario(world: LinkedCluster) -> None:
        world.key_placement.before[:] = ["broker-2"]
        world.send_all_configs()
        sending = Sending(world)
        assert await sending.append() == ("broker-2", 0)
        sending.result.cancel()

    run(scenario)


def test_the_key_is_read_again_for_each_list() -> None:
    """`keyFrom` has changed before the list, and a proof is about one key only."""

    async def scenario(world: LinkedCluster) -> None:
        groups = ["broker-1", "broker-2"]
        world.key_placement = pb.KeyPlacement(broker_groups=groups, version=2)
        world.send_all_configs()
        key = next(f"k{n}" for n in range(99) if owner_of_key(b"k%d" % n, groups) == "broker-1")
        id_ = next(f"i{n}" for n in range(99) if owner_of_key(b"i%d" % n, groups) == "broker-2")
        message = blob("body", message_id=id_, properties={"dedup-key": key})
        sending = Sending(world, message, key)
        assert await sending.append() == ("broker-1", 0)
        sending.fail()
        await asyncio.sleep(0)
        assert not sending.result.done()
        assert world.dedup is not None
        world.dedup.key_from = pb.DEDUP_KEY_SOURCE_MESSAGE_ID
        world.topic_version += 1
        world.send_all_configs()
        assert await sending.append() == ("broker-2", 0), "the setting alone has changed"
        sending.fail()
        # A new owner that has the list from a lookup waits for the topic with the same list.
        world.topic_version += 1
        world.send_config(2)
        assert await sending.append() == ("broker-2", 0), "the topic at broker-2 has changed"
        sending.fail()
        await asyncio.sleep(0)
        world.key_placement = pb.KeyPlacement(
            broker_groups=["broker-0"], version=4, before=["broker-2"]
        )
        world.send_all_configs()
        name, lookup = await sending.lookup()
        assert (name, lookup.key, lookup.is_message_id) == ("broker-2", id_.encode(), True)
        sending.answer(pb.KeyLookupReply())
        assert await sending.append() == ("broker-0", 4)
        sending.result.cancel()

    run(scenario)


@pytest.mark.parametrize("is_off", [True, False])
def test_a_message_that_loses_its_key_in_between_is_stored_without_a_lookup(is_off: bool) -> None:
    async def scenario(world: LinkedCluster) -> None:
        sending = Sending(world, blob("body", message_id=MESSAGE_ID), MESSAGE_ID)
        await sending.lookup()
        sending.fail()
        await asyncio.sleep(0)
        if is_off:
            world.dedup = None
            world.key_placement = pb.KeyPlacement(version=6, before=["broker-1", "broker-2"])
        else:
            assert world.dedup is not None
            world.dedup.key_from = pb.DEDUP_KEY_SOURCE_PROPERTY
        world.topic_version += 1
        world.send_all_configs()
        assert await sending.append() == ("broker-2", 0)
        sending.result.cancel()

    run(scenario)


def test_a_lookup_and_its_answer_fit_into_frames() -> None:
    lookup = pb.KeyLookup(request_id=3, topic_id=1, key=b"k", is_message_id=True)
    frame = pb.RequestFrame()
    LOOK_UP_KEY.pack(frame, [(3, lookup)])
    assert list(frame.key_lookups) == [lookup]
    reply = pb.ReplyFrame(key_lookups=[pb.KeyLookupReply(request_id=3, queue_offset=8)])
    [(request_id, result)] = LOOK_UP_KEY.unpack(reply.key_lookups)
    assert (request_id, result.queue_offset) == (3, 8)
    assert LOOK_UP_KEY.may_repeat, "a lookup changes nothing but the list"
