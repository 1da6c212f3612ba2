"""The distribution `tidemill`, built from a clean checkout and installed elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.processes.processes import STOP_S, broker, environment

ROOT = Path(__file__).resolve().parents[2]
# Each extra, with a command that it adds.
EXTRAS = {
    "cli": ["topic", "--help"],
    "admin": ["admin", "--help"],
    "standalone": ["standalone", "--help"],
    "release": ["release", "--help"],
}

pytestmark = pytest.mark.heavy


def run(*command: object, cwd: Path | None = None, status: int = 0) -> str:
    """Run a command, which must end with `status`, and return its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source distribution of the last commit, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    run("git", "-C", ROOT, "archive", "--output", folder / "checkout.tar", "HEAD")
    with tarfile.open(folder / "checkout.tar") as archive:
        archive.extractall(checkout, filter="data")
    # The build needs packages that the tests also need, so it fetches nothing.
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=checkout)
    (source,) = folder.glob("tidemill-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("tidemill-*.whl")
    return source, wheel


def test_an_index_accepts_the_distributions(distributions: tuple[Path, Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *distributions)


def new_environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """Install the wheel into a new virtual environment, and return its folder of programs."""
    # Without hashes, because the wheel has none.
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(re.findall(r"^[^ #]\S*==[^\\]*", lock, re.MULTILINE)), "utf-8")
    run(sys.executable, "-m", "venv", folder / "venv")
    bin_dir = folder / "venv" / "bin"
    package = f"{wheel}[{extra}]" if extra else wheel
    run(bin_dir / "pip", "install", "--quiet", "--no-compile", "--constraint", constraints, package)
    return bin_dir


def check_broker(bin_dir: Path, data_dir: Path) -> None:
    """Start the broker of an environment, and stop it."""
    with broker(data_dir, python=bin_dir / "python") as (process, _, log):
        process.terminate()
        assert process.wait(STOP_S) == 0, log.read_text("utf-8")


def test_the_package_without_extras_runs_a_broker_and_names_missing_extras(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    bin_dir = new_environment(tmp_path, distributions[1])
    assert "Usage" in run(bin_dir / "tidemill", "--help")
    assert "pip install 'tidemill[cli]'" in run(bin_dir / "tidemill", "topic", "list", status=2)
    assert "pip install 'tidemill[admin]'" in run(bin_dir / "tidemill", "admin", status=2)
    check_broker(bin_dir, tmp_path / "data")


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_package_with_an_extra_has_its_commands_and_runs_a_broker(
    extra: str, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    bin_dir = new_environment(tmp_path, distributions[1], extra)
    assert "Usage" in run(bin_dir / "tidemill", *EXTRAS[extra])
    check_broker(bin_dir, tmp_path / "data")
