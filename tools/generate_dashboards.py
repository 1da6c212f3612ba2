"""Generate the dashboards of the chart and the alert rules of a laptop, for `make dashboards`.

A test fails if the files differ from `tools/monitoring` and the alerts of the chart.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# A script can only import from its own folder.
sys.path.insert(0, str(ROOT))

from tools.monitoring import alerts, grafana  # noqa: E402  # See above.
from tools.monitoring.pages import PAGES  # noqa: E402  # See above.

DASHBOARDS: Final = ROOT / "charts" / "tidemill" / "files" / "dashboards"
RULES: Final = ROOT / "deploy" / "observability" / "alerts.yaml"


def documents() -> dict[Path, str]:
    """Return every generated file by its path."""
    dashboards = {DASHBOARDS / f"{page.name}.json": grafana.text_of(page) for page in PAGES}
    return {**dashboards, RULES: alerts.rule_file()}


def main() -> None:
    """Write the files and delete dashboards without a page."""
    made = documents()
    for path in set(DASHBOARDS.glob("*.json")) - set(made):
        path.unlink()
    for path, text in made.items():
        path.write_text(text, "utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
