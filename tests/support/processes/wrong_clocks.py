"""Wrong wall clocks, which a test sets while the processes run.

Python loads `wrong_clock/sitecustomize.py` first in such a process, so the product needs no hook.
The monotonic clock stays correct, as on a machine with a changed wall clock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.wrong_clock.sitecustomize import OFFSET_NS

FOLDER = Path(__file__).parent / "wrong_clock"
NS_PER_S = 1_000_000_000


class WrongClocks:
    """Files with the clock offset of each process, by its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def variables(self, name: str) -> Mapping[str, str]:
        """Return the environment variables of a process. Its clock is right at first."""
        path = self._path(name)
        if not path.exists():
            path.write_bytes(OFFSET_NS.pack(0))
        return {"PYTHONPATH": str(FOLDER), "WRONG_CLOCK_FILE": str(path)}

    def set(self, name: str, ahead_s: int) -> None:
        """Set the clock of a process at once; 0 corrects it."""
        descriptor = os.open(self._path(name), os.O_RDWR)
        try:
            os.pwrite(descriptor, OFFSET_NS.pack(ahead_s * NS_PER_S), 0)
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> Path:
        return self._folder / f"clock of {name}"
