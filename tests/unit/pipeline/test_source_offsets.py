"""Offsets of a read: what a trigger takes, and how it is split, for every backlog."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill_pipeline.errors import PipelineError
from tidemill_pipeline.offsets import (
    Incarnation,
    Offsets,
    SourceQueue,
    SourceRange,
    backlog,
    split,
    take_bytes,
    take_rows,
)

QUEUES = [
    SourceQueue("orders", broker, i, Incarnation("log", 1))
    for broker in ("a", "b")
    for i in range(3)
]
Backlogs = st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 1000))


@given(Backlogs, st.integers(1, 500))
def test_a_trigger_takes_exactly_as_many_rows_as_it_may(
    waiting: dict[SourceQueue, int], rows_max: int
) -> None:
    start = dict.fromkeys(waiting, 7)
    target = {name: 7 + rows for name, rows in waiting.items()}
    taken = take_rows(start, target, rows_max)
    share = backlog(start, taken)
    filled = [name for name, rows in waiting.items() if rows]
    assert set(share) == set(filled), "each queue that has something gets at least one"
    assert all(share[name] <= waiting[name] for name in filled)
    assert sum(share.values()) == min(sum(waiting.values()), max(rows_max, len(filled)))


@given(Backlogs, st.integers(1, 100_000))
def test_a_trigger_by_bytes_never_stands_still(
    waiting: dict[SourceQueue, int], bytes_max: int
) -> None:
    start = dict.fromkeys(waiting, 0)
    taken = take_bytes(start, waiting, dict.fromkeys(waiting, 100.0), bytes_max)
    share = backlog(start, taken)
    assert set(share) == {name for name, rows in waiting.items() if rows}
    assert sum(share.values()) * 100 <= bytes_max + 100 * len(share)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3000)), max_size=6),
    st.integers(1, 700),
    st.integers(1, 20),
)
def test_tasks_cover_every_range_once(
    sizes: list[tuple[int, int]], rows_per_partition: int, partitions_min: int
) -> None:
    ranges = [
        SourceRange(queue=QUEUES[i], start=start, end=start + rows)
        for i, (start, rows) in enumerate(sizes)
    ]
    parts = split(ranges, rows_per_partition=rows_per_partition, partitions_min=partitions_min)
    assert all(0 < part.rows <= rows_per_partition for part in parts)
    for each in ranges:
        mine = [part for part in parts if part.queue == each.queue]
        at = each.start
        for part in mine:
            assert part.start == at
            at = part.end
        assert at == each.end
    # About so many: rounding may leave half of them.
    total = sum(each.rows for each in ranges)
    assert 2 * len(parts) >= min(partitions_min, total)


def test_equal_offsets_are_equal_texts() -> None:
    at = {QUEUES[4]: 5, QUEUES[0]: 3, QUEUES[1]: 0}
    one, other = Offsets(at=at), Offsets(at=dict(reversed(at.items())))
    assert json.dumps(one.as_document()) == json.dumps(other.as_document())
    assert one.as_document()["o"] == {
        "orders": {"a": {"log/1": {"0": 3, "1": 0}}, "b": {"log/1": {"1": 5}}}
    }
    assert Offsets.from_document(one.as_document()) == one


def test_a_document_of_another_version_is_rejected() -> None:
    with pytest.raises(PipelineError, match="new checkpoint"):
        Offsets.from_document({"v": 2, "o": {}})


@pytest.mark.parametrize(("topics", "queues", "brokers"), [(1, 1000, 4), (125, 8, 4), (250, 4, 1)])
def test_a_thousand_queues_have_a_document_of_at_most_64_kib(
    topics: int, queues: int, brokers: int
) -> None:
    log = "0123456789abcdef0123456789abcdef"
    at = {
        SourceQueue(
            f"of-some-name-{topic}", f"broker-{i % brokers}", i, Incarnation(log, topic)
        ): 10**12
        for topic in range(topics)
        for i in range(queues)
    }
    text = json.dumps(Offsets(at=at).as_document())
    assert len(at) == 1000
    assert len(text) <= 64 << 10
    assert Offsets.from_document(json.loads(text)).at == at
