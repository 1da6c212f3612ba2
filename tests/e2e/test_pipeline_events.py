"""Events of messages through real processes: ReadEvents and `message trace`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.clients.api import Api, api, message
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, command, environment, standalone
from tests.support.processes.replicated_standalone import FLAGS, ReplicatedStandalone, send_signal
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

TOPIC, GROUP = "orders", "billing"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder: Path = tmp_path_factory.mktemp("events")
    with standalone(folder / "data") as started:
        started.put(f"topics/{TOPIC}", queues=1)
        started.put(f"groups/{GROUP}", maxAttempts=2)
        yield started


@pytest.fixture(scope="module")
def stub(running: Standalone) -> Iterator[pipeline_pb2_grpc.PipelineSourceStub]:
    with grpc.insecure_channel(running.grpc) as opened:
        yield pipeline_pb2_grpc.PipelineSourceStub(opened)


def events_of(
    stub: pipeline_pb2_grpc.PipelineSourceStub, **fields: object
) -> tuple[list[pb.Event], pb.ReadEventsReply]:
    replies = list(stub.ReadEvents(pb.ReadEventsRequest(broker="broker-0", **fields)))  # type: ignore[arg-type]  # as the message
    return [event for reply in replies for event in reply.events], replies[-1]


def run(running: Standalone, act: Callable[[Api], Awaitable[None]]) -> None:
    async def connected() -> None:
        async with api(running.grpc) as client:
            await act(client)

    asyncio.run(connected())


async def receive(client: Api, *, invisible_ms: int = 60_000) -> v2.Message:
    [got] = await client.receive(TOPIC, GROUP, poll_ms=20_000, invisible_ms=invisible_ms)
    return got


def event_facts(events: list[pb.Event]) -> list[tuple[object, ...]]:
    """Return the kind of each event, with details of some."""
    return [
        (
            pb.EventKind.Name(event.kind).removeprefix("EVENT_KIND_"),
            event.attempt,
            event.reason,
            event.consumer_group,
        )
        for event in events
    ]


def test_a_message_without_acks_becomes_a_dead_letter(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    """Delayed, moved to another time, fired, popped, renewed, given back, revived, dead."""

    async def act(client: Api) -> None:
        due_at_ms = int(time.time() * 1000) + 1_500
        await client.send(message(TOPIC, b"late", message_id="LATE", due_at_ms=due_at_ms))
        got = await receive(client)
        handle = got.system_properties.receipt_handle
        renewed = await client.change_invisible(TOPIC, GROUP, handle, 120_000)
        await client.change_invisible(TOPIC, GROUP, renewed.receipt_handle, 1_000)
        got = await receive(client, invisible_ms=60_000)
        assert got.system_properties.delivery_attempt == 2
        handle = got.system_properties.receipt_handle
        await client.change_invisible(TOPIC, GROUP, handle, 1_000)
        dead = await client.receive(f"%DLQ%{GROUP}", "undertaker", poll_ms=20_000)
        assert [one.system_properties.message_id for one in dead] == ["LATE"]
        handles = [one.system_properties.receipt_handle for one in dead]
        await client.ack(f"%DLQ%{GROUP}", "undertaker", handles)

    run(running, act)
    events, end = events_of(stub, message_id="LATE")
    assert event_facts(events) == [
        ("SCHEDULED", 0, "", ""),
        ("FIRED", 0, "", ""),
        ("DELIVERED", 1, "", GROUP),
        ("RENEWED", 1, "", GROUP),
        ("NACKED", 1, "", GROUP),
        ("REVIVED", 1, "", GROUP),
        ("DELIVERED", 2, "", GROUP),
        ("NACKED", 2, "", GROUP),
        ("DEAD_LETTERED", 2, "attempts_exhausted", GROUP),
        ("DELIVERED", 3, "", "undertaker"),
        ("ACKED", 3, "", "undertaker"),
    ]
    fired, delivered = events[1], events[2]
    assert fired.at_ms >= events[0].due_at_ms == fired.due_at_ms
    assert fired.timer_id == delivered.timer_id == events[0].timer_id > 0
    assert (fired.topic, fired.queue_offset) == (delivered.topic, delivered.queue_offset)
    assert delivered.client_id == "tests"
    assert delivered.delivery_id == delivered.position
    assert events[3].delivery_id == delivered.position, "what is renewed"
    assert events[4].delivery_id == events[3].position, "goes on as another delivery"
    assert {event.topic for event in events[5:8]} == {f"%RETRY%{GROUP}+{TOPIC}"}
    assert {event.origin_topic for event in events[5:]} == {TOPIC}
    assert [event.position for event in events] == sorted(event.position for event in events)
    assert end.next_position == end.log_end


def test_a_recalled_message_and_an_acked_one(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    async def act(client: Api) -> None:
        due_at_ms = int(time.time() * 1000) + 3_600_000
        sent = await client.send(message(TOPIC, b"never", message_id="NEVER", due_at_ms=due_at_ms))
        await client.recall(TOPIC, sent.entries[0].recall_handle)
        await client.send(message(TOPIC, b"now", message_id="NOW"))
        got = await receive(client)
        await client.ack(TOPIC, GROUP, [got.system_properties.receipt_handle])

    run(running, act)
    never, _ = events_of(stub, message_id="NEVER")
    assert [row[0] for row in event_facts(never)] == ["SCHEDULED", "RECALLED"]
    assert {event.topic for event in never} == {TOPIC}
    now, _ = events_of(stub, message_id="NOW")
    assert [row[0] for row in event_facts(now)] == ["STORED", "DELIVERED", "ACKED"]
    assert now[0].body_size == len(b"now")
    assert now[2].delivery_id == now[1].position
    assert now[2].delivery_index == now[1].index


def test_event_reads_continue_at_the_end_of_a_reply(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    everything, end = events_of(stub)
    assert len(everything) > 5
    pieces: list[pb.Event] = []
    position = index = 0
    while position < end.next_position:
        some, reply = events_of(
            stub,
            from_position=position,
            from_index=index,
            log_bytes_max=300,
            until_position=end.next_position,
            log_id=end.log_id,
        )
        pieces += some
        position, index = reply.next_position, reply.next_index
    assert pieces == everything
    # A read may start at any position: it returns the events that begin behind it.
    middle = everything[len(everything) // 2].position
    behind, _ = events_of(stub, from_position=middle + 1, until_position=end.next_position)
    assert behind == [event for event in everything if event.position > middle]
    fired, _ = events_of(stub, kinds=[pb.EVENT_KIND_FIRED], topics=[TOPIC])
    assert fired == [event for event in everything if event.kind == pb.EVENT_KIND_FIRED]
    assert events_of(stub, topics=["another"])[0] == []


def test_a_position_of_another_log_is_refused(stub: pipeline_pb2_grpc.PipelineSourceStub) -> None:
    for fields in ({"log_id": "0123456789abcdef"}, {"from_position": 1 << 50}):
        with pytest.raises(grpc.RpcError) as refused:
            events_of(stub, **fields)
        trailers = {each.key: str(each.value) for each in refused.value.trailing_metadata()}
        assert trailers["tidemill-error"] == "LogChanged"


def test_the_journey_is_a_timeline_in_rest_and_on_the_command_line(running: Standalone) -> None:
    run(running, lambda client: client.send(message(TOPIC, b"here", message_id="HERE")))  # type: ignore[arg-type,return-value]  # The answer is not used.
    run(running, take_all)
    shown = running.get("messages/HERE/trace")
    assert [event["event"] for event in shown["events"]] == ["stored", "delivered", "acked"]
    assert "cursor" not in shown
    line = tidemill(running, "message", "trace", "HERE")
    assert [row.split()[3] for row in line.splitlines()[1:]] == ["stored", "delivered", "acked"]
    parsed: dict[str, Any] = json.loads(tidemill(running, "message", "trace", "HERE", "-o", "json"))
    assert parsed["events"] == shown["events"]


@pytest.mark.heavy
def test_a_new_master_returns_the_same_events_and_appends_more(tmp_path: Path) -> None:
    held: list[str] = []

    async def before(client: Api) -> None:
        for number in range(20):
            await client.send(message(TOPIC, b"x", message_id=f"M{number}"))
        got = await client.receive(TOPIC, GROUP, poll_ms=20_000, batch_size=20)
        held.extend(one.system_properties.receipt_handle for one in got)
        await client.ack(TOPIC, GROUP, held[:5])

    async def after(client: Api) -> None:
        answer = await client.ack(TOPIC, GROUP, held[5:])
        assert {entry.status.code for entry in answer.entries} == {v2.OK}

    with (
        standalone(tmp_path / "data", *FLAGS, start_s=120.0) as replicated,
        grpc.insecure_channel(replicated.grpc) as channel,
    ):
        source = pipeline_pb2_grpc.PipelineSourceStub(channel)
        group = ReplicatedStandalone(replicated)
        asyncio.run(group.in_sync())
        replicated.put(f"topics/{TOPIC}", queues=1)
        run(replicated, before)
        events, end = events_of(source)
        asyncio.run(group.in_sync())
        send_signal(group.pids(group.master()), signal.SIGKILL)
        eventually(lambda: has_master(source), within_ms=30_000)
        again, _ = events_of(source, until_position=end.next_position, log_id=end.log_id)
        assert again == events
        run(replicated, after)
        behind, _ = events_of(source, from_position=end.next_position)
        acked = [event for event in behind if event.kind == pb.EVENT_KIND_ACKED]
        delivered = [event for event in events if event.kind == pb.EVENT_KIND_DELIVERED][
            len(held[:5]) :
        ]
        assert [(e.message_id, e.delivery_id, e.delivery_index) for e in acked] == [
            (e.message_id, e.delivery_id, e.delivery_index) for e in delivered
        ]


def has_master(source: pipeline_pb2_grpc.PipelineSourceStub) -> bool:
    """Return whether there is a master."""
    try:
        return bool(events_of(source))
    except grpc.RpcError:
        return False


def tidemill(running: Standalone, *arguments: str) -> str:
    done = subprocess.run(
        command(*arguments, "--admin", running.admin),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


async def take_all(client: Api) -> None:
    got = await client.receive(TOPIC, GROUP, poll_ms=20_000)
    await client.ack(TOPIC, GROUP, [one.system_properties.receipt_handle for one in got])


def test_invalid_arguments_are_rejected_without_a_server_error(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    broker = next(iter(stub.GetQueues(pb.GetQueuesRequest(topic_pattern="*")))).groups[0].broker
    requests: list[Callable[[], object]] = [
        lambda: list(stub.ListProgress(pb.ListProgressRequest(broker=broker, cursor="x"))),
        lambda: list(stub.ListPending(pb.ListPendingRequest(broker=broker, cursor="x"))),
        lambda: list(stub.ListInFlight(pb.ListInFlightRequest(broker=broker, cursor="x"))),
        lambda: list(stub.ReadEvents(pb.ReadEventsRequest(broker=broker, from_position=-1))),
    ]
    for ask in requests:
        with pytest.raises(grpc.RpcError) as raised:
            ask()
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_read_until_behind_the_end_of_the_log_ends_at_its_end(
    stub: pipeline_pb2_grpc.PipelineSourceStub,
) -> None:
    """No event comes without a new message: a call that waits for one would never end."""
    _, end = events_of(stub)
    call = stub.ReadEvents(
        pb.ReadEventsRequest(
            broker="broker-0", from_position=end.log_end, until_position=end.log_end + (1 << 40)
        ),
        timeout=30,
    )
    assert list(call)[-1].next_position >= end.log_end
