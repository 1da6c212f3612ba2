"""Rounds and links over a real engine: the replies, their order and their receivers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from tests.support.bodies import body_of
from tests.support.disk.quiet import has_pending
from tests.support.worlds.engine_world import GROUP
from tests.support.worlds.packed_worlds import SEGMENT, pack_all, two_topics
from tests.support.worlds.round_world import Proxy, RoundWorld, idle
from tidemill.broker.engine import message_store
from tidemill.broker.engine.engine import Engine
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.engine.layout.pack import EXTENT
from tidemill.broker.engine.metadata.group_pause import GroupPause
from tidemill.broker.engine.timer.firing_clock import HOLD_MS
from tidemill.broker.engine.upkeep import packing
from tidemill.broker.metrics.lag import Lag
from tidemill.broker.metrics.pop_metrics import PopMetrics
from tidemill.broker.metrics.store_metrics import StoreMetrics, TopicSizes
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.link import pops, proxy_link
from tidemill.broker.server.link.pops import ROOM_WAIT_MS
from tidemill.broker.server.round import background_work
from tidemill.broker.server.round.rounds import REFRESH_MS
from tidemill.broker.server.round.turn import Turn
from tidemill.broker.sync_process import SyncFailed
from tidemill.common.errors import Draining, QueryFailed, TopicNotFound
from tidemill.common.metrics import Registry
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def in_world(scenario: Callable[[RoundWorld, Proxy], Awaitable[None]], **limits: int) -> RoundWorld:
    """Run `scenario` with a broker in memory and one proxy."""

    async def main() -> RoundWorld:
        world = RoundWorld(**limits)
        async with world.running(), world.proxy() as proxy:
            await scenario(world, proxy)
        return world

    return asyncio.run(main())


def bodies(reply: pb.PopReply) -> list[str]:
    return [body_of(blob).decode() for batch in reply.batches for blob in batch.blobs]


def test_requests_of_one_frame_share_a_sync_and_a_reply() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        before = world.syncs.count
        await proxy.send(world.append_frame("a", "b", "c"))
        reply = await proxy.reply()
        assert list(reply.appends.request_ids) == [1, 2, 3]
        assert list(reply.appends.queue_offsets) == [0, 1, 2]
        assert world.syncs.count == before + 1

    in_world(scenario)


def test_requests_during_a_hold_are_applied_after_it() -> None:
    """As during a planned transfer, which needs a log that does not grow."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        held = [True]
        world.durability.is_held = lambda: bool(held)
        log_end = world.world.engine.log.log_end
        await proxy.send(world.append_frame("a"))
        await idle()
        assert world.world.engine.log.log_end == log_end
        held.clear()
        world.rounds.wake()
        assert list((await proxy.reply()).appends.request_ids) == [1]

    in_world(scenario)


def test_sends_are_rejected_while_too_few_replicas_are_in_sync() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.world.engine.commands.why_unconfirmed = "too few replicas are in sync"
        log_end = world.world.engine.log.log_end
        await proxy.send(world.append_frame("a"))
        [failure] = (await proxy.reply()).failures
        assert failure.error == "TooFewInSync"
        assert world.world.engine.log.log_end == log_end

    in_world(scenario)


def test_links_learn_at_once_that_sends_are_rejected() -> None:
    """The reply of a refused send would wait for the round before it."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await idle()
        world.rounds.report_rejection("too few replicas are in sync")
        reply = await proxy.reply()
        assert reply.sends_rejected == "too few replicas are in sync"
        assert not reply.appends.request_ids
        world.rounds.report_rejection("")
        reply = await proxy.reply()
        assert (reply.HasField("sends_rejected"), reply.sends_rejected) == (True, "")
        world.syncs.gate.set()
        assert list((await proxy.reply()).appends.request_ids) == [1]

    in_world(scenario)


def test_a_new_link_learns_that_sends_are_rejected() -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        world.world.engine.commands.why_unconfirmed = "its master stood still"
        newer = Proxy(world.rounds, {})
        reading = asyncio.create_task(newer.link.read(newer.frames()))
        assert (await newer.reply()).sends_rejected == "its master stood still"
        reading.cancel()

    in_world(scenario)


def test_a_reply_waits_until_the_request_is_durable() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await proxy.send(world.pop_frame(9))
        await idle()
        assert proxy.replies.empty()
        world.syncs.gate.set()
        assert (await proxy.reply()).appends.request_ids

    in_world(scenario)


def test_requests_during_a_sync_share_the_next_sync() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await idle()
        for n in range(2, 5):
            await proxy.send(world.append_frame(str(n), first_id=n))
            await idle()
        before = world.syncs.count
        world.syncs.gate.set()
        answered = [list((await proxy.reply()).appends.request_ids) for _ in range(4)]
        assert answered == [[1], [2], [3], [4]], "a frame a round, in the order of the log"
        assert world.syncs.count == before + 2

    in_world(scenario)


def test_rounds_are_written_while_another_is_synced() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await idle()
        first_end, written = engine.log.log_end, engine.log.written_bytes
        await proxy.send(world.append_frame("b", first_id=2))
        await idle()
        assert engine.log.log_end > first_end
        assert engine.log.written_bytes > written, "written, and not only applied"
        assert engine.log.committed_offset < first_end
        assert proxy.replies.empty()

    in_world(scenario)


def test_a_round_written_during_a_sync_waits_for_the_next_sync() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await idle()
        await proxy.send(world.append_frame("b", first_id=2))
        await idle()
        world.syncs.let_one_pass()
        await idle()
        assert list((await proxy.reply()).appends.request_ids) == [1]
        assert proxy.replies.empty()

    in_world(scenario)


def test_a_pop_of_an_uncommitted_message_waits_for_both_commits() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as other:
            world.syncs.gate.clear()
            await proxy.send(world.append_frame("a"))
            await idle()
            await other.send(world.pop_frame(9))
            await idle()
            world.syncs.let_one_pass()
            assert (await proxy.reply()).appends.request_ids
            await idle()
            assert other.replies.empty(), "the message is durable, its delivery is not"
            world.syncs.let_one_pass()
            assert bodies((await other.reply()).pops[0]) == ["a"]

    in_world(scenario)


def test_a_round_without_records_waits_for_the_rounds_before_it() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as other:
            world.syncs.gate.clear()
            await proxy.send(world.append_frame("a"))
            await idle()
            await other.send(world.pop_frame(9, tags=("nothing has it",)))
            call = asyncio.ensure_future(
                world.rounds.call(lambda engine, _turn: engine.log.log_end)
            )
            await idle()
            assert other.replies.empty()
            assert not call.done(), "it has read a record that may be lost"
            world.syncs.gate.set()
            assert not (await other.reply()).pops[0].batches
            assert await call == world.world.engine.log.committed_offset

    in_world(scenario)


def test_the_number_of_rounds_in_flight_is_limited() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        for n in range(1, 7):
            await proxy.send(world.append_frame(str(n), first_id=n))
            await idle()
        assert world.rounds.pending_count == 3
        world.syncs.gate.set()
        answered = [list((await proxy.reply()).appends.request_ids) for _ in range(4)]
        assert answered == [[1], [2], [3], [4, 5, 6]]

    in_world(scenario, rounds_max=3)


def test_a_failed_sync_ends_the_rounds_without_a_reply() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        for n in (1, 2):
            await proxy.send(world.append_frame(str(n), first_id=n))
            await idle()
        world.syncs.failure = SyncFailed("the disk is broken")
        world.syncs.gate.set()
        await idle()
        raise AssertionError("the rounds go on")

    async def main() -> None:
        world = RoundWorld()
        async with world.running(), world.proxy() as proxy:
            proxies.append(proxy)
            await scenario(world, proxy)

    proxies: list[Proxy] = []
    with pytest.raises(BaseExceptionGroup) as raised:
        asyncio.run(main())
    assert raised.group_contains(SyncFailed)
    assert not raised.group_contains(AssertionError)
    assert proxies[0].replies.empty()


def test_a_stop_answers_the_rounds_in_flight() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        for n in (1, 2):
            await proxy.send(world.append_frame(str(n), first_id=n))
            await idle()
        await proxy.send(world.append_frame("3", first_id=3))
        await idle()
        world.rounds.stop()
        await idle()
        assert proxy.replies.empty()
        world.syncs.gate.set()
        assert [(await proxy.reply()).appends.request_ids[0] for _ in range(3)] == [1, 2, 3]

    in_world(scenario)


def test_settle_waits_for_the_replies_of_rounds_in_flight() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("a"))
        await idle()
        settling = asyncio.ensure_future(world.rounds.settle())
        await idle()
        assert not settling.done()
        world.syncs.gate.set()
        await settling
        assert list(proxy.replies.get_nowait().appends.request_ids) == [1]

    in_world(scenario)


def test_an_idle_broker_does_one_round_and_one_sync_per_request() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await idle()
        rounds, syncs = world.rounds.count, world.syncs.count
        for n in range(1, 4):
            await proxy.send(world.append_frame("a", first_id=n))
            await proxy.reply()
            await idle()
            assert (world.rounds.count, world.syncs.count) == (rounds + n, syncs + n)

    in_world(scenario)


def test_background_work_continues_under_constant_load() -> None:
    """A checkpoint needs quiet moments, and constant load leaves none."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        world.syncs.turns = 20

        async def send() -> None:
            for request_id in itertools.count(1):
                await proxy.send(world.append_frame("x" * 20_000, first_id=request_id))
                while proxy.requests.qsize():
                    moments.append(has_pending(engine))
                    await asyncio.sleep(0)

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(send())
            while not engine.log.min_offset:
                await proxy.reply()
            sending.cancel()
        assert engine.store.derived_offset >= engine.log.min_offset
        assert moments.count(True) > 0.8 * len(moments), "mostly a round was pending"

    moments: list[bool] = []
    # As at a real broker, a round is a small part of the log between two checkpoints.
    in_world(
        scenario, pending_bytes_max=60_000, checkpoint_log_bytes=4 << 20, retention_bytes=1 << 20
    )


def test_at_most_one_slice_is_done_during_a_sync() -> None:
    """Without a break between slices, the sync process and the receivers of replies lack CPU."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        log, operations = world.world.engine.log, world.world.disk.operations
        world.background_syncs.gate.clear()
        await proxy.send(world.append_frame(*["x" * 60_000] * 60))
        await proxy.reply()
        await idle()
        assert log.needs_preparation, "the first slice is written, and waits for its sync"
        world.syncs.gate.clear()
        began = len(operations)
        await proxy.send(world.append_frame("more", first_id=100))
        world.background_syncs.gate.set()
        await idle()
        written = [one for one in operations[began:] if one.startswith("write log/prepared")]
        assert len(written) <= 1
        assert log.needs_preparation, "nine slices remain"
        world.syncs.gate.set()
        await proxy.reply()
        await idle()
        assert not log.needs_preparation

    in_world(
        scenario, segment_bytes=10 << 20, pending_bytes_max=16 << 20, checkpoint_log_bytes=1 << 30
    )


def test_packs_are_written_at_the_configured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_work, "MADE_UP_S_MAX", 0.0)
    rate_bytes = 400_000

    async def scenario(world: RoundWorld, _: Proxy) -> None:
        engine = world.world.engine
        two_topics(world.world, count=200, kept_size=10_000)
        world.world.purge("gone")
        began_s = time.monotonic()
        async with asyncio.timeout(20):
            while engine.packing.copied_bytes < rate_bytes // 2:
                world.advance(1_000)
                await asyncio.sleep(0.001)
        # The time for the last part follows it.
        copied = engine.packing.copied_bytes
        assert time.monotonic() - began_s >= (copied - SEGMENT) / rate_bytes

    in_world(scenario, segment_bytes=SEGMENT, pack_rate_bytes=rate_bytes)


def test_a_pack_does_not_delay_the_rebuild_of_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consumers wait for a rebuild. It comes after the pack, whose pauses end."""
    monkeypatch.setattr(packing, "SLICE_BYTES", 1_000)
    rate_bytes = 300  # with all pauses the pack takes 40 seconds

    async def scenario(world: RoundWorld, _: Proxy) -> None:
        engine = world.world.engine
        two_topics(world.world, count=300)
        world.world.purge("gone")
        async with asyncio.timeout(20):
            while not engine.packing.copied_bytes:
                world.advance(1_000)
                await asyncio.sleep(0.001)
            damaged = engine.store.queue_files[0]
            engine.store.damaged_files[damaged.name] = damaged
            while engine.store.damaged_files:
                world.advance(1_000)
                await asyncio.sleep(0.001)

    in_world(scenario, segment_bytes=4 * SEGMENT, pack_rate_bytes=rate_bytes)


FIRST_MESSAGES = 50


def test_a_requested_checkpoint_is_written_under_constant_load() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        world.syncs.turns = 20

        async def send() -> None:
            for request_id in itertools.count(1):
                await proxy.send(world.append_frame("x" * 20_000, first_id=request_id))
                await proxy.reply()
                if request_id == FIRST_MESSAGES:
                    has_begun.set()

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            has_begun = asyncio.Event()
            sending = tasks.create_task(send())
            await has_begun.wait()
            begin = engine.log.committed_offset
            assert engine.store.derived_offset < begin
            await world.rounds.write_checkpoint(20)
            assert engine.store.derived_offset >= begin
            sending.cancel()

    in_world(scenario, checkpoint_log_bytes=1 << 30)


def test_a_checkpoint_that_runs_already_is_not_the_requested_one() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        world.background_syncs.gate.clear()
        async with asyncio.timeout(20):
            await world.rounds.write_checkpoint(0.05)  # It begins, and waits for the disk.
            await proxy.send(world.append_frame("b", first_id=2))
            await proxy.reply()
            committed = engine.log.committed_offset
            requested = asyncio.create_task(world.rounds.write_checkpoint(20))
            await idle()
            world.background_syncs.gate.set()
            await requested
        assert engine.store.derived_offset >= committed

    in_world(scenario)


def test_a_requested_checkpoint_is_given_up_in_time() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        world.background_syncs.gate.clear()
        async with asyncio.timeout(20):
            await world.rounds.write_checkpoint(0.05)
        await proxy.send(world.append_frame("b"))
        await proxy.reply()
        world.background_syncs.gate.set()

    in_world(scenario)


def test_a_full_disk_has_no_room_for_a_requested_checkpoint() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        world.world.leave_room(0)
        async with asyncio.timeout(20):
            await world.rounds.write_checkpoint(600)
        assert world.world.engine.store.derived_offset < world.world.engine.log.committed_offset

    in_world(scenario)


def test_messages_deleted_before_the_reply_are_omitted() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        inner = world.world
        inner.send("first")
        inner.send("old", topic="late", size=600_000)
        inner.send("middle", topic="late", size=600_000)
        inner.send("new", topic="late")
        inner.checkpoint()
        inner.engine.take_ready()
        inner.engine.take_config_changes()
        log = inner.engine.log
        assert len(log.segments) == 2
        steps = inner.engine.retention.retire_oldest(inner.now_ms)
        # Until retention has waited for a quiet moment and has cut the first queue.
        while inner.engine.catalog.queue(TopicId(world.topic_id), QueueId(0)).min_offset == 0:
            for file in next(steps):
                file.sync()
            if has_pending(inner.engine):
                inner.commit()
        world.syncs.gate.clear()
        await proxy.send(world.pop_frame(9, topic_id=inner.topic("late")))
        await idle()
        min_offset = log.min_offset
        for files in steps:
            for file in files:
                file.sync()
        assert log.min_offset > min_offset
        world.syncs.gate.set()
        (pop,) = (await proxy.reply()).pops
        assert [text.rstrip(".") for text in bodies(pop)] == ["middle", "new"]
        assert len(pop.batches[0].indexes) == 2

    in_world(scenario)


def test_a_new_message_answers_a_waiting_poll_in_the_same_round() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await idle()
        assert world.polls.count == 1
        await proxy.send(world.append_frame("a"))
        reply = await proxy.reply()
        assert list(reply.appends.request_ids) == [1]
        assert bodies(reply.pops[0]) == ["a"]
        assert world.polls.count == 0

    in_world(scenario)


def test_a_poll_is_answered_empty_at_its_deadline() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await idle()
        world.advance(19_999)
        await idle()
        assert proxy.replies.empty()
        world.advance(1)
        reply = await proxy.reply()
        assert reply.pops[0].request_id == 7
        assert not reply.pops[0].batches

    in_world(scenario)


def test_a_poll_without_a_duration_does_not_wait() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7))
        assert not (await proxy.reply()).pops[0].batches

    in_world(scenario)


def test_a_revived_message_wakes_a_waiting_poll() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.send(world.pop_frame(7))
        first = await proxy.reply()
        if not first.pops:
            first = await proxy.reply()
        await proxy.send(world.pop_frame(8, poll_ms=60_000))
        await idle()
        world.advance(30_000)
        reply = await proxy.reply()
        assert reply.pops[0].request_id == 8
        assert list(reply.pops[0].batches[0].delivery_attempts) == [2]

    in_world(scenario)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_the_end_of_a_pause_answers_a_waiting_poll(*, is_resumed: bool) -> None:
    """The end comes by an operator or by time."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        pause = GroupPause(until_ms=world.clock.wall_ms() + 10_000, by="ops")
        await world.rounds.call(
            lambda engine, turn: engine.group_pauses.put(GROUP, pause, now_ms=turn.now_ms)
        )
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await idle()
        assert world.polls.count == 1
        if is_resumed:
            await world.rounds.call(
                lambda engine, turn: engine.group_pauses.put(GROUP, None, now_ms=turn.now_ms)
            )
        else:
            world.advance(10_000)
        while not (reply := await proxy.reply()).pops:
            pass  # Changes of the configuration.
        assert bodies(reply.pops[0]) == ["a"]

    in_world(scenario)


def test_the_oldest_poll_is_served_first_and_the_others_wait() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        for request_id in (1, 2, 3):
            await proxy.send(world.pop_frame(request_id, poll_ms=20_000, want=1))
        await idle()
        await proxy.send(world.append_frame("a", "b", first_id=10))
        reply = await proxy.reply()
        assert [pop.request_id for pop in reply.pops] == [1, 2]
        assert world.polls.count == 1

    in_world(scenario)


def test_a_cancelled_poll_takes_no_message() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await proxy.send(pb.RequestFrame(cancelled_polls=[7]))
        await proxy.send(world.append_frame("a"))
        assert not (await proxy.reply()).pops
        await proxy.send(world.pop_frame(8))
        assert bodies((await proxy.reply()).pops[0]) == ["a"]

    in_world(scenario)


def test_polls_beyond_the_limit_are_rejected() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        for request_id in (1, 2):
            await proxy.send(world.pop_frame(request_id, poll_ms=20_000))
        failure = (await proxy.reply()).failures[0]
        assert (failure.request_id, failure.error) == (2, "Overloaded")

    in_world(scenario, parked_max=1)


def test_a_rejected_request_does_not_fail_others() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        frame = world.append_frame("a", "b")
        frame.appends.topic_ids[0] = 999
        await proxy.send(frame)
        reply = await proxy.reply()
        assert [(f.request_id, f.error) for f in reply.failures] == [(1, "TopicNotFound")]
        assert list(reply.appends.request_ids) == [2]

    in_world(scenario)


def test_every_link_gets_a_configuration_change() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as other:
            await proxy.send(pb.RequestFrame(ensures=[pb.EnsureRequest(request_id=1, topic="new")]))
            for end in (proxy, other):
                reply = await end.reply()
                assert [topic.name for topic in reply.config.topics] == ["new"]

    in_world(scenario)


def test_a_poll_on_a_deleted_topic_fails() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await idle()
        await world.rounds.call(
            lambda engine, turn: engine.administration.delete_topic("orders", turn.now_ms)
        )
        reply = await proxy.reply()
        assert [(f.request_id, f.error) for f in reply.failures] == [(7, "TopicNotFound")]

    in_world(scenario)


def test_draining_answers_polls_empty_and_rejects_changes() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(7, poll_ms=20_000))
        await idle()
        world.rounds.drain()
        assert not (await proxy.reply()).pops[0].batches
        await proxy.send(world.pop_frame(8, poll_ms=20_000))
        assert not (await proxy.reply()).pops[0].batches
        with pytest.raises(Draining):
            await world.rounds.call(
                lambda engine, turn: engine.administration.delete_topic("orders", turn.now_ms)
            )

    in_world(scenario)


def test_a_call_raises_the_error_of_the_engine() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        def delete(engine: Engine, turn: Turn) -> None:
            engine.administration.delete_topic("unknown", turn.now_ms)

        with pytest.raises(TopicNotFound):
            await world.rounds.call(delete)

    in_world(scenario)


def test_a_cancelled_call_is_not_run() -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        made: list[str] = []

        async def call(name: str) -> None:
            await world.rounds.call(lambda _engine, _turn: made.append(name))

        asked = [asyncio.ensure_future(call(name)) for name in ("cancelled", "waits")]
        await asyncio.sleep(0)  # Both are queued, and no round has begun.
        asked[0].cancel()
        await asked[1]
        assert made == ["waits"]

    in_world(scenario)


def test_a_call_that_fails_without_a_change_does_not_end_the_rounds() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        def look(engine: Engine, _turn: Turn) -> int:
            return len(engine.catalog.topics) // 0

        with pytest.raises(ZeroDivisionError):
            await world.rounds.call(look)
        await proxy.send(world.append_frame("a"))
        assert list((await proxy.reply()).appends.request_ids) == [1], "the rounds go on"

    in_world(scenario)


class UnexpectedError(Exception):
    """An unexpected error."""


def put_and_break(engine: Engine, turn: Turn) -> None:
    engine.administration.put_topic("new", type_=None, queues=1, now_ms=turn.now_ms)
    raise UnexpectedError


def ack_and_break(engine: Engine, turn: Turn) -> None:
    (slot,) = (slot for slot, live in enumerate(engine.state.table.live) if live)
    assert engine.consumption.acks.add_live(slot, 1, turn.now_ms)
    raise UnexpectedError


def read_a_broken_disk(_engine: Engine, _turn: Turn) -> None:
    raise OSError("an error of the disk")


def break_an_invariant(_engine: Engine, _turn: Turn) -> None:
    raise AssertionError("a broken invariant")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (put_and_break, UnexpectedError),
        (ack_and_break, UnexpectedError),
        (read_a_broken_disk, OSError),
        (break_an_invariant, AssertionError),
    ],
)
def test_a_call_that_fails_after_a_change_ends_the_rounds(
    call: Callable[[Engine, Turn], None], error: type[Exception]
) -> None:
    answered: list[object] = []

    async def main() -> None:
        world = RoundWorld()
        world.world.send("a", topic="popped")
        world.world.pop(topic="popped")
        async with world.running():
            with contextlib.suppress(error):
                await world.rounds.call(call)
            answered.append(await world.rounds.call(lambda _engine, _turn: "the rounds go on"))

    async def in_time() -> None:
        async with asyncio.timeout(20):
            await main()

    with pytest.raises(BaseExceptionGroup) as raised:
        asyncio.run(in_time())
    assert raised.group_contains(error)
    assert not answered


@pytest.mark.parametrize("read", [read_a_broken_disk, break_an_invariant])
def test_a_read_that_fails_unexpectedly_fails_alone(read: Callable[[Engine, Turn], None]) -> None:
    async def scenario(world: RoundWorld, _proxy: Proxy) -> None:
        with pytest.raises(QueryFailed, match="its log has it"):
            await world.rounds.read(read)
        assert world.rounds.failed_read_count == 1
        with pytest.raises(TopicNotFound):
            await world.rounds.read(find_no_topic)
        assert world.rounds.failed_read_count == 1, "an expected error is no failure"
        assert await world.rounds.call(lambda _engine, _turn: "the rounds go on")

    in_world(scenario)


def find_no_topic(_engine: Engine, _turn: Turn) -> None:
    raise TopicNotFound("there is none")


@pytest.mark.parametrize("call", [put_and_break, ack_and_break])
def test_a_read_that_changes_the_state_ends_the_rounds(
    call: Callable[[Engine, Turn], None],
) -> None:
    async def main() -> None:
        world = RoundWorld()
        world.world.send("a", topic="popped")
        world.world.pop(topic="popped")
        async with asyncio.timeout(20), world.running():
            with contextlib.suppress(UnexpectedError):
                await world.rounds.read(call)
            await world.rounds.call(lambda _engine, _turn: None)

    with pytest.raises(BaseExceptionGroup) as raised:
        asyncio.run(main())
    assert raised.group_contains(UnexpectedError)


def test_an_idle_loop_does_no_round() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await idle()
        count = world.rounds.count
        await idle()
        assert world.rounds.count == count

    in_world(scenario)


def test_a_frame_waits_while_too_many_bytes_are_queued() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("first"))
        await idle()
        for n in range(2, 6):
            await proxy.send(world.append_frame("x" * 400, first_id=n))
        await idle()
        assert 0 < world.rounds.pending_count < 4
        world.syncs.gate.set()
        answered: list[int] = []
        while len(answered) < 5:
            answered.extend((await proxy.reply()).appends.request_ids)
        assert answered == [1, 2, 3, 4, 5]

    in_world(scenario, pending_bytes_max=1_200, rounds_max=1)


def test_popped_messages_are_given_back_if_the_link_ends_during_the_sync() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        world.syncs.gate.clear()
        await proxy.send(world.pop_frame(9))
        await idle()
        proxy.link.end()
        world.syncs.gate.set()
        await idle()
        async with world.proxy() as other:
            await other.send(world.pop_frame(10, poll_ms=20_000))
            await idle()
            assert other.replies.empty()
            world.advance(1_001)
            (pop,) = (await other.reply()).pops
            assert bodies(pop) == ["a"]
            assert list(pop.batches[0].delivery_attempts) == [1], "no consumer has received it"

    in_world(scenario)


def test_unsent_messages_of_an_ended_link_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_link, "REPLY_FRAME_BYTES", 1)  # so that each pop is a frame

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a", "b", "c"))
        await proxy.reply()
        write = proxy.write

        def write_and_break(message: bytes) -> None:
            write(message)
            proxy.link.end()

        monkeypatch.setattr(proxy, "write", write_and_break)
        frame = world.pop_frame(1, want=1)
        for request_id in (2, 3):
            frame.pops.add().CopyFrom(frame.pops[0])
            frame.pops[-1].request_id = request_id
        await proxy.send(frame)
        assert bodies((await proxy.reply()).pops[0]) == ["a"]
        await idle()
        async with world.proxy() as other:
            world.advance(1_001)
            await idle()
            assert (await other.reply()).config.topics, "the retry topic"
            await other.send(world.pop_frame(10, want=3))
            assert sorted(bodies((await other.reply()).pops[0])) == ["b", "c"]

    in_world(scenario)


def test_unsent_messages_are_given_back_before_a_stop() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        world.syncs.gate.clear()
        await proxy.send(world.pop_frame(9))
        await idle()
        proxy.link.end()
        world.rounds.stop()

    world = in_world(scenario)
    assert world.rounds.pending_count == 0
    engine, now_ms = world.world.engine, world.clock.wall_ms() + 1_001
    engine.run_due(now_ms, firing_ms=now_ms)
    (batch,) = engine.commands.pop(
        GroupId(world.group_id),
        TopicId(world.topic_id),
        max_messages=1,
        invisible_duration_ms=10_000,
        attempt_id="",
        now_ms=now_ms,
    )
    assert list(batch.delivery_attempts) == [1]


def introduction(number: int) -> pb.RequestFrame:
    return pb.RequestFrame(process_id=b"one proxy", stream_number=number)


@pytest.mark.parametrize("is_late", [False, True])
def test_late_requests_on_an_older_stream_of_a_proxy_are_dropped(*, is_late: bool) -> None:
    """The proxy repeats them on the newer stream, which may introduce itself first."""

    async def scenario(world: RoundWorld, old: Proxy) -> None:
        if not is_late:
            await old.send(introduction(1))
        async with world.proxy() as new:
            await new.send(introduction(2))
            again = world.append_frame("a", "b")
            again.repeated_ids.extend([1, 2])
            await new.send(again)
            assert list((await new.reply()).appends.queue_offsets) == [0, 1]
            if is_late:
                await old.send(introduction(1))
            await old.send(world.append_frame("a", "b"))
            await idle()
            assert old.replies.empty()
            await new.send(world.pop_frame(3))
            (pop,) = (await new.reply()).pops
            assert bodies(pop) == ["a", "b"]

    in_world(scenario)


def test_polls_of_an_older_stream_take_no_message() -> None:
    async def scenario(world: RoundWorld, old: Proxy) -> None:
        await old.send(introduction(1))
        await old.send(world.pop_frame(1, poll_ms=10_000))
        await idle()
        async with world.proxy() as new, world.proxy() as other:
            await new.send(introduction(2))
            await new.send(world.pop_frame(1, poll_ms=10_000))
            await idle()
            assert world.polls.count == 1
            await other.send(world.append_frame("a"))
            (pop,) = (await new.reply()).pops
            assert bodies(pop) == ["a"]
            assert old.replies.empty()

    in_world(scenario)


def test_only_unread_messages_of_an_ended_link_are_given_back() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        async with world.proxy() as ended:
            await ended.send(world.append_frame("sent"))
            await ended.reply()
            await ended.send(world.pop_frame(2))
            await ended.reply()
            await ended.send(world.append_frame("unsent"))
            await ended.reply()
            ended.unsent_bytes = 10_000  # From here on it reads nothing.
            await ended.send(world.pop_frame(4))
            await idle()
        await idle()
        world.advance(1_001)
        await idle()
        await proxy.send(world.pop_frame(1))
        while not (pops := (await proxy.reply()).pops):
            pass  # The first frame is about the retry topic.
        (pop,) = pops
        assert bodies(pop) == ["unsent"]
        assert list(pop.batches[0].delivery_attempts) == [1]

    in_world(scenario)


def test_an_older_pop_gets_the_room_on_the_link_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a", "b", "c", "d"))
        await proxy.reply()
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 100)
        proxy.unsent_bytes = 100
        proxy.is_read.clear()
        await proxy.send(world.pop_frame(5, poll_ms=10_000, want=1))
        await idle()
        proxy.unsent_bytes = 50  # There is room, and an older pop waits for it.
        await proxy.send(world.pop_frame(6, poll_ms=10_000, want=1))
        await idle()
        assert proxy.replies.empty()
        proxy.unsent_bytes = 0
        proxy.is_read.set()
        (pop,) = (await proxy.reply()).pops
        assert (pop.request_id, bodies(pop)) == (5, ["a"])

    in_world(scenario)


def test_a_poll_that_waits_for_a_message_ends_empty_on_a_full_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(1, poll_ms=5_000, tags=("none",)))
        await idle()
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 0)
        proxy.is_read.clear()
        await proxy.send(world.pop_frame(2, poll_ms=60_000, tags=("other",)))
        await idle()
        world.advance(5_000)
        await idle()
        reply = await proxy.reply()
        assert [(pop.request_id, bodies(pop)) for pop in reply.pops] == [(1, [])]
        assert not reply.failures

    in_world(scenario)


def test_a_repeated_send_that_cannot_be_searched_has_an_unknown_outcome() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        frame = world.append_frame(*["same id"] * (message_store.SENT_MATCHES_MAX + 1))
        await proxy.send(frame)
        await proxy.reply()
        again = world.append_frame("same id", tag="another", first_id=100)
        again.repeated_ids.append(100)
        await proxy.send(again)
        (failure,) = (await proxy.reply()).failures
        assert (failure.request_id, failure.error) == (100, "BrokerTimeout")

    in_world(scenario)


def test_a_pop_waits_while_its_link_is_full() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.pop_frame(1, poll_ms=10_000))
        await idle()
        proxy.unsent_bytes = pops.UNSENT_POPS_BYTES_MAX
        proxy.is_read.clear()
        async with world.proxy() as other:
            await other.send(world.pop_frame(1, poll_ms=10_000, want=1))
            await other.send(world.append_frame("a", "b", first_id=2))
            (pop,) = (await other.reply()).pops
            assert bodies(pop) == ["a"], "another proxy's poll is served"
        await idle()
        assert proxy.replies.empty()
        proxy.unsent_bytes = 0
        proxy.is_read.set()
        (pop,) = (await proxy.reply()).pops
        assert bodies(pop) == ["b"], "as soon as the proxy has read"

    in_world(scenario)


def test_a_wait_for_room_ends_with_the_poll_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 0)
        proxy.is_read.clear()
        await proxy.send(world.pop_frame(1, poll_ms=10_000))
        await idle()
        assert proxy.replies.empty()
        world.advance(10_000)
        await idle()
        # Not empty, because a message is there.
        (failure,) = (await proxy.reply()).failures
        assert (failure.request_id, failure.error) == (1, "Overloaded")

    in_world(scenario)


def test_a_pop_without_a_duration_waits_shortly_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 0)
        proxy.is_read.clear()
        await proxy.send(world.pop_frame(1))
        await idle()
        assert proxy.replies.empty()
        monkeypatch.undo()
        proxy.is_read.set()
        (pop,) = (await proxy.reply()).pops
        assert bodies(pop) == ["a"]

    in_world(scenario)


def test_a_pop_without_a_duration_is_rejected_if_the_link_stays_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 0)
        proxy.is_read.clear()
        await proxy.send(world.pop_frame(1))
        await idle()
        world.advance(ROOM_WAIT_MS)
        await idle()
        (failure,) = (await proxy.reply()).failures
        assert (failure.request_id, failure.error) == (1, "Overloaded")

    in_world(scenario)


def test_polls_of_one_frame_get_their_messages_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 100)  # room for one message
        await proxy.send(world.append_frame("a", "b", "c"))
        await proxy.reply()
        frame = world.pop_frame(1, poll_ms=10_000, want=1)
        for request_id in (2, 3):
            frame.pops.add().CopyFrom(frame.pops[0])
            frame.pops[-1].request_id = request_id
        await proxy.send(frame)
        answers: list[list[str]] = []
        while len(answers) < 3:
            reply = await proxy.reply()
            assert not reply.failures
            answers += [bodies(pop) for pop in reply.pops]
        assert answers == [["a"], ["b"], ["c"]]

    in_world(scenario)


def test_the_bytes_of_the_pops_of_one_frame_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a", "b", "c"))
        await proxy.reply()
        monkeypatch.setattr(pops, "UNSENT_POPS_BYTES_MAX", 200)
        frame = world.pop_frame(1, want=1)
        for request_id in (2, 3):
            frame.pops.add().CopyFrom(frame.pops[0])
            frame.pops[-1].request_id = request_id
        await proxy.send(frame)
        reply = await proxy.reply()
        assert [bodies(pop) for pop in reply.pops] == [["a"], ["b"]]
        (pop,) = (await proxy.reply()).pops
        assert bodies(pop) == ["c"], "in the next round"

    in_world(scenario)


def test_a_jump_of_the_clock_does_not_end_an_invisible_duration() -> None:
    """The new time counts after ten seconds; then all due invisible durations end."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        await proxy.send(world.append_frame("a"))
        await proxy.reply()
        await proxy.send(world.pop_frame(2))
        assert bodies((await proxy.reply()).pops[0]) == ["a"]
        world.clock.step(3_600_000)
        world.advance(1)
        await idle()
        await proxy.send(world.pop_frame(3))
        assert not (await proxy.reply()).pops[0].batches
        world.advance(HOLD_MS)
        await idle()
        await proxy.send(world.pop_frame(4))
        reply = await proxy.reply()
        if not reply.pops:
            reply = await proxy.reply()  # The previous frame was about the retry topic.
        assert bodies(reply.pops[0]) == ["a"]

    in_world(scenario)


def test_a_damaged_message_is_omitted_counted_and_logged() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine, disk = world.world.engine, world.world.disk
        await proxy.send(world.append_frame("a", "b", "c"))
        await proxy.reply()
        queue = engine.catalog.queue(TopicId(world.topic_id), QueueId(0))
        disk.damage(disk.names("log")[0], queue.entry(1)[0])
        with capture_logs() as logs:
            await proxy.send(world.pop_frame(9))
            assert bodies((await proxy.reply()).pops[0]) == ["a", "c"]
            await idle()
            dead = engine.catalog.find_topic("%DLQ%billing")
            assert dead is not None, "the next round dead-letters it without a request"
            assert has_pending(engine) is False
            world.advance(REFRESH_MS)
            await idle()
        assert [topic.name for topic in (await proxy.reply()).config.topics] == [dead.name]
        (line,) = [line for line in logs if line["log_level"] == "error"]
        assert (line["topic"], line["queue_offset"]) == ("orders", 1)
        await proxy.send(world.pop_frame(10, topic_id=dead.id))
        assert bodies((await proxy.reply()).pops[0]) == [""]

    in_world(scenario)


def test_a_poll_waits_for_the_rebuild_of_a_damaged_queue_file() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine, disk = world.world.engine, world.world.disk
        await proxy.send(world.append_frame("a", "b"))
        await proxy.reply()
        world.world.checkpoint()
        (name,) = disk.names("queues")
        disk.damage(name, len(disk.read(name) or b"") - 1)
        with capture_logs() as logs:
            await proxy.send(world.pop_frame(9, poll_ms=20_000))
            assert bodies((await proxy.reply()).pops[0]) == ["a", "b"]
            world.advance(REFRESH_MS)
            await idle()
        assert [line["file"] for line in logs if line["log_level"] == "warning"] == [name]
        assert engine.rebuilds.counts["queues"] == 1

    in_world(scenario)


def test_a_poll_waits_for_the_directory_of_a_pack() -> None:
    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        engine = world.world.engine
        for n in range(40):
            world.world.send(f"m{n}", size=500)
            world.world.send("gone", topic="gone", size=3_000)
        world.world.checkpoint()
        world.world.purge("gone")
        assert pack_all(world.world)
        pack = engine.log.segments[0].pack
        assert pack is not None
        end = pack.header.records_end + EXTENT.size * pack.header.extent_count
        world.world.disk.damage(engine.log.segments[0].name, end - 1)
        await proxy.send(world.pop_frame(9, poll_ms=20_000))
        found: list[str] = []
        while len(found) < 40:
            for popped in (await proxy.reply()).pops:
                found += [body.rstrip(".") for body in bodies(popped)]
                await proxy.send(world.pop_frame(9 + len(found), poll_ms=20_000))
        assert {*found} == {f"m{n}" for n in range(40)}
        assert pack.is_derived

    in_world(scenario, segment_bytes=64 << 10, checkpoint_log_bytes=64 << 10)


def test_damage_is_counted() -> None:
    world = RoundWorld()
    traffic = Traffic()
    traffic.polled(TopicId(world.topic_id), GroupId(world.group_id))
    registry = Registry(cluster="test", node_type="broker", node_id="broker-0")
    PopMetrics(registry, traffic, Lag(), world.rounds)
    StoreMetrics(registry, TopicSizes(), world.rounds)
    world.world.engine.rebuilds.counts["index"] += 3
    world.world.engine.store.damaged_count += 1
    world.world.engine.state.counts["damaged", world.group_id, world.topic_id] += 2
    found = {
        (sample.name, tuple(sample.labels.get(at) for at in ("folder", "topic", "file"))): (
            sample.value
        )
        for metric in registry.collect()
        for sample in metric.samples
    }
    assert found["rocketmq_storage_repaired_files_total", ("queues", None, None)] == 0
    assert found["rocketmq_storage_repaired_files_total", ("index", None, None)] == 3
    assert found["rocketmq_storage_corrupt_records_total", (None, None, "log")] == 1
    assert found["rocketmq_storage_corrupt_records_total", (None, None, "index")] == 3
    assert found["rocketmq_damaged_messages_total", (None, "orders", None)] == 2


def test_one_slow_sync_does_not_stop_the_background_work() -> None:
    """The break of the background ends without another round, too."""

    async def scenario(world: RoundWorld, proxy: Proxy) -> None:
        log = world.world.engine.log
        world.background_syncs.gate.clear()
        await proxy.send(world.append_frame(*["x" * 60_000] * 60))
        await proxy.reply()
        await idle()
        assert log.needs_preparation
        world.syncs.gate.clear()
        await proxy.send(world.append_frame("more", first_id=100))
        await idle()
        world.background_syncs.gate.set()
        try:
            async with asyncio.timeout(20):
                while log.needs_preparation:
                    world.clock.advance(5)
                    await asyncio.sleep(0)
        finally:
            world.syncs.gate.set()

    in_world(
        scenario, segment_bytes=10 << 20, pending_bytes_max=16 << 20, checkpoint_log_bytes=1 << 30
    )
