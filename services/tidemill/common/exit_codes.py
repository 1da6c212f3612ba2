"""The exit codes of the commands and processes."""

from __future__ import annotations

from typing import Final

EXIT_REFUSED: Final = 1  # the server rejected the call
EXIT_USAGE: Final = 2  # wrong options, arguments or settings
EXIT_UNREACHABLE: Final = 3  # no answer from the server
EXIT_PROBLEM: Final = 4  # a check has found a problem
EXIT_PARTIAL: Final = 5  # a part of the work is not done, or a part of the answer is unknown
EXIT_INTERRUPTED: Final = 130  # by Ctrl-C, as shells report it
