"""Answers to calls that wait for one reply of one broker, without a task and a future (ADR 0106).

A link passes the reply to such an answer as it passes it to a future. The answer encodes the
response and gives it to the transport in the same turn of the event loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

from tidemill.common.errors import ServiceError, UnavailableError
from tidemill.proxy.server.call import status_of
from tidemill.proxy.server.send_results import (
    OK,
    encode_entry,
    encode_response,
    encode_stored_entry,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidemill.proxy.cluster.send_target import SendTarget
    from tidemill.proxy.link import BrokerLink
    from tidemill.proxy.link.commands import Appended
    from tidemill.proxy.server.call import Call


class LinkAnswer:
    """The answer to a call that waits for one reply. `encode` makes the response of the reply."""

    __slots__ = ("_call", "_link", "_request_id")

    def __init__(self, call: Call, link: BrokerLink) -> None:
        self._call = call
        self._link = link
        self._request_id = 0

    def wait(self, request_id: int) -> None:
        """Wait for the reply to a request of the link, until the client cancels the call."""
        assert self._call.reply is not None, "a call without a reply is answered by a task"
        self._request_id = request_id
        self._call.reply.on_cancel = self._cancel

    def encode(self, result: Any) -> bytes:
        """Return the response."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether it needs no result: never, since the link forgets the request at its end."""
        return False

    def cancelled(self) -> bool:
        """Whether the call was cancelled: never, for the same reason."""
        return False

    def set_result(self, result: Any) -> None:
        """Answer the call with the reply of the broker."""
        try:
            response = self.encode(result)
        except Exception as error:  # noqa: BLE001  # The other replies of the frame go on.
            self._call.fail(error)
        else:
            self._call.respond(response)

    def set_exception(self, exception: Exception) -> None:
        """Answer the call with an error."""
        self._call.fail(exception)

    def _cancel(self) -> None:
        self._link.withdraw(self._request_id)
        self._call.cancel()


@final
class SendAnswer(LinkAnswer):
    """The answer to a send of one message, which one broker group stores."""

    __slots__ = ("_message_id", "_send_elsewhere", "_target", "_topic")

    def __init__(
        self,
        call: Call,
        topic: str,
        message_id: str,
        target: SendTarget,
        send_elsewhere: Callable[[UnavailableError], Awaitable[bytes]] | None,
    ) -> None:
        """`send_elsewhere` sends the message to other broker groups if the first one is down."""
        super().__init__(call, target.broker.link)
        self._topic = topic
        self._message_id = message_id
        self._target = target
        self._send_elsewhere = send_elsewhere

    def encode(self, result: Appended) -> bytes:
        """Return the SendMessageResponse of a stored message."""
        entry = encode_stored_entry(self._target.broker, self._topic, self._message_id, result)
        return encode_response(self._call, OK, entry)

    def set_exception(self, exception: Exception) -> None:
        """Send the message to another broker group, or answer with the error of this one."""
        if self._send_elsewhere is not None and isinstance(exception, UnavailableError):
            self._call.answer_in_task(partial(self._send_elsewhere, exception))
        elif isinstance(exception, ServiceError):
            status = status_of(exception)
            entry = encode_entry(status, self._message_id)
            self._call.respond(encode_response(self._call, status, entry))
        else:
            self._call.fail(exception)
