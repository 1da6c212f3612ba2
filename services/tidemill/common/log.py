"""Logging for every process: events with fields, always on standard error.

    log = structlog.get_logger()
    log.info("store recovered", records=n, took_ms=t)

One JSON line an event, or coloured text when standard error is a terminal. Standard output is never
written: it belongs to whoever started the process. A line that cannot be written is lost, and the
process goes on: no log is worth a broker.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, TextIO, cast

if not sys.stderr.isatty():
    # structlog imports rich for its console where it can: 0.1 s and 8 MiB that JSON does not need.
    _blocked = "rich" not in sys.modules and sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]  # None blocks an import
    import structlog

    if _blocked:
        del sys.modules["rich"]
import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor


class LogStream(io.TextIOBase):
    """Lines to a descriptor. What cannot be written is counted, and told by the next line that can.

    Not buffered: a buffer would keep what failed, and fail again when the process ends.
    """

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self.lost_count = 0

    def write(self, text: str) -> int:
        """Write `text`, or lose it."""
        if self.lost_count:
            told = json.dumps({"event": "log lines lost", "count": self.lost_count}) + "\n"
            if not self._write(told.encode()):
                self.lost_count += text.count("\n")
                return len(text)
            self.lost_count = 0
        if not self._write(text.encode(errors="backslashreplace")):
            self.lost_count += max(text.count("\n"), 1)
        return len(text)

    def _write(self, data: bytes) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            return False
        return True


def configure_logging(*, process: str, level: str) -> None:
    """Route structlog, and what libraries log, to standard error as events of `process`."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.processors.JSONRenderer(default=str)
    if sys.stderr.isatty():
        shared.pop()  # The console shows exceptions itself.
        renderer = structlog.dev.ConsoleRenderer()
    stream = cast("TextIO", LogStream(sys.stderr.fileno()))
    severity = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    # Libraries speak only when something is wrong; their chatter is not ours.
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)
