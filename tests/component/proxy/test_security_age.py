"""Users and rights that the home has not confirmed for a while."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import HEADERS, ProxyWorld, eventually
from tidemill.common.errors import SecurityStale
from tidemill.proxy.cluster.security_age import SecurityAge
from tidemill.proxy.server.call import Call
from tidemill.security.acl import Action, parse_entry, topic_resource
from tidemill.security.table import Mode

SEND = parse_entry("Topic:topic", ["Pub"])


def metrics_of(age: SecurityAge) -> dict[str, float]:
    return {one.name: sample.value for one in age.collect() for sample in one.samples}


def test_the_age_grows_while_the_home_is_away() -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(20),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            limited, free = SecurityAge(world.cluster, 1), SecurityAge(world.cluster, 0)
            limited.check()
            assert metrics_of(limited)["rocketmq_security_stale_seconds"] == 0
            broker.go()
            with capture_logs() as lines:
                await eventually(lambda: limited.age_s > 0.001)
                for _ in range(3):
                    with pytest.raises(SecurityStale, match="security_stale_max_ms"):
                        limited.check()
                free.check()
            stale = [one for one in lines if one["event"] == "security tables stale"]
            assert len(stale) == 1
            assert metrics_of(limited)["rocketmq_security_stale_seconds"] > 0

    asyncio.run(main())


@pytest.mark.parametrize("mode", list(Mode))
def test_only_the_mode_on_refuses_calls_by_old_rights(mode: Mode) -> None:
    users = AccessWorld(mode)
    users.put_user("orders", SEND)

    def fail() -> None:
        raise SecurityStale("too old")

    call = Call(
        {**HEADERS, **signed("orders")},
        peer=lambda: "test",
        connection="test",
        time_remaining_s=60,
        gate=users.gate,
    )
    call.method = "send_message"
    users.gate.require(call, (Action.PUB,), topic_resource("topic"))
    users.gate.check_age = fail
    if mode is Mode.ON:
        with pytest.raises(SecurityStale):
            users.gate.require(call, (Action.PUB,), topic_resource("topic"))
    else:
        users.gate.require(call, (Action.PUB,), topic_resource("topic"))
    users.gate.check_age = lambda: None
    users.gate.require(call, (Action.PUB,), topic_resource("topic"))
