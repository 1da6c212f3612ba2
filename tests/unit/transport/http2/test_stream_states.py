"""The table of stream states and its transitions."""

from __future__ import annotations

import itertools

from tidemill.transport.http2.stream_states import (
    LOCAL_ENDED,
    REMOTE_ENDED,
    TRANSITIONS,
    StreamChange,
    StreamState,
)


def after(*changes: StreamChange) -> StreamState | None:
    """Return the state of a stream after `changes`; None if one of them cannot happen."""
    state: StreamState | None = StreamState.OPEN
    for change in changes:
        state = TRANSITIONS[change].get(state) if state is not None else None
    return state


def test_a_stream_is_closed_when_both_sides_have_ended_in_either_order() -> None:
    for order in itertools.permutations([StreamChange.LOCAL_END, StreamChange.REMOTE_END]):
        assert after(*order) is StreamState.CLOSED


def test_a_stream_may_be_reset_until_it_is_closed() -> None:
    for before in ([], [StreamChange.LOCAL_END], [StreamChange.REMOTE_END]):
        assert after(*before, StreamChange.RESET) is StreamState.RESET
    assert after(StreamChange.LOCAL_END, StreamChange.REMOTE_END, StreamChange.RESET) is None


def test_no_side_ends_twice_and_final_states_have_no_transition() -> None:
    for change in (StreamChange.LOCAL_END, StreamChange.REMOTE_END):
        assert after(change, change) is None
    for change in StreamChange:
        for last in (StreamState.CLOSED, StreamState.RESET):
            assert last not in TRANSITIONS[change]


def test_a_side_has_ended_exactly_after_its_last_frame_or_a_reset() -> None:
    for changes in itertools.chain.from_iterable(
        itertools.permutations(StreamChange, count) for count in range(4)
    ):
        state = after(*changes)
        if state is not None:
            is_reset = StreamChange.RESET in changes
            assert (state in LOCAL_ENDED) == (is_reset or StreamChange.LOCAL_END in changes)
            assert (state in REMOTE_ENDED) == (is_reset or StreamChange.REMOTE_END in changes)
