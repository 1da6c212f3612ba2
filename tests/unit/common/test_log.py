"""The stream of the log, which outlives what it writes to."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tidemill.common.log import LogStream


def test_a_line_to_a_closed_pipe_is_lost_and_counted() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = LogStream(writing)
    stream.write("first\n")
    stream.write("second\n")
    os.close(writing)
    stream.write("third\n")
    assert stream.lost_count == 3


def test_the_first_line_after_a_loss_tells_how_many_were_lost(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    full = os.open("/dev/full", os.O_WRONLY)
    spare = os.dup(fd)
    os.dup2(full, fd)
    stream = LogStream(fd)
    stream.write("lost\n")
    os.dup2(spare, fd)
    stream.write("kept\n")
    for each in (fd, full, spare):
        os.close(each)
    told, kept = (tmp_path / "log").read_text().splitlines()
    assert json.loads(told) == {"event": "log lines lost", "count": 1}
    assert (kept, stream.lost_count) == ("kept", 0)
