"""The program: `tidemill COMMAND`, or `python -m tidemill COMMAND`."""

from __future__ import annotations

import importlib
import sys

from tidemill.cli.processes import PROCESSES


def main() -> None:
    """Run a process, or a command against a running one."""
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if command in PROCESSES:
        # Before anything imports structlog: see there.
        importlib.import_module("tidemill.common.log")
        # Not through the command line's library: the time until a process serves is promised.
        sys.exit(PROCESSES[command](arguments))
    from tidemill.cli.app import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
