"""RPCs that run a function in a round."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.common.errors import QueryFailed, RequestError, ServiceError
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.broker.engine.engine import Engine
    from tidemill.broker.server.round.rounds import Rounds
    from tidemill.broker.server.round.turn import Turn

T = TypeVar("T")

ERROR_KEY: Final = "tidemill-error"  # trailing metadata that names an error by its class


async def in_round(rounds: Rounds, function: Callable[[Engine, Turn], T]) -> T:
    """Run `function` in a round; its ServiceError ends the RPC."""
    try:
        return await rounds.call(function)
    except ServiceError as error:
        raise rpc_error(error) from error


async def slices_in_round(
    rounds: Rounds, function: Callable[[Engine, Turn], Generator[None, None, T]]
) -> T:
    """Run a long `function`, which yields between slices, in a round, as `in_round` does."""
    try:
        return await rounds.call_slices(function)
    except ServiceError as error:
        raise rpc_error(error) from error


async def read_in_round(rounds: Rounds, function: Callable[[Engine, Turn], T]) -> T:
    """Run `function`, which changes nothing, in a round; its ServiceError ends the RPC."""
    try:
        return await rounds.read(function)
    except ServiceError as error:
        raise rpc_error(error) from error


def rpc_error(error: ServiceError) -> RpcError:
    """Return the RPC error that carries `error` to the caller."""
    code = RpcCode.FAILED_PRECONDITION if isinstance(error, RequestError) else RpcCode.UNAVAILABLE
    if isinstance(error, QueryFailed):
        code = RpcCode.INTERNAL
    return RpcError(code, error.message, ((ERROR_KEY, type(error).__name__),))
