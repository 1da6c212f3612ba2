"""Processes whose wall clock a test sets wrong, and right again, while they run.

Python reads `wrong_clock/sitecustomize.py` before anything else of such a process, so the product
needs no hook for it. Its monotonic clock is the machine's: so it is where somebody sets a clock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.wrong_clock.sitecustomize import OFFSET_NS

FOLDER = Path(__file__).parent / "wrong_clock"
NS_PER_S = 1_000_000_000


class WrongClocks:
    """A file for each process, by its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def variables(self, name: str) -> Mapping[str, str]:
        """Return what the environment of a process is to have; its clock is right at first."""
        path = self._path(name)
        if not path.exists():
            path.write_bytes(OFFSET_NS.pack(0))
        return {"PYTHONPATH": str(FOLDER), "WRONG_CLOCK_FILE": str(path)}

    def set(self, name: str, ahead_s: int) -> None:
        """Set the clock of a process, at once; 0 sets it right."""
        descriptor = os.open(self._path(name), os.O_RDWR)
        try:
            os.pwrite(descriptor, OFFSET_NS.pack(ahead_s * NS_PER_S), 0)
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> Path:
        return self._folder / f"clock of {name}"
