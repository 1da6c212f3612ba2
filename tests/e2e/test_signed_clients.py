"""The official clients with access keys, unmodified, against a standalone with its security on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clients.api import POLL_MS_MIN, api, message
from tests.support.clients.client_process import (
    GO_PROGRAM,
    JAVA_CLASSES,
    NODE_PACKAGES,
    RUST_PROGRAM,
    Facts,
    needs,
    run_go_client,
    run_java_client,
    run_node_client,
    run_python_client,
    run_rust_client,
    staying_client,
)
from tests.support.processes.processes import LARGEST_MESSAGES, Standalone, standalone
from tests.support.worlds.access_world import signed
from tidemill.security.key_file import add_first_key
from tidemill.security.secret_keys import KEY_FILE
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

RunClient = Callable[..., Facts]

CLIENTS = [
    pytest.param((run_python_client, "round_trip"), id="python"),
    pytest.param((run_go_client, "roundTrip"), id="go", marks=needs("go", GO_PROGRAM)),
    pytest.param((run_node_client, "roundTrip"), id="node", marks=needs("node", NODE_PACKAGES)),
    pytest.param((run_java_client, "roundTrip"), id="java", marks=needs("java", JAVA_CLASSES)),
    pytest.param(
        (run_rust_client, "roundTrip"),
        id="rust",
        marks=[needs("cargo", RUST_PROGRAM), pytest.mark.large],
    ),
]


class Secured(NamedTuple):
    """A standalone with its security on, and the secret of the user `shop`."""

    running: Standalone
    home: Path
    secret: str


def tidemill(running: Standalone, home: Path, *arguments: str) -> object:
    """Run a command line; return the JSON that it prints."""
    line = [sys.executable, "-m", "tidemill", "--admin", running.admin, "-o", "json", *arguments]
    ended = subprocess.run(
        line, env={"HOME": str(home)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("signed")
    with standalone(folder / "data", "--proxies=2", LARGEST_MESSAGES) as running:
        tidemill(running, folder, "security", "enable")
        made = tidemill(
            running, folder, "user", "create", "shop", "--producer=shop*", "--consumer=shop*:shop*"
        )
        assert isinstance(made, dict)
        for resource in ("Topic:shop*", "Group:shop*"):
            tidemill(running, folder, "acl", "allow", "shop", resource, "Create")
        yield Secured(running, folder, made["secret"])


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_with_the_secret_sends_and_receives(
    tmp_path: Path, secured: Secured, client: tuple[RunClient, str]
) -> None:
    run, scenario = client
    name = f"shop-{run.__name__}"
    facts = run(
        tmp_path,
        scenario,
        secured.running.grpc,
        topic=name,
        group=name,
        credentials=("shop", secured.secret),
    )
    assert {fact["id"] for fact in facts.of("received")} == {
        fact["id"] for fact in facts.of("sent")
    }
    assert facts.of("sent")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["no credentials", "a wrong secret", "no right"])
def test_a_client_without_the_right_reads_and_sends_nothing(
    tmp_path: Path, secured: Secured, client: tuple[RunClient, str], kind: str
) -> None:
    run, scenario = client
    credentials = {
        "no credentials": None,
        "a wrong secret": ("shop", "x" * 20),
        "no right": ("shop", secured.secret),
    }[kind]
    name = "other" if kind == "no right" else f"shop-refused-{run.__name__}"
    with pytest.raises(AssertionError, match=r"failed|did not end"):
        run(
            tmp_path,
            scenario,
            secured.running.grpc,
            topic=name,
            group=name,
            credentials=credentials,
        )
    topics = tidemill(secured.running, secured.home, "topic", "list")
    assert isinstance(topics, list)
    assert name not in {topic["name"] for topic in topics}


@pytest.mark.parametrize(
    "language",
    [
        "python",
        pytest.param("go", marks=needs("go", GO_PROGRAM)),
        pytest.param("java", marks=needs("java", JAVA_CLASSES)),
        pytest.param("node", marks=needs("node", NODE_PACKAGES)),
    ],
)
def test_the_messages_of_a_revoked_push_consumer_go_to_others(
    tmp_path: Path, secured: Secured, language: str
) -> None:
    running, home = secured.running, secured.home
    name, user = f"shop-{language}", f"leaver-{language}"
    made = tidemill(
        running, home, "user", "create", user, f"--producer={name}", f"--consumer={name}:{name}"
    )
    assert isinstance(made, dict)
    tidemill(running, home, "topic", "create", name)
    tidemill(running, home, "group", "create", name)
    names = {"topic": name, "group": name}
    (tmp_path / "other").mkdir()
    leaving = staying_client(
        language, tmp_path, running.grpc, **names, credentials=(user, made["secret"])
    )
    with leaving as leaver:
        tidemill(running, home, "message", "send", name, "work")
        leaver.wait_for("received", body="work")
        staying = staying_client(
            "python",
            tmp_path / "other",
            running.grpc,
            **names,
            credentials=("shop", secured.secret),
        )
        with staying as stayer:
            tidemill(running, home, "acl", "revoke", user, f"Topic:{name}", "Sub")
            if language == "python":  # Its script holds this message; the others ack it.
                stayer.wait_for("received", body="work", timeout_s=20)
            tidemill(running, home, "message", "send", name, "later")
            stayer.wait_for("received", body="later")
            assert not leaver.facts_of("received", body="later")
    assert "client revoked" in running.log.read_text()


def test_a_user_cannot_touch_the_client_of_another_user(secured: Secured) -> None:
    """Both have the same rights and the same client id."""
    running, home = secured.running, secured.home
    tidemill(running, home, "topic", "create", "shop-owned")
    tidemill(running, home, "group", "create", "shop-owned")
    made = tidemill(running, home, "user", "create", "mallory", "--consumer=shop*:shop*")
    assert isinstance(made, dict)
    tidemill(running, home, "message", "send", "shop-owned", "one")
    tidemill(running, home, "message", "send", "shop-owned", "two")

    async def scenario() -> None:
        name = "shop-owned"
        async with (
            api(running.grpc, headers=signed("shop", secured.secret)) as shop,
            api(running.grpc, headers=signed("mallory", made["secret"])) as mallory,
        ):
            assert (await shop.heartbeat(name)).status.code == v2.OK
            assert (await mallory.heartbeat(name)).status.code == v2.OK
            held = await shop.receive(name, name, poll_ms=POLL_MS_MIN, renews=True)
            while len(held) < 2:
                held += await shop.receive(name, name, poll_ms=POLL_MS_MIN, renews=True)
            handles = [one.system_properties.receipt_handle for one in held]
            acked = await mallory.ack(name, name, handles[:1])
            assert acked.status.code == v2.INVALID_RECEIPT_HANDLE
            changed = await mallory.change_invisible(name, name, handles[1], 1_000)
            assert changed.status.code == v2.INVALID_RECEIPT_HANDLE
            assert (await mallory.end(name)).status.code == v2.OK
            assert not await mallory.receive(name, name, poll_ms=POLL_MS_MIN)
            acked = await shop.ack(name, name, handles[:1])
            assert acked.status.code == v2.OK
            assert (await shop.end(name)).status.code == v2.OK
            [returned] = await mallory.receive(name, name, poll_ms=POLL_MS_MIN)
            assert returned.body == held[1].body

    asyncio.run(scenario())


def test_a_second_call_of_enable_changes_nothing(secured: Secured) -> None:
    before = tidemill(secured.running, secured.home, "security", "status")
    again = tidemill(secured.running, secured.home, "security", "enable")
    assert isinstance(before, dict)
    assert isinstance(again, dict)
    assert again["version"] == before["version"]
    assert "secret" not in again
    saved = secured.home / ".config" / "tidemill" / "credentials"
    assert saved.stat().st_mode & 0o777 == 0o600
    assert saved.read_text().startswith("admin\n")


def test_a_user_shows_the_last_use_of_each_secret(secured: Secured) -> None:
    running, home = secured.running, secured.home
    made = tidemill(running, home, "user", "create", "rotated", "--producer=shop*")
    newer = tidemill(running, home, "user", "rotate", "rotated")
    assert isinstance(made, dict)
    assert isinstance(newer, dict)
    tidemill(running, home, "topic", "create", "shop-uses")

    def last_uses() -> list[int | None]:
        shown = tidemill(running, home, "user", "show", "rotated")
        assert isinstance(shown, dict)
        assert "unreachable" not in shown
        assert shown["usesSinceMs"] <= shown["createdAtMs"]
        return [secret.get("usedAtMs") for secret in shown["secrets"]]

    async def send(secret: str) -> None:
        headers = signed("rotated", secret)
        async with api(running.grpc, headers=headers) as shop:
            answer = await shop.send(message("shop-uses", b"m"))
        assert answer.status.code == v2.OK, answer.status

    assert last_uses() == [None, None]
    asyncio.run(send(newer["secret"]))
    [older_use, newer_use] = last_uses()
    assert older_use is None
    assert newer_use is not None
    assert newer_use >= newer["createdAtMs"]
    asyncio.run(send(made["secret"]))
    assert None not in last_uses()


def test_a_rotation_of_the_key_file_costs_no_call(secured: Secured) -> None:
    running, home = secured.running, secured.home
    tidemill(running, home, "topic", "create", "shop-keys")
    keys_before = (home / "data" / KEY_FILE).read_text()

    async def send_until(ended: asyncio.Task[object]) -> int:
        sent = 0
        while not ended.done():
            # Each call has another signature, so the proxy decrypts the secret again.
            headers = signed("shop", secured.secret, str(sent))
            async with api(running.grpc, headers=headers) as shop:
                answer = await shop.send(message("shop-keys", b"m"))
            assert answer.status.code == v2.OK, answer.status
            sent += 1
        return sent

    async def scenario() -> object:
        rotating = asyncio.create_task(
            asyncio.to_thread(tidemill, running, home, "security", "rotate-key")
        )
        assert await send_until(rotating)
        return rotating.result()

    known = asyncio.run(scenario())
    assert isinstance(known, dict)
    new, *old = [line.split()[0] for line in (home / "data" / KEY_FILE).read_text().splitlines()]
    assert old == [line.split()[0] for line in keys_before.splitlines()]
    assert known["firstKeyId"] == new
    counts = {key["id"]: key["secrets"] for key in known["keys"]}
    assert counts[new]
    assert not any(counts[key_id] for key_id in old)


def test_a_rotation_waits_for_a_key_of_another_process(secured: Secured) -> None:
    """The certificate job of the chart writes the key file in Kubernetes."""
    running, home = secured.running, secured.home
    line = ["security", "rotate-key", "--await-key", "--wait-s"]
    command = [sys.executable, "-m", "tidemill", "--admin", running.admin, *line, "0"]
    ended = subprocess.run(
        command, env={"HOME": str(home)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "no new key within 0 s" in ended.stderr

    async def scenario() -> object:
        rotating = asyncio.create_task(
            asyncio.to_thread(tidemill, running, home, *line, "60"), name="rotation"
        )
        file = home / "data" / KEY_FILE
        first = file.read_text().split(" ")[0]
        add_first_key(str(file), "by-a-job", after=first)
        return await rotating

    known = asyncio.run(scenario())
    assert isinstance(known, dict)
    assert known["firstKeyId"] == "by-a-job"
    counts = {key["id"]: key["secrets"] for key in known["keys"]}
    assert [key_id for key_id in counts if counts[key_id]] == ["by-a-job"]


def test_secrets_are_nowhere_in_the_store(secured: Secured) -> None:
    data = secured.home / "data"
    found = [
        file
        for file in data.rglob("*")
        if file.is_file() and secured.secret.encode() in file.read_bytes()
    ]
    assert not found
    assert (data / "security.key").stat().st_mode & 0o777 == 0o600
