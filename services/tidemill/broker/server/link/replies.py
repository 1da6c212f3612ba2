"""What one round has for one link, until it may leave.

Results are kept as plain values until the round is committed. Protobuf is built then, and only then
are the messages of a pop read: what is not durable leaves the process in no form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tidemill.broker.server.link.commands import COMMANDS
from tidemill.common.errors import ServiceError, codes_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.server.link.commands import Command, Result
    from tidemill.broker.server.link.link import Link
    from tidemill.common.histogram import Histogram
    from tidemill.common.metrics import Labels


class Replies:
    """The results of one round for one link."""

    __slots__ = (
        "_link",
        "answered_sequence",
        "arrived_s",
        "configs",
        "failures",
        "pop_bytes",
        "results",
    )

    def __init__(self, link: Link) -> None:
        self._link = link
        self.answered_sequence = 0
        self.arrived_s = math.inf  # time.monotonic() of the oldest frame that is answered
        self.configs: list[pb.ConfigUpdate] = []
        self.results: dict[Command, list[Result]] = {}
        self.pop_bytes = 0
        self.failures: list[tuple[int, ServiceError]] = []

    def of(self, command: Command) -> list[Result]:
        """Return the list for the results of a command."""
        return self.results.setdefault(command, [])

    def release(self) -> Iterator[None]:
        """Send the replies over the link; yield between slices."""
        return self._link.send(self)

    def frames(self, size_max: int) -> Iterator[pb.ReplyFrame]:
        """Build the frames; a new one begins where one reaches `size_max` bytes."""
        link = self._link
        self._observe(link.traffic.latencies)
        frame = pb.ReplyFrame()
        for config in self.configs:
            frame.config.CopyFrom(config)
            frame.epoch = link.epoch
            if len(self.configs) > 1:
                yield frame
                frame = pb.ReplyFrame()
        for request_id, error in self.failures:
            frame.failures.add(
                request_id=request_id, error=type(error).__name__, message=error.message
            )
        size = 0
        for command in COMMANDS:
            results = self.results.get(command)
            if not results:
                continue
            if not command.is_large:
                command.reply(frame, results, link)
                continue
            for result in results:
                size += command.reply(frame, (result,), link)
                if size > size_max:
                    yield frame
                    frame, size = pb.ReplyFrame(), 0
        frame.answered_sequence = self.answered_sequence
        yield frame

    def _observe(self, latencies: Histogram[Labels]) -> None:
        """Count what the requests of the round took, from their arrival to here."""
        now_s = time.monotonic()
        for command, results in self.results.items():
            if results:
                command.observe(command.name, results, latencies, self.arrived_s, now_s)
        for _, error in self.failures:
            code = str(codes_of(error).rocketmq)
            labels = ("grpc", "any", code, "false", "process_request_failed")
            elapsed_ms = (now_s - self.arrived_s) * 1000
            latencies.observe(labels, max(0.0, elapsed_ms) if self.arrived_s < now_s else 0.0)
