"""Connections to invalid addresses."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.transport.aio.channel import connected
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.limits import Limits


@pytest.mark.parametrize("address", ["x" * 70 + ":1", "..:1", "127.0.0.1:99999", "127.0.0.1:"])
def test_an_invalid_address_counts_as_an_unreachable_server(address: str) -> None:
    async def connect() -> None:
        async with connected(address, Limits(), message_bytes_max=1 << 10, timeout_s=5):
            pass

    with pytest.raises(RpcError) as refusal:
        asyncio.run(connect())
    assert refusal.value.code is RpcCode.UNAVAILABLE
