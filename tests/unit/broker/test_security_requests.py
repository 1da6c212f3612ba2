"""ChangeSecurity and ListSecurity, and the items on the link of a proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.security_items import MODE_ON, change, delete, put, table_of
from tests.support.worlds.proxy_world import eventually
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.server.admin import security as security_admin
from tidemill.broker.server.admin.security import SecurityAdmin
from tidemill.broker.server.wire import security_frames
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.transport.grpc.status import RpcError

Scenario = Callable[[RoundWorld, SecurityAdmin], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(20), world.running():
            await scenario(world, SecurityAdmin(world.rounds))

    asyncio.run(main())


def request_of(*items: dict[str, Any] | bytes, version: int = 0, **fields: Any) -> Any:
    encoded = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in items]
    return pb.ChangeSecurityRequest(expected_version=version, items=encoded, **fields)


def error_of(error: RpcError) -> str:
    [(_, name)] = error.trailers
    return name


def test_a_change_is_recorded_listed_and_logged_without_its_content() -> None:
    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        with capture_logs() as lines:
            reply = await admin.ChangeSecurity(
                request_of(put("a", "secret"), put("b"), MODE_ON, requested_by="me")
            )
        assert reply.version == 3
        assert lines == [
            {
                "event": "security changed",
                "log_level": "info",
                "items": ["user a", "user b", "security"],
                "item_count": 3,
                "version": 3,
                "by": "me",
            }
        ]
        assert (await admin.ChangeSecurity(request_of(delete("b"), version=3))).version == 4
        found = await admin.ListSecurity(pb.ListSecurityRequest(kind="user", limit=10))
        assert (found.version, found.has_more) == (4, False)
        assert [json.loads(item) for item in found.items] == [{**put("a", "secret"), "version": 1}]
        found = await admin.ListSecurity(pb.ListSecurityRequest(kind="security", limit=1))
        assert [json.loads(item) for item in found.items] == [{**MODE_ON, "version": 3}]

    run(scenario)


def test_a_dry_run_changes_and_logs_nothing() -> None:
    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        with capture_logs() as lines:
            assert (await admin.ChangeSecurity(request_of(put("a"), dry_run=True))).version == 1
        assert lines == []
        assert table_of(world.world.engine) == (0, {})

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (request_of(put("a"), version=7), "Conflict"),
        (request_of(put("a"), b"{"), "BadRequest"),
        (request_of(put("a"), b"[]"), "BadRequest"),
        (request_of(put("a"), b"[" * 100_000), "BadRequest"),
        (request_of(put("a"), delete("b")), "BadRequest"),
    ],
)
def test_a_rejected_change_names_its_error(request_: pb.ChangeSecurityRequest, name: str) -> None:
    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        with pytest.raises(RpcError) as caught:
            await admin.ChangeSecurity(request_)
        assert error_of(caught.value) == name
        assert table_of(world.world.engine) == (0, {})

    run(scenario)


def test_a_change_is_answered_when_it_is_committed() -> None:
    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        world.syncs.gate.clear()
        changing = asyncio.create_task(admin.ChangeSecurity(request_of(put("a"))))
        await idle()
        assert not changing.done()
        world.syncs.gate.set()
        assert (await changing).version == 1

    run(scenario)


@pytest.mark.parametrize("bytes_max", [1 << 20, 1])
def test_pages_have_all_items(bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_admin, "PAGE_BYTES_MAX", bytes_max)

    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        change(world.world, *(put(f"{n}") for n in range(20)), put("other", kind="ban"))
        names: list[str] = []
        while True:
            after = names[-1] if names else ""
            page = await admin.ListSecurity(
                pb.ListSecurityRequest(kind="user", after_name=after, limit=7)
            )
            names += [json.loads(item)["name"] for item in page.items]
            if not page.has_more:
                break
        assert names == sorted(f"{n}" for n in range(20))

    run(scenario)


@pytest.mark.parametrize(("kind", "limit"), [("topic", 5), ("", 5), ("user", 0), ("user", 1_001)])
def test_a_wrong_page_is_rejected(kind: str, limit: int) -> None:
    async def scenario(_world: RoundWorld, admin: SecurityAdmin) -> None:
        with pytest.raises(RpcError) as caught:
            await admin.ListSecurity(pb.ListSecurityRequest(kind=kind, limit=limit))
        assert error_of(caught.value) == "BadRequest"

    run(scenario)


# ---------------------------------------------------------------- the link


def test_pages_wait_until_the_proxy_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 300)
    monkeypatch.setattr("tidemill.broker.server.link.security_stream.PAGE_BYTES", 300)

    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        change(world.world, *(put(f"{n}", "x" * 50) for n in range(20)))
        world.world.engine.take_config_changes()
        async with world.proxy() as proxy:
            assert proxy.config.security_follows
            proxy.unsent_bytes = 300
            proxy.is_read.clear()
            await idle()
            received = proxy.replies.qsize()
            assert received < 8, "not all pages are in memory"
            await admin.ChangeSecurity(request_of(put("0", "new"), delete("19"), version=20))
            proxy.is_read.set()
            updates: list[pb.ConfigUpdate] = []
            while not updates or not updates[-1].is_security_complete:
                updates.append((await proxy.reply()).config)
            items = [json.loads(item) for update in updates for item in update.security_items]
            last = {item["name"]: item["op"] for item in items}
            assert last["19"] == "deleteUser"
            assert [item for item in items if item["name"] == "0"][-1]["version"] == 21
            assert updates[-1].security_version == 22
            await admin.ChangeSecurity(request_of(put("later"), version=22))
            update = (await proxy.reply()).config
            assert (len(update.security_items), update.security_version) == (1, 23)

    run(scenario)


def test_a_change_is_sent_to_proxies_only_when_it_is_committed() -> None:
    async def scenario(world: RoundWorld, admin: SecurityAdmin) -> None:
        async with world.proxy() as proxy:
            assert proxy.config.is_security_complete
            world.syncs.gate.clear()
            changing = asyncio.create_task(admin.ChangeSecurity(request_of(put("a"))))
            await idle()
            assert proxy.replies.empty()
            world.syncs.gate.set()
            assert (await proxy.reply()).config.security_version == 1
            await changing

    run(scenario)


def test_a_replaced_link_gets_no_more_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_frames, "PAGE_BYTES", 300)
    monkeypatch.setattr("tidemill.broker.server.link.security_stream.PAGE_BYTES", 300)

    async def scenario(world: RoundWorld, _admin: SecurityAdmin) -> None:
        change(world.world, *(put(f"{n}", "x" * 50) for n in range(20)))
        world.world.engine.take_config_changes()
        async with world.proxy() as proxy:
            proxy.unsent_bytes = 300
            proxy.is_read.clear()
            await proxy.send(pb.RequestFrame(process_id=b"p", stream_number=1))
            await idle()
            async with world.proxy() as newer:
                await newer.send(pb.RequestFrame(process_id=b"p", stream_number=2))
                await idle()
                before = proxy.replies.qsize()
                proxy.is_read.set()
                await idle()
                assert proxy.replies.qsize() == before
                await eventually(lambda: newer.replies.qsize() > 5)

    run(scenario)
