"""The mapped files: however many a store has, few are mapped at a time."""

from __future__ import annotations

from typing import final

from tidemill.broker.engine.store.disk import Disk

FILES_MAX = 192  # each takes a mapping and a descriptor


@final
class Mappings(dict[str, memoryview]):
    """Read-only views of whole files by name; what is asked for and not there is mapped.

    The file that was mapped first gives way. A view that somebody still holds stays valid: it is
    the caller who must not hold it longer than the file. Whoever renames, deletes or replaces a
    file takes its old name out.
    """

    def __init__(self, disk: Disk, *, files_max: int = FILES_MAX) -> None:
        super().__init__()
        self._disk = disk
        self._files_max = files_max

    def __missing__(self, name: str) -> memoryview:
        """Map a file."""
        if len(self) >= self._files_max:
            del self[next(iter(self))]
        file = self._disk.open(name)
        view = self[name] = file.view()
        file.close()
        return view

    def forget(self, name: str) -> None:
        """Take a name out; its file will be another one, or none."""
        self.pop(name, None)

    def advise(self, name: str) -> None:
        """Say that all of a file will be read soon; a hint."""
        file = self._disk.open(name)
        file.advise(0, file.size())
        file.close()
