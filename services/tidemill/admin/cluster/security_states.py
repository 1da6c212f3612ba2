"""The security states of proxies: the changes that they have applied, and their keys (ADR 0080)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import grpc

from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.cluster.proxies import ask_all
from tidemill.common.errors import ServiceError
from tidemill.security.secret_uses import KnownUse, SecretUses
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


async def find_states(brokers: Brokers, user_id: int = 0) -> SecurityStates:
    """Ask all proxies for their states. An error is reported among the unreachable processes.

    With the id of a user, the states have the last uses of its secrets.
    """
    question = pb.ProxyQuestion(get_security=pb.GetSecurityState(user_id=user_id))
    try:
        asked = await ask_all(brokers, question, STATE_TIMEOUT_MS)
    except (ServiceError, grpc.aio.AioRpcError) as error:
        return SecurityStates((), (f"proxies are unknown: {error}",))
    states = [(proxy.name, answer.security) for proxy, answer in asked.answers]
    return SecurityStates(states, asked.unreachable)


class FoundUses(NamedTuple):
    """The last uses of the secrets of a user, in ms since 1970."""

    used_at_ms: Mapping[tuple[int, int], int]  # by the id and the creation of the secret
    since_ms: int  # Earlier uses are unknown.
    unreachable: Sequence[str]  # processes whose uses are unknown


async def find_secret_uses(brokers: Brokers, user_id: int, own: SecretUses) -> FoundUses:
    """Return the last uses of the secrets of a user, at all proxies and at this process.

    A process knows the uses since its start.
    """
    found = await find_states(brokers, user_id)
    since_ms, unreachable = own.since_ms, list(found.unreachable)
    uses = own.of_user(user_id)
    for name, state in found.states:
        if not state.uses_since_ms:
            unreachable.append(f"{name}: its version knows no last uses")
            continue
        since_ms = max(since_ms, state.uses_since_ms)
        uses += [
            KnownUse(use.secret_id, use.created_at_ms, use.used_at_ms) for use in state.secret_uses
        ]
    used_at_ms: dict[tuple[int, int], int] = {}
    for use in uses:
        key = use.secret_id, use.created_at_ms
        used_at_ms[key] = max(used_at_ms.get(key, 0), use.used_at_ms)
    return FoundUses(used_at_ms, since_ms, unreachable)


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
