"""Clients that lose a right while a stream of theirs is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.common.errors import InvalidReceiptHandle, Unauthorized, WrongCredentials
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server import revoked_clients
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.revoked_clients import REVOKED_MS, SETTLING
from tidemill.security.acl import parse_entry
from tidemill.security.bans import BanKind
from tidemill.security.table import Mode

RIGHTS = (parse_entry("Topic:orders", ["Sub"]), parse_entry("Group:billing", ["Sub"]))
CLIENT_ID = HEADERS["x-mq-client-id"]


class RevocationWorld(AccessWorld):
    """The user `shop` with a client that has an open stream."""

    def __init__(self) -> None:
        super().__init__()
        self.put_user("shop", *RIGHTS)
        self.revoked: list[ClientKey] = []
        self.gate.on_revoked = self.revoked.append

    def call(self, method: str, user: str = "shop", client_id: str = CLIENT_ID) -> Call:
        headers = {**HEADERS, **signed(user), "x-mq-client-id": client_id}
        call = Call(
            headers,
            peer=lambda: "ipv4:10.1.2.3:4",
            connection=1,
            time_remaining_s=None,
            gate=self.gate,
        )
        call.method = method
        return call

    def settle(self, method: str, user: str = "shop", client_id: str = CLIENT_ID) -> None:
        """Check a call as its method does. Raises its error."""
        call = self.call(method, user, client_id)
        call.check()
        call.require_consumer("billing", "orders")

    async def lose_while_open(self, method: str, change: Callable[[], object]) -> None:
        """Open a stream of the client, change users or bans, and wait for its end."""
        call, is_open = self.call(method), asyncio.Event()

        async def stream() -> None:
            call.check()
            call.require_consumer("billing", "orders")
            is_open.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(call.watched(stream()))
        await is_open.wait()
        change()
        async with asyncio.timeout(10):
            with pytest.raises(Unauthorized):
                await task


def disable(world: RevocationWorld) -> None:
    world.put_user("shop", *RIGHTS, is_enabled=False, is_same=True)


def revoke(world: RevocationWorld) -> None:
    world.put_user("shop", RIGHTS[1], is_same=True)


def ban_user(world: RevocationWorld) -> None:
    world.put_ban(BanKind.USER, "shop", user_id=1)


def ban_client(world: RevocationWorld) -> None:
    world.put_ban(BanKind.CLIENT, CLIENT_ID)


@pytest.mark.parametrize("method", ["telemetry", "receive_message", "pull_message"])
@pytest.mark.parametrize("change", [disable, revoke, ban_user, ban_client])
def test_a_revoked_client_has_no_valid_handle(
    method: str, change: Callable[[RevocationWorld], None]
) -> None:
    async def scenario() -> None:
        world = RevocationWorld()
        await world.lose_while_open(method, lambda: change(world))
        assert world.revoked == [ClientKey(CLIENT_ID, 1)]
        for settling in SETTLING:
            with pytest.raises(InvalidReceiptHandle, match="lost its rights"):
                world.settle(settling)
        with pytest.raises(Unauthorized):
            world.settle("receive_message")
        world.now_ms += REVOKED_MS + 1
        with pytest.raises(Unauthorized):
            world.settle("ack_message")

    asyncio.run(scenario())


def test_only_the_client_of_the_same_user_is_revoked() -> None:
    async def scenario() -> None:
        world = RevocationWorld()
        await world.lose_while_open("telemetry", lambda: revoke(world))
        with pytest.raises(Unauthorized, match="signature is wrong"):
            world.settle("ack_message", "unknown")
        with pytest.raises(Unauthorized, match="user shop may not"):
            world.settle("ack_message", client_id="another")
        world.put_user("shop", *RIGHTS, is_same=True)
        world.settle("ack_message")
        world.put_user("other")
        with pytest.raises(Unauthorized, match="user other may not"):
            world.settle("ack_message", "other")

    asyncio.run(scenario())


def test_a_client_that_never_had_the_right_gets_the_refusal() -> None:
    world = RevocationWorld()
    revoke(world)
    with pytest.raises(Unauthorized):
        world.settle("ack_message")


def test_the_number_of_revoked_clients_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoked_clients, "REVOKED_MAX", 2)
    now_ms = 5
    known = revoked_clients.RevokedClients(lambda: now_ms)
    for name in ("a", "b", "a", "c"):
        known.note(ClientKey(name, 1))
    world = RevocationWorld()
    refusal = Unauthorized("no")
    refusal.user_id = 1
    answers = {
        name: known.answer(world.call("ack_message", client_id=name), refusal) for name in "abc"
    }
    assert {name for name, answer in answers.items() if answer is refusal} == {"b"}


def create_again(world: RevocationWorld) -> None:
    """Delete the user and create another one of its name and secret, in one update."""
    world.delete_user("shop")
    world.put_user("shop", *RIGHTS)


@pytest.mark.parametrize("method", ["telemetry", "receive_message"])
def test_a_stream_does_not_pass_to_a_user_that_was_created_again(method: str) -> None:
    """A user created again inherits nothing (S-20), and the former one holds nothing (S-11)."""

    async def scenario() -> None:
        world = RevocationWorld()
        await world.lose_while_open(method, lambda: create_again(world))
        assert world.revoked == [ClientKey(CLIENT_ID, 1)]

    asyncio.run(scenario())


def test_a_ban_without_a_user_is_not_shown_to_wrong_credentials() -> None:
    """A stranger gets the text, and the delay, of wrong credentials (S-6)."""

    async def scenario() -> None:
        world = RevocationWorld()
        world.set_mode(Mode.OFF)
        await world.lose_while_open("telemetry", lambda: ban_client(world))
        world.set_mode(Mode.ON)
        with pytest.raises(WrongCredentials, match="signature is wrong"):
            world.settle("ack_message", "unknown")

    asyncio.run(scenario())
