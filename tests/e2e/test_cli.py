"""The command line against a running standalone."""

from __future__ import annotations

import http.server
import json
import os
import pty
import subprocess
import threading

import pytest

from tests.support.clients.commands import tidemill
from tests.support.processes.processes import Standalone, command, environment


def process(*arguments: str, admin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in its own process."""
    variables = environment() | ({"TIDEMILL_ADMIN": admin} if admin else {})
    return subprocess.run(
        command(*arguments),
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_topic_from_creation_to_deletion(running: Standalone) -> None:
    created = tidemill(running, "topic", "create", "a", "--type", "fifo", "--queues=3")
    assert (created.returncode, created.stdout) == (0, "topic a: FIFO, 3 queues\n")
    listed = tidemill(running, "topic", "list", "-o", "json")
    assert json.loads(listed.stdout)[0]["queues"] == 3
    table = process("topic", "show", "a", "--admin", running.admin)
    lines = table.stdout.splitlines()
    assert (len(lines), lines[4]) == (5, "Its creator is unknown: created without a user.")
    deleted = tidemill(running, "topic", "delete", "a", "--yes")
    assert deleted.returncode == 0


def test_set_clears_the_delivery_spread(running: Standalone) -> None:
    def run(verb: str, *arguments: str) -> str:
        return tidemill(running, "topic", verb, "spread-out", *arguments).stdout

    sentence = "topic spread-out: MIXED, 8 queues, deliveries spread over 5000 ms\n"
    assert run("create", "--delivery-spread=5s") == sentence
    sentence = "topic spread-out: changed: MIXED, 8 queues, deliveries spread over 5000 -> 0 ms\n"
    assert run("set", "--delivery-spread=0s") == sentence
    assert run("set") == "topic spread-out: is there, unchanged: MIXED, 8 queues\n"


def test_a_group_from_creation_to_deletion(running: Standalone) -> None:
    def group(*arguments: str) -> subprocess.CompletedProcess[str]:
        return tidemill(running, "group", *arguments)

    tidemill(running, "topic", "create", "b", "--queues=2")
    assert (
        group("create", "g", "--max-attempts=3", "--retry-ms=10", "--retry-ms=20").returncode == 0
    )
    assert "10 ms, 20 ms" in group("show", "g").stdout
    assert "(total)" in group("progress", "g").stdout
    reset = group("reset", "g", "--topic=b", "--to=latest", "--output=json", "--yes")
    assert json.loads(reset.stdout)["topic"] == "b"
    assert group("delete", "g", "-y").returncode == 0


def test_an_error_goes_to_standard_error(running: Standalone) -> None:
    refused = tidemill(running, "topic", "show", "none")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: TopicNotFound: there is no topic 'none'\n"


def test_an_api_that_cannot_be_reached_has_a_status_of_its_own() -> None:
    refused = process("topic", "list", "--admin=http://127.0.0.1:1")
    assert refused.returncode == 3
    assert "tidemill standalone" in refused.stderr


@pytest.mark.parametrize(
    "noun", ["", "topic", "group", "message", "timer", "store", "standalone", "broker", "proxy"]
)
def test_every_command_has_help(noun: str) -> None:
    shown = process(*([noun] if noun else []), "--help")
    assert shown.returncode == 0
    assert "usage" in shown.stdout.lower()


def test_the_help_of_standalone_names_all_sources_of_settings() -> None:
    shown = " ".join(process("standalone", "--help").stdout.replace("│", "").split())
    for text in ("TIDEMILL_GRPC_PORT", "YAML", "next ports"):
        assert text in shown


def test_wrong_usage_has_status_2() -> None:
    assert process("topic", "paint").returncode == 2
    assert process("standalone", "--proxies=0").returncode == 2


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b"])
@pytest.mark.parametrize("verb", ["topic delete --yes", "topic create", "group show"])
def test_an_invalid_name_is_rejected(running: Standalone, verb: str, name: str) -> None:
    refused = tidemill(running, *verb.split(), name)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{name!r} is not a name" in refused.stderr


def test_the_address_of_the_api_needs_no_scheme(running: Standalone) -> None:
    assert process("topic", "list", admin=running.admin.removeprefix("http://")).returncode == 0


def test_a_redirect_is_an_error() -> None:
    class RedirectingHandler(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            self.send_response(307)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            del arguments  # Standard error is the test's.

    with http.server.HTTPServer(("127.0.0.1", 0), RedirectingHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        answer = process("topic", "delete", "a", "--yes", admin=f"127.0.0.1:{server.server_port}")
        server.shutdown()
        serving.join()
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "307" in answer.stderr


def test_set_prints_the_changes(running: Standalone) -> None:
    def run(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return tidemill(running, "topic", verb, "live", *arguments)

    settings = "--type=normal", "--queues=3"
    assert run("create", *settings).stdout == "topic live: NORMAL, 3 queues\n"
    again = run("create", *settings)
    assert (again.returncode, again.stdout) == (0, "topic live: exists already, unchanged\n")
    different = run("create", "--type=normal", "--queues=4")
    assert (different.returncode, "tidemill topic set live" in different.stderr) == (1, True)
    assert run("set").stdout == "topic live: is there, unchanged: NORMAL, 3 queues\n"
    warned = run("set", "--type=lite", "--queues=4")
    assert warned.stdout == "topic live: changed: NORMAL -> LITE, 3 -> 4 queues\n"
    assert "LITE messages are not served yet" in warned.stderr
    assert warned.returncode == 0
    assert run("set", "--type=fifo").stdout == "topic live: changed: LITE -> FIFO, 4 queues\n"


def test_topics_of_the_broker_are_listed_when_asked_for(running: Standalone) -> None:
    tidemill(running, "topic", "create", "own")
    listed = tidemill(running, "topic", "list", "--system")
    assert "own" in listed.stdout
    assert listed.returncode == 0


def test_an_empty_search_prints_nothing_found(running: Standalone) -> None:
    tidemill(running, "topic", "create", "silent")
    found = tidemill(running, "message", "find", "silent", "--key=k")
    assert found.returncode == 0
    assert "nothing found" in found.stderr


def test_a_table_for_a_program_keeps_each_row_on_a_line(running: Standalone) -> None:
    name = "n" * 127
    tidemill(running, "topic", "create", name)
    listed = tidemill(running, "topic", "list")
    assert name in listed.stdout


def test_the_log_records_changes_of_topics_and_groups(running: Standalone) -> None:
    for line in (
        "topic create logged --type=normal --queues=3",
        "topic set logged --queues=4",
        "topic set logged",
        "group create teller",
        "group set teller --max-attempts=3 -y",
        "group reset teller --topic logged --to earliest --yes",
        "group delete teller --yes",
        "topic delete logged --yes",
    ):
        assert tidemill(running, *line.split()).returncode == 0, line
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    logged_events = [e for e in lines if "logged" in e.values() or "teller" in e.values()]
    assert [event["event"] for event in logged_events] == [
        "topic created",
        "topic changed",
        "group created",
        "group changed",
        "offsets reset",
        "group deleted",
        "topic deleted",
    ]
    assert logged_events[0]["auto_create"] is False
    assert (logged_events[1]["old_queues"], logged_events[1]["queues"]) == (3, 4)


def test_a_group_is_not_named_like_a_topic_of_the_broker(running: Standalone) -> None:
    refused = tidemill(running, "group", "create", "%DLQ%x")
    assert refused.returncode == 1
    assert "IllegalGroup" in refused.stderr


@pytest.mark.parametrize(
    "verb", ["topic delete sure", "group delete sure", "group reset sure --topic sure --to latest"]
)
def test_destructive_commands_ask_for_confirmation(running: Standalone, verb: str) -> None:
    running.put("topics/sure", queues=1)
    running.put("groups/sure")
    refused = tidemill(running, *verb.split())
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--yes" in refused.stderr
    assert "not a terminal" in refused.stderr
    denied, output = at_a_terminal(*verb.split(), answer="n", admin=running.admin)
    assert (denied, "sure" in output) == (1, True)
    planned = tidemill(running, *verb.split(), "--dry-run")
    assert planned.returncode == 0
    assert "would" in planned.stdout.lower()
    assert running.lag("sure") == 0  # It is there.
    assert at_a_terminal(*verb.split(), answer="y", admin=running.admin)[0] == 0


@pytest.mark.parametrize(
    ("verb", "repeated"), [("cancel", "was cancelled before (ALREADY_CANCELLED)"), ("fire", "")]
)
def test_ending_a_timer_names_it_and_asks_for_confirmation(
    running: Standalone, verb: str, repeated: str
) -> None:
    running.put("topics/delayed-by-cli", queues=1)
    delayed = ("message", "send", "delayed-by-cli", "hello", "--delay=1h", "-o", "json")
    sent = json.loads(tidemill(running, *delayed).stdout)
    number = str(sent["timerId"])
    refused = tidemill(running, "timer", verb, number)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "add --yes" in refused.stderr
    denied, output = at_a_terminal("timer", verb, number, answer="n", admin=running.admin)
    assert denied == 1
    for said in (f"timer {number}", sent["messageId"], "topic delayed-by-cli", "due 20", "in "):
        assert said in output
    assert "PENDING" in tidemill(running, "timer", "show", number).stdout
    assert at_a_terminal("timer", verb, number, answer="y", admin=running.admin)[0] == 0
    assert "PENDING" not in tidemill(running, "timer", "show", number).stdout
    again = tidemill(running, "timer", verb, number, "--yes")
    assert again.returncode == 1
    assert repeated in again.stdout


def at_a_terminal(*arguments: str, answer: str, admin: str) -> tuple[int, str]:
    """Run a command at a terminal and type an answer; return the status and the output."""
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    ran = subprocess.run(
        command(*arguments),
        env=environment() | {"TIDEMILL_ADMIN": admin},
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    return ran.returncode, ran.stderr


def test_a_reset_takes_a_time_as_people_write_it(running: Standalone) -> None:
    running.put("topics/dated", queues=1)
    running.put("groups/dated")
    reset = ("group", "reset", "dated", "--topic=dated", "--yes")
    done = tidemill(running, *reset, "--at=2027-01-01T08:00:00Z", "-o", "json")
    assert json.loads(done.stdout)["queues"][0]["toOffset"] == 0
    assert tidemill(running, *reset, "--at=2027-01-01T08:00:00").returncode == 2
    both = tidemill(running, *reset, "--at=2027-01-01T08:00:00Z", "--to=latest")
    assert both.returncode == 2


def test_the_type_of_a_topic_in_use_needs_force(running: Standalone) -> None:
    running.put("topics/used", messageType="NORMAL", queues=1)
    tidemill(running, "message", "send", "used", "hello")
    refused = tidemill(running, "topic", "set", "used", "--type=fifo")
    assert refused.returncode == 1
    assert "from NORMAL to FIFO only with force" in refused.stderr
    assert "1 messages" in refused.stderr
    forced = tidemill(running, "topic", "set", "used", "--type=fifo", "--force")
    assert forced.stdout == "topic used: changed: NORMAL -> FIFO, 1 queues\n"
