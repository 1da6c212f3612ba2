"""The last uses of secrets by calls of clients."""

from __future__ import annotations

import time

from tests.component.proxy.test_rights import PUB, SEND, Client, entries, in_world
from tests.support.worlds.access_world import SECRET, AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.proxy.app import security_state_of
from tidemill.proxy.server.call import Call
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

OLDER = "the older secret 1"


def used(users: AccessWorld, user_id: int) -> set[int]:
    state = security_state_of(
        1, Mode.ON, None, users.gate.credentials.uses, has_open_port=False, user_id=user_id
    )
    assert state.uses_since_ms > 0
    return {use.secret_id for use in state.secret_uses}


def test_each_secret_has_a_use_of_its_own() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        user = users.put_user("orders", *entries([PUB]), secrets=(OLDER, SECRET))
        assert used(users, user.id) == set()
        assert (await client.code(SEND, signed("orders", "a wrong secret ...")))[0] != v2.OK
        assert used(users, user.id) == set()
        assert (await client.code(SEND, signed("orders")))[0] == v2.OK
        assert used(users, user.id) == {2}
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(SEND, signed("orders", OLDER)))[0] == v2.OK
        assert used(users, user.id) == {1, 2}
        later = users.put_user("orders", *entries([PUB]))
        assert used(users, later.id) == set(), "another user of this name"

    in_world(scenario)


def test_a_refused_call_of_a_disabled_user_is_no_use() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        user = users.put_user("orders", *entries([PUB]), is_enabled=False)
        assert (await client.code(SEND, signed("orders")))[0] == v2.UNAUTHORIZED
        assert used(users, user.id) == set()

    in_world(scenario)


def test_a_repeated_header_is_another_use() -> None:
    """A client may send one header for hours, and its signature is checked once."""

    async def scenario(users: AccessWorld, _client: Client) -> None:
        user = users.put_user("orders", *entries([PUB]))
        times = []
        for age_s in (60.0, 10.0):
            call = Call(
                {**HEADERS, **signed("orders")},
                peer=lambda: "ipv4:10.1.2.3:5000",
                connection="test",
                time_remaining_s=5,
                gate=users.gate,
            )
            call.started_at = time.monotonic() - age_s
            users.gate.authenticate(call)
            [use] = users.gate.credentials.uses.of_user(user.id)
            times.append(use.used_at_ms)
        first_ms, second_ms = times
        assert second_ms - first_ms > 40_000

    in_world(scenario)
