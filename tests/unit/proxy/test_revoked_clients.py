"""Clients that lose a right while a stream of theirs is open."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.issuer import NOW_S, claims_of, jwk, rsa_key, token, write_keys
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.common.errors import InvalidReceiptHandle, Unauthorized, WrongCredentials
from tidemill.message.client_key import ClientKey
from tidemill.proxy.server import revoked_clients
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.revoked_clients import REVOKED_MS, SETTLING
from tidemill.security.acl import Resource, ResourceType, parse_entry
from tidemill.security.bans import BanKind
from tidemill.security.issuer_keys import IssuerKeys, KeySource
from tidemill.security.table import Mode
from tidemill.security.tokens import MadeToken, NamedToken, make_token

RIGHTS = (parse_entry("Topic:orders", ["Sub"]), parse_entry("Group:billing", ["Sub"]))
CLIENT_ID = HEADERS["x-mq-client-id"]


class RevocationWorld(AccessWorld):
    """The user `shop` with a client that has an open stream."""

    def __init__(self, issuer_keys: IssuerKeys | None = None) -> None:
        super().__init__(issuer_keys=issuer_keys)
        self.put_user("shop", *RIGHTS)
        self.headers_of: Callable[[str], dict[str, str]] = signed
        self.certificate_names: list[str] = []
        self.revoked: list[ClientKey] = []
        self.lost: list[Sequence[Resource]] = []
        self.gate.revoked.on_revoked = self._note

    def _note(self, client: ClientKey, lost: Sequence[Resource]) -> None:
        self.revoked.append(client)
        self.lost.append(lost)

    def call(self, method: str, user: str = "shop", client_id: str = CLIENT_ID) -> Call:
        headers = {**HEADERS, **self.headers_of(user), "x-mq-client-id": client_id}
        call = Call(
            headers,
            peer=lambda: "ipv4:10.1.2.3:4",
            connection=1,
            time_remaining_s=None,
            gate=self.gate,
            certificate_names=self.certificate_names,
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
            call.check_while_open(lambda: call.require_consumer("billing", "orders"))
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


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (revoke, [Resource(ResourceType.TOPIC, "orders")]),
        (disable, []),
        (ban_client, []),
        (
            lambda world: world.put_user("shop", is_same=True),
            [Resource(ResourceType.GROUP, "billing"), Resource(ResourceType.TOPIC, "orders")],
        ),
    ],
)
def test_a_revocation_names_all_lost_resources(
    change: Callable[[RevocationWorld], object], lost: list[Resource]
) -> None:
    async def scenario() -> None:
        world = RevocationWorld()
        await world.lose_while_open("telemetry", lambda: change(world))
        assert [list(one) for one in world.lost] == [lost]

    asyncio.run(scenario())


def test_a_client_that_loses_many_rights_loses_all_deliveries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(count_max: int) -> list[Sequence[Resource]]:
        monkeypatch.setattr(revoked_clients, "LOST_RESOURCES_MAX", count_max)
        world = RevocationWorld()
        await world.lose_while_open("telemetry", lambda: world.put_user("shop", is_same=True))
        return world.lost

    [lost] = asyncio.run(scenario(2))
    assert len(lost) == 2
    [lost] = asyncio.run(scenario(1))
    assert not lost


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


def test_identities_take_no_places_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoked_clients, "REVOKED_MAX", 2)
    known = revoked_clients.RevokedClients(lambda: 5)
    world = RevocationWorld()
    for name in ("a", "b", "c"):
        known.note(ClientKey(name, 1), f"token:{name}")
    of_user, of_token = Unauthorized("no"), Unauthorized("no")
    of_user.user_id = 1
    for name, is_known in (("a", False), ("b", True), ("c", True)):
        call = world.call("ack_message", client_id=name)
        of_token.identities = (f"token:{name}",)
        for refusal in (of_user, of_token):
            assert (known.answer(call, refusal) is not refusal) is is_known


def test_new_settings_replace_the_rights_that_a_stream_needs() -> None:
    async def scenario() -> None:
        world = RevocationWorld()
        world.put_user("shop", *RIGHTS, parse_entry("Topic:new", ["Sub"]), is_same=True)
        call = world.call("telemetry")

        async def stream() -> None:
            call.check()
            call.check_while_open(lambda: call.require_consumer("billing", "orders"))
            call.check_while_open(lambda: call.require_consumer("billing", "new"))
            await asyncio.Event().wait()

        task = asyncio.create_task(call.watched(stream()))
        await asyncio.sleep(0)  # It begins in this turn.
        world.put_user("shop", RIGHTS[1], parse_entry("Topic:new", ["Sub"]), is_same=True)
        _, open_streams = await asyncio.wait([task], timeout=0.05)
        assert open_streams, "the stream does not need the former topic"
        revoke(world)
        async with asyncio.timeout(10):
            with pytest.raises(Unauthorized, match="Topic:new"):
                await task

    asyncio.run(scenario())


def create_again(world: RevocationWorld) -> None:
    """Delete the user and create a new one with its name and secret, in one update."""
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


# ---------------------------------------------------------------- accounts and certificates

ACCOUNT, URI, DNS_NAME = "shop/orders", "spiffe://shop", "orders.shop.svc"
LISTS = {"serviceAccounts": [ACCOUNT], "certificates": [DNS_NAME]}


def identity_world(folder: Path, field: str) -> RevocationWorld:
    """Return a world whose client shows an identity that its user lists in a field."""
    keys = IssuerKeys(KeySource(write_keys(folder, jwk(rsa_key()))), lambda: 0)
    world = RevocationWorld(keys)
    world.now_ms = NOW_S * 1_000
    if field == "certificates":
        world.headers_of, world.certificate_names = lambda _user: {}, [URI, DNS_NAME]
    else:
        world.headers_of = lambda _user: {"x-mq-session-token": token(claims_of(ACCOUNT))}
    set_fields(world, **{field: LISTS[field]})
    return world


def set_fields(world: RevocationWorld, **fields: object) -> None:
    item = json.loads(world.items["user", "shop"])
    item["user"].update(fields)
    world.put_item(item)


def remove_identity(world: RevocationWorld) -> None:
    set_fields(world, serviceAccounts=[], certificates=[])


def remove_right(world: RevocationWorld) -> None:
    set_fields(world, entries=[RIGHTS[1].to_item()])


def disable_user(world: RevocationWorld) -> None:
    set_fields(world, enabled=False)


def delete_user(world: RevocationWorld) -> None:
    world.delete_user("shop")


def list_twice(world: RevocationWorld) -> None:
    world.put_user("other", accounts=[ACCOUNT], certificates=[DNS_NAME])


def move_identity(world: RevocationWorld) -> None:
    """Let another user list the account, and an earlier name of the certificate."""
    is_account = not world.certificate_names
    remove_identity(world)
    certificates = [] if is_account else [URI]
    world.put_user("other", accounts=[ACCOUNT], certificates=certificates)


@pytest.mark.parametrize("field", LISTS)
@pytest.mark.parametrize(
    "change", [remove_identity, remove_right, disable_user, delete_user, list_twice, move_identity]
)
def test_a_client_with_a_lost_identity_has_no_valid_handle(
    tmp_path: Path, field: str, change: Callable[[RevocationWorld], None]
) -> None:
    async def scenario() -> None:
        world = identity_world(tmp_path, field)
        await world.lose_while_open("telemetry", lambda: change(world))
        for settling in SETTLING:
            with pytest.raises(InvalidReceiptHandle, match="lost its rights"):
                world.settle(settling)
        with pytest.raises(Unauthorized):
            world.settle("receive_message")
        with pytest.raises(Unauthorized):
            world.settle("ack_message", client_id="another")
        world.now_ms += REVOKED_MS + 1
        with pytest.raises(Unauthorized):
            world.settle("ack_message")

    asyncio.run(scenario())


@pytest.mark.parametrize("field", LISTS)
def test_another_identity_does_not_learn_of_a_revoked_client(tmp_path: Path, field: str) -> None:
    async def scenario() -> None:
        world = identity_world(tmp_path, field)
        await world.lose_while_open("telemetry", lambda: remove_identity(world))
        world.certificate_names = ["another"]
        if field == "serviceAccounts":
            world.headers_of = lambda _user: {"x-mq-session-token": token(claims_of("shop/other"))}
        with pytest.raises(Unauthorized, match="no user lists"):
            world.settle("ack_message")
        world.headers_of = lambda _user: {"x-mq-session-token": token(key=rsa_key(1))}
        with pytest.raises(WrongCredentials):
            world.settle("ack_message")

    asyncio.run(scenario())


# ---------------------------------------------------------------- named tokens


def token_world() -> tuple[RevocationWorld, MadeToken]:
    """Return a world and the named token that its client shows."""
    world, made = RevocationWorld(), make_token()
    named = NamedToken(id=made.id, name="ci", user="shop", user_id=1, sha256=made.sha256)
    world.put_item(named.to_item())
    world.headers_of = lambda _user: _bearer(made.text)
    return world, made


@pytest.mark.parametrize("change", ["token", "user"])
def test_a_client_with_a_deleted_token_has_no_valid_handle(change: str) -> None:
    async def scenario() -> None:
        world, made = token_world()
        name = made.id if change == "token" else "shop"
        await world.lose_while_open("telemetry", lambda: world.delete_item(change, name))
        assert world.revoked == [ClientKey(CLIENT_ID, 1)]
        for settling in SETTLING:
            with pytest.raises(InvalidReceiptHandle, match="lost its rights"):
                world.settle(settling)
        with pytest.raises(WrongCredentials):
            world.settle("send_message")
        with pytest.raises(WrongCredentials):
            world.settle("ack_message", client_id="another")
        world.now_ms += REVOKED_MS + 1
        with pytest.raises(WrongCredentials):
            world.settle("ack_message")

    asyncio.run(scenario())


def test_another_token_does_not_learn_of_a_revoked_client() -> None:
    async def scenario() -> None:
        world, made = token_world()
        await world.lose_while_open("telemetry", lambda: world.delete_item("token", made.id))
        guessed = f"tmk_{made.id}_{make_token().text[-43:]}"
        for text in (guessed, make_token().text, "tmk_", ""):
            world.headers_of = functools.partial(lambda text, _user: _bearer(text), text)
            with pytest.raises(WrongCredentials):
                world.settle("ack_message")

    asyncio.run(scenario())


def _bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_client_whose_token_was_deleted_before_gets_the_refusal() -> None:
    world, made = token_world()
    world.delete_item("token", made.id)
    for method in ("ack_message", "send_message"):
        with pytest.raises(WrongCredentials, match="the token is wrong"):
            world.settle(method)
