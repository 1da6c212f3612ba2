"""Shares of a limited resource among users and addresses."""

from __future__ import annotations

from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.proxy.server.call import Call
from tidemill.proxy.shares import Shares, sharer_of
from tidemill.security.table import Mode


def sharer(world: AccessWorld, user: str, port: int = 4) -> str:
    call = Call(
        {**HEADERS, **signed(user)},
        peer=lambda: f"ipv4:10.1.2.3:{port}",
        connection=1,
        time_remaining_s=None,
        gate=world.gate,
    )
    call.authenticate()
    return call.sharer


def test_a_call_shares_with_those_of_its_user_or_else_of_its_address() -> None:
    world = AccessWorld()
    for name in ("anna", "bert", "10.1.2.3"):
        world.put_user(name)
    assert sharer(world, "anna") == sharer(world, "anna", port=5)
    assert sharer(world, "anna") != sharer(world, "bert")
    world.set_mode(Mode.PERMISSIVE)
    assert sharer(world, "unknown") == sharer_of("", "ipv4:10.1.2.3:9")
    assert sharer(world, "10.1.2.3") != sharer(world, "unknown"), "a name may look like an address"
    world.set_mode(Mode.OFF)
    assert sharer(world, "anna") == sharer(world, "bert"), "credentials are ignored"


def test_one_sharer_leaves_room_for_others() -> None:
    shares = Shares(8)

    def take_all(name: str) -> int:
        count = 0
        while shares.has_room(name):
            shares.take(name)
            count += 1
        return count

    assert [take_all(name) for name in "abc"] == [4, 2, 1]
    for _ in range(4):
        shares.give_back("a")
    assert take_all("b") == 2, "the largest one is rejected first"
    assert take_all("d") == 2
    assert shares.total == 7
