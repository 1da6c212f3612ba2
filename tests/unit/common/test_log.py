"""The log: a stream that survives the loss of its target, and lines for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.common.log import LogFormat, LogStream, TextRenderer


def test_a_line_to_a_closed_pipe_is_lost_and_counted() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = LogStream(writing)
    stream.write("first\n")
    stream.write("second\n")
    os.close(writing)
    stream.write("third\n")
    assert stream.lost_count == 3


def test_the_first_line_after_a_loss_has_the_number_of_lost_lines(tmp_path: Path) -> None:
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
    lost, kept = (tmp_path / "log").read_text().splitlines()
    assert json.loads(lost) == {"event": "log lines lost", "count": 1}
    assert (kept, stream.lost_count) == ("kept", 0)


def line_of(**event: object) -> str:
    given = {"timestamp": "2027-01-01T08:00:01.123456Z", "level": "info", "process": "broker-0"}
    return TextRenderer(has_colors=False)(None, "info", {**given, **event})


def test_lines_for_people_are_aligned() -> None:
    first = line_of(event="store recovered", records=3, took_ms=2)
    assert first == (
        "08:00:01.123 info     broker-0   store recovered              records=3 took_ms=2"
    )
    second = line_of(event="topic created", level="warning", process="admin", topic="a")
    assert second.index("topic=") == first.index("records=")
    assert line_of(event="stopped").endswith("stopped")


def test_text_of_a_client_cannot_move_the_cursor_or_forge_a_field() -> None:
    line = line_of(event="client met", client="a\x1b[31m b=c\nnext", empty="", names=["a", "b"])
    assert line.partition("client=")[2] == ('"a\\u001b[31m b=c\\nnext" empty="" names=["a", "b"]')


def test_a_trace_follows_its_line() -> None:
    assert line_of(event="failed", exception="Traceback\n  x").splitlines()[1:] == [
        "Traceback",
        "  x",
    ]


# In a process of its own: the log keeps its descriptor, and pytest closes those that it captures.
# Later tests would write log lines into any file that gets the same descriptor.
PROGRAM = """
import structlog
from tidemill.common.log import configure_logging
configure_logging(process="broker-0", level="info", log_format="{log_format}")
structlog.get_logger().warning("store recovered", records=3)
"""


def program(log_format: LogFormat) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(log_format=log_format)]


@pytest.mark.parametrize(
    ("log_format", "is_json"), [("auto", True), ("json", True), ("text", False)]
)
def test_without_a_terminal_lines_are_json_unless_text_is_configured(
    log_format: LogFormat, is_json: bool
) -> None:
    done = subprocess.run(
        program(log_format), stderr=subprocess.PIPE, check=True, timeout=30, text=True
    )
    [line] = done.stderr.splitlines()
    assert line.startswith("{") == is_json
    assert "store recovered" in line
    assert "broker-0" in line


def test_on_a_terminal_lines_are_text() -> None:
    ours, terminal = os.openpty()
    subprocess.run(program("auto"), stderr=terminal, check=True, timeout=30)
    os.close(terminal)
    text = os.read(ours, 4096).decode()
    os.close(ours)
    assert "\x1b[33mwarning \x1b[0m broker-0   store recovered" in text


def test_a_changed_level_counts_for_loggers_that_exist() -> None:
    program = """
import logging
import structlog
from tidemill.common import log
log.configure_logging(process="p", level="info", log_format="json")
events = structlog.get_logger()
library = logging.getLogger("library")
def report(at):
    events.debug("debug", at=at)
    events.info("info", at=at)
    events.error("error", at=at)
    library.warning("warning")
report(0)
assert log.change_level("debug") == "info"
report(1)
assert log.change_level("error") == "debug"
report(2)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert events == ["info", "error", "warning", "debug", "info", "error", "warning", "error"]
