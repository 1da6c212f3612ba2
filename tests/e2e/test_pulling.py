"""PullMessage and related calls through real processes, by the stubs of the public protocol."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.clients.hostile_client import CLOSED, Stranger, memory_mib
from tests.support.clients.pulling import PullAnswer, PullClient, message_of
from tests.support.processes.processes import Standalone
from tidemill.proxy.server.puller import WAITS_MAX
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

OPTIONS = [("grpc.max_receive_message_length", 16 << 20)]
HELD_MIB_MAX = 96  # For connections, a page in flight per turn, and buffers.


@pytest.fixture(scope="module")
def client(running: Standalone) -> Iterator[PullClient]:
    with grpc.insecure_channel(running.grpc, options=OPTIONS) as channel:
        yield PullClient(channel)


def pull_all(client: PullClient, topic: str, *, batch_size: int = 1024) -> list[v2.Message]:
    """Pull a queue from its first message to its end."""
    offset = 0
    found: list[v2.Message] = []
    while True:
        pulled = client.pull(topic, offset, batch_size=batch_size)
        if pulled.code == v2.MESSAGE_NOT_FOUND and pulled.next_offset == offset:
            return found
        found += pulled.messages
        offset = pulled.next_offset


def test_a_queue_is_pulled_by_offset_and_nothing_is_consumed(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/pulled", queues=1)
    running.put("groups/pulled-readers")
    for n in range(5):
        client.send("pulled", b"m%d" % n, keys=("k1", "k2"), properties={"a": "b"})
    pulled = client.pull("pulled", 1, batch_size=3)
    assert (pulled.code, pulled.next_offset) == (v2.OK, 4)
    assert (pulled.bodies, pulled.offsets) == ([b"m1", b"m2", b"m3"], [1, 2, 3])
    first = pulled.messages[0]
    assert first.topic == v2.Resource(name="pulled")
    assert dict(first.user_properties) == {"a": "b"}
    properties = first.system_properties
    assert list(properties.keys) == ["k1", "k2"]
    assert (properties.born_host, properties.store_host) == ("here", "broker-0")
    assert abs(properties.store_timestamp.ToMilliseconds() - time.time() * 1000) < 60_000
    assert (properties.delivery_attempt, properties.queue_id) == (1, 0)
    assert properties.provenance.log_offset > 0
    assert not properties.HasField("receipt_handle")
    assert not properties.HasField("invisible_duration")
    received = client.receive("pulled", "pulled-readers")
    assert sorted(message.body for message in received) == [b"m%d" % n for n in range(5)]


def test_an_offset_that_is_not_in_the_queue_is_refused_with_where_it_is(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/ends", queues=1)
    client.send("ends", b"only")
    assert client.pull("ends", 1) == PullAnswer(
        v2.MESSAGE_NOT_FOUND, "no message became available", next_offset=1
    )
    beyond = client.pull("ends", 7)
    assert (beyond.code, beyond.next_offset) == (v2.ILLEGAL_OFFSET, 1)
    assert client.pull("ends", -1).code == v2.ILLEGAL_OFFSET
    assert client.pull("ends", 0, queue_id=1).code == v2.BAD_REQUEST
    assert client.pull("ends", 0, broker="broker-3").code == v2.NOT_FOUND
    assert client.pull("nothing", 0).code == v2.TOPIC_NOT_FOUND
    assert client.pull("%SYS%TIMER", 0).code == v2.ILLEGAL_TOPIC
    assert client.pull("ends", 0, group="nobody").code == v2.CONSUMER_GROUP_NOT_FOUND


def test_a_filter_passes_over_and_says_how_far(running: Standalone, client: PullClient) -> None:
    running.put("topics/tagged", queues=1)
    for n in range(6):
        client.send("tagged", b"m%d" % n, tag="even" if n % 2 == 0 else "odd")
    assert client.pull("tagged", 0, tags="odd", batch_size=2).offsets == [1, 3]
    both = client.pull("tagged", 0, tags="odd || even")
    assert both.offsets == list(range(6))
    nothing = client.pull("tagged", 0, tags="none")
    assert (nothing.code, nothing.next_offset) == (v2.MESSAGE_NOT_FOUND, 6)


def test_a_pull_at_the_end_waits_for_the_next_message(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/waited", queues=1)
    found: list[PullAnswer] = []
    waiting = threading.Thread(
        target=lambda: found.append(client.pull("waited", 0, tags="b", wait_s=20))
    )
    waiting.start()
    client.send("waited", b"another", tag="a")
    client.send("waited", b"it", tag="b")
    waiting.join(20)
    assert [(one.code, one.bodies, one.next_offset) for one in found] == [(v2.OK, [b"it"], 2)]
    nothing = client.pull("waited", 2, wait_s=1)
    assert (nothing.code, nothing.next_offset) == (v2.MESSAGE_NOT_FOUND, 2)


def test_large_messages_come_one_at_a_time(running: Standalone, client: PullClient) -> None:
    running.put("topics/large", queues=1)
    bodies = [bytes([n]) * ((4 << 20) - 4_096) for n in range(3)]
    for body in bodies:
        client.send("large", body, message_id=f"large-{body[0]}")
    first = client.pull("large", 0, batch_size=512)
    assert (first.bodies == bodies[:1], first.next_offset) == (True, 1)
    assert [message.body for message in pull_all(client, "large")] == bodies


def test_offsets_of_begin_end_and_a_time(running: Standalone, client: PullClient) -> None:
    running.put("topics/stamped", queues=2)
    for n in range(4):
        client.send("stamped", b"m%d" % n)
    stored = [
        message.system_properties.store_timestamp.ToMilliseconds()
        for message in client.pull("stamped", 0).messages
    ]
    end = client.query("stamped", v2.END).offset
    assert (client.query("stamped", v2.BEGINNING).offset, end) == (0, len(stored))
    at = client.query("stamped", v2.TIMESTAMP, at_ms=stored[-1])
    assert stored[at.offset] == stored[-1]
    assert client.query("stamped", v2.TIMESTAMP, at_ms=stored[-1] + 1_000_000).offset == end
    assert client.query("stamped", v2.TIMESTAMP).status.code == v2.BAD_REQUEST


def test_a_group_says_how_far_it_has_pulled_and_its_pops_stay(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/marked", queues=1)
    running.put("groups/markers")
    for n in range(3):
        client.send("marked", b"m%d" % n)
    assert client.get_offset("markers", "marked").status.code == v2.OFFSET_NOT_FOUND
    assert client.update_offset("markers", "marked", 2).status.code == v2.OK
    assert client.get_offset("markers", "marked").offset == 2
    assert client.update_offset("markers", "marked", 4).status.code == v2.ILLEGAL_OFFSET
    assert client.update_offset("nobody", "marked", 1).status.code == v2.CONSUMER_GROUP_NOT_FOUND
    assert client.get_offset("markers", "marked").offset == 2
    assert len(client.receive("marked", "markers")) == 3
    # A new topic or consumer group with the same name is a different one.
    running.delete("groups/markers")
    running.put("groups/markers")
    assert client.get_offset("markers", "marked").status.code == v2.OFFSET_NOT_FOUND


def test_a_dead_letter_is_pulled_with_where_it_came_from_and_why(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/dead-lettered", queues=1)
    running.put("groups/mourners")
    client.send("dead-lettered", b"first", message_id="id-first")
    client.send("dead-lettered", b"poison", message_id="id-poison")
    [poison] = [
        message
        for message in client.receive("dead-lettered", "mourners")
        if message.body == b"poison"
    ]
    client.forward_to_dead_letters("dead-lettered", "mourners", poison)
    [dead] = client.pull("%DLQ%mourners", 0).messages
    properties = dead.system_properties
    assert (dead.body, properties.message_id) == (b"poison", "id-poison")
    assert properties.dead_letter_queue.topic == "dead-lettered"
    provenance = properties.provenance
    assert (provenance.consumer_group, provenance.reason) == ("mourners", "forwarded_by_client")
    assert (provenance.origin_topic, provenance.origin_queue_id) == ("dead-lettered", 0)
    assert provenance.origin_queue_offset == 1


def test_a_delayed_message_has_its_due_and_fire_times(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/delayed", queues=1, messageType="DELAY")
    client.send("delayed", b"late already", due_at_ms=1_000)
    due_at_ms = int(time.time() * 1000) + 300
    client.send("delayed", b"late", due_at_ms=due_at_ms)
    found = client.pull("delayed", 1, wait_s=20).messages
    properties = found[0].system_properties
    assert properties.delivery_timestamp.ToMilliseconds() == due_at_ms
    assert properties.provenance.fired_at_ms == properties.store_timestamp.ToMilliseconds()
    assert properties.provenance.fired_at_ms >= due_at_ms
    [at_once] = client.pull("delayed", 0, batch_size=1).messages
    provenance = at_once.system_properties.provenance
    assert provenance.fired_at_ms == at_once.system_properties.store_timestamp.ToMilliseconds()


@pytest.fixture(scope="module")
def source(running: Standalone) -> Iterator[pipeline_pb2_grpc.PipelineSourceStub]:
    with grpc.insecure_channel(running.grpc, options=OPTIONS) as channel:
        yield pipeline_pb2_grpc.PipelineSourceStub(channel)


def read(
    source: pipeline_pb2_grpc.PipelineSourceStub, topic: str, **fields: object
) -> list[pb.ReadMessagesReply]:
    request = pb.ReadMessagesRequest(topic=topic, broker="broker-0", **fields)  # type: ignore[arg-type]  # as the message
    return list(source.ReadMessages(request))


def test_a_range_is_read_with_the_messages_that_pulls_give(
    running: Standalone, client: PullClient, source: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    running.put("topics/ranged", queues=1)
    client.send_all([message_of("ranged", b"m%d" % n, tag=f"t{n % 3}") for n in range(3000)])
    pulled = pull_all(client, "ranged")
    replies = read(source, "ranged")
    assert len(replies) > 1
    assert [message for reply in replies for message in reply.messages] == pulled
    assert [reply.next_offset for reply in replies][-1] == 3000
    assert {(reply.min_offset, reply.end_offset, reply.is_gone) for reply in replies} == {
        (0, 3000, False)
    }
    part = read(source, "ranged", from_offset=10, until_offset=1500)
    assert [message for reply in part for message in reply.messages] == pulled[10:1500]
    tagged = read(source, "ranged", filter="t1||t2", until_offset=100)
    wanted = [message for message in pulled[:100] if message.system_properties.tag != "t0"]
    assert [message for reply in tagged for message in reply.messages] == wanted
    assert tagged[-1].next_offset == 100
    [none] = read(source, "ranged", from_offset=3000)
    assert (len(none.messages), none.next_offset) == (0, 3000)


def test_a_range_is_read_without_bodies(
    running: Standalone, client: PullClient, source: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    running.put("topics/headed", queues=1)
    client.send("headed", b"a body", keys=("k",), properties={"a": "b"})
    [whole] = client.pull("headed", 0).messages
    [reply] = read(source, "headed", without_bodies=True)
    [headed] = reply.messages
    assert headed.system_properties.provenance.body_size == len(b"a body")
    headed.system_properties.provenance.ClearField("body_size")
    whole.body = b""
    assert headed == whole


def test_endless_pulls_do_not_affect_a_consumer(running: Standalone, client: PullClient) -> None:
    """Some clients read all the time, and one opens pulls without reading them."""
    running.put("topics/busy", queues=1)
    running.put("topics/honest", queues=2)
    running.put("groups/honest-readers")
    for n in range(8):
        client.send("busy", bytes(1 << 20), message_id=f"busy-{n}")
    [proxy] = [each for name, each in running.processes.items() if name.startswith("proxy")]
    before_mib, is_over = memory_mib(proxy.pid), threading.Event()

    def pull_on() -> None:
        with grpc.insecure_channel(running.grpc, options=OPTIONS) as channel:
            stranger = PullClient(channel)
            while not is_over.is_set():
                stranger.pull("busy", 0, batch_size=1024)

    strangers = [threading.Thread(target=pull_on) for _ in range(4)]
    request = service.PullMessageRequest(message_queue=client.queue("busy"), batch_size=1024)
    with Stranger(running.grpc, CLOSED) as mute:
        mute.begin(*[mute.call_of("PullMessage", request) for _ in range(300)])
        for each in strangers:
            each.start()
        try:
            bodies = {b"m%d" % n for n in range(100)}
            for body in sorted(bodies):
                client.send("honest", body)
            received: list[bytes] = []
            while len(received) < len(bodies):
                received += [one.body for one in client.receive("honest", "honest-readers")]
        finally:
            is_over.set()
            for each in strangers:
                each.join(30)
        assert len(received) == len(bodies), "nothing comes twice"
        assert set(received) == bodies
        assert memory_mib(proxy.pid) - before_mib < HELD_MIB_MAX


def test_pulls_that_wait_are_so_many_and_an_address_has_its_share(
    running: Standalone, client: PullClient
) -> None:
    running.put("topics/crowded", queues=1)
    request = service.PullMessageRequest(
        message_queue=client.queue("crowded"), long_polling_timeout=Duration(seconds=20)
    )
    with Stranger(running.grpc) as stranger:
        stranger.begin(*[stranger.call_of("PullMessage", request) for _ in range(WAITS_MAX // 2)])
        last_id = stranger._next_id
        stranger.begin(stranger.call_of("PullMessage", request))
        stranger.until_end_of(last_id)
        assert stranger.codes() == {v2.TOO_MANY_REQUESTS: 1}
        # The proxy serves a call that does not wait.
        assert client.pull("crowded", 0).code == v2.MESSAGE_NOT_FOUND
        client.send("crowded", b"for all of them")
        for number in range(WAITS_MAX // 2):
            stranger.until_end_of(1 + 2 * number)
    assert client.pull("crowded", 1, wait_s=1).code == v2.MESSAGE_NOT_FOUND


def named(error: Any) -> str:
    """Return the cluster's name of a call's error."""
    return str(dict(error.trailing_metadata())["tidemill-error"])


def test_a_range_is_read_only_from_the_topic_with_the_given_id(running: Standalone) -> None:
    running.put("topics/again", queues=1)
    with grpc.insecure_channel(running.grpc, options=OPTIONS) as channel:
        source, sender = pipeline_pb2_grpc.PipelineSourceStub(channel), PullClient(channel)

        def look() -> tuple[str, int]:
            (reply,) = source.GetQueues(pb.GetQueuesRequest(topics=["again"]))
            (group,) = reply.groups
            return group.log_id, group.queues[0].topic_id

        def read(log_id: str, topic_id: int) -> tuple[list[bytes], str]:
            request = pb.ReadMessagesRequest(topic="again", log_id=log_id, topic_id=topic_id)
            try:
                replies = list(source.ReadMessages(request))
            except grpc.RpcError as error:
                return [], named(error)
            return [each.body for reply in replies for each in reply.messages], ""

        sender.send("again", b"old")
        log_id, first = look()
        assert read(log_id, first) == ([b"old"], "")
        running.delete("topics/again")
        assert read(log_id, first) == ([], "TopicNotFound")
        running.put("topics/again", queues=1)
        sender.send("again", b"new")
        second = look()[1]
        assert second != first
        assert read(log_id, first) == ([], "TopicNotFound")
        assert read(log_id, second) == ([b"new"], "")
        assert read("another", second) == ([], "LogChanged")
        # The id belongs to a topic with another name.
        running.put("topics/other", queues=1)
        request = pb.ReadMessagesRequest(topic="other", topic_id=second)
        with pytest.raises(grpc.RpcError) as refused:
            list(source.ReadMessages(request))
        assert named(refused.value) == "TopicNotFound"


def test_the_official_client_sends_in_the_process_of_a_pipeline(running: Standalone) -> None:
    running.put("topics/both", queues=1)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.clients.both_clients", running.grpc],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "by the official client True\n", done.stderr[-2000:]
