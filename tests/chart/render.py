"""Render the chart as each profile has it into golden/, for `make charts`."""

from __future__ import annotations

from pathlib import Path

from tests.support.chart import CHART, rendered

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
# By the name of the golden file, the values files.
PROFILES: dict[str, list[Path]] = {
    "default": [],
    "dev": [CHART / "values-dev.yaml"],
    "ha": [CHART / "values-ha.yaml"],
    "prod": [CHART / "values-prod.yaml"],
    # Everything that good charts can be told.
    "everything": [HERE / "values-everything.yaml"],
    "cert-manager": [HERE / "values-cert-manager.yaml"],
}


def profile(name: str) -> str:
    """Return the manifests of a profile."""
    return rendered(*(part for file in PROFILES[name] for part in ("-f", file)))


def main() -> None:
    """Write the golden files."""
    GOLDEN.mkdir(exist_ok=True)
    for name in PROFILES:
        (GOLDEN / f"{name}.yaml").write_text(profile(name), "utf-8")


if __name__ == "__main__":
    main()
