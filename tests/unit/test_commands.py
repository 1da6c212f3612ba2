"""The tables of commands of both ends of the link, against the frames of broker.proto."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from tidemill.broker.server.link import commands as broker
from tidemill.proxy.link import commands as proxy
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# What a frame itself says, of no command or of all.
OF_THE_REQUEST_FRAME = {
    "sequence",
    "cancelled_polls",
    "repeated_ids",
    "process_id",
    "stream_number",
    "alive_clients",
    "ended_clients",
    "revoked",
    "disconnected_clients",
    "handed_over",
    "subscribed",
    "alive_owners",
    "ended_owners",
    "disconnected_owners",
    "feature_level",
}
OF_THE_REPLY_FRAME = {
    "config",
    "epoch",
    "failures",
    "answered_sequence",
    "not_master",
    "sends_rejected",
    "times",
}


def test_both_ends_know_the_same_commands() -> None:
    ends = [
        {row.name: (row.request_field, row.reply_field) for row in table}
        for table in (broker.COMMANDS, proxy.COMMANDS)
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == len(broker.COMMANDS) == len(proxy.COMMANDS)


def test_every_field_of_a_frame_is_one_commands_or_the_frames_own() -> None:
    for table in (broker.COMMANDS, proxy.COMMANDS):
        requests = [row.request_field for row in table]
        replies = [row.reply_field for row in table]
        assert sorted([*requests, *OF_THE_REQUEST_FRAME]) == fields_of(pb.RequestFrame)
        assert sorted([*replies, *OF_THE_REPLY_FRAME]) == fields_of(pb.ReplyFrame)


def test_the_columns_of_a_row_are_the_columns_of_its_message() -> None:
    for command in broker.COMMANDS:
        field = pb.RequestFrame.DESCRIPTOR.fields_by_name[command.request_field]
        assert field.message_type is not None
        columns = [one.name for one in field.message_type.fields if one.is_repeated]
        if "request_ids" not in columns:
            assert command.columns is None
            continue
        batch = getattr(pb, field.message_type.name)()
        for n, column in enumerate(columns):
            fill(batch, column, n)
        assert command.columns is not None
        assert sorted(map(len, command.columns(batch))) == list(range(len(columns)))


def test_every_command_defines_its_answer_to_a_lost_link() -> None:
    for command in proxy.COMMANDS:
        assert command.when_lost


def fields_of(frame: type[pb.RequestFrame | pb.ReplyFrame]) -> list[str]:
    return sorted(frame.DESCRIPTOR.fields_by_name)


def fill(batch: object, column: str, count: int) -> None:
    """Put `count` values into a column."""
    is_bytes = (
        batch.DESCRIPTOR.fields_by_name[column].type  # type: ignore[attr-defined]  # a message
        == FieldDescriptor.TYPE_BYTES
    )
    getattr(batch, column).extend([b"" if is_bytes else 0] * count)
