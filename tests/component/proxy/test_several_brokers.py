"""Receives at several brokers: a consumer gets the messages of every broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    eventually,
    message,
    receive_request,
)
from tests.support.worlds.several_brokers import SeveralBrokers, run
from tidemill.proxy.polling.shell import MultiBrokerReceive
from tidemill.proxy.server.call import Call
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.grpc.connection_memory import SMALL_REPLY_BYTES

POLL_MS = 20_000  # longer than a scenario: no test waits for its end


def poll(world: SeveralBrokers, *, poll_ms: int = POLL_MS) -> asyncio.Task[list[str]]:
    """Begin to receive. Return the bodies or the name of the status."""

    async def receiving() -> list[str]:
        items = await world.receive(receive_request(poll_ms=poll_ms))
        bodies = [item.message.body.decode() for item in items if item.HasField("message")]
        statuses = [item.status.code for item in items if item.HasField("status")]
        return bodies or [v2.Code.Name(statuses[0])]

    return asyncio.create_task(receiving())


async def ended(*polls: Awaitable[list[str]]) -> list[str]:
    return sorted(text for texts in await asyncio.gather(*polls) for text in texts)


def of(*labels: str) -> frozenset[str]:
    """Return the labels of a sample of this consumer group and topic."""
    return frozenset({"topic", "group", *labels})


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_waiting_consumer_gets_a_message_of_any_broker_at_once(at: int) -> None:
    async def scenario(world: SeveralBrokers) -> None:
        waiting = poll(world)
        await world.until_asked()
        world.send(at, "a")
        assert await waiting == ["a"]

    run(scenario)


def test_an_existing_message_is_found_at_any_broker() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for n in range(3):
            world.send(n, f"m{n}")
        found = [await poll(world) for _ in range(3)]
        assert sorted(text for texts in found for text in texts) == ["m0", "m1", "m2"]

    run(scenario)


def test_polls_of_one_proxy_share_one_notification_per_broker() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        polls = [poll(world) for _ in range(20)]
        await eventually(lambda: sum(b.count_of("pops") for b in world.brokers) == 20)
        await world.until_asked()
        await eventually(lambda: world.polling.counts.inflight["notify"] == 20)
        assert [broker.count_of("notifications") for broker in world.brokers] == [1, 1, 1]
        for n in range(20):
            world.send(n % 3, f"m{n:02}")
        # One poll may get several messages; the other polls continue to wait.
        done, waiting = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        await eventually(lambda: sum(len(one.result()) for one in polls if one.done()) == 20)
        for one in waiting:
            one.cancel()
        assert done

    run(scenario)


def test_a_poll_without_a_wait_pops_at_every_broker_once() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        assert await poll(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        assert [broker.count_of("pops") for broker in world.brokers] == [1, 1, 1]
        assert [broker.count_of("notifications") for broker in world.brokers] == [0, 0, 0]
        for n in range(3):
            world.send(n, "a")
            assert await poll(world, poll_ms=0) == ["a"]

    run(scenario)


def test_messages_popped_for_a_disconnected_consumer_go_back() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        waiting = poll(world)
        await world.until_asked()
        world.brokers[1].holds.add("pop")
        popped = world.brokers[1].count_of("pops")
        world.send(1, "a")
        await eventually(lambda: world.brokers[1].count_of("pops") == popped + 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        held = [frame.pops[0] for frame in world.brokers[1].frames if frame.pops][-1]
        world.brokers[1].holds.clear()
        world.brokers[1].answer_late(held)
        await eventually(lambda: world.brokers[1].count_of("changes") == 1)
        assert world.metrics.messages_returned == 1
        assert not world.polling._receives
        assert world.polling.counts.receives["topic", "group", "notify", "cancelled"] == 1

    run(scenario)


def test_a_lost_broker_is_skipped_and_asked_when_it_reconnects() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        waiting = poll(world)
        await world.until_asked()
        world.brokers[2].go()
        await eventually(lambda: world.polling.polling.down == {"broker-2"})
        other = poll(world)
        world.send(1, "a")
        done, pending = await asyncio.wait([waiting, other], return_when=asyncio.FIRST_COMPLETED)
        assert [one.result() for one in done] == [["a"]]
        asked = world.brokers[2].count_of("notifications")
        world.brokers[2].is_up.set()
        await eventually(lambda: world.brokers[2].count_of("notifications") == asked + 1)
        world.send(2, "b")
        assert await pending.pop() == ["b"]

    run(scenario)


def test_a_pop_at_a_lost_broker_does_not_block_others() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for broker in world.brokers:
            broker.holds.add("pop")
        waiting = poll(world)
        await eventually(lambda: any(broker.count_of("pops") for broker in world.brokers))
        [n] = [n for n in range(3) if world.brokers[n].count_of("pops")]
        for broker in world.brokers:
            broker.holds.clear()
        world.brokers[n].go()
        world.send((n + 1) % 3, "a")
        assert await waiting == ["a"]

    run(scenario)


def test_a_parked_poll_moves_to_a_message_and_its_pop_is_cancelled() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        polling = world.polling.polling
        assert await poll(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        [mode] = polling.modes.values()
        mode.is_direct, mode._changed_at_ms = True, world.polling.now_ms()
        waiting = poll(world)
        await eventually(lambda: sum(b.count_of("notifications") for b in world.brokers) == 1)
        [parked] = [one.parked_at for pair in polling.pairs.values() for one in pair.parked]
        at = ["broker-0", "broker-1"].index(parked or "")
        left = world.brokers[at]
        await eventually(lambda: left.count_of("pops") == 2)
        world.send(1 - at, "a")
        assert await waiting == ["a"]
        cancelled = await left.wait_for_frame("cancelled_polls")
        pops = [frame.pops[0] for frame in left.frames if frame.pops]
        assert list(cancelled.cancelled_polls) == [pops[-1].request_id]

    run(scenario, count=2)


def test_unneeded_notifications_are_cancelled() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        waiting = poll(world)
        await world.until_asked()
        world.send(0, "a")
        assert await waiting == ["a"]
        for broker in world.brokers[1:]:
            cancelled = await broker.wait_for_frame("cancelled_polls")
            [asked] = [f.notifications[0] for f in broker.frames if f.notifications]
            assert list(cancelled.cancelled_polls) == [asked.request_id]
        await eventually(lambda: not world.polling.polling.pairs)
        assert not world.polling._asked

    run(scenario)


def test_a_waiting_poll_includes_a_broker_that_gets_the_topic() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for broker in world.cluster.brokers[1:]:
            broker.is_member = False
        waiting = poll(world)
        await eventually(lambda: world.brokers[0].count_of("pops") == 1)
        for broker in world.cluster.brokers[1:]:
            broker.is_member = True
        world.cluster._changed()
        await eventually(lambda: all(b.count_of("notifications") for b in world.brokers[1:]))
        world.send(2, "a")
        assert await waiting == ["a"]

    run(scenario)


def test_a_poll_of_one_broker_includes_brokers_that_join() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        members, all_of_them = world.cluster._members, world.cluster.brokers
        members.brokers = list(all_of_them[:1])
        waiting = poll(world)
        await eventually(lambda: world.brokers[0].count_of("pops") == 1)
        members.brokers = list(all_of_them)
        world.cluster._changed()
        await eventually(lambda: all(b.count_of("notifications") for b in world.brokers[1:]))
        world.send(2, "a")
        assert await waiting == ["a"]

    run(scenario)


def test_a_waiting_poll_includes_a_broker_that_replaces_another() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        members, all_of_them = world.cluster._members, world.cluster.brokers
        members.brokers = list(all_of_them[:2])
        waiting = poll(world)
        await eventually(lambda: world.brokers[1].count_of("notifications") == 1)
        # As many as before.
        members.brokers = [all_of_them[0], all_of_them[2]]
        world.cluster._changed()
        await eventually(lambda: world.brokers[2].count_of("notifications") == 1)
        world.send(2, "a")
        assert await waiting == ["a"]

    run(scenario)


def test_a_possibly_stored_message_is_not_reported_as_rejected() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for broker in world.brokers:
            broker.holds.add("append")
        sending = asyncio.create_task(ProxyWorld.send(world, message(b"m")))
        await eventually(lambda: any(broker.count_of("appends") for broker in world.brokers))
        [n] = [n for n in range(3) if world.brokers[n].count_of("appends")]
        # The other brokers are removed while the append is in flight.
        world.cluster._members.brokers = [world.cluster.brokers[n]]
        world.cluster._changed()
        world.brokers[n].go()
        status = (await sending).status
        assert status.code != v2.OK
        assert "has taken the message" not in status.message

    run(scenario)


def test_messages_for_a_poll_that_just_ended_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    popped = MultiBrokerReceive.popped

    def popped_late(receive: MultiBrokerReceive, reply: link_pb2.PopReply) -> bool:
        """End the poll and deliver the reply in one turn of the event loop."""
        shell = receive._shell
        if reply.batches:
            shell.polling.cancel(receive._poll, shell.now_ms())
        return popped(receive, reply)

    async def scenario(world: SeveralBrokers) -> None:
        monkeypatch.setattr(MultiBrokerReceive, "popped", popped_late)
        waiting = poll(world)
        await world.until_asked()
        world.send(1, "a")
        assert await waiting == ["MESSAGE_NOT_FOUND"]
        await eventually(lambda: world.brokers[1].count_of("changes") == 1)
        assert world.metrics.messages_returned == 1

    run(scenario)


def test_rejections_of_all_brokers_end_a_poll_with_their_error() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        for broker in world.brokers:
            for name in ("pop", "notification"):
                broker.failures[name] = link_pb2.Failure(error="Overloaded", message="full")
        assert await poll(world) == ["TOO_MANY_REQUESTS"]
        assert await poll(world, poll_ms=0) == ["TOO_MANY_REQUESTS"]
        del world.brokers[1].failures["pop"]
        assert await poll(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]

    run(scenario)


def test_a_draining_proxy_answers_waiting_polls() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        polls = [poll(world) for _ in range(3)]
        await world.until_asked()
        world.cluster.release_polls()
        for broker in world.cluster.brokers:
            broker.link.release_polls()
        assert await ended(*polls) == ["MESSAGE_NOT_FOUND"] * 3
        assert await poll(world) == ["MESSAGE_NOT_FOUND"]

    run(scenario)


def test_a_repeated_attempt_of_an_ordered_group_asks_every_broker_before_it_waits() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        request = receive_request(poll_ms=POLL_MS)
        request.attempt_id = "attempt"
        waiting = asyncio.create_task(world.receive(request))
        await world.until_asked()
        assert [broker.count_of("pops") for broker in world.brokers] == [1, 1, 1]
        world.send(0, "a")
        items = await waiting
        assert [item.message.body for item in items if item.HasField("message")] == [b"a"]

    run(scenario, is_ordered=True)


def test_a_scrape_counts_each_receive() -> None:
    """The expected counts of each receive are worked out by hand."""

    async def scenario(world: SeveralBrokers) -> None:
        # Two receives that do not wait: one finds a message at the first broker, one finds none.
        for n in range(3):
            world.send(n, "a")
        for _ in range(3):
            assert await poll(world, poll_ms=0) == ["a"]
        assert await poll(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        # A long poll finds a message with its first pop.
        for n in range(3):
            world.send(n, "b")
        for _ in range(3):
            assert await poll(world) == ["b"]
        # A long poll that waits: a hint and a hit.
        waiting = poll(world)
        await world.until_asked()
        world.send(1, "c")
        assert await waiting == ["c"]
        # A poll that ends empty at a release.
        waiting = poll(world)
        await eventually(lambda: world.polling.counts.inflight["notify"] == 1)
        await eventually(lambda: bool(world.polling.polling.pairs))
        await eventually(lambda: any(pair.waiting for pair in world.polling.polling.pairs.values()))
        world.polling.release()
        assert await waiting == ["MESSAGE_NOT_FOUND"]
        samples = world.scrape()
        assert samples["rocketmq_proxy_receive_total"] == {
            of("notify", "first_pop"): 6,
            of("notify", "timeout_empty"): 2,
            of("notify", "notified"): 1,
        }
        assert samples["rocketmq_proxy_long_polling_total"] == {of("notify"): 5}
        assert samples["rocketmq_proxy_short_polling_hit_total"] == {of(): 6}
        assert samples["rocketmq_proxy_notified_pop_total"] == {of("hit"): 1}
        assert samples["rocketmq_proxy_notification_total"] == {of("true"): 1}
        assert "rocketmq_proxy_false_empty_total" not in samples
        assert samples["rocketmq_proxy_polling_mode"] == {frozenset({"notify"}): 1}
        assert "rocketmq_proxy_long_polling_inflight" not in samples
        waits = samples["rocketmq_proxy_long_polling_wait_seconds_count"]
        assert sum(waits.values()) == 5
        # The metrics of calls, each in one cell.
        by_cell: dict[tuple[str, ...], int] = {}
        for labels, count in world.metrics.rpcs.totals().items():
            by_cell[labels[4:]] = by_cell.get(labels[4:], 0) + count
        assert by_cell == {
            ("false", "true"): 3,
            ("false", "false"): 1,
            ("true", "true"): 3,
            ("true", "false"): 2,
        }

    run(scenario)


def test_with_one_broker_group_a_poll_is_one_pop_that_is_parked_there() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        waiting = poll(world)
        await eventually(lambda: world.brokers[0].count_of("pops") == 1)
        world.send(0, "a")
        assert await waiting == ["a"]
        assert await poll(world, poll_ms=0) == ["MESSAGE_NOT_FOUND"]
        world.send(0, "b")
        assert await poll(world) == ["b"]
        assert world.brokers[0].count_of("pops") == 3
        assert world.brokers[0].count_of("notifications") == 0
        samples = world.scrape()
        assert samples["rocketmq_proxy_receive_total"] == {
            of("direct", "notified"): 1,
            of("direct", "timeout_empty"): 1,
            of("direct", "first_pop"): 1,
        }
        assert samples["rocketmq_proxy_short_polling_hit_total"] == {of(): 1}
        by_cell = {labels[4:]: count for labels, count in world.metrics.rpcs.totals().items()}
        assert by_cell == {("true", "false"): 1, ("false", "false"): 1, ("true", "true"): 1}

    run(scenario, count=1)


class NarrowConnection(ResponseCollector):
    """Responses on a connection that never has more room than it held at first."""

    def hold(self, size_bytes: int) -> bool:
        return False

    async def hold_in_turn(self, size_bytes: int, *, timeout_s: float) -> bool:
        return timeout_s > 0


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("poll_ms", "outcome", "status"),
    [(0, "throttled", "TOO_MANY_REQUESTS"), (POLL_MS, "no_room", "MESSAGE_NOT_FOUND")],
)
def test_receives_without_room_are_counted(
    poll_ms: int, outcome: str, status: str, count: int
) -> None:
    """They do not count as cancelled or empty."""

    async def scenario(world: SeveralBrokers) -> None:
        for n in range(count):
            # Each message is larger than the held room.
            world.send(n, *["a" * (SMALL_REPLY_BYTES + size) for size in (10, 20, 30, 40)])
        request = receive_request(poll_ms=poll_ms)
        request.batch_size = 1
        items = await world.receive(request, responses=NarrowConnection())
        assert v2.Code.Name(items[0].status.code) == status
        mode = "direct" if count == 1 else "notify"
        assert world.polling.counts.receives == {("topic", "group", mode, outcome): 1}
        assert not any(world.polling.counts.inflight.values())

    run(scenario, count=count)


def test_a_rejected_receive_is_not_a_long_poll() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        request = receive_request(poll_ms=POLL_MS)
        request.invisible_duration.FromMilliseconds(13 * 3_600_000)
        await world.receive(request)
        [labels] = world.metrics.rpcs.totals()
        assert labels[2] == str(v2.ILLEGAL_INVISIBLE_TIME)
        assert labels[4:] == ("false", "false")

    run(scenario)


def test_rejected_receives_are_counted_once() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        request = service.ReceiveMessageRequest()
        await world.receive(request)
        [labels] = world.metrics.rpcs.totals()
        assert labels[4:] == ("false", "false")

    run(scenario)


async def assignments(world: SeveralBrokers) -> list[tuple[str, int, str]]:
    """Return the entries that a push consumer polls: broker group, queue, permission."""
    request = service.QueryAssignmentRequest()
    request.topic.name, request.group.name = "topic", "group"
    request.endpoints.scheme = v2.IPv4
    request.endpoints.addresses.add(host="127.0.0.1", port=8081)
    call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=5)
    answer = await world.methods.unary["QueryAssignment"](call, request.SerializeToString())
    queues = [
        each.message_queue
        for each in service.QueryAssignmentResponse.FromString(answer).assignments
    ]
    return [(queue.broker.name, queue.id, v2.Permission.Name(queue.permission)) for queue in queues]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_push_consumer_polls_every_broker_group_as_long_as_it_is_a_member(
    is_ordered: bool,
) -> None:
    async def scenario(world: SeveralBrokers) -> None:
        names = [broker.name for broker in world.all_brokers]
        assigned = await assignments(world)
        if not is_ordered:
            assert assigned == [(name, -1, "READ_WRITE") for name in names]
        else:
            assert {name for name, _, _ in assigned} == set(names)
            assert min(queue_id for _, queue_id, _ in assigned) == 0
        # An unreachable or draining broker group still has messages, and clients drop a changed
        # entry.
        world.all_brokers[1].is_draining = True
        world.brokers[2].go()
        await eventually(lambda: not world.all_brokers[2].link.is_connected)
        assert await assignments(world) == assigned
        world.leave(1)
        assert await assignments(world) == [each for each in assigned if each[0] != names[1]]

    run(scenario, is_ordered=is_ordered)
