"""The duration of a long poll: as long as the client and the limits allow."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tidemill.common.errors import BadRequest, IllegalPollingTime
from tidemill.proxy.server.invisible_duration import duration_ms
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.server.call import Call
    from tidemill.proxy.settings import ProxySettings
    from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

# The first client version that knows ILLEGAL_POLLING_TIME.
_KNOWS_ILLEGAL_POLLING_TIME = (5, 0, 3)


class PollDurations:
    """The poll durations of receives."""

    def __init__(self, clients: Clients, settings: ProxySettings) -> None:
        self._clients = clients
        self._min_ms = settings.grpc_client_consumer_min_long_polling_timeout_ms
        self._max_ms = settings.long_polling_max_ms
        self._reserve_ms = settings.deadline_reserve_ms
        self._request_timeout_ms = settings.request_timeout_ms

    def duration_ms(self, call: Call, parsed: service.ReceiveMessageRequest) -> int:
        """Return the poll duration; 0 means one pop without waiting.

        Raises IllegalPollingTime if the deadline is too close for a poll.
        """
        remaining_ms = call.time_remaining_ms()
        if parsed.HasField("long_polling_timeout"):
            wanted_ms = duration_ms(parsed.long_polling_timeout)
            if wanted_ms == 0:
                return 0
        elif remaining_ms is None:
            wanted_ms = self._max_ms
        else:
            wanted_ms = remaining_ms - self._request_timeout_ms_of(call) // 2
        poll_ms = min(max(wanted_ms, self._min_ms), self._max_ms)
        if remaining_ms is None or poll_ms <= remaining_ms - self._reserve_ms:
            return poll_ms
        if remaining_ms >= self._min_ms:
            return max(remaining_ms - self._reserve_ms, 0)
        message = (
            f"the deadline is in {remaining_ms} ms, and a long poll takes at least"
            f" {self._min_ms} ms; raise the timeout of the request"
        )
        if _version(call.version) < _KNOWS_ILLEGAL_POLLING_TIME:
            raise BadRequest(message)
        raise IllegalPollingTime(message)

    def _request_timeout_ms_of(self, call: Call) -> int:
        """Return the request timeout in the client's settings, but at least that of the proxy.

        A client that sends no poll duration calls with a deadline after this duration and its
        request timeout. The other half of the request timeout is for a busy client or proxy.
        """
        client = self._clients.find(call.client)
        if client is None:
            return self._request_timeout_ms
        stated = v2.Settings.FromString(client.settings).request_timeout
        return max(duration_ms(stated), self._request_timeout_ms)


def _version(text: str) -> tuple[int, ...]:
    """Parse the version of a client. A version of another form counts as new."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else _KNOWS_ILLEGAL_POLLING_TIME
