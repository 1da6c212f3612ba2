"""The compiled filters that a broker keeps."""

from __future__ import annotations

import tracemalloc

import pytest

from tidemill.broker.server.wire import filters
from tidemill.broker.server.wire.filters import FILTER_BYTES_MAX, FILTERS_MAX, FilterCache


def between(number: int) -> str:
    return " OR ".join(f"NOT p{number}_{k} NOT BETWEEN .1 AND .2" for k in range(100))


def equal(number: int) -> str:
    return " OR ".join(f"p{number}_{k} = q{k}" for k in range(128))


def listed(number: int) -> str:
    texts = ",".join(f"'{chr(0x100 + k)}'" for k in range(800))
    return f"a{number} IN ({texts})"


@pytest.mark.parametrize("make", [between, equal, listed])
def test_the_memory_of_filters_has_a_bound(make: object) -> None:
    assert callable(make)
    expressions = [make(number) for number in range(6)]
    filters.SqlFilter(expressions[0])  # Loads what all filters share.
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]
        kept = [filters.SqlFilter(expression) for expression in expressions]
        used = tracemalloc.get_traced_memory()[0] - begin
    finally:
        tracemalloc.stop()
    estimated = sum(one.memory_bytes for one in kept)
    assert used <= estimated <= 2.5 * used


def test_the_filters_used_longest_ago_go_first() -> None:
    cache = FilterCache(bytes_max=1 << 20)
    first = cache.find((), between(0))
    second = cache.find((), between(1))
    for number in range(2, 12):
        cache.find((), between(number))
        assert cache.find((), between(0)) is first
        assert cache.memory_bytes <= 1 << 20
    assert len(cache) < 10
    assert cache.find((), between(1)) is not second
    assert cache.find((), between(1)) == second


def test_short_filters_are_bound_by_their_number() -> None:
    cache = FilterCache()
    for number in range(FILTERS_MAX):
        cache.find((), f"a = {number}")
        cache.find((f"tag{number}",), "")
    assert len(cache) == FILTERS_MAX


def test_long_tags_count_with_their_length() -> None:
    cache = FilterCache()
    for number in range(FILTERS_MAX):
        cache.find((f"{number}" + "x" * 16_000,), "")
    assert len(cache) < FILTERS_MAX
    assert cache.memory_bytes <= FILTER_BYTES_MAX
