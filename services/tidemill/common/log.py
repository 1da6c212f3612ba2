"""Logging for every process: events with fields, always on standard error.

    log = structlog.get_logger()
    log.info("store recovered", records=n, took_ms=t)

One JSON line an event, or text for people where standard error is a terminal or `log_format` says
so. Standard output is never written: it belongs to whoever started the process. A line that cannot
be written is lost, and the process goes on: no log is worth a broker.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, Literal, TextIO, TypeAlias, cast

# structlog imports rich for its console where it can: 0.1 s and 8 MiB that nobody here needs.
_blocked = "rich" not in sys.modules and sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]  # None blocks an import
import structlog  # noqa: E402  # Behind what blocks its import of rich.

if _blocked:
    del sys.modules["rich"]

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

LogFormat: TypeAlias = Literal["auto", "json", "text"]
# Columns of a text line: the longest level, the processes of a standalone, and most events.
LEVEL_WIDTH, PROCESS_WIDTH, EVENT_WIDTH = 8, 10, 28
_COLORS = {"debug": 2, "warning": 33, "error": 31, "critical": 31}  # of levels: ANSI, 2 is faint


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


_severity = logging.INFO  # as configured


def is_debug() -> bool:
    """Whether debug lines are written; asked where something is made, not where it is busy."""
    return _severity <= logging.DEBUG


class TextRenderer:
    """One aligned line an event: time, level, process, event, fields; a trace stands below it."""

    def __init__(self, *, has_colors: bool) -> None:
        self._has_colors = has_colors

    def __call__(self, _logger: object, _method: str, event: EventDict) -> str:
        """Render an event."""
        trace = event.pop("exception", None)
        level, process = str(event.pop("level", "")), str(event.pop("process", ""))
        # Of the time without the date: who watches a terminal knows it.
        at = str(event.pop("timestamp", "")).partition("T")[2][:12]
        shown_level = f"{level:<{LEVEL_WIDTH}}"
        if self._has_colors and level in _COLORS:
            shown_level = f"\x1b[{_COLORS[level]}m{shown_level}\x1b[0m"
        what = _plain(str(event.pop("event", "")))
        fields = " ".join(f"{name}={_shown(value)}" for name, value in event.items())
        line = f"{at} {shown_level} {process:<{PROCESS_WIDTH}} {what:<{EVENT_WIDTH}} {fields}"
        return line.rstrip() + (f"\n{trace}" if trace else "")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    # Quoted where the eye could not tell where it ends.
    is_clear = text and _plain(text) == text and not set(text) & set(' "=')
    return text if is_clear or not isinstance(value, str) else json.dumps(value)


def _plain(text: str) -> str:
    """Return `text` without what would move the cursor: it may come from a client."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def logs_text(log_format: LogFormat) -> bool:
    """Whether lines are for people, and not JSON."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def configure_logging(*, process: str, level: str, log_format: LogFormat = "auto") -> None:
    """Route structlog, and what libraries log, to standard error as events of `process`."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.processors.JSONRenderer(default=str)
    if logs_text(log_format):
        renderer = TextRenderer(has_colors=sys.stderr.isatty())
    stream = cast("TextIO", LogStream(sys.stderr.fileno()))
    global _severity  # A process has one log.
    severity = _severity = logging.getLevelNamesMapping()[level.upper()]
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
