"""What is generated from code and checked in is current."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.common.known_settings import KNOWN_KEYS
from tools.generate_docs import PROCESSES, documents


@pytest.mark.parametrize(("path", "text"), documents().items(), ids=lambda part: str(part)[-20:])
def test_a_generated_document_is_current(path: Path, text: str) -> None:
    assert path.read_text("utf-8") == text, "run `make docs`"


def test_every_setting_has_a_description() -> None:
    for settings in PROCESSES:
        for name, field in settings.model_fields.items():
            assert field.description, f"{settings.command}: {name}"


def test_the_known_settings_cover_all_processes() -> None:
    assert {name for settings in PROCESSES for name in settings.model_fields} == KNOWN_KEYS
