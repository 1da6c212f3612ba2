"""The codec against protobuf: joined bytes must parse as the intended message."""

from __future__ import annotations

from hashlib import md5

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bodies import body_of
from tidemill.common.errors import BadRequest, IllegalDeliveryTime, PropertiesTooLarge
from tidemill.message import stored_message
from tidemill.message.encoding import encode_stored
from tidemill.message.namespaces import full_name
from tidemill.message.receipt_handle import HandleSigner
from tidemill.message.resources import ResourceName
from tidemill.proxy import message_codec
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2

SIGNER = HandleSigner(b"k" * 32, "broker-0")
NOW_MS = 1_790_000_000_123

texts = st.text(max_size=40).filter(lambda text: "\ud800" not in text)
some_texts = st.text(min_size=1, max_size=300)
instants_ms = st.integers(0, 253_402_300_799_999)


@st.composite
def messages(draw: st.DrawFn) -> v2.Message:
    """A message of a producer, also with fields that only the broker should set."""
    message = v2.Message(topic=v2.Resource(name="topic"), body=draw(st.binary(min_size=1)))
    message.user_properties.update(draw(st.dictionaries(texts, texts, max_size=5)))
    properties = message.system_properties
    properties.message_id = draw(some_texts)
    properties.keys.extend(draw(st.lists(some_texts, max_size=3)))
    if draw(st.booleans()):
        properties.tag = draw(some_texts)
    if draw(st.booleans()):
        properties.message_group = draw(some_texts)
    if draw(st.booleans()):
        properties.trace_context = draw(texts)
    properties.body_encoding = draw(st.sampled_from([v2.IDENTITY, v2.GZIP]))
    properties.born_timestamp.seconds = draw(st.integers(-62_135_596_800, 253_402_300_799))
    properties.born_timestamp.nanos = draw(st.integers(0, 999_999_999))
    properties.born_host = draw(texts)
    properties.delivery_timestamp.FromMilliseconds(draw(instants_ms))
    # Some clients send invalid values here; consumers must not get them.
    properties.delivery_attempt = draw(st.integers(-5, 5))
    properties.receipt_handle = draw(texts)
    properties.queue_id = draw(st.integers(0, 9))
    properties.store_host = draw(texts)
    return message


def sample(**properties: object) -> v2.Message:
    return v2.Message(
        topic=v2.Resource(name="topic"),
        body=b"body",
        system_properties=v2.SystemProperties(message_id="id-1", **properties),  # type: ignore[arg-type]  # keywords by name
    )


def encode(message: v2.Message, kind: v2.MessageType.ValueType = v2.NORMAL) -> bytes:
    return encode_stored(message, message_type=kind, now_ms=NOW_MS)


def receive(batch: link_pb2.Batch, *, namespace: str = "") -> list[v2.Message]:
    signed = SIGNER.sign(
        "group",
        "topic",
        slot=batch.slot,
        delivery_id=batch.delivery_id,
        visible_at_ms=batch.visible_at_ms,
    )
    items = message_codec.encode_received(
        batch,
        topic=ResourceName(full_name(namespace, "topic"), namespace),
        store_host=b"broker-0",
        signed=signed,
    )
    responses = [service.ReceiveMessageResponse.FromString(item) for item in items]
    assert all(response.WhichOneof("content") == "message" for response in responses)
    return [response.message for response in responses]


def batch_of(*blobs: bytes, **fields: object) -> link_pb2.Batch:
    values: dict[str, object] = {
        "slot": 1,
        "delivery_id": 2,
        "popped_at_ms": NOW_MS,
        "visible_at_ms": NOW_MS + 30_000,
        "queue_id": 3,
        "indexes": range(len(blobs)),
        "queue_offsets": range(len(blobs)),
        "stored_at_ms": [NOW_MS] * len(blobs),
        "delivery_attempts": [1] * len(blobs),
        "blobs": blobs,
    }
    return link_pb2.Batch(**{**values, **fields})  # type: ignore[arg-type]  # keywords by name


@given(
    messages(),
    st.sampled_from([v2.NORMAL, v2.FIFO, v2.DELAY]),
    st.integers(0, 31),
    st.integers(0, 2**63 - 1),
    instants_ms,
    st.integers(0, 2**31 - 1),
    st.integers(1, 2**31 - 1),
    st.integers(0, 43_200_000),
)
def test_a_delivered_message_is_the_sent_one_with_fields_of_the_delivery(
    sent: v2.Message,
    kind: v2.MessageType.ValueType,
    index: int,
    queue_offset: int,
    stored_at_ms: int,
    queue_id: int,
    attempt: int,
    invisible_ms: int,
) -> None:
    batch = batch_of(
        encode(sent, kind),
        visible_at_ms=NOW_MS + invisible_ms,
        queue_id=queue_id,
        indexes=[index],
        queue_offsets=[queue_offset],
        stored_at_ms=[stored_at_ms],
        delivery_attempts=[attempt],
    )
    [received] = receive(batch, namespace="space")

    expected = v2.Message(topic=v2.Resource(resource_namespace="space", name="topic"))
    expected.user_properties.update(sent.user_properties)
    expected.body = sent.body
    properties = expected.system_properties
    source = sent.system_properties
    for optional in ("tag", "message_group", "trace_context"):
        if source.HasField(optional):
            setattr(properties, optional, getattr(source, optional))
    properties.keys.extend(source.keys)
    properties.message_id = source.message_id
    properties.body_digest.type = v2.MD5
    properties.body_digest.checksum = md5(sent.body, usedforsecurity=False).hexdigest().upper()
    properties.body_encoding = source.body_encoding
    properties.message_type = kind
    properties.born_timestamp.CopyFrom(source.born_timestamp)
    properties.born_host = source.born_host
    properties.store_timestamp.FromMilliseconds(stored_at_ms)
    properties.store_host = "broker-0"
    properties.receipt_handle = received.system_properties.receipt_handle
    properties.queue_id = queue_id
    properties.queue_offset = queue_offset
    properties.invisible_duration.FromMilliseconds(invisible_ms)
    properties.delivery_attempt = attempt
    if kind in {v2.DELAY, v2.TRANSACTION}:
        properties.delivery_timestamp.CopyFrom(source.delivery_timestamp)
    assert received == expected
    opened = SIGNER.open(received.system_properties.receipt_handle, "group", "topic")
    assert opened == (1, 2, NOW_MS + invisible_ms, index)


@given(messages())
def test_the_fixed_fields_have_the_values_of_the_message(sent: v2.Message) -> None:
    blob = encode(sent)
    stored = stored_message.decode(blob)
    source = sent.system_properties
    assert stored_message.message_id_of(blob) == source.message_id
    assert stored_message.tag_of(blob) == source.tag
    assert body_of(blob) == sent.body
    group_at = stored.system_at + stored.group_at
    assert blob[group_at : group_at + stored.group_size].decode() == source.message_group
    assert stored.tag_hash == (stored_message.tag_hash(source.tag) if source.tag else 0)
    assert stored.key_count == 1 + len(source.keys)
    hashes = blob[stored_message.FIXED_SIZE : stored.system_at]
    expected = [
        stored_message.key_hash("id", source.message_id),
        *(stored_message.key_hash("key", key) for key in source.keys),
    ]
    assert [
        int.from_bytes(hashes[at : at + 8], "big") for at in range(0, len(hashes), 8)
    ] == expected
    born = source.born_timestamp
    assert stored.born_at_ms == born.seconds * 1000 + born.nanos // 1_000_000


@pytest.mark.parametrize(
    ("seconds", "nanos", "due_at_ms"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (5, 1_000_000, 5_001),
        (5, 1_000_001, 5_002),
        (253_402_300_799, 999_000_000, 253_402_300_799_999),
    ],
)
def test_a_delivery_timestamp_is_kept_in_milliseconds_and_never_earlier(
    seconds: int, nanos: int, due_at_ms: int
) -> None:
    sent = sample(delivery_timestamp=Timestamp(seconds=seconds, nanos=nanos))
    blob = encode(sent, v2.DELAY)
    assert stored_message.decode(blob).due_at_ms == due_at_ms
    [received] = receive(batch_of(blob))
    assert received.system_properties.HasField("delivery_timestamp")
    assert received.system_properties.delivery_timestamp.ToMilliseconds() == due_at_ms


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [(-1, 0), (253_402_300_800, 0), (1, -1), (1, 1_000_000_000), (2**63 - 1, 0)],
)
def test_a_delivery_timestamp_outside_the_calendar_is_rejected(seconds: int, nanos: int) -> None:
    sent = sample(delivery_timestamp=Timestamp(seconds=seconds, nanos=nanos))
    with pytest.raises(IllegalDeliveryTime, match="253402300799"):
        encode(sent, v2.DELAY)


def test_the_messages_of_a_batch_differ_in_their_own_fields_only() -> None:
    batch = batch_of(
        encode(sample()),
        encode(sample(tag="tag")),
        indexes=[4, 9],
        queue_offsets=[100, 20_000],
        delivery_attempts=[1, 200],
    )
    first, second = (message.system_properties for message in receive(batch))
    assert (first.queue_offset, second.queue_offset) == (100, 20_000)
    assert (first.delivery_attempt, second.delivery_attempt) == (1, 200)
    assert (first.HasField("tag"), second.tag) == (False, "tag")
    indexes = [
        SIGNER.open(properties.receipt_handle, "group", "topic").message_index
        for properties in (first, second)
    ]
    assert indexes == [4, 9]


def test_an_unspecified_encoding_is_delivered_as_identity() -> None:
    [received] = receive(batch_of(encode(sample())))
    assert received.system_properties.body_encoding == v2.IDENTITY


def test_a_message_without_a_born_time_is_born_when_it_arrives() -> None:
    [received] = receive(batch_of(encode(sample())))
    assert received.system_properties.born_timestamp.ToMilliseconds() == NOW_MS


def test_an_empty_tag_is_not_sent() -> None:
    [received] = receive(batch_of(encode(sample(tag=""))))
    assert not received.system_properties.HasField("tag")


def test_a_dead_letter_has_its_origin() -> None:
    [received] = receive(batch_of(encode(sample()), origin_topics=["orders"]))
    origin = received.system_properties.dead_letter_queue
    assert (origin.topic, origin.message_id) == ("orders", "id-1")


@pytest.mark.parametrize(("namespace", "shown"), [("", "space%orders"), ("space", "orders")])
def test_a_dead_letter_has_its_origin_as_its_client_names_it(namespace: str, shown: str) -> None:
    batch = batch_of(encode(sample()), origin_topics=["space%orders"])
    [received] = receive(batch, namespace=namespace)
    assert received.system_properties.dead_letter_queue.topic == shown
    original = v2.Provenance(consumer_group="space%group", origin_topic="space%orders")
    reply = link_pb2.PullReply(
        blobs=[encode(sample())],
        queue_offsets=[0],
        log_offsets=[0],
        stored_at_ms=[NOW_MS],
        delivery_attempts=[2],
        provenance_of=[0],
        provenances=[original.SerializeToString()],
        dead_letter_origins=["space%orders"],
    )
    [message] = pulled(reply, namespace=namespace)
    provenance = message.system_properties.provenance
    group = shown.replace("orders", "group")
    assert (provenance.origin_topic, provenance.consumer_group) == (shown, group)
    assert message.system_properties.dead_letter_queue.topic == shown


@pytest.mark.parametrize(
    "born", [{"seconds": 253_402_300_800}, {"nanos": -1}, {"nanos": 1_000_000_000}]
)
def test_an_invalid_born_time_is_rejected(born: dict[str, int]) -> None:
    message = sample()
    for name, value in born.items():
        setattr(message.system_properties.born_timestamp, name, value)
    with pytest.raises(BadRequest):
        encode(message)


def test_system_properties_that_cannot_be_stored_are_rejected() -> None:
    with pytest.raises(PropertiesTooLarge):
        encode(sample(trace_context="x" * 65_535))


@given(st.integers(1, 99_999), st.text())
def test_a_status_is_field_one_of_every_response(code: int, text: str) -> None:
    encoded = message_codec.encode_status(code, text)
    for response in (
        service.SendMessageResponse,
        service.AckMessageResponse,
        service.HeartbeatResponse,
        service.QueryRouteResponse,
        service.ReceiveMessageResponse,
        service.TelemetryCommand,
    ):
        status = response.FromString(encoded).status
        assert (status.code, status.message) == (code, text)


@given(st.lists(st.tuples(texts, texts, st.booleans()), max_size=4), st.booleans())
def test_the_response_to_an_ack_has_one_entry_per_handle(
    entries: list[tuple[str, str, bool]], is_lite: bool
) -> None:
    gone = message_codec.encode_status(v2.INVALID_RECEIPT_HANDLE, "gone")
    encoded = message_codec.encode_acks(
        [
            service.AckMessageEntry(
                message_id=message_id, receipt_handle=handle, lite_topic="lite" if is_lite else None
            )
            for message_id, handle, _ in entries
        ],
        [message_codec.OK_STATUS if is_settled else gone for _, _, is_settled in entries],
        message_codec.OK_STATUS,
    )
    response = service.AckMessageResponse.FromString(encoded)
    assert response.status.code == v2.OK
    assert [
        (entry.message_id, entry.receipt_handle, entry.status.code) for entry in response.entries
    ] == [
        (message_id, handle, v2.OK if is_settled else v2.INVALID_RECEIPT_HANDLE)
        for message_id, handle, is_settled in entries
    ]


@given(instants_ms)
def test_every_receive_ends_with_the_time_of_the_server(now_ms: int) -> None:
    response = service.ReceiveMessageResponse.FromString(
        message_codec.encode_delivery_timestamp(now_ms)
    )
    assert response.WhichOneof("content") == "delivery_timestamp"
    assert response.delivery_timestamp.ToMilliseconds() == now_ms


def pulled(reply: link_pb2.PullReply, *, namespace: str = "") -> list[v2.Message]:
    """Join a page in both ways; return the messages, which are equal."""

    def join(header: bytes) -> list[bytes]:
        joining = message_codec.join_pulled(
            reply,
            header=header,
            topic=ResourceName(full_name(namespace, "topic"), namespace),
            store_host=b"broker-0",
            queue_id=3,
        )
        while True:
            try:
                next(joining)
            except StopIteration as ended:
                joined: list[bytes] = ended.value
                return joined

    responses = [
        service.PullMessageResponse.FromString(item) for item in join(message_codec.OF_PULL)
    ]
    page = pipeline_pb2.ReadMessagesReply.FromString(
        message_codec.encode_read(
            join(message_codec.OF_READ), next_offset=7, min_offset=0, end_offset=9, gone_from=0
        )
    )
    assert (page.next_offset, page.min_offset, page.end_offset) == (7, 0, 9)
    assert (page.gone_from, page.is_gone) == (0, True)
    messages = [response.message for response in responses]
    assert list(page.messages) == messages
    return messages


@given(
    messages(),
    st.sampled_from([v2.NORMAL, v2.FIFO, v2.DELAY]),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    instants_ms,
    st.integers(1, 2**16),
    st.booleans(),
)
def test_a_pulled_message_has_its_position_and_no_handle(
    sent: v2.Message,
    kind: v2.MessageType.ValueType,
    queue_offset: int,
    log_offset: int,
    stored_at_ms: int,
    attempt: int,
    has_body: bool,
) -> None:
    blob = encode(sent, kind)
    fields: dict[str, object] = {
        "queue_offsets": [queue_offset],
        "stored_at_ms": [stored_at_ms],
        "delivery_attempts": [attempt],
    }
    [expected] = receive(batch_of(blob, **fields), namespace="space")
    properties = expected.system_properties
    properties.ClearField("receipt_handle")
    properties.ClearField("invisible_duration")
    properties.provenance.log_offset = log_offset
    if kind == v2.DELAY and attempt == 1:
        properties.provenance.fired_at_ms = stored_at_ms
    if not has_body:
        blob = blob[: stored_message.decode(blob).body_wire_at]
        properties.provenance.body_size = len(expected.body)
        expected.body = b""
    reply = link_pb2.PullReply(blobs=[blob], log_offsets=[log_offset], **fields)  # type: ignore[arg-type]  # keywords by name
    assert pulled(reply, namespace="space") == [expected]


@pytest.mark.parametrize("has_body", [True, False])
def test_fields_of_a_dead_letter_copy_belong_to_that_message_only(has_body: bool) -> None:
    count = 3 * message_codec.JOINED_A_SLICE
    blobs = [encode(sample()) for _ in range(count)]
    body_size = stored_message.decode(blobs[70]).body_size
    if not has_body:
        blobs = [blob[: stored_message.decode(blob).body_wire_at] for blob in blobs]
    provenance = v2.Provenance(reason="damaged", consumer_group="group", origin_topic="first")
    reply = link_pb2.PullReply(
        blobs=blobs,
        queue_offsets=range(count),
        log_offsets=range(count),
        stored_at_ms=[NOW_MS] * count,
        delivery_attempts=[2] * count,
        provenance_of=[70],
        provenances=[provenance.SerializeToString()],
        dead_letter_origins=["first"],
    )
    found = pulled(reply)
    assert [message.system_properties.queue_offset for message in found] == list(range(count))
    provenance.log_offset = 70
    provenance.body_size = 0 if has_body else body_size
    for number, message in enumerate(found):
        properties = message.system_properties
        if number == 70:
            assert properties.provenance == provenance
            assert properties.dead_letter_queue.topic == "first"
            assert properties.dead_letter_queue.message_id == sample().system_properties.message_id
        else:
            own = v2.Provenance(log_offset=number, body_size=provenance.body_size)
            assert properties.provenance == own
            assert not properties.HasField("dead_letter_queue")
