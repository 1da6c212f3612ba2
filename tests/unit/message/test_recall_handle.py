"""Recall handles: a handle opens for its topic, and other text does not open."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.errors import BadRequest
from tidemill.message.recall_handle import HANDLE_CHARS_MAX, RecallFields, RecallSigner
from tidemill.message.receipt_handle import HandleSigner

SECRET = bytes(range(32))
SIGNER = RecallSigner(SECRET, "broker-0")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
GOLDEN = Path(__file__).parent / "golden" / "recall_handles.txt"

names = st.text(alphabet="abcXYZ019_+%-|", min_size=1, max_size=127)
recalls = st.builds(
    RecallFields,
    timer_id=st.integers(0, 2**64 - 1),
    due_at_ms=st.integers(0, 2**53),
    message_id=st.text(min_size=1, max_size=100),
)

# As in the golden file, line by line: topic and fields of the handle.
SAMPLES = [
    ("topic", RecallFields(0, 0, "i")),
    ("topic", RecallFields(7, 1_790_000_000_123, "01A2B3C4D5E6F708090A0B0C0D0E0F1011")),
    ("orders", RecallFields(2**64 - 1, 2**53, "an id of another length, ä")),
]


@given(names, recalls)
def test_a_handle_names_its_timer_and_message(topic: str, recall: RecallFields) -> None:
    assert SIGNER.open(SIGNER.sign(topic, recall), topic) == recall


def test_the_longest_message_id_has_room() -> None:
    recall = RecallFields(1, 2, "x" * 1024)
    handle = SIGNER.sign("topic", recall)
    assert len(handle) <= HANDLE_CHARS_MAX
    assert SIGNER.open(handle, "topic") == recall


@pytest.mark.parametrize("id_size", [33, 34, 35])
def test_no_changed_character_is_accepted(id_size: int) -> None:
    """For each of the three numbers of unused bits in the last character."""
    handle = SIGNER.sign("topic", RecallFields(7, 1_790_000_000_123, "i" * id_size))
    for position, right in enumerate(handle):
        for character in ALPHABET + "+/= \n\0é":
            if character != right:
                assert_refused(handle[:position] + character + handle[position + 1 :])


@given(names, recalls, st.data())
def test_a_cut_or_lengthened_handle_is_rejected(
    topic: str, recall: RecallFields, data: st.DataObject
) -> None:
    handle = SIGNER.sign(topic, recall)
    cut = data.draw(st.integers(0, len(handle) - 1))
    assert_refused(handle[:cut], topic)
    assert_refused(handle + data.draw(st.text(min_size=1, max_size=5)), topic)


@given(st.text(max_size=200))
def test_other_text_is_rejected(text: str) -> None:
    assert_refused(text)


@given(names, names, recalls)
def test_a_handle_of_another_topic_is_rejected(
    topic: str, other: str, recall: RecallFields
) -> None:
    handle = SIGNER.sign(topic, recall)
    for foreign in (other, topic + "x", topic[1:]):
        if foreign != topic:
            assert_refused(handle, foreign)


def test_a_character_moved_from_the_message_id_to_the_topic_is_rejected() -> None:
    assert_refused(SIGNER.sign("bc", RecallFields(1, 2, "a")), "abc")


def test_a_recall_handle_of_another_broker_or_secret_is_rejected() -> None:
    handle = SIGNER.sign("topic", RecallFields(1, 2, "id"))
    with pytest.raises(BadRequest, match="another broker"):
        RecallSigner(SECRET, "broker-1").open(handle, "topic")
    with pytest.raises(BadRequest, match="belongs to another topic"):
        RecallSigner(b"k" * 32, "broker-0").open(handle, "topic")


def test_a_receipt_handle_is_not_a_recall_handle() -> None:
    signed = HandleSigner(SECRET, "broker-0").sign(
        "group", "topic", slot=1, delivery_id=2, visible_at_ms=3
    )
    assert_refused(signed.handle(0).decode())


def test_a_handle_keeps_its_text_across_releases() -> None:
    """Golden: a handle issued before an upgrade must be valid after it."""
    handles = GOLDEN.read_text().splitlines()
    assert handles == [SIGNER.sign(topic, recall) for topic, recall in SAMPLES]
    for handle, (topic, recall) in zip(handles, SAMPLES, strict=True):
        assert SIGNER.open(handle, topic) == recall


def assert_refused(text: str, topic: str = "topic") -> None:
    with pytest.raises(BadRequest):
        SIGNER.open(text, topic)
