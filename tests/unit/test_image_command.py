"""The targets of the Dockerfile: the command of the laptop's image, and who has a data folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tidemill.common.addresses import is_unspecified
from tidemill.standalone.settings import StandaloneSettings

DOCKERFILE = Path(__file__).resolve().parents[2] / "Dockerfile"


def instructions(stage: str) -> str:
    """Return the text of a stage of the Dockerfile."""
    text = DOCKERFILE.read_text("utf-8").replace("\\\n", "")
    (body,) = re.findall(
        rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return str(body)


def default_command(stage: str) -> list[str]:
    """Return the CMD of a stage of the Dockerfile."""
    (command,) = re.findall(r"^CMD (\[.*\])$", instructions(stage), re.MULTILINE)
    found: list[str] = json.loads(command)
    return found


@pytest.mark.parametrize("host", ["grpc_host", "admin_host", "metrics_host"])
def test_the_image_listens_on_all_addresses_of_its_container(host: str) -> None:
    program, *arguments = default_command("tidemill")
    assert program == "standalone"
    assert is_unspecified(getattr(StandaloneSettings.load(arguments), host))


@pytest.mark.parametrize("flag", ["--admin-open", "--admin-plain"])
def test_the_command_of_the_image_opens_the_doors_by_name(flag: str) -> None:
    _, *arguments = default_command("tidemill")
    arguments.remove(flag)
    with pytest.raises(SystemExit):
        StandaloneSettings.load(arguments)


def test_no_image_declares_a_volume() -> None:
    """A runtime makes a writable folder of it in each pod, also on a read-only root."""
    assert not re.findall(r"^VOLUME", DOCKERFILE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("stage", "has_data"),
    [
        ("root", False),
        ("base", False),
        ("proxy", False),
        ("admin", False),
        ("broker", True),
        ("dev", True),
        ("tidemill", True),
    ],
)
def test_only_images_of_a_broker_have_a_data_folder(stage: str, has_data: bool) -> None:
    assert bool(re.search(r"install -d .*/data$", instructions(stage), re.MULTILINE)) is has_data
