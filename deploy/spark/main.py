"""What spark-submit starts in the image: `tidemill pipeline` with the arguments it was given."""

from __future__ import annotations

import sys

from tidemill.cli.app import run

run(["pipeline", *sys.argv[1:]])
