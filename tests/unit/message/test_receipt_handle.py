"""Receipt handles: a handle opens for its group and topic, and other text does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.errors import InvalidReceiptHandle
from tidemill.message import receipt_handle
from tidemill.message.receipt_handle import INDEX_COUNT_MAX, HandleFields, HandleSigner

SIGNER = HandleSigner(bytes(range(32)), "broker-0")
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
PREFIX_CHARS = 52

names = st.text(alphabet="abcXYZ019_+%-|", min_size=1, max_size=127)
indexes = st.integers(0, INDEX_COUNT_MAX - 1)
slots = st.integers(0, 2**32 - 1)
delivery_ids = st.integers(0, 2**64 - 1)
instants = st.integers(-(2**63), 2**63 - 1)


def handle_of(group: str = "group", topic: str = "topic", index: int = 3) -> str:
    signed = SIGNER.sign(group, topic, slot=7, delivery_id=1 << 40, visible_at_ms=1_790_000_000_000)
    return signed.handle(index).decode()


@given(names, names, slots, delivery_ids, instants, indexes)
def test_a_handle_names_its_delivery_and_message(
    group: str, topic: str, slot: int, delivery_id: int, visible_at_ms: int, index: int
) -> None:
    signed = SIGNER.sign(
        group, topic, slot=slot, delivery_id=delivery_id, visible_at_ms=visible_at_ms
    )
    opened = SIGNER.open(signed.handle(index).decode(), group, topic)
    assert opened == HandleFields(slot, delivery_id, visible_at_ms, index)


@pytest.mark.parametrize("position", range(PREFIX_CHARS))
def test_no_changed_character_is_accepted_in_the_prefix(position: int) -> None:
    handle = handle_of()
    for character in ALPHABET + "+/= \n\0é":
        if character != handle[position]:
            assert_refused(handle[:position] + character + handle[position + 1 :])


def test_no_changed_character_is_accepted_in_a_check() -> None:
    for index in range(INDEX_COUNT_MAX):
        handle = handle_of(index=index)
        for position in (PREFIX_CHARS + 1, PREFIX_CHARS + 2):
            for character in ALPHABET + "+/=":
                if character != handle[position]:
                    assert_refused(handle[:position] + character + handle[position + 1 :])


def test_a_handle_with_another_index_is_rejected() -> None:
    """The check of one index fits another one once in 4096; this delivery has no such pair."""
    for index in range(INDEX_COUNT_MAX):
        handle = handle_of(index=index)
        for character in ALPHABET:
            if character != ALPHABET[index]:
                assert_refused(handle[:PREFIX_CHARS] + character + handle[PREFIX_CHARS + 1 :])


@given(st.text(max_size=80))
def test_text_that_is_not_a_handle_is_rejected(text: str) -> None:
    assert_refused(text)


@pytest.mark.parametrize("cut", [0, 1, 51, 52, 54])
def test_a_shortened_handle_is_rejected(cut: int) -> None:
    assert_refused(handle_of()[:cut])


@pytest.mark.parametrize("suffix", ["A", "=", "==", "\n", " "])
def test_a_lengthened_handle_is_rejected(suffix: str) -> None:
    assert_refused(handle_of() + suffix)


@given(names, names)
def test_another_group_or_topic_is_rejected(group: str, topic: str) -> None:
    handle = handle_of(group, topic)
    for other_group, other_topic in [(group + "x", topic), (group, topic + "x"), (topic, group)]:
        if (other_group, other_topic) != (group, topic):
            with pytest.raises(InvalidReceiptHandle):
                SIGNER.open(handle, other_group, other_topic)


@pytest.mark.parametrize(("group", "topic"), [("g" * 70_000, "t"), ("g", "t" * 5_000_000)])
def test_names_longer_than_any_topic_or_group_are_rejected_and_not_kept(
    group: str, topic: str
) -> None:
    """A client may send any names with a handle. A cache of them would fill the memory."""
    handle, kept = handle_of(), receipt_handle._names.cache_info().currsize
    with pytest.raises(InvalidReceiptHandle):
        SIGNER.open(handle, group, topic)
    assert receipt_handle._names.cache_info().currsize == kept


def test_a_character_moved_from_the_group_to_the_topic_is_rejected() -> None:
    handle = handle_of("ab", "c")
    with pytest.raises(InvalidReceiptHandle):
        SIGNER.open(handle, "a", "bc")


def test_a_handle_of_another_broker_or_secret_is_rejected() -> None:
    handle = handle_of()
    for stranger in (
        HandleSigner(bytes(range(32)), "broker-1"),
        HandleSigner(b"k" * 32, "broker-0"),
    ):
        with pytest.raises(InvalidReceiptHandle):
            stranger.open(handle, "group", "topic")


def test_a_handle_keeps_its_text_across_releases() -> None:
    """Golden: a handle issued before an upgrade must be valid after it."""
    assert handle_of() == "AeB4AAAABwAAAQAAAAAAAAABoMRQbAD29vYJjqnQL3J_b-sR8r8YD-n"


def assert_refused(text: str) -> None:
    with pytest.raises(InvalidReceiptHandle):
        SIGNER.open(text, "group", "topic")
