"""Lines of standard input: from a pipe that stays open, and from a file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import IO

import pytest

from tidemill.cli.line_source import (
    BATCH_LINES_MAX,
    FIRST_BATCH_LINES,
    LINE_BYTES_MAX,
    InputLine,
    LineBatches,
    LineSource,
)


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A pipe as the reader and the writer of it, which stays open."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "wb", buffering=0) as writer:
        yield reader, writer


def test_lines_are_sent_while_the_writer_is_slow(pipe: tuple[IO[bytes], IO[bytes]]) -> None:
    reader, writer = pipe
    batches = iter(LineBatches(LineSource(reader), None))
    writer.write(b"a\nb\nbegin of c")
    assert [line.content for line in next(batches)] == [b"a", b"b"]
    writer.write(b", and its end\n")
    assert next(batches) == [InputLine(3, b"begin of c, and its end")]
    writer.write(b"last")
    writer.close()
    assert list(batches) == [[InputLine(4, b"last")]]


def test_batches_of_a_file_grow_to_the_limit_of_the_api() -> None:
    batches = list(LineBatches(LineSource(io.BytesIO(b"x\n" * 5_000)), None))
    sizes = [len(batch) for batch in batches]
    assert sizes[0] == FIRST_BATCH_LINES
    assert max(sizes) <= BATCH_LINES_MAX
    assert [line.number for batch in batches for line in batch] == list(range(1, 5_001))


def test_a_slow_rate_does_not_hold_a_line_back() -> None:
    # With a line per 100 ms, the second line is due after the first batch has left.
    batches = LineBatches(LineSource(io.BytesIO(b"x\n" * 3)), 10)
    assert [len(batch) for batch in batches] == [1, 1, 1]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_that_is_too_long_is_left_out_alone(end: bytes) -> None:
    long = b"a" * (LINE_BYTES_MAX + 1)
    source = LineSource(io.BytesIO(b"first\n" + long + end + (b"next\n" if end else b"")))
    lines = list(iter(source.take, None))
    wanted = [b"first", None, *([b"next"] if end else [])]
    assert [line.content for line in lines] == wanted
    longest = LineSource(io.BytesIO(long[1:] + b"\n")).take()
    assert longest is not None
    assert longest.content == long[1:]
