"""Banned users and addresses at the REST API, and the ways that stay open for operators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tidemill.admin.cluster.ban_copy import BanCopy
from tidemill.admin.cluster.item_copy import ITEMS_A_TURN
from tidemill.admin.http.actor import BUILT_IN_USER, VIA_FILE, Actor
from tidemill.admin.http.banned_callers import BannedCallers
from tidemill.admin.http.identities import CHALLENGE, Identity
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.admin.http.request_access import OPEN, RequestAccess, user_access
from tidemill.admin.http.shown_secrets import VIA_BASIC
from tidemill.common.errors import BrokerUnreachable
from tidemill.security.bans import Ban, BanKind
from tidemill.security.identities import User
from tidemill.security.rights import Rights
from tidemill.security.table import KnownUser, Mode

NOW_MS = 1_000_000
ORDERS = KnownUser(User(name="orders", id=7), Rights([]))


class World:
    """The bans of a cluster, and one caller."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.version = 0
        self.reads = 0
        self.is_up = True
        self.now_ms = NOW_MS
        self.refusals: list[str] = []
        self.identity = self.caller()
        copy = BanCopy(self.read_all, lambda: self.version)
        self.check = BannedCallers(self, copy, lambda: self.now_ms, self)

    challenge = CHALLENGE

    def caller(
        self, address: str = "10.1.2.3", access: RequestAccess = OPEN, user: str = "", via: str = ""
    ) -> Identity:
        return Identity(Actor(user=user, via=via, claimed_user="", address=address), access)

    async def identify(self, _scope: Any) -> Identity:
        return self.identity

    def note_refusal(self, _scope: Any, _actor: Actor, reason: str) -> None:
        self.refusals.append(reason)

    async def read_all(self, _kind: str) -> AsyncIterator[bytes]:
        self.reads += 1
        if not self.is_up:
            raise BrokerUnreachable("down")
        for name in sorted(self.items):
            yield self.items[name]

    def ban(self, kind: BanKind, value: str, *, user_id: int = 0, until_ms: int = 0) -> None:
        one = Ban(kind=kind, value=value, user_id=user_id, until_ms=until_ms)
        self.items[one.name] = json.dumps(one.to_item()).encode()
        self.version += 1

    async def is_refused(self, identity: Identity) -> bool:
        self.identity = identity
        try:
            assert await self.check.identify({"type": "http"}) is identity
        except RefusedLogin:
            return True
        return False


def in_world(scenario: Any) -> None:
    asyncio.run(scenario(World()))


def test_a_banned_address_is_refused_until_the_ban_ends() -> None:
    async def scenario(world: World) -> None:
        assert not await world.is_refused(world.caller())
        world.ban(BanKind.ADDRESS, "10.1.0.0/16", until_ms=NOW_MS + 10)
        assert await world.is_refused(world.caller())
        assert not await world.is_refused(world.caller("10.2.0.1"))
        assert world.refusals == ["address 10.1.0.0/16 is banned until 1970-01-01T00:16:40Z"]
        world.now_ms += 10
        assert not await world.is_refused(world.caller())
        assert world.reads == 1, "one read per change"

    in_world(scenario)


@pytest.mark.parametrize("mode", [Mode.PERMISSIVE, Mode.ON])
def test_a_banned_user_is_refused_from_each_address(mode: Mode) -> None:
    async def scenario(world: World) -> None:
        world.ban(BanKind.USER, "orders", user_id=7)
        for address in ("10.1.2.3", "127.0.0.1"):
            access = user_access(mode, ORDERS, address=address)
            assert await world.is_refused(world.caller(address, access, "orders", VIA_BASIC))
        later = KnownUser(User(name="orders", id=8), Rights([]))
        access = user_access(mode, later, address="10.1.2.3")
        assert not await world.is_refused(world.caller("10.1.2.3", access, "orders", VIA_BASIC))

    in_world(scenario)


def test_many_bans_are_read_in_several_turns_of_the_event_loop() -> None:
    async def scenario(world: World) -> None:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        for number in range(10 * ITEMS_A_TURN):
            world.ban(BanKind.CLIENT, f"c{number}")
        world.ban(BanKind.ADDRESS, "10.1.0.0/16")
        assert await world.is_refused(world.caller())
        assert turns >= 10
        counting.cancel()

    in_world(scenario)


def test_an_operator_can_undo_each_ban() -> None:
    """From loopback, and from each address with the token of admin_token_file."""

    async def scenario(world: World) -> None:
        world.ban(BanKind.ADDRESS, "0.0.0.0/0")
        world.ban(BanKind.ADDRESS, "::/0")
        assert await world.is_refused(world.caller("10.1.2.3"))
        assert await world.is_refused(world.caller("2001:db8::1"))
        for address in ("127.0.0.1", "::1"):
            assert not await world.is_refused(world.caller(address))
        token = RequestAccess(Mode.ON, is_super=True, address="10.1.2.3")
        assert not await world.is_refused(world.caller("10.1.2.3", token, BUILT_IN_USER, VIA_FILE))

    in_world(scenario)


def test_known_bans_stay_in_force_while_no_broker_group_answers() -> None:
    async def scenario(world: World) -> None:
        world.ban(BanKind.ADDRESS, "10.1.0.0/16")
        assert await world.is_refused(world.caller())
        world.is_up = False
        world.items.clear()
        world.version += 1
        assert await world.is_refused(world.caller())
        world.is_up = True
        assert not await world.is_refused(world.caller())

    in_world(scenario)


def test_requests_at_the_same_time_share_one_read() -> None:
    async def scenario(world: World) -> None:
        world.ban(BanKind.CLIENT, "c")
        await asyncio.gather(*(world.is_refused(world.caller()) for _ in range(10)))
        assert world.reads == 1

    in_world(scenario)
