"""Logging of every process: events with fields, always on standard error.

    log = structlog.get_logger()
    log.info("store recovered", records=n, took_ms=t)

An event is one line of JSON. It is text if standard error is a terminal or `log_format` asks for
text. The log never uses standard output, which belongs to the parent process. If a line cannot be
written, it is lost and the process continues.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, Literal, TextIO, TypeAlias, cast

# structlog imports rich for its console if rich is installed. That costs 0.1 s and 8 MiB.
_blocked = "rich" not in sys.modules and sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]  # None blocks an import
import structlog  # noqa: E402  # Behind what blocks its import of rich.

if _blocked:
    del sys.modules["rich"]

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

LogFormat: TypeAlias = Literal["auto", "json", "text"]
# Columns of a text line: the longest level, the process names of a standalone, most events.
LEVEL_WIDTH, PROCESS_WIDTH, EVENT_WIDTH = 8, 10, 28
_COLORS = {"debug": 2, "warning": 33, "error": 31, "critical": 31}  # ANSI colors; 2 is faint


# For support bundles. A longer line is kept to its limit.
RECENT_LINES: Final = 2_000
RECENT_CHARS_MAX: Final = 1_000
_recent: Final[deque[str]] = deque(maxlen=RECENT_LINES)


def recent_lines() -> list[str]:
    """Return the newest lines of this process, the oldest first."""
    return list(_recent)


class LogStream(io.TextIOBase):
    """A stream of lines to a descriptor; the next written line reports the number of lost lines.

    The stream has no buffer. A buffer would keep the failed lines and fail again at the exit.
    """

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self.lost_count = 0

    def write(self, text: str) -> int:
        """Write `text`; count its lines as lost if that fails."""
        if line := text.rstrip("\n"):
            _recent.append(line[:RECENT_CHARS_MAX])
        if self.lost_count:
            notice = json.dumps({"event": "log lines lost", "count": self.lost_count}) + "\n"
            if not self._write(notice.encode()):
                self.lost_count += text.count("\n")
                return len(text)
            self.lost_count = 0
        if not self._write(text.encode(errors="backslashreplace")):
            self.lost_count += max(text.count("\n"), 1)
        return len(text)

    def _write(self, data: bytes) -> bool:
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._fd, unwritten) :]
        except OSError:
            return False
        return True


class LogLevel:
    """The level of the log of this process."""

    def __init__(self) -> None:
        self.severity = logging.INFO
        self.is_debug = False  # hot paths check it before they build a line

    @property
    def text(self) -> str:
        """The level as settings write it."""
        return logging.getLevelName(self.severity).lower()


LEVEL: Final = LogLevel()


class _ProcessLogger(structlog.BoundLoggerBase):
    """The class of all loggers. `change_level` replaces its methods, because loggers are cached."""


def _use_level(level: str) -> int:
    """Let loggers write events from a level on, such as `info`. Return its number."""
    severity = LEVEL.severity = logging.getLevelNamesMapping()[level.upper()]
    LEVEL.is_debug = severity <= logging.DEBUG
    for name, method in vars(structlog.make_filtering_bound_logger(severity)).items():
        if callable(method) and not name.startswith("_"):
            setattr(_ProcessLogger, name, method)
    return severity


def change_level(level: str) -> str:
    """Write events from a level on, such as `info`, until the process ends. Return the last level.

    Loggers that exist follow it.
    """
    before = LEVEL.text
    severity = _use_level(level)
    logging.getLogger().setLevel(max(severity, logging.WARNING))
    return before


class TextRenderer:
    """One aligned line per event: time, level, process, event, fields; a trace follows below."""

    def __init__(self, *, has_colors: bool) -> None:
        self._has_colors = has_colors

    def __call__(self, _logger: object, _method: str, event: EventDict) -> str:
        """Render an event."""
        trace = event.pop("exception", None)
        level, process = str(event.pop("level", "")), str(event.pop("process", ""))
        # Without the date, which is known at a terminal.
        at = str(event.pop("timestamp", "")).partition("T")[2][:12]
        shown_level = f"{level:<{LEVEL_WIDTH}}"
        if self._has_colors and level in _COLORS:
            shown_level = f"\x1b[{_COLORS[level]}m{shown_level}\x1b[0m"
        name = _escaped(str(event.pop("event", "")))
        fields = " ".join(f"{key}={_format_value(value)}" for key, value in event.items())
        line = f"{at} {shown_level} {process:<{PROCESS_WIDTH}} {name:<{EVENT_WIDTH}} {fields}"
        return line.rstrip() + (f"\n{trace}" if trace else "")


def _format_value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    # Quoted if a reader could not see where the value ends.
    is_clear = text and _escaped(text) == text and not set(text) & set(' "=')
    return text if is_clear or not isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    """Escape characters that would move the cursor; the text may come from a client."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def is_text_format(log_format: LogFormat) -> bool:
    """Return whether log lines are text for people, not JSON."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def configure_logging(*, process: str, level: str, log_format: LogFormat = "auto") -> None:
    """Send the events of structlog and the logs of libraries to standard error."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Processor = structlog.processors.JSONRenderer(default=str)
    if is_text_format(log_format):
        renderer = TextRenderer(has_colors=sys.stderr.isatty())
    stream = cast("TextIO", LogStream(sys.stderr.fileno()))
    severity = _use_level(level)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=_ProcessLogger,
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
    # Of libraries, only warnings and errors matter.
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)
