"""The lock of a data directory, and the wait for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tidemill.broker.data_dir import LOCK_RETRY_MS, locked_data_dir
from tidemill.common.lifecycle import StartError


def test_a_data_directory_in_use_is_rejected_at_once(tmp_path: Path) -> None:
    with (
        locked_data_dir(tmp_path),
        pytest.raises(StartError, match="in use by another broker"),
        locked_data_dir(tmp_path, pause=no_pause),
    ):
        pass


def no_pause(_seconds: float) -> None:
    raise AssertionError("there is no wait by default")


def test_a_start_waits_for_a_stopping_broker(tmp_path: Path) -> None:
    """A pod that was deleted by force may run for a while beside its replacement."""
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


def test_the_wait_for_another_broker_is_limited(tmp_path: Path) -> None:
    pauses: list[float] = []
    with (
        locked_data_dir(tmp_path),
        pytest.raises(StartError, match="in use by another broker"),
        locked_data_dir(tmp_path, wait_ms=4 * LOCK_RETRY_MS, pause=pauses.append),
    ):
        pass
    assert len(pauses) == 4
