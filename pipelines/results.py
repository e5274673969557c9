"""Render every committed report again, by the command that it records."""

import json
import shlex
import sys
from pathlib import Path

from quarl_tf.cli import main


def render(reports: Path) -> int:
    """Render all reports of a folder; return how many could not be."""
    failures = 0
    for path in sorted(reports.glob("*/results.json")):
        program, *words = shlex.split(json.loads(path.read_text())["command"])
        # A report that was made in Python records no command line.
        failures += program != "quarl" or main(words) != 0
    return failures


if __name__ == "__main__":
    sys.exit(render(Path("reports")))
