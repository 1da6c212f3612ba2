"""Each command that an error names as its remedy is accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, command, environment, standalone

COMMAND = re.compile(r"tidemill ((?:[\w.:%=/|\[\]-]+ ?)+)")
UNUSED = "127.0.0.1:1"  # no broker listens there


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("remedies") / "data") as started:
        yield started


def refused(running: Standalone, *arguments: str) -> str:
    """Run a command that fails with a conflict or a missing object, and return its error."""
    done = tidemill(running, *arguments)
    assert done.returncode == 1, done
    return done.stderr


def remedy(running: Standalone, error: str, **placeholders: str) -> CompletedProcess[str]:
    """Run the command that an error names, and answer its question with yes."""
    found = COMMAND.search(error)
    assert found, error
    words = [placeholders.get(word, word) for word in shlex.split(found[1])]
    words = [word.split("|")[0] for word in words]
    done = tidemill(running, *words)
    if done.returncode and "needs a confirmation" in done.stderr:
        done = tidemill(running, *words, "--yes")
    assert done.returncode == 0, (error, done)
    return done


def test_the_type_of_a_topic_with_messages_changes_with_force(running: Standalone) -> None:
    tidemill(running, "topic", "create", "typed")
    tidemill(running, "message", "send", "typed", "hello")
    change = "topic", "set", "typed", "--type", "NORMAL"
    assert "only with force (--force)" in refused(running, *change)
    assert tidemill(running, *change, "--force").returncode == 0


def test_a_group_that_has_begun_to_read_moves_by_a_reset(running: Standalone) -> None:
    tidemill(running, "topic", "create", "read")
    tidemill(running, "group", "create", "reader")
    tidemill(running, "group", "reset", "reader", "--topic", "read", "--to", "earliest", "--yes")
    error = refused(running, "group", "set", "reader", "--start-from", "latest")
    remedy(running, error, TOPIC="read")


def test_an_operator_creates_a_deleted_topic_again(running: Standalone) -> None:
    tidemill(running, "topic", "create", "back")
    tidemill(running, "topic", "delete", "back", "--yes")
    remedy(running, refused(running, "message", "send", "back", "hello"))
    assert tidemill(running, "message", "send", "back", "hello").returncode == 0


def test_a_broker_group_that_is_down_is_added_and_removed_by_force(running: Standalone) -> None:
    # The first broker group of a cluster adds itself.
    [home] = running.get("broker-groups")["items"]
    alone = refused(running, "broker-group", "add", "broker-9", UNUSED)
    remedy(running, alone, ADDRESS=home["address"])
    remedy(running, refused(running, "broker-group", "add", "broker-9", UNUSED))
    error = refused(running, "broker-group", "remove", "broker-9", "--yes")
    assert "drain it first" in error
    assert tidemill(running, "broker-group", "drain", "broker-9", "--yes").returncode == 0
    remedy(running, refused(running, "broker-group", "remove", "broker-9", "--yes"))
    assert tidemill(running, "broker-group", "show", "broker-9").returncode == 1


def test_a_setting_that_does_not_exist_names_the_ones_that_do(tmp_path: Path) -> None:
    def start(*flags: str) -> str:
        done = subprocess.run(
            command("standalone", f"--data-dir={tmp_path}", *flags),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 2
        return done.stderr

    error = start("--auto-create")
    flags = re.findall(r"--auto-create-\w+", error)
    assert len(flags) == 2
    assert "unrecognized" not in start(*flags, "--grpc-port=-1")
