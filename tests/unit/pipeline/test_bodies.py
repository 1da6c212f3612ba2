"""Packed bodies: unpacked as a whole or not at all, and within bounds."""

from __future__ import annotations

import gzip
import zlib

import pytest

from tidemill_pipeline import bodies as under_test
from tidemill_pipeline.bodies import unpacked, unpacked_parts

FIRST, SECOND = b"first-" * 50, b"second-" * 5_000
BOUND = 1 << 20


def packed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (packed(FIRST), FIRST),
        (packed(b""), b""),
        (packed(FIRST) + packed(b"") + packed(SECOND), FIRST + SECOND),
        (packed(b"a") * 3_000, b"a" * 3_000),
    ],
)
def test_all_members_of_a_packed_body_are_unpacked(body: bytes, whole: bytes) -> None:
    assert unpacked(body) == whole


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        zlib.compress(FIRST),
        packed(FIRST)[:-5],
        packed(FIRST)[:-8] + bytes(8),
        packed(FIRST) + b"garbage",
        packed(FIRST) + packed(SECOND)[:-1],
        packed(FIRST) + packed(SECOND) + b"\x1f",
        b"garbage" + packed(FIRST),
    ],
)
def test_an_incomplete_gzip_body_stays_packed(body: bytes) -> None:
    assert unpacked(body) == body


def test_all_members_together_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "BODY_BYTES_MAX", BOUND)
    half = packed(bytes(BOUND // 2))
    assert len(unpacked(half * 2)) == BOUND
    for larger in (half * 3, half * 2 + packed(b"a"), packed(bytes(BOUND + 1))):
        assert unpacked(larger) == larger


def test_unpacked_bytes_of_a_part_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "PART_BYTES", BOUND)
    large = packed(bytes(BOUND))
    given = [b"plain" * BOUND, packed(FIRST), large, packed(FIRST), large, large, b"plain"]
    are_packed = [body not in {given[0], b"plain"} for body in given]
    parts = list(unpacked_parts(given, are_packed))
    # Plain bodies do not count towards the bound: the caller already limits them.
    assert [(part.start, part.stop) for part, _ in parts] == [(0, 3), (3, 5), (5, 6), (6, 7)]
    assert [len(body) for _, bodies in parts for body in bodies] == [
        len(given[0]),
        len(FIRST),
        BOUND,
        len(FIRST),
        BOUND,
        BOUND,
        5,
    ]
    assert list(unpacked_parts([], [])) == []
