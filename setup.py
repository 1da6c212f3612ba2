"""Build step of the wheel: it generates `tidemill.stubs` from proto/.

The stubs are not in the repository. pyproject.toml has everything else about the package.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
STUBS = ROOT / "services" / "tidemill" / "stubs"


class BuildWithStubs(build_py):
    """The step that collects the modules, after the stubs are generated."""

    def finalize_options(self) -> None:
        """Generate the stubs, and add their packages to those of the distribution."""
        # An editable install uses the files in place, and `make` keeps those up to date.
        if not (self.editable_mode and STUBS.exists()):
            runpy.run_path(str(ROOT / "tools" / "generate_stubs.py"), run_name="__main__")
            found = find_packages("services", include=["tidemill.stubs", "tidemill.stubs.*"])
            known = self.distribution.packages
            self.distribution.packages = known + [name for name in found if name not in known]
        super().finalize_options()


setup(cmdclass={"build_py": BuildWithStubs})
