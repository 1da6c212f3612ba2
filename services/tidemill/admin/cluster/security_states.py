"""The security states of proxies: the changes that they have applied, and their keys (ADR 0080)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import grpc

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.proxies import ask_all
from tidemill.common.errors import ServiceError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

STATE_TIMEOUT_MS: Final = 1_000
CONFIRM_S: Final = 1.0  # the longest wait for the proxies after a change
REPEAT_S: Final = 0.05  # between two questions to proxies that do not have a change yet


class SecurityStates(NamedTuple):
    """The states by the name of the proxy, and the unreachable processes."""

    states: Sequence[tuple[str, pb.SecurityState]]
    unreachable: Sequence[str]

    def lacking(self, version: int) -> list[str]:
        """Return the proxies with an older version of the items, and the unreachable processes."""
        older = [name for name, state in self.states if state.version < version]
        return [*older, *self.unreachable]


async def find_states(brokers: Brokers) -> SecurityStates:
    """Ask all proxies for their states. An error is reported among the unreachable processes."""
    question = pb.ProxyQuestion(get_security=pb.GetSecurityState())
    try:
        asked = await ask_all(brokers, question, STATE_TIMEOUT_MS)
    except (ServiceError, grpc.aio.AioRpcError) as error:
        return SecurityStates((), (f"proxies are unknown: {error}",))
    states = [(proxy.name, answer.security) for proxy, answer in asked.answers]
    return SecurityStates(states, asked.unreachable)


async def wait_for_version(brokers: Brokers, version: int) -> SecurityStates:
    """Wait at most CONFIRM_S until all proxies have a version; return the last known states."""
    found = SecurityStates((), ("no proxy has answered",))
    try:
        async with asyncio.timeout(CONFIRM_S):
            while True:
                found = await find_states(brokers)
                if not found.lacking(version):
                    return found
                await asyncio.sleep(REPEAT_S)
    except TimeoutError:
        return found
