"""The age of signatures, with the setting `signature_age_max_ms`."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from pydantic import ValidationError

from tests.component.proxy.test_rights import PUB, SEND, Client, entries, in_world
from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import HEADERS
from tidemill.common.errors import Unauthorized
from tidemill.proxy.server.call import Call
from tidemill.proxy.settings import ProxySettings
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

HOUR_MS = 3_600_000
AGE_MS = 15 * HOUR_MS
SIGNED_AT_MS = 1_796_133_952_000
DATE = "20261201T140552Z"


def put_user(users: AccessWorld) -> None:
    users.gate.credentials.signature_age_max_ms = AGE_MS
    users.put_user("orders", *entries([PUB]))


def call_of(users: AccessWorld) -> Call:
    return Call(
        {**HEADERS, **signed("orders", date=DATE)},
        peer=lambda: "ipv4:10.1.2.3:5000",
        connection="test",
        time_remaining_s=5,
        gate=users.gate,
    )


def test_signatures_have_no_age_by_default() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        users.put_user("orders", *entries([PUB]))
        users.now_ms = SIGNED_AT_MS + 1_000 * AGE_MS
        assert (await client.code(SEND, signed("orders", date=DATE)))[0] == v2.OK

    in_world(scenario)


@pytest.mark.parametrize("offset_ms", [-AGE_MS + HOUR_MS, 0, AGE_MS - HOUR_MS])
def test_a_signature_within_the_age_is_accepted(offset_ms: int) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        put_user(users)
        users.now_ms = SIGNED_AT_MS + offset_ms
        for _ in range(2):
            assert (await client.code(SEND, signed("orders", date=DATE)))[0] == v2.OK

    in_world(scenario)


@pytest.mark.parametrize(
    ("offset_ms", "side", "time_of_proxy"),
    [
        (AGE_MS + HOUR_MS, "older", "20261202T060552Z"),
        (-AGE_MS - HOUR_MS, "newer", "20261130T220552Z"),
    ],
)
def test_a_signature_beyond_the_age_is_refused_with_both_times(
    offset_ms: int, side: str, time_of_proxy: str
) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        put_user(users)
        # A remembered header is checked again.
        users.now_ms = SIGNED_AT_MS
        assert (await client.code(SEND, signed("orders", date=DATE)))[0] == v2.OK
        users.now_ms = SIGNED_AT_MS + offset_ms
        for _ in range(2):
            code, text = await client.code(SEND, signed("orders", date=DATE))
            assert code == v2.UNAUTHORIZED
            assert f"the date of the signature, {DATE}, is {side} than" in text
            assert time_of_proxy in text
            assert f"{AGE_MS} ms (signature_age_max_ms)" in text
        code, text = await client.code(SEND, signed("orders", "another secret ...", date=DATE))
        assert text == "the access key or the signature is wrong"

    in_world(scenario)


def test_the_mode_permissive_lets_old_signatures_pass() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        put_user(users)
        users.now_ms = SIGNED_AT_MS + 2 * AGE_MS
        users.set_mode(Mode.PERMISSIVE)
        assert (await client.code(SEND, signed("orders", date=DATE)))[0] == v2.OK
        assert users.gate.accesses["send_message", "would_refuse"] >= 1

    in_world(scenario)


@pytest.mark.parametrize(
    "date", ["2026-12-01T16:05:52.123456789+02:00", "2026-12-01T14:05:52Z", "20261201T140552"]
)
def test_the_dates_of_all_clients_are_read(date: str) -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        put_user(users)
        users.now_ms = SIGNED_AT_MS + AGE_MS
        assert (await client.code(SEND, signed("orders", date=date)))[0] == v2.OK
        users.now_ms += HOUR_MS
        assert (await client.code(SEND, signed("orders", date=date)))[0] == v2.UNAUTHORIZED

    in_world(scenario)


def test_a_date_of_another_form_is_refused() -> None:
    async def scenario(users: AccessWorld, client: Client) -> None:
        put_user(users)
        for date in ("today", "00000000T000000Z", "1"):
            code, text = await client.code(SEND, signed("orders", date=date))
            assert (code, "is not a date" in text) == (v2.UNAUTHORIZED, True), date

    in_world(scenario)


def test_the_exports_of_client_metrics_have_no_limit() -> None:
    async def scenario(users: AccessWorld, _client: Client) -> None:
        put_user(users)
        users.now_ms = SIGNED_AT_MS + 2 * AGE_MS
        export = call_of(users)
        export.method = "export"
        users.gate.authenticate(export)
        other = call_of(users)
        other.method = "heartbeat"
        with pytest.raises(Unauthorized, match="older"):
            users.gate.authenticate(other)

    in_world(scenario)


def test_an_open_stream_outlives_the_age_of_its_signature() -> None:
    async def scenario(users: AccessWorld, _client: Client) -> None:
        put_user(users)
        users.now_ms = SIGNED_AT_MS
        call = call_of(users)
        call.method = "telemetry"
        users.gate.authenticate(call)
        ending = asyncio.Event()

        async def wait_for_end() -> None:
            await ending.wait()

        streams = users.gate.streams
        task = asyncio.create_task(streams.watched(call, wait_for_end()))
        await asyncio.sleep(0)
        users.now_ms = SIGNED_AT_MS + 2 * AGE_MS
        call.started_at = time.monotonic() - 2 * AGE_MS / 1_000
        users.put_user("another")  # Each change checks all streams.
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(streams.of_client(call.client_id, None)) == 1
        users.delete_user("orders")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not streams.of_client(call.client_id, None)
        with contextlib.suppress(Unauthorized):
            await task

    in_world(scenario)


def test_an_age_that_time_zones_exceed_is_no_setting() -> None:
    with pytest.raises(ValidationError, match="15 hours"):
        ProxySettings(signature_age_max_ms=AGE_MS - 1)
    for accepted_ms in (0, AGE_MS):
        settings = ProxySettings(signature_age_max_ms=accepted_ms)
        assert settings.signature_age_max_ms == accepted_ms
