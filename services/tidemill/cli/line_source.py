"""Lines of standard input in batches, which do not wait for a slow writer."""

from __future__ import annotations

import io
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, Final, NamedTuple, final

LINE_BYTES_MAX: Final = 8 << 20  # a body of 4 MiB in base64, with properties
BATCH_LINES_MAX: Final = 256  # as of the REST API
FIRST_BATCH_LINES: Final = 16  # the size grows while batches are quick
GATHER_S: Final = 0.05  # the longest time between the first line of a batch and its send
QUICK_S: Final = 0.25  # after a quicker batch the next one is larger
SLOW_S: Final = 1.0  # after a slower batch the next one is smaller
_READ_BYTES: Final = 64 << 10
_NEVER: Final = float("inf")


class InputLine(NamedTuple):
    """A line of standard input."""

    number: int  # from 1
    content: bytes | None  # without its end; None: the line is too long


@final
class LineSource:
    """The lines of a file, pipe or terminal, with a limit of the wait for the next one."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._lines: deque[bytes | None] = deque()
        self._begin = bytearray()  # of the line whose end is not read yet
        self._is_too_long = False
        self._is_ended = False
        self._count = 0  # of the lines taken
        self._descriptor: int | None = None
        try:
            self._descriptor = source.fileno()
        except io.UnsupportedOperation:
            """A buffer in memory has all its lines already."""

    def take(self, end_s: float = _NEVER) -> InputLine | None:
        """Return the next line; None at the end, or if no whole line comes until `end_s`."""
        while not self._lines and not self._is_ended:
            if not self._is_readable(end_s):
                return None
            self._read()
        if not self._lines:
            return None
        self._count += 1
        return InputLine(self._count, self._lines.popleft())

    def _is_readable(self, end_s: float) -> bool:
        if self._descriptor is None:
            return True
        wait_s = None if end_s == _NEVER else max(end_s - time.monotonic(), 0)
        return bool(select.select([self._descriptor], [], [], wait_s)[0])

    def _read(self) -> None:
        chunk = (
            self._source.read(_READ_BYTES)
            if self._descriptor is None
            else os.read(self._descriptor, _READ_BYTES)
        )
        *ends, begin = chunk.split(b"\n")
        for end in ends:
            self._extend(end)
            self._end_line()
        self._extend(begin)
        if not chunk:
            self._is_ended = True
            if self._begin or self._is_too_long:
                self._end_line()

    def _extend(self, part: bytes) -> None:
        self._is_too_long = self._is_too_long or len(self._begin) + len(part) > LINE_BYTES_MAX
        if self._is_too_long:
            self._begin.clear()
        else:
            self._begin += part

    def _end_line(self) -> None:
        self._lines.append(None if self._is_too_long else bytes(self._begin.removesuffix(b"\r")))
        self._begin.clear()
        self._is_too_long = False


@final
class LineBatches:
    """Batches of lines, at most `rate` lines per second."""

    def __init__(self, lines: LineSource, rate: float | None) -> None:
        self._lines = lines
        self._period_s = 1 / rate if rate is not None else 0.0
        self._due_s = time.monotonic()  # of the next line
        self._size = FIRST_BATCH_LINES

    def __iter__(self) -> Iterator[list[InputLine]]:
        """Yield each batch as soon as it is full, or 50 ms after its first line."""
        while (line := self._lines.take()) is not None:
            self._pace()
            batch, end_s = [line], time.monotonic() + GATHER_S
            while len(batch) < self._size and self._due_s < end_s:
                line = self._lines.take(end_s)
                if line is None:
                    break
                self._pace()
                batch.append(line)
            begin_s = time.monotonic()
            yield batch
            self._adapt(time.monotonic() - begin_s)

    def _pace(self) -> None:
        """Wait until the next line may be sent."""
        now_s = time.monotonic()
        if self._due_s > now_s:
            time.sleep(self._due_s - now_s)
        # A slow call is not made up for: the rate is a limit at each time.
        self._due_s = max(self._due_s, now_s) + self._period_s

    def _adapt(self, duration_s: float) -> None:
        """Keep a batch shorter than the time-out of the API, also at a slow broker."""
        if duration_s < QUICK_S:
            self._size = min(2 * self._size, BATCH_LINES_MAX)
        elif duration_s > SLOW_S:
            self._size = max(self._size // 2, 1)
