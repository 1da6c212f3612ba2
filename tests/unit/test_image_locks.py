"""What images are made of is what is tested, and all that their processes import."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LOCKS = ROOT / "deploy" / "image"
IMAGES = ("build", "broker", "proxy", "admin", "tidemill")
# Without what an image does not hold, its process is imported as far as it goes.
WITHOUT = {
    "proxy": ("numpy", ["tidemill.proxy.app"]),
    "admin": ("numpy", ["tidemill.admin.process", "tidemill.cli.app", "tidemill.release.trial"]),
}


def versions(lock: Path) -> dict[str, set[str]]:
    """Return the versions of each package; one for several markers."""
    found: dict[str, set[str]] = {}
    lines = re.findall(r"^([a-z0-9-]+)(?:\[.*\])?==([^ ;]+)", lock.read_text("utf-8"), re.MULTILINE)
    for name, version in lines:
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_the_versions_that_are_tested(image: str) -> None:
    tested = versions(ROOT / "requirements.lock")
    for name, found in versions(LOCKS / f"{image}.lock").items():
        # pip and wheel, for building, are in no environment's list.
        assert image == "build" or found <= tested[name], name


@pytest.mark.parametrize("image", ["broker", "proxy", "admin", "tidemill"])
def test_an_image_lock_contains_the_package_dependencies(image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {re.split(r"[\[><=~! ]", each)[0] for each in project["dependencies"]}
    needed -= {WITHOUT[image][0]} if image in WITHOUT else set()
    assert needed <= versions(LOCKS / f"{image}.lock").keys()


@pytest.mark.parametrize("image", WITHOUT)
def test_a_process_starts_without_packages_missing_in_its_image(image: str) -> None:
    lacks, modules = WITHOUT[image]
    script = f"import sys; sys.modules[{lacks!r}] = None; import {', '.join(modules)}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
