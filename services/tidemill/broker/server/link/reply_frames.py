"""Reply frames, built from the results of a committed round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tidemill.broker.server.link.commands import COMMANDS
from tidemill.common.errors import codes_of
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from tidemill.broker.server.link.commands import ReplySource
    from tidemill.broker.server.link.replies import LinkReplies
    from tidemill.broker.server.round.round_times import RoundParts
    from tidemill.common.histogram import Histogram
    from tidemill.common.metrics import Labels

TIMED_S_MIN: Final = 0.05  # a frame with older requests has its times


def build_frames(
    replies: LinkReplies, source: ReplySource, *, epoch: int, size_max: int
) -> Iterator[pb.ReplyFrame]:
    """Build the frames; a frame with more than `size_max` bytes of messages is the last of them.

    If the oldest request took long, each frame has the parts of its time.
    """
    now_s = time.monotonic()
    _observe(replies, source.traffic.latencies, now_s)
    is_timed = now_s - replies.arrived_s >= TIMED_S_MIN
    times = _times(replies.times.parts(now_s)) if is_timed else None
    frame = pb.ReplyFrame(times=times)
    for config in replies.configs:
        frame.config.CopyFrom(config)
        frame.epoch = epoch
        if len(replies.configs) > 1:
            yield frame
            frame = pb.ReplyFrame(times=times)
    for request_id, error in replies.failures:
        frame.failures.add(request_id=request_id, error=type(error).__name__, message=error.message)
    size = 0
    for command in COMMANDS:
        results = replies.results.get(command.name)
        if not results:
            continue
        if not command.is_large:
            command.reply(frame, results, source)
            continue
        for result in results:
            size += command.reply(frame, (result,), source)
            if size > size_max:
                yield frame
                frame, size = pb.ReplyFrame(times=times), 0
    frame.answered_sequence = replies.answered_sequence
    yield frame


def _times(parts: RoundParts | None) -> pb.RoundTimes | None:
    if parts is None:
        return None
    return pb.RoundTimes(
        broker_ms=round(parts.broker_ms),
        sync_ms=None if parts.sync_ms is None else round(parts.sync_ms),
        replicate_ms=None if parts.replicate_ms is None else round(parts.replicate_ms),
    )


def _observe(replies: LinkReplies, latencies: Histogram[Labels], now_s: float) -> None:
    """Count the time from the arrival of the requests to now."""
    for command in COMMANDS:
        results = replies.results.get(command.name)
        if results:
            command.observe(command.name, results, latencies, replies.arrived_s, now_s)
    for _, error in replies.failures:
        code = str(codes_of(error).rocketmq)
        labels = ("grpc", "any", code, "false", "process_request_failed")
        elapsed_ms = (now_s - replies.arrived_s) * 1000
        latencies.observe(labels, max(0.0, elapsed_ms) if replies.arrived_s < now_s else 0.0)
