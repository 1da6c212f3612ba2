"""Commands that repeat a query until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import IO, Any

import httpx

from tests.support.processes.processes import Standalone, command, environment
from tidemill.common.exit_codes import EXIT_INTERRUPTED

END_S = 30.0  # For a command to end on a busy machine.


def _hear_of_ctrl_c() -> None:
    # A background process of a shell ignores Ctrl-C, and its children inherit this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def watching(running: Standalone, *arguments: str) -> Iterator[IO[str]]:
    """Run a command for the block and yield its output; Ctrl-C ends it with status 130."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment() | {"TIDEMILL_ADMIN": running.admin},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_of_ctrl_c,  # noqa: PLW1509 - nothing else runs in this process
    )
    assert process.stdout is not None
    try:
        yield process.stdout
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(END_S) == EXIT_INTERRUPTED
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def send(running: Standalone, topic: str, body: str) -> None:
    with httpx.Client(trust_env=False) as client:
        path = f"{running.admin}/api/v1/topics/{topic}/messages"
        client.post(path, json={"body": body}).raise_for_status()


def read(lines: IO[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines.readline())
    return found


def test_tail_shows_messages_as_they_come(running: Standalone) -> None:
    running.put("topics/tailed", queues=1)
    send(running, "tailed", "before")
    with watching(running, "message", "tail", "tailed", "--from=earliest", "-o", "json") as lines:
        first = read(lines)
        assert (first["bodyText"], first["queueOffset"]) == ("before", 0)
        for n, body in enumerate(("one", "two"), 1):
            send(running, "tailed", body)
            shown = read(lines)
            assert (shown["bodyText"], shown["queueOffset"]) == (body, n)


def read_document(lines: IO[str]) -> dict[str, Any]:
    """Read a document of several lines."""
    text = ""
    for line in lines:
        text += line
        if line == "}\n":
            break
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_consumer_group_is_shown_again_and_again(running: Standalone) -> None:
    running.put("topics/paced", queues=1)
    running.put("groups/pacing")
    with httpx.Client(trust_env=False) as client:
        path = f"{running.admin}/api/v1/groups/pacing:resetOffset"
        client.post(path, json={"topic": "paced", "to": "earliest"}).raise_for_status()
    watch = ("--watch", "--interval", "10ms", "-o", "json")
    with watching(running, "group", "show", "pacing", *watch) as lines:
        assert read_document(lines)["total"]["lag"] == 0
        send(running, "paced", "body")
        while read_document(lines)["total"]["lag"] == 0:
            pass
