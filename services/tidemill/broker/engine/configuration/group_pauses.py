"""The commands that pause and resume a consumer group, at the home."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from tidemill.broker.engine.configuration.administration import Administration
from tidemill.broker.engine.metadata.catalog import Catalog, ConsumerGroup, group_item
from tidemill.broker.engine.metadata.group_pause import PAUSE_LEVEL, GroupPause
from tidemill.common.errors import GroupNotFound


@final
class GroupPauseCommands:
    """Pauses and resumes consumer groups."""

    def __init__(self, catalog: Catalog, administration: Administration) -> None:
        self._catalog = catalog
        self._administration = administration

    def put(
        self, name: str, pause: GroupPause | None, *, is_dry: bool = False, now_ms: int
    ) -> ConsumerGroup:
        """Pause a group, also if it is paused already; None resumes it. Return the group.

        `is_dry` only checks. Raises GroupNotFound, BadRequest, Forbidden, Conflict.
        """
        group = self._catalog.find_group(name)
        if group is None:
            raise GroupNotFound(f"there is no consumer group {name!r}")
        self._administration.check_home()
        if pause is not None:
            pause.check(now_ms)
            self._administration.check_level("a pause of a consumer group", PAUSE_LEVEL)
        if group.paused == pause:
            return group
        group = replace(group, version=group.version + 1, paused=pause)
        if not is_dry:
            self._administration.record(group_item(group), now_ms)
        return group
