"""One broker at a time in a folder, and how the next one comes to it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tidemill.broker.data_dir import LOCK_RETRY_MS, locked_data_dir
from tidemill.common.lifecycle import StartError


def test_a_folder_of_another_broker_is_refused_at_once(tmp_path: Path) -> None:
    with (
        locked_data_dir(tmp_path),
        pytest.raises(StartError, match="in use by another broker"),
        locked_data_dir(tmp_path, pause=no_pause),
    ):
        pass


def no_pause(_seconds: float) -> None:
    raise AssertionError("nobody is to be waited for")


def test_a_broker_that_is_going_is_waited_for(tmp_path: Path) -> None:
    """A pod that was deleted by force may run on for a while beside the one in its place."""
    former = contextlib.ExitStack()
    former.enter_context(locked_data_dir(tmp_path))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            former.close()

    with locked_data_dir(tmp_path, wait_ms=10 * LOCK_RETRY_MS, pause=pause) as path:
        assert path == tmp_path
    assert len(pauses) == 3


def test_one_that_stays_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    pauses: list[float] = []
    with (
        locked_data_dir(tmp_path),
        pytest.raises(StartError, match="in use by another broker"),
        locked_data_dir(tmp_path, wait_ms=4 * LOCK_RETRY_MS, pause=pauses.append),
    ):
        pass
    assert len(pauses) == 4
